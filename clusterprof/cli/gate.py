"""`clusterprof gate RUN...`: pass (0), fail (3) or cannot tell (4) by rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clusterprof.cli import common

if TYPE_CHECKING:
    from clusterprof.gate import Policy, Rule, Verdict
    from clusterprof.profiles import Profile


def gate(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help=common.RUN_HELP)],
    assertions: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--assert", help="A rule, such as 'gpu.busy_ratio >= 70%'. Repeatable."),
    ] = None,
    profile: Annotated[
        Optional[str], typer.Option(help="Shipped profile (ci), or a file.")  # noqa: UP045
    ] = None,
    min_steps: Annotated[
        Optional[int], typer.Option(min=0, help="Fewer steps: cannot tell.")  # noqa: UP045
    ] = None,
    min_coverage: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, max=1, help="A smaller share of time with samples: cannot tell."),
    ] = None,
    on_inconclusive: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="When it cannot tell: fail (exit 4), warn or pass (exit 0)."),
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="plain or json.")] = "plain",
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="Write to this file.")  # noqa: UP045
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the nodes.")] = 1,
) -> None:
    """Test a recording: exit 0 passed, 3 failed, 4 cannot tell."""
    from clusterprof.gate import judge

    with common.errors_also_as_json(as_json or format_ == "json"):
        chosen = common.chosen_format(format_, as_json, ("plain", "json"))
        settings = common.load_profile(profile)
        rules = _rules(assertions or [], settings)
        policy = _policy(settings, min_steps, min_coverage, on_inconclusive)
        verdict = judge(common.analyse_with(run, settings, jobs), rules, policy)
        common.write_result(_json(verdict) if chosen == "json" else _plain(verdict), output)
    raise typer.Exit(verdict.exit_code)


def _rules(assertions: list[str], profile: Profile) -> list[Rule]:
    """Parse the profile's rules, then those of the command line; a fault names its origin."""
    from clusterprof.errors import UsageError
    from clusterprof.gate import insist_on_rules, parse_rule

    rules = []
    for text in profile.values["gate.assertions"]:
        try:
            rules.append(parse_rule(text))
        except UsageError as error:
            origin = profile.origins["gate.assertions"]
            raise UsageError(f"{origin}: {error.message}", error.remedy) from None
    rules += [parse_rule(text) for text in assertions]
    insist_on_rules(rules)  # before the analysis, which takes longer
    return rules


def _policy(
    profile: Profile, min_steps: int | None, min_coverage: float | None, inconclusive: str | None
) -> Policy:
    from clusterprof.errors import UsageError
    from clusterprof.gate import Policy
    from clusterprof.profiles import nearest

    values: dict[str, Any] = profile.section("gate")
    del values["assertions"]
    given = {
        "min_steps": min_steps,
        "min_coverage_ratio": min_coverage,
        "on_inconclusive": inconclusive,
    }
    values |= {name: value for name, value in given.items() if value is not None}
    choices = ("fail", "warn", "pass")
    if values["on_inconclusive"] not in choices:
        word = values["on_inconclusive"]
        raise UsageError(f"--on-inconclusive {word!r} is unknown{nearest(word, choices)}")
    return Policy(**values)


def _plain(verdict: Verdict) -> str:
    from clusterprof.renderers.text_safety import safe_text

    return "".join(safe_text(line, 500) + "\n" for line in verdict.lines)


def _json(verdict: Verdict) -> str:
    document = {
        "format": "clusterprof-gate",
        "schema_version": common.SCHEMA_VERSION,
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "rules": [
            {
                "rule": result.rule.text,
                "metric": result.metric,
                "operator": result.rule.operator,
                "limit": result.limit,
                "value": result.value,
                "unit": result.unit,
                "outcome": result.outcome,
                "why": result.why,
            }
            for result in verdict.results
        ],
        "doubts": list(verdict.doubts),
    }
    return common.json_text(document)
