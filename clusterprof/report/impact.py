"""How much of a device its work filled: a ledger of busy time beside that of lost time.

A kernel that leaves most multiprocessors empty is no idle time, and none of this is ever counted as
lost. For every rank whose device was measured, and for the sum of all, to the nanosecond:

    busy_ns = lost_ns + filled_ns + underfilled_ns + unmeasured_ns
    unmeasured_ns = sum of `reasons`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KNOWN_AT_LEAST_RATIO = 0.5
"""Of the time at work: a device of which less was measured counts as not measured."""


@dataclass(frozen=True, slots=True)
class Levels:
    """What a device was seen to do while it was at work; None where it was not recorded."""

    sm_active_ratio: float | None = None
    """Share of the multiprocessors that had work, mean of the time with a kernel resident."""
    sm_active_p90_ratio: float | None = None
    """The same of single samples: nine tenths of the time were no higher."""
    sm_occupancy_ratio: float | None = None
    """Warps resident over those that fit."""
    tensor_active_ratio: float | None = None
    """Share of the time in which tensor cores worked."""
    dram_active_ratio: float | None = None
    """Part of the memory's highest rate that was used."""
    power_ratio: float | None = None
    """Power at work, from 0 (what the device drew idle) to 1 (its limit); where it was never seen
    idle, over the limit: at most this much."""
    memory_used_bytes: int | None = None
    """The most that was in use."""
    memory_total_bytes: int | None = None
    host_on_cpu_ratio: float | None = None
    """Of the time outside marked waits, the main thread was on a CPU."""

    @property
    def memory_free_ratio(self) -> float | None:
        """Share of the memory that was never in use; None where it is not known."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return max(0.0, 1 - self.memory_used_bytes / self.memory_total_bytes)


@dataclass(frozen=True, slots=True)
class RankFill:
    """How much of its device one rank filled, inside steps."""

    node: str
    rank: int | None
    pid: int
    device: str
    busy_ns: int
    """Time with a kernel resident, by the device's own samples."""
    lost_ns: int
    """Of it, what the ledger of lost time has already: spinning for a late rank, slowed."""
    filled_ns: int
    """Multiprocessors at work, as time: 10 s with half of them busy are 5 s."""
    underfilled_ns: int
    """The rest of the time in which that was measured."""
    unmeasured_ns: int
    """Busy time of which it is not known."""
    reasons: tuple[tuple[str, int], ...]
    """(reason, ns), largest first; sums to `unmeasured_ns`."""
    levels: Levels
    advice: tuple[str, ...] = ()
    """Codes of what is advised (`Advice.code`)."""

    @property
    def is_measured(self) -> bool:
        """True when enough is known of how it was filled."""
        known_ns = self.filled_ns + self.underfilled_ns
        return 0 < known_ns >= KNOWN_AT_LEAST_RATIO * (self.busy_ns - self.lost_ns)


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about devices that are hardly filled; no cause of idle time, and not ranked."""

    code: str
    text: str
    """An instruction, or why there is nothing to do, without a full stop."""
    measured: bool
    """False when it is guessed from power and memory, because SM activity was not recorded."""
    confidence_ratio: float
    grade: Literal["B", "C"]
    """B one direct signal, C correlation only."""
    ranks: int
    """How many it is meant for; `RankFill.advice` says which."""


@dataclass(frozen=True, slots=True)
class Underfill:
    """The ledger of all ranks whose device was measured, and what to do."""

    busy_ns: int
    lost_ns: int
    filled_ns: int
    underfilled_ns: int
    unmeasured_ns: int
    reasons: tuple[tuple[str, int], ...]
    ranks: tuple[RankFill, ...]
    advice: tuple[Advice, ...]
    """That for the most ranks first."""
    why_missing: str = ""
    """Why there is no ledger at all; "" when some rank has one."""


def imbalances(found: Underfill | None) -> list[tuple[str, int, int]]:
    """Return (what, sum, its parts) for every line of the ledger; all hold when each two agree."""
    if found is None:
        return []
    sums = []
    lines: list[tuple[str, Underfill | RankFill]] = [("", found)]
    for name, one in (*lines, *((f" of pid {rank.pid}", rank) for rank in found.ranks)):
        parts = one.lost_ns + one.filled_ns + one.underfilled_ns + one.unmeasured_ns
        sums.append((f"busy{name}", one.busy_ns, parts))
        reasons = sum(ns for _, ns in one.reasons)
        sums.append((f"fill unmeasured{name}", one.unmeasured_ns, reasons))
    for name in ("busy_ns", "lost_ns", "filled_ns", "underfilled_ns", "unmeasured_ns"):
        whole = getattr(found, name)
        sums.append((f"{name} of ranks", whole, sum(getattr(one, name) for one in found.ranks)))
    return sums
