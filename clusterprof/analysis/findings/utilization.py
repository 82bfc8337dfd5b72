"""From sums over windows to the ledger of filled time, and what to do about devices hardly filled.

Nothing here is lost time, and nothing is ranked among its causes. What is advised follows from what
was measured while a device was at work:

    SM activity < 0.5            below it a GPU is likely used in vain, says NVIDIA of DCGM's metric
      DRAM or tensor cores busy  nothing: the memory's rate or the tensor cores limit the work
      now and then nearly full   only a part of each step is small: fuse that part
      memory free >= 30 %        a larger batch
      main thread on a CPU       kernels are launched one by one: torch.compile, CUDA graphs
      none of these              torch.compile, or room in memory for a larger batch
    not recorded                 the same, "may be", where power is low and half the memory is free
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from clusterprof.attribution import filling
from clusterprof.attribution.confidence import confidence
from clusterprof.attribution.ledger import RankBooks
from clusterprof.underfill import Advice, Levels, RankFill, Underfill

HARDLY_FILLED_RATIO = 0.5
"""SM activity at work below which something is advised."""
NEARLY_FULL_RATIO = 0.7
"""SM activity that a tenth of the time at work is above, where only a part of a step is small."""
DRAM_BUSY_RATIO, TENSOR_BUSY_RATIO = 0.5, 0.3
"""From here on the device does what it can: of its memory's rate; of the time at work."""
ROOM_RATIO = 0.3
"""Memory that was never in use, from which on a larger batch has room."""
LAUNCHING_RATIO = 0.8
"""Of its time outside marked waits: the main thread is always launching."""
LOW_POWER_RATIO, MUCH_ROOM_RATIO = 0.4, 0.5
"""Weaker signs: of the way from idle to the limit of power; memory never in use."""
LEAST_WORK_NS = 1_000_000_000
ZERO_READING = "zero-reading"
NOT_MEASURED = "no accelerator was measured inside steps"

TEXTS: Mapping[str, str] = {
    "larger-batch": "Raise the batch size while at most 80 % of the memory is used",
    "fewer-launches": "Launch less and larger work: torch.compile, CUDA graphs, fused optimizers",
    "larger-kernels": "Memory is nearly full: fuse operations with torch.compile, or make room for"
    " a larger batch (activation checkpointing, sharded optimizer states)",
    "uneven-step": "Part of each step fills the device and part does not: fuse the small operations"
    " (torch.compile, fused optimizers), overlap communication with computation",
    "memory-bound": "Nothing to gain from a larger batch: the rate of the device's memory is the"
    " limit",
    "tensor-bound": "Nothing to gain from a larger batch: its tensor cores are busy",
}
"""Code -> what is said."""


def underfill_of(books: Sequence[RankBooks]) -> Underfill:
    """Return the ledger of filled time of all ranks, and what is advised."""
    pairs = [(one, _rank(one)) for one in books if one.partial.fill.get((filling.BUSY, 0), 0)]
    ranks = tuple(replace(fill, advice=_advised(fill)) for _, fill in pairs)
    reasons: dict[str, int] = {}
    for one in ranks:
        for reason, ns in one.reasons:
            reasons[reason] = reasons.get(reason, 0) + ns
    peers = any(one.has_peers for one, _ in pairs)
    return Underfill(
        busy_ns=sum(one.busy_ns for one in ranks),
        lost_ns=sum(one.lost_ns for one in ranks),
        filled_ns=sum(one.filled_ns for one in ranks),
        underfilled_ns=sum(one.underfilled_ns for one in ranks),
        unmeasured_ns=sum(one.unmeasured_ns for one in ranks),
        reasons=_largest_first(reasons),
        ranks=ranks,
        advice=_advice(ranks, peers),
        why_missing="" if ranks else NOT_MEASURED,
    )


def _rank(books: RankBooks) -> RankFill:
    sums, ledger = books.partial.fill, books.ledger
    work, active = (sums.get((what, 0), 0) for what in (filling.WORK, filling.ACTIVE))
    unmeasured = {why: ns for why in filling.UNMEASURED if (ns := sums.get((why, 0), 0))}
    if not sums.get((filling.SM_KNOWN, 0), 0) and filling.NO_READING in unmeasured:
        missing = unmeasured.pop(filling.NO_READING)  # a column without a single reading
        unmeasured[filling.NO_SM_ACTIVITY] = unmeasured.get(filling.NO_SM_ACTIVITY, 0) + missing
    if work >= LEAST_WORK_NS and not active:
        # Kernels cannot run on no multiprocessor: a driver that says so measures nothing.
        unmeasured[ZERO_READING], work = work, 0
    filled = min(work, active)
    return RankFill(
        node=ledger.node,
        rank=ledger.rank,
        pid=ledger.pid,
        device=ledger.device,
        busy_ns=sums.get((filling.BUSY, 0), 0),
        lost_ns=sums.get((filling.LOST, 0), 0),
        filled_ns=filled,
        underfilled_ns=work - filled,
        unmeasured_ns=sum(unmeasured.values()),
        reasons=_largest_first(unmeasured),
        levels=_levels(sums, filled, work),
    )


