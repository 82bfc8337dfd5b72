"""The clean run of each injected fault: the same job and random numbers without the fault.

A synthetic job is simulated again with the size of that fault 0 and all others unchanged. Uneven
work ("skew") is evened out instead: removing it would remove work, and no fix of an imbalance does
that. A real job has one clean run for all its faults, measured once per layout on the same machine
at another time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from clusterprof_lab.families import FAMILY_OF
from clusterprof_lab.scenario import Scenario, Trial
from clusterprof_lab.synth.simulate import run_job
from clusterprof_lab.synth.simulate_faults import Faults
from clusterprof_lab.synth.simulate_plan import Plan, draw_plan
from clusterprof_lab.synth.simulate_truth import compute_step_ns
from clusterprof_lab.truth import Truth

SAME_RATIO = 1e-6
REMOVED, EVENED = "removed", "evened out"


class NoPairError(ValueError):
    """A run has no clean run to hold it against; the text says why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One fault, or all of a real run, and what the job would take without it."""

    leaves: tuple[str, ...]
    """Causes any of which is a right name for it."""
    family: str
    clean_step_ns: float
    how: str
    """"removed" or "evened out"."""

    def gain_points(self, truth: Truth) -> float:
        """Return what the fault costs, in hundredths of the step time."""
        assert truth.step_ns
        return 100.0 * (1 - self.clean_step_ns / truth.step_ns)


def make_pairs(truth: Truth, scenario: Scenario) -> Iterator[Pair]:
    """Yield a pair per injected fault; NoPairError when there is nothing to hold it against."""
    wanted = scenario.wanted
    if not wanted.family or wanted.outside_steps:
        raise NoPairError("no fault inside steps")
    if not truth.step_ns or truth.clean_step_ns is None:
        raise NoPairError("its clean run was not measured")
    if truth.testbed != "synth":
        leaves = (*wanted.leaves, *(leaf for _, leaf in wanted.also))
        yield Pair(leaves, wanted.family, truth.clean_step_ns, REMOVED)
        return
    trial = Trial(scenario, truth.severity, truth.seed, truth.split)  # type: ignore[arg-type]
    plan, faults = draw_plan(trial)
    sizes = [float(size) for size in truth.parameters["size_ns"]]
    again = compute_step_ns(run_job(plan, faults.set_sizes(sizes)))
    if abs(again - truth.step_ns) > SAME_RATIO * truth.step_ns:
        raise NoPairError("it was simulated by another version: make it anew")
    for at, fault in enumerate(faults.all):
        if fault.kind == "none" or not sizes[at]:
            continue
        named = wanted.leaves if at == 0 else (fault.cause,)
        if fault.pattern == "skew":
            yield Pair(
                named, FAMILY_OF[fault.cause], _simulate_even_fault(plan, faults, sizes, at), EVENED
            )
            continue
        less = [0.0 if other == at else size for other, size in enumerate(sizes)]
        clean_ns = compute_step_ns(run_job(plan, faults.set_sizes(less)))
        yield Pair(named, FAMILY_OF[fault.cause], clean_ns, REMOVED)


def _simulate_even_fault(plan: Plan, faults: Faults, sizes: list[float], at: int) -> float:
    """Return the step time with each step's work of one fault spread evenly over the ranks."""
    fault = faults.all[at]
    noise = np.broadcast_to(fault.noise.mean(axis=0), fault.noise.shape)
    even = [
        replace(candidate, noise=noise) if candidate is fault else candidate
        for candidate in faults.all
    ]
    return compute_step_ns(run_job(plan, Faults(tuple(even)).set_sizes(sizes)))
