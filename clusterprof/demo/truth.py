"""Compute the ground truth of a demo run: device idle time by injected cause, from
timestamps.

The device's own log shows when it had no work; the rank's timestamps show what the host
was doing then; the worker's timestamps show how the time for the awaited batch was
spent.

    device log      [0, 60) [100, 160)        idle: [60, 100)
    rank waited     [10, 98) for a batch that took 75 reading, 25 decoding
    truth           storage 28.5, cpu 9.5, other 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which the host kept the device waiting, and the weights of its causes.

    "other" is the part that was not injected.
    """

    start_ns: int
    end_ns: int
    weights: Mapping[str, int]


def attribute_idle_time(
    log: Sequence[tuple[int, int]], waits: Sequence[Wait], start_ns: int, end_ns: int
) -> dict[str, object]:
    """Attribute the idle time of the device between `start_ns` and `end_ns` to the causes.

    Returns {"in_step_ns", "idle_ns", "causes": {cause: ns}}; idle time outside all waits is
    under "other".
    """
    idle = _list_idle_gaps(log, start_ns, end_ns)
    causes: dict[str, float] = {}
    covered_ns = 0
    for wait in waits:
        overlap_ns = sum(
            max(0, min(end, wait.end_ns) - max(start, wait.start_ns)) for start, end in idle
        )
        covered_ns += overlap_ns
        total_weight = sum(wait.weights.values())
        for cause, weight in wait.weights.items():
            if total_weight > 0:
                causes[cause] = causes.get(cause, 0.0) + overlap_ns * weight / total_weight
    idle_ns = sum(end - start for start, end in idle)
    if idle_ns > covered_ns:
        causes["other"] = causes.get("other", 0.0) + idle_ns - covered_ns
    return {
        "in_step_ns": end_ns - start_ns,
        "idle_ns": idle_ns,
        "causes": {cause: round(ns) for cause, ns in sorted(causes.items())},
    }


def _list_idle_gaps(
    log: Sequence[tuple[int, int]], start_ns: int, end_ns: int
) -> list[tuple[int, int]]:
    gaps = []
    at_ns = start_ns
    for begin, end in log:
        if begin > at_ns:
            gaps.append((at_ns, min(begin, end_ns)))
        at_ns = max(at_ns, end)
        if at_ns >= end_ns:
            return gaps
    gaps.append((at_ns, end_ns))
    return gaps
