"""All remedies, and the order in which they are advised. Nothing is said of what is not there.

The lists have those first that win most, as far as anything is published. Of those that fit a run
the first few are advised, and of these what asks least of a person comes first: it is soon tried,
and whether the waits go tells whether the cause was right.
"""

from __future__ import annotations

from clusterprof.advice import EFFORTS, Advice
from clusterprof.remedies import (
    cpu,
    cpu_time,
    h2d,
    launch,
    network,
    network_faults,
    network_transfer,
    phases,
    ranks,
    storage,
    storage_mounts,
)
from clusterprof.remedies import (
    input as input_,
)
from clusterprof.remedies.base import Remedy, Rule
from clusterprof.remedies.diagnose import DIAGNOSES
from clusterprof.remedies.scene import Scene

MOST = 4
"""Pieces of advice about one finding: who reads a fifth?"""

REMEDIES: tuple[Remedy, ...] = (
    *storage_mounts.REMEDIES,
    *storage.REMEDIES,
    *storage_mounts.LAST,
    *cpu.REMEDIES,
    *cpu_time.REMEDIES,
    *input_.REMEDIES,
    *h2d.REMEDIES,
    *launch.REMEDIES,
    *phases.REMEDIES,
    *network.REMEDIES,
    *network_transfer.REMEDIES,
    *network_faults.REMEDIES,
    *ranks.REMEDIES,
)

WITHOUT: dict[str, str] = {}
"""Cause -> why nothing can be advised about it at all. Every other cause has a remedy."""

NOTHING_LOST = Rule(
    "nothing-lost",
    "nothing was lost to the cause: a wait that the device's queue hid costs nothing",
    lambda s: s.finding.lost_ns <= 0 or s.finding.recoverable_ns == 0,
)
"""Cancels every remedy."""


_ORDER = {effort: at for at, effort in enumerate(EFFORTS)}


def remedies_of(cause: str) -> tuple[Remedy, ...]:
    """Return the remedies against a cause, the first to try first."""
    return tuple(sorted(_listed(cause), key=lambda one: _ORDER[one.effort]))


def _listed(cause: str) -> list[Remedy]:
    """Return the remedies against a cause, those first that win most."""
    return [one for one in REMEDIES if cause in one.causes]


def advise(scene: Scene) -> tuple[Advice, ...]:
    """Return what to do about a finding, the best first; empty when nothing speaks for anything.

    A cause that is not sure enough, or only a family, is not mended but looked into.
    """
    if NOTHING_LOST.holds(scene):
        return ()
    if not scene.named:
        asked = DIAGNOSES
        found = [advice for one in asked if (advice := one.advise(scene)) is not None]
        return tuple(found[:2])
    fit = [
        (one, advice) for one in _listed(scene.cause) if (advice := one.advise(scene)) is not None
    ][:MOST]
    fit.sort(key=lambda pair: _cheapest_first(pair[0], scene))
    return tuple(advice for _, advice in fit)


def withheld(scene: Scene) -> tuple[str, ...]:
    """Say of remedies that a reader may expect why they are not advised in this run."""
    if NOTHING_LOST.holds(scene) or not scene.named:
        return ()
    said = []
    for one in _listed(scene.cause):
        rule = next((rule for rule in one.unless if rule.holds(scene)), None)
        if one.missed and rule is not None and rule.why is not None:
            said.append(f"{one.missed}: {rule.why(scene)}")
    return tuple(dict.fromkeys(said))


def _cheapest_first(one: Remedy, scene: Scene) -> tuple[int, bool]:
    """The least effort first; of equal ones what a number of this run speaks for."""
    return _ORDER[one.effort], not any(scene.number(ending) for ending in one.seen)
