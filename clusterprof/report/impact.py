"""Define the impact of lost time: its cost, and the job's duration with a cause fixed.

Define device utilization: a ledger of busy time by how much of the device was used.

A kernel that leaves most multiprocessors empty is not idle time, and none of this is
counted as lost. For every rank whose device was measured, and for the sum of all, to
the nanosecond:

    busy_ns = lost_ns + well_used_ns + under_used_ns + unmeasured_ns
    unmeasured_ns = sum of `reasons`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CauseImpact:
    """Impact of one cause: cost, and savings in completion time."""

    cause: str
    """Cause id, as in `Finding.cause`."""
    lost_cost: float | None
    """Cost of its lost device time; None without a price."""
    saved_ns: int | None
    """How much sooner the job would end with only this cause fixed; None when it is not known."""
    saved_low_ns: int | None
    saved_high_ns: int | None
    """Bounds of `saved_ns`, 95 %; None when the run was too short to tell."""
    why_missing: str = ""
    """Reason when `saved_ns` is None."""
    outside_steps: bool = False
    """As in `Finding.outside_steps`."""
    lost_ns: int = 0
    """Its lost device time, as in `Finding.lost_ns`."""
    saved_cost: float | None = None
    """Cost of `saved_ns` on all GPUs of the job; None without a price or without `saved_ns`."""
    is_unknowable: bool = False
    """True if `why_missing` lies in the cause, so that no other method gives savings; not in JSON.
    """


@dataclass(frozen=True, slots=True)
class Impact:
    """Cost, completion time and common efficiency metrics of a job."""

    price_per_gpu_hour: float | None
    currency: str
    lost_cost: float | None
    """Cost of all lost device time inside steps; None without a price."""
    job_ns: int | None
    """From the start of the first step to the end of the last; None without steps."""
    causes: tuple[CauseImpact, ...]
    """In the order of the findings."""
    tokens_per_second: float | None = None
    tokens_per_second_if_fixed: float | None = None
    """Throughput with every fixable finding fixed."""
    samples_per_second: float | None = None
    cost_per_million_tokens: float | None = None
    cost_per_million_tokens_if_fixed: float | None = None
    efficiency_metrics: tuple[tuple[str, float | None, str], ...] = ()
    """(name, value, definition or reason for its absence)."""
    gpus: int = 0
    """Devices that are paid for: one per rank."""
    upper_bound: bool = False
    """True when lost time, and therefore its cost, is known only as "at most"."""
    why_no_cost: str = ""
    """Reason when there is no `lost_cost`."""
    saved_ns: int | None = None
    """How much sooner the job would end with every fixable finding fixed. Not the sum over
    `causes`, since causes hide each other.
    """
    saved_low_ns: int | None = None
    saved_high_ns: int | None = None
    """Bounds of `saved_ns`, 95 %; None when the run was too short to tell."""
    samples_per_second_if_fixed: float | None = None
    why_no_tokens: str = ""
    """Reason when there is no `tokens_per_second`."""
    why_no_samples: str = ""
    """Reason when there is no `samples_per_second`."""


MIN_KNOWN_RATIO = 0.5
"""Smallest measured share of the busy time; below it a device counts as not measured."""


@dataclass(frozen=True, slots=True)
class UtilizationLevels:
    """Utilization of a device while it was busy; None where it was not recorded."""

    sm_active_ratio: float | None = None
    """Share of the multiprocessors that had work, mean over the time with a kernel resident."""
    sm_active_p90_ratio: float | None = None
    """90th percentile of this share over single samples."""
    sm_occupancy_ratio: float | None = None
    """Resident warps over the maximum."""
    tensor_active_ratio: float | None = None
    """Share of the time in which tensor cores were active."""
    dram_active_ratio: float | None = None
    """Share of the peak memory bandwidth that was used."""
    power_ratio: float | None = None
    """Power while busy, from 0 (idle power) to 1 (power limit). Without a sample of idle power
    it is power over the limit: an upper bound.
    """
    memory_used_bytes: int | None = None
    """Peak memory in use."""
    memory_total_bytes: int | None = None
    host_on_cpu_ratio: float | None = None
    """Share of the time outside marked waits in which the main thread was on a CPU."""

    @property
    def memory_free_ratio(self) -> float | None:
        """Share of the memory that was never in use; None where it is not known."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return max(0.0, 1 - self.memory_used_bytes / self.memory_total_bytes)