def _levels(sums: Mapping[tuple[str, int], int], filled: int, work: int) -> Levels:
    means = {what: _mean(sums, what) for what in filling.MEANS}
    totals = _histogram(sums, filling.MEMORY_TOTAL)
    used = _histogram(sums, filling.MEMORY)
    size = max(totals) if totals else None
    return Levels(
        sm_active_ratio=filled / work if work else None,
        sm_active_p90_ratio=_p90(_histogram(sums, filling.LEVEL)) if work else None,
        sm_occupancy_ratio=means["occupancy"],
        tensor_active_ratio=means["tensor"],
        dram_active_ratio=means["dram"],
        power_ratio=_power(sums),
        memory_used_bytes=size * max(used) // 1000 if size is not None else None,
        memory_total_bytes=size,
        host_on_cpu_ratio=_mean(sums, filling.HOST),
    )


def _mean(sums: Mapping[tuple[str, int], int], what: str) -> float | None:
    """Return the mean of a share over the time for which it is known."""
    mean = _over(sums, what)
    return None if mean is None else min(1.0, mean)


def _over(sums: Mapping[tuple[str, int], int], what: str) -> float | None:
    known = sums.get((what + filling.KNOWN, 0), 0)
    return sums.get((what, 0), 0) / known if known else None


def _histogram(sums: Mapping[tuple[str, int], int], what: str) -> dict[int, int]:
    return {level: ns for (name, level), ns in sums.items() if name == what}


def _p90(levels: Mapping[int, int]) -> float | None:
    """Return the level, in percent before, that nine tenths of the time do not exceed."""
    reached, whole = 0, sum(levels.values())
    for level in sorted(levels):
        reached += levels[level]
        if 10 * reached >= 9 * whole:
            return level / 100
    return None


def _power(sums: Mapping[tuple[str, int], int]) -> float | None:
    """Power at work between idle and the limit: what idle parts of windows drew is taken out."""
    drawn, limit = _over(sums, filling.POWER), _over(sums, filling.LIMIT)
    if drawn is None or limit is None:
        return None
    rest = _over(sums, filling.REST) or 0.0
    busy = sums.get((filling.POWER_BUSY, 0), 0) / sums[filling.POWER + filling.KNOWN, 0]
    if limit <= rest or busy <= 0:
        return None
    return min(1.0, max(0.0, (drawn - rest) / busy / (limit - rest)))


def _advised(one: RankFill) -> tuple[str, ...]:
    """Return codes of what to do about one device."""
    levels = one.levels
    if one.busy_ns - one.lost_ns < LEAST_WORK_NS:
        return ()
    if not one.is_measured:
        low = levels.power_ratio is not None and levels.power_ratio < LOW_POWER_RATIO
        room = levels.memory_free_ratio
        return ("larger-batch",) if low and room is not None and room >= MUCH_ROOM_RATIO else ()
    if levels.sm_active_ratio is None or levels.sm_active_ratio >= HARDLY_FILLED_RATIO:
        return ()
    if (levels.dram_active_ratio or 0.0) >= DRAM_BUSY_RATIO:
        return ("memory-bound",)
    if (levels.tensor_active_ratio or 0.0) >= TENSOR_BUSY_RATIO:
        return ("tensor-bound",)
    if (levels.sm_active_p90_ratio or 0.0) >= NEARLY_FULL_RATIO:
        return ("uneven-step",)
    room = levels.memory_free_ratio
    codes = ["larger-batch"] if room is None or room >= ROOM_RATIO else []
    if (levels.host_on_cpu_ratio or 0.0) >= LAUNCHING_RATIO:
        codes.append("fewer-launches")
    return tuple(codes or ["larger-kernels"])


def _advice(ranks: Sequence[RankFill], peers: bool) -> tuple[Advice, ...]:
    """Say what is advised, once for measured and once for guessed devices."""
    found = []
    for code, text in TEXTS.items():
        for measured in (True, False):
            some = [one for one in ranks if code in one.advice and one.is_measured == measured]
            if some:
                found.append(_one(code, text, some, measured, peers))
    return tuple(sorted(found, key=lambda one: (-one.ranks, not one.measured)))


def _one(code: str, text: str, some: Sequence[RankFill], measured: bool, peers: bool) -> Advice:
    """Word one piece of advice and say how sure it is.

    Kernels of collectives that were not told apart have low activity too; and without knowing how
    much memory is free a larger batch is a guess.
    """
    blind = code == "larger-batch" and any(one.levels.memory_free_ratio is None for one in some)
    if blind:
        text += " (how much is free was not recorded)"
    if code in ("larger-batch", "fewer-launches", "larger-kernels") and peers and measured:
        text += "; kernels of collectives may be part of it"
    sure = measured and not blind and not peers
    known = sum(one.filled_ns + one.underfilled_ns for one in some) if measured else 1
    unknown = sum(one.unmeasured_ns for one in some) if measured else 0
    score = confidence({"B" if sure else "C": max(known, 1)}, unknown, 1.0)
    return Advice(code, text, measured, score, "B" if sure else "C", len(some))


def _largest_first(amounts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((k, ns) for k, ns in amounts.items() if ns), key=lambda p: (-p[1], p[0])))
