"""The sentences about devices that their work hardly fills; not a word of it is about lost time."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.findings import Report
from clusterprof.hostlists import fold_numbers
from clusterprof.renderers import sure
from clusterprof.renderers.text_safety import safe_text
from clusterprof.underfill import RankFill, Underfill
from clusterprof.units import human

HEADING = "UNDER-FILLED, apart from lost time"
_MOST_NAMES = 4  # of ranks that no launcher numbered
_REASONS = {
    "no-sm-activity": "no SM activity was recorded",
    "no-reading": "readings of SM activity are missing",
    "perhaps-waiting": "the device may have waited for other ranks",
    "zero-reading": "SM activity reads 0 while kernels ran",
}


def sentences(report: Report) -> list[str]:
    """Say how much was under-filled and what to do; [] where nothing is advised."""
    found = report.underfill
    if found is None or not found.advice:
        return []
    groups: dict[tuple[tuple[str, ...], bool], list[RankFill]] = {}
    for one in found.ranks:
        if one.advice:
            groups.setdefault((one.advice, one.is_measured), []).append(one)
    largest_first = sorted(groups.values(), key=lambda some: -len(some))
    return [_ledger(found), *(_told(found, some, report) for some in largest_first)]


def reason(code: str) -> str:
    """Word why it is not known how a device was filled."""
    return _REASONS.get(code) or safe_text(code, 200)


def _ledger(found: Underfill) -> str:
    """Add the ledger up in words."""
    at_work = found.busy_ns - found.lost_ns
    text = f"Kernels were at work for {human(at_work, 'ns')}"
    known = found.filled_ns + found.underfilled_ns
    if known:
        part = human(found.underfilled_ns / known, "ratio")
        text += (
            f": {human(found.filled_ns, 'ns')} filled and {human(found.underfilled_ns, 'ns')}"
            f" under-filled ({part})"
        )
    if found.unmeasured_ns:
        why = ", ".join(reason(code) for code, _ in found.reasons)
        text += f"; not known for {human(found.unmeasured_ns, 'ns')}: {why}"
    return f"{text}. None of it is idle."


def _told(found: Underfill, some: Sequence[RankFill], report: Report) -> str:
    """What ranks with the same advice were seen to do, what to do, and how sure that is."""
    codes, measured = some[0].advice, some[0].is_measured
    text = _names(some) + ("" if measured else " may be under-filled")
    text += f" ({', '.join(_seen(some))}):"
    for one in found.advice:
        if one.code in codes and one.measured == measured:
            certain = f"{100 * one.confidence_ratio:.0f} % sure: {sure.grounds(one.grade)}"
            text += f" {safe_text(one.text, 300)} ({certain})."
    if "fewer-launches" in codes and _idle_too(report):
        text += " What stood idle between launches is launch-bound, among the causes."
    return text


def _idle_too(report: Report) -> bool:
    return any(finding.cause.id == "launch-bound" for finding in report.findings)


def _seen(some: Sequence[RankFill]) -> list[str]:
    """What was measured at work, mean of the ranks; of memory the rank with the most in use."""
    words = []
    for label, name in (
        ("SM activity", "sm_active_ratio"),
        ("occupancy", "sm_occupancy_ratio"),
        ("tensor cores", "tensor_active_ratio"),
        ("memory rate", "dram_active_ratio"),
        ("power between idle and limit", "power_ratio"),
        ("main thread on a CPU", "host_on_cpu_ratio"),
    ):
        known = [ratio for one in some if (ratio := getattr(one.levels, name)) is not None]
        if known:
            words.append(f"{label} {human(sum(known) / len(known), 'ratio')}")
    rooms = [one.levels for one in some if one.levels.memory_free_ratio is not None]
    if rooms:
        most = min(rooms, key=lambda one: one.memory_free_ratio or 0.0)
        used, total = most.memory_used_bytes or 0, most.memory_total_bytes or 0
        words.append(f"{human(used, 'bytes')} of {human(total, 'bytes')} memory used")
    return words or ["nothing else was recorded"]


def _names(some: Sequence[RankFill]) -> str:
    numbers = [one.rank for one in some if one.rank is not None]
    if len(numbers) == len(some):
        return f"rank{'' if len(numbers) == 1 else 's'} {fold_numbers(numbers)}"
    names = [f"pid {one.pid} on {safe_text(one.node, 60)}" for one in some[:_MOST_NAMES]]
    more = len(some) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
