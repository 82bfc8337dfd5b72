"""What to record or look at where a cause is not sure enough to mend anything because of it.

Asked in the place of the remedies for a family, and for a cause below the limit from which one is
named.
"""

from __future__ import annotations

from clusterprof.attribution.confidence import NAMED_FROM
from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.scene import Scene
from clusterprof.units import human

_SHORT_NS = 2_000_000_000
"""Of lost time: what less says rests on a handful of samples."""


def _why(scene: Scene) -> str:
    if scene.is_family:
        return "only the family of the cause could be told"
    sure = human(scene.finding.confidence_ratio, "ratio")
    return f"the cause is only {sure} sure, and is named for sure from {NAMED_FROM:.0%}"


def _probe(scene: Scene) -> Filled:
    return Filled(
        f"{run('clusterprof record --inject auto -- COMMAND')}; {run('clusterprof doctor')} says"
        " whether the probe can be loaded",
        (_why(scene), "no process of the job carried the probe"),
    )


def _counters(scene: Scene) -> Filled:
    holes = [f"{what}: {remedy}" for what, remedy in scene.holes]
    lacking = [f"the recording has no {name}" for name in scene.missing]
    change = "; ".join(holes[:3]) or "clusterprof doctor says how to switch on what is missing"
    return Filled(change, (_why(scene), *lacking[:3]))


def _longer(scene: Scene) -> Filled:
    steps = scene.setup.steps
    many = max(200, 4 * steps)
    return Filled(
        f"record {many:,} steps or more (now {steps:,}), then {run('clusterprof analyze RUN')}",
        (_why(scene), f"{human(scene.finding.lost_ns, 'ns')} of loss are a handful of samples"),
    )


def _by_hand(scene: Scene) -> Filled:
    if scene.is_family:
        how = "lists the causes that it may be; explain each: how to verify it by hand"
    else:
        how = "says how to verify it by hand on a running job"
    return Filled(
        f"{run(f'clusterprof explain {scene.cause}')} {how}",
        (_why(scene),),
    )


NO_PROBE = Rule(
    "probe-there", "the processes of the job carried the probe", lambda s: s.marked
)  # fmt: skip
NOTHING_MISSING = Rule(
    "nothing-missing", "nothing that the family needs is known to be missing",
    lambda s: not s.missing and not s.holes,
)  # fmt: skip
LONG_ENOUGH = Rule(
    "long-enough", "the loss is of two seconds or more", lambda s: s.finding.lost_ns >= _SHORT_NS
)  # fmt: skip

DIAGNOSES = (
    Mend(
        "record-with-probe", (), "Record with the probe to learn the cause",
        "clusterprof record --inject auto", _probe, diagnose=True,
        moves="the cause itself is named", unless=(NO_PROBE,),
        worse="a probe in the process: its cost is in docs/accuracy.md",
        place="job",
        effort="look",
    ),
    Mend(
        "record-what-is-missing", (), "Record what is missing to learn the cause",
        "what clusterprof doctor lists as holes", _counters, diagnose=True,
        moves="the cause itself is named", unless=(NOTHING_MISSING,),
        place="job",
        effort="look",
    ),
    Mend(
        "record-longer", (), "Record longer to be sure of the cause",
        "more steps", _longer, diagnose=True,
        moves="the cause is surer, or gone", unless=(LONG_ENOUGH,),
        place="job",
        effort="setting",
    ),
    Mend(
        "verify-by-hand", (), "Look by hand before anything is changed",
        "clusterprof explain CAUSE", _by_hand, diagnose=True, moves="what is seen by hand agrees",
        place="job",
        effort="look",
    ),
)  # fmt: skip