@dataclass(frozen=True, slots=True)
class RankUtilization:
    """Device utilization of one rank, inside steps."""

    node: str
    rank: int | None
    pid: int
    device: str
    busy_ns: int
    """Time with a kernel resident, by the device's own samples."""
    lost_ns: int
    """The part already in the ledger of lost time: busy-wait for a late rank, slowed clocks."""
    well_used_ns: int
    """Time weighted by active multiprocessors: 10 s with half of them busy are 5 s."""
    under_used_ns: int
    """The rest of the time in which multiprocessor activity was measured."""
    unmeasured_ns: int
    """Busy time without a measurement of multiprocessor activity."""
    reasons: tuple[tuple[str, int], ...]
    """(reason, ns), largest first; sums to `unmeasured_ns`."""
    levels: UtilizationLevels
    advice: tuple[str, ...] = ()
    """Codes of the advice for this rank (`UtilizationAdvice.code`)."""

    @property
    def is_measured(self) -> bool:
        """True when enough of the busy time was measured."""
        known_ns = self.well_used_ns + self.under_used_ns
        return 0 < known_ns >= MIN_KNOWN_RATIO * (self.busy_ns - self.lost_ns)


AdviceCode = Literal[
    "larger-batch",
    "fewer-launches",
    "larger-kernels",
    "uneven-step",
    "memory-bound",
    "tensor-bound",
]


@dataclass(frozen=True, slots=True)
class UtilizationAdvice:
    """Advice for under-used devices; not a cause of idle time, and not ranked."""

    code: AdviceCode
    text: str
    """An instruction, or why there is nothing to do, without a full stop."""
    measured: bool
    """False when it is inferred from power and memory, because SM activity was not recorded."""
    confidence_ratio: float
    grade: Literal["B", "C"]
    """B one direct signal, C correlation only."""
    ranks: int
    """Number of ranks it applies to; `RankUtilization.advice` names them."""


@dataclass(frozen=True, slots=True)
class DeviceUtilization:
    """The ledger of all ranks whose device was measured, and the advice."""

    busy_ns: int
    lost_ns: int
    well_used_ns: int
    under_used_ns: int
    unmeasured_ns: int
    reasons: tuple[tuple[str, int], ...]
    ranks: tuple[RankUtilization, ...]
    advice: tuple[UtilizationAdvice, ...]
    """The advice for the most ranks first."""
    why_missing: str = ""
    """Why there is no ledger at all; "" when some rank has one."""


def list_utilization_sums(utilization: DeviceUtilization | None) -> list[tuple[str, int, int]]:
    """List (name, total ns, sum of its parts ns) for every line of the ledger.

    The ledger is consistent when both numbers agree in every line.
    """
    if utilization is None:
        return []
    sums = []
    lines: list[tuple[str, DeviceUtilization | RankUtilization]] = [("", utilization)]
    for name, ledger in (*lines, *((f" of pid {rank.pid}", rank) for rank in utilization.ranks)):
        parts = ledger.lost_ns + ledger.well_used_ns + ledger.under_used_ns + ledger.unmeasured_ns
        sums.append((f"busy{name}", ledger.busy_ns, parts))
        reasons = sum(ns for _, ns in ledger.reasons)
        sums.append((f"fill unmeasured{name}", ledger.unmeasured_ns, reasons))
    for name in ("busy_ns", "lost_ns", "well_used_ns", "under_used_ns", "unmeasured_ns"):
        whole = getattr(utilization, name)
        sums.append(
            (f"{name} of ranks", whole, sum(getattr(rank, name) for rank in utilization.ranks))
        )
    return sums
