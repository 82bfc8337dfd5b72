"""What lost time is worth, and what the job would be with a cause fixed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CauseWorth:
    """One cause in money, and in the time of the job."""

    cause: str
    """Cause id, as in `Finding.cause`."""
    lost_cost: float | None
    """What its lost device time cost; None without a price."""
    saved_ns: int | None
    """How much sooner the job would end with only this fixed; None when that cannot be said."""
    saved_low_ns: int | None
    saved_high_ns: int | None
    """Bounds of `saved_ns`, 95 %."""
    why_missing: str = ""
    """Reason when `saved_ns` is None."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Money, completion time and the yardsticks users know."""

    price_per_gpu_hour: float | None
    currency: str
    lost_cost: float | None
    """Of all lost device time; None without a price."""
    job_ns: int | None
    """From the first step's start to the last one's end; None without steps."""
    causes: tuple[CauseWorth, ...]
    """In the order of the findings."""
    tokens_per_second: float | None = None
    tokens_per_second_if_fixed: float | None = None
    """With every finding that can be fixed fixed."""
    samples_per_second: float | None = None
    cost_per_million_tokens: float | None = None
    cost_per_million_tokens_if_fixed: float | None = None
    yardsticks: tuple[tuple[str, float | None, str], ...] = ()
    """(name, value, how it is defined or why there is none)."""
