"""Rules and policy of a gate, from its command line and a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.gate import AnyRule, Policy
    from clusterprof.profiles import Profile

_RULES = ("assertions", "regressions")


@dataclass(frozen=True, slots=True)
class Asked:
    """Rules as they stand on the command line."""

    assertions: Sequence[str]
    max_stall: Sequence[str]
    min_util: str | None
    levels: Sequence[str]


def rules_of(asked: Asked, profile: Profile, compares: bool) -> tuple[AnyRule, ...]:
    """Return the profile's rules, then those of the command line; a fault names its origin.

    `compares`: there are baselines; without them the profile's rules on changes are left out.
    Raises UsageError when no rule is left.
    """
    from clusterprof.gate import at_levels, insist_on_rules, max_stall, min_util, parse_any

    rules = [*_of_profile(profile, "assertions")]
    if compares:
        rules += _of_profile(profile, "regressions")
    rules += [parse_any(text) for text in asked.assertions]
    rules += [max_stall(text) for text in asked.max_stall]
    if asked.min_util is not None:
        rules.append(min_util(asked.min_util))
    if asked.levels:
        rules = list(at_levels(rules, asked.levels))
    insist_on_rules(rules)  # before the analysis, which takes longer
    return tuple(rules)


def _of_profile(profile: Profile, key: str) -> Iterator[AnyRule]:
    from clusterprof.gate import parse_any, parse_change

    for text in profile.values[f"gate.{key}"]:
        try:
            yield parse_change(text) if key == "regressions" else parse_any(text)
        except UsageError as error:
            origin = profile.origins[f"gate.{key}"]
            raise UsageError(f"{origin}: {error.message}", error.remedy) from None


def policy_of(profile: Profile, **given: Any) -> Policy:
    """Return the profile's policy with what is given and not None on top."""
    from clusterprof.gate import AGGREGATES, Policy, allowed
    from clusterprof.profiles import nearest

    values: dict[str, Any] = {
        name: value for name, value in profile.section("gate").items() if name not in _RULES
    }
    values |= {name: value for name, value in given.items() if value is not None}
    for option, choices in (
        ("on_inconclusive", ("fail", "warn", "pass")),
        ("aggregate", AGGREGATES),
    ):
        word = values[option]
        if word not in choices:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} {word!r} is unknown{nearest(word, choices)}")
    values["allow_unlike"] = allowed(values["allow_unlike"])
    return Policy(**values)
