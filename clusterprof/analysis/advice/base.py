"""What a remedy is: words for its page, rules that cancel it, and how it is filled with numbers.

A remedy is asked for the causes it names. Each of its rules that holds cancels it, and stands on
the page of the cause in its own words, so that what is documented is what is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from clusterprof.advice import Advice
from clusterprof.findings import Culprit, Evidence
from clusterprof.hostlists import fold_numbers
from clusterprof.remedies.commands import unmarked
from clusterprof.remedies.scene import Scene
from clusterprof.units import human

Effort = Literal["look", "setting", "code", "site", "data"]
_TELLS = "nothing by itself: it tells what to mend"


@dataclass(frozen=True, slots=True)
class Rule:
    """When a remedy would be wrong."""

    name: str
    words: str
    """Goes after "Left out when"."""
    holds: Callable[[Scene], bool]
    why: Callable[[Scene], str] | None = None
    """Says with the numbers of a run why it holds; None where a reader need not know."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A remedy for one run."""

    change: str
    """With what is pasted as it is marked by `commands.run`."""
    because: tuple[str, ...] = ()
    """Parts of the sentence beside the evidence named by the remedy."""
    what: str = ""
    """In the place of the remedy's own, with numbers in it."""


class Remedy(Protocol):
    """One thing that helps against some causes."""

    @property
    def id(self) -> str: ...
    @property
    def causes(self) -> tuple[str, ...]: ...
    @property
    def what(self) -> str: ...
    @property
    def how(self) -> str: ...
    @property
    def published(self) -> str: ...
    @property
    def worse(self) -> str: ...
    @property
    def moves(self) -> str: ...
    @property
    def unless(self) -> tuple[Rule, ...]: ...
    @property
    def seen(self) -> tuple[str, ...]: ...
    @property
    def effort(self) -> Effort: ...
    @property
    def missed(self) -> str: ...

    def advise(self, scene: Scene) -> Advice | None:
        """Return what to do in this run; None when a rule cancels it."""
        ...


@dataclass(frozen=True, slots=True)
class Mend:
    """A remedy that changes the job, its node or its submission."""

    id: str
    causes: tuple[str, ...]
    what: str
    """An instruction, one sentence without a full stop."""
    how: str
    """The change in general, for the page."""
    fill: Callable[[Scene], Filled]
    """The change with the values of a run."""
    seen: tuple[str, ...] = ()
    """Endings of names of the evidence that speaks for it."""
    published: str = ""
    """What others won by it, with the source."""
    worse: str = ""
    moves: str = ""
    """Evidence that changes when it worked, for the page and the check, besides the lost time."""
    unless: tuple[Rule, ...] = ()
    diagnose: bool = False
    missed: str = ""
    """What is said where a reader may expect it and a rule cancels it: "More workers are not
    advised"."""
    place: Literal["rank", "node", "job"] = "rank"
    """Whom it is for: those who caused it, whoever runs their node, or everybody."""
    effort: Effort = field(kw_only=True)
    """What it asks of a person: a word of `advice.EFFORTS`."""

    def advise(self, scene: Scene) -> Advice | None:
        """Return what to do in this run; None when a rule cancels it."""
        if any(rule.holds(scene) for rule in self.unless):
            return None
        filled = self.fill(scene)
        change, commands = unmarked(filled.change)
        return Advice(
            what=_addressed(filled.what or self.what, scene, self.place),
            because=_because(scene, self.seen, filled.because),
            change=change,
            gain=_gain(scene, self.published) if not self.diagnose else _TELLS,
            verify=_verify(scene, self.moves),
            worse=self.worse,
            id=self.id,
            diagnose=self.diagnose,
            effort=self.effort,
            commands=commands,
        )


def say(item: Evidence) -> str:
    """Write one number of the evidence with its unit and what it says."""
    note = f" ({item.note})" if item.note else ""
    return f"{item.name} {human(item.value, item.unit)}{note}"


def where(scene: Scene) -> str:
    """Name node and rank when the cause is theirs and not the whole job's; "" otherwise."""
    culprits = scene.finding.culprits
    if not culprits or (scene.ranks < 2 and scene.nodes < 2):
        return ""
    chief = [one for one in culprits if _weight(one) * 10 >= _weight(culprits[0])]
    names = list(dict.fromkeys(one.node for one in chief))
    if scene.nodes > 1 and len(names) >= scene.nodes:
        return ""
    if scene.nodes < 2 and any(one.rank is None for one in chief):
        return ""
    if len(chief) >= scene.ranks:
        return ""
    if len(names) > 1:
        return f"on {len(names)} nodes, {names[0]} first"
    ranks = [one.rank for one in chief if one.rank is not None]
    few = ""
    if ranks and len(ranks) == len(chief):
        few = f"rank{'' if len(ranks) == 1 else 's'} {fold_numbers(ranks)}"
    if scene.nodes < 2:
        return f"on {few or names[0]}"
    return f"on {names[0]}, {few}" if few else f"on {names[0]}"


def share(scene: Scene) -> str:
    """Say how much was lost to the cause."""
    finding = scene.finding
    whole = "the recorded time" if finding.outside_steps else "the time in steps"
    at_most = "at most " if finding.upper_bound else ""
    part = human(finding.share_ratio, "ratio")
    return f"{at_most}{human(finding.lost_ns, 'ns')} of GPU time ({part} of {whole}) was lost to it"


def _weight(one: Culprit) -> int:
    return (one.own_ns or 0) + (one.others_ns or 0)


def _addressed(what: str, scene: Scene, whom: str) -> str:
    place = "" if whom == "job" or (whom == "node" and scene.nodes < 2) else where(scene)
    if whom == "node":
        place = place.partition(", rank")[0]
    return f"{place[:1].upper()}{place[1:]}: {what[:1].lower()}{what[1:]}" if place else what


def _because(scene: Scene, endings: tuple[str, ...], more: tuple[str, ...]) -> str:
    numbers = [item for ending in endings if (item := scene.number(ending)) is not None]
    return "; ".join(dict.fromkeys([share(scene), *(say(item) for item in numbers), *more]))


def _gain(scene: Scene, published: str) -> str:
    finding = scene.finding
    if finding.recoverable_ns is None:
        text = "what it wins in this run cannot be said"
    else:
        text = f"{human(finding.recoverable_ns, 'ns')} of GPU time here if it mends all of it"
    if finding.upper_bound:
        text += (
            "; an upper bound: no accelerator was measured, so waits that its queue hid count too"
        )
    return f"{text}; published: {published}" if published else text


def metric_of(scene: Scene) -> str:
    """Name the metric that has the cause's share; "" when there is none."""
    finding = scene.finding
    if finding.outside_steps:
        return ""
    if finding.cause.family == "synchronization":
        return ""  # only the sum of the family has one
    return f"stall.{finding.cause.id}_ratio"


def _verify(scene: Scene, moves: str) -> str:
    now = human(scene.finding.share_ratio, "ratio")
    metric = metric_of(scene)
    if metric:
        half = f"{50 * scene.finding.share_ratio:.1f}%"
        text = f"record again, then clusterprof gate RUN --assert '{metric} <= {half}' (now {now})"
    else:
        whole = "the recorded time" if scene.finding.outside_steps else "the time in steps"
        text = (
            f"record again, then clusterprof analyze RUN: {scene.cause} is below {now} of {whole}"
        )
    return f"{text}; {moves}" if moves else text
