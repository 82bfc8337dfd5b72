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
    """Bounds of `saved_ns`, 95 %; None when the run was too short to tell."""
    why_missing: str = ""
    """Reason when `saved_ns` is None."""
    outside_steps: bool = False
    """As in `Finding.outside_steps`."""
    lost_ns: int = 0
    """Its lost device time, as in `Finding.lost_ns`."""
    saved_cost: float | None = None
    """What `saved_ns` of all its GPUs cost; None without a price or without `saved_ns`."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Money, completion time and the yardsticks users know."""

    price_per_gpu_hour: float | None
    currency: str
    lost_cost: float | None
    """Of all lost device time inside steps; None without a price."""
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
    gpus: int = 0
    """Devices that are paid for: one per rank."""
    upper_bound: bool = False
    """True when lost time is known only as "at most", and so what it cost."""
    why_no_cost: str = ""
    """Reason when there is no `lost_cost`."""
    saved_ns: int | None = None
    """How much sooner the job would end with every finding that can be fixed fixed; more or less
    than the sum over `causes`, for causes hide behind each other."""
    saved_low_ns: int | None = None
    saved_high_ns: int | None = None
    """Bounds of `saved_ns`, 95 %; None when the run was too short to tell."""
    samples_per_second_if_fixed: float | None = None
    why_no_tokens: str = ""
    """Reason when there are no `tokens_per_second`."""
    why_no_samples: str = ""
    """Reason when there are no `samples_per_second`."""
