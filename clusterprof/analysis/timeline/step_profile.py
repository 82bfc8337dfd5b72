"""Fit the activity of a device over the course of a step, to separate work from busy-waiting.

Where every window contains work and busy-waiting, steps help: most of them are alike. The
activity of each twelfth of a step is fitted to many windows by least squares, and shows work and
busy-waiting apart:

    steps of 240 ms, windows of 200 ms      |==== work 0.9 ====|-- busy-wait 0.05 --|
    windows                                 0.62 to 0.75
    twelfths of a step                      0.9 0.9 0.9 0.9 0.9 0.9 0.9 0.5 0.05 0.05 0.05 0.05
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.timeline.intervals import EMPTY, Pair
from clusterprof.analysis.timeline.model import Float, Int, Rank
from clusterprof.analysis.timeline.spans import CollectiveSpans
from clusterprof.probe import layout
from clusterprof.util.statistics import solve_within_bounds

BUSY_WAIT_RATIO = 1 / 3
"""Part of the usual activity below which a busy device computes nothing."""
PARTIAL_RATIO = 0.8
"""Part of the usual activity below which a window worked only for a part of its time."""
DEFAULT_BUSY_WAIT_RATIO = 0.06
"""Activity of busy-waiting, as a part of the usual one, assumed where it was never seen
alone.
"""
MIN_BUSY_RATIO = 0.5  # below it a window is no evidence of the usual activity
_PARTS = 12
"""Equal parts into which a step is divided."""
_MIN_PROFILE_WINDOWS, _MAX_PROFILE_WINDOWS = 5 * _PARTS // 2, 2048
_SMOOTHING = 0.02
"""Weight of the assumption that a part is like the next one."""
_MAX_UNEVEN_RATIO = 0.25
"""Operations in a step that its marks may differ by: those of start-up, or a step that was cut."""
_MIN_INSIDE_RATIO = 0.9
"""Part of a window that must lie within steps."""
_MIN_F = 5.0
"""Least F value at which parts of a step differ: chance gives less in all but one of 500 jobs."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Sums for fitting the activity of each part of a step to windows."""

    windows: int = 0
    products: tuple[float, ...] = (0.0,) * (_PARTS * _PARTS)
    """Sum over windows of the product of each two parts' shares of the window."""
    activity: tuple[float, ...] = (0.0,) * _PARTS
    """Sum over windows of the product of a part's share and the activity."""
    busy: tuple[float, ...] = (0.0,) * _PARTS
    """The same of the busy share of the window."""
    squares: float = 0.0
    """Sum over windows of the squared activity."""


NO_PROFILE = StepProfile()


def measure_step_parts(rank: Rank, windows: Pair, profile: StepProfile) -> Float | None:
    """Measure which share of each window lies in each part of a step: float64[n, parts].

    0 for windows that are not within steps. None without steps, or when enough is known.
    """
    if profile.windows >= _MAX_PROFILE_WINDOWS:
        return None
    start_ns, end_ns = windows
    begun, ended = _find_steps(rank)
    if not begun.size:
        return None
    start = np.maximum(begun, np.append(begun[0], ended[:-1]))
    length = np.maximum(ended - start, 0).astype(np.float64)
    edges_ns = (start[:, None] + length[:, None] * np.arange(_PARTS + 1) / _PARTS).ravel()
    before = np.cumsum(length) - length
    ends_ns = np.stack([start_ns, end_ns]).astype(np.float64)
    shares = np.zeros((start_ns.size, _PARTS))
    for part in range(_PARTS):
        passed = before[:, None] + np.where(np.arange(_PARTS + 1) > part, length[:, None], 0.0)
        low, high = np.interp(ends_ns, edges_ns, passed.ravel() / _PARTS)
        shares[:, part] = high - low
    shares /= np.maximum(end_ns - start_ns, 1)[:, None]
    shares[shares.sum(axis=1) < _MIN_INSIDE_RATIO] = 0.0
    return shares


def _find_steps(rank: Rank) -> Pair:
    """Find the steps of the device: int64[n] starts and ends, ns; empty without marks.

    A thread that runs collective operations waits for the device before each, so their ends follow
    it, also where the main thread is steps ahead. Else the steps of the host count; without them, a
    step lasts from one wait for data to the next.
    """
    steps, waits = rank.main.spans.get(layout.STEP), rank.main.spans.get(layout.DATA_WAIT)
    if steps is not None:
        begun, ended = steps.start_ns, steps.end_ns
    elif waits is not None:
        begun, ended = waits.start_ns[:-1], waits.start_ns[1:]
    else:
        return EMPTY
    ends = _find_ends_of_operations(rank, begun.size)
    return (ends[:-1], ends[1:]) if ends.size > 1 else (begun, ended)


def _find_ends_of_operations(rank: Rank, steps: int) -> Int:
    """Find the end of one operation of other threads in each step: int64[n], ns, sorted.

    Empty unless their group has the same number of operations in each step.
    """
    operations = rank.main.get_spans(CollectiveSpans)
    no_ends = np.zeros(0, np.int64)
    if operations is None or not steps:
        return no_ends
    (rows,) = (operations.by_other_thread & (operations.group != 0)).nonzero()
    if not rows.size:
        return no_ends
    groups, counts = np.unique(operations.group[rows], return_counts=True)
    rows = rows[operations.group[rows] == groups[np.argmax(counts)]]
    per_step = round(rows.size / steps)
    if not per_step or abs(rows.size / steps - per_step) > _MAX_UNEVEN_RATIO:
        return no_ends
    return np.sort(operations.end_ns[rows[operations.number[rows] % per_step == 0]])


def add_to_profile(profile: StepProfile, parts: Float, value: Float, busy: Float) -> StepProfile:
    """Add windows, float64[n, parts] and float64[n] each, up to _MAX_PROFILE_WINDOWS."""
    if profile.windows >= _MAX_PROFILE_WINDOWS:
        return profile
    (rows,) = (parts.any(axis=1) & ~np.isnan(value)).nonzero()
    rows = rows[: _MAX_PROFILE_WINDOWS - profile.windows]
    selected = parts[rows]
    products = np.reshape(profile.products, (_PARTS, _PARTS)) + selected.T @ selected
    return StepProfile(
        profile.windows + rows.size,
        tuple(products.ravel().tolist()),
        tuple((np.array(profile.activity) + selected.T @ value[rows]).tolist()),
        tuple((np.array(profile.busy) + selected.T @ busy[rows]).tolist()),
        profile.squares + float(value[rows] @ value[rows]),
    )


def find_levels(profile: StepProfile) -> tuple[float, float] | None:
    """Find the activity of work and of busy-waiting in steps; None where they show only one.

    Work is the mean of the busy parts that are nearly as active as the highest quarter.
    """
    if profile.windows < _MIN_PROFILE_WINDOWS:
        return None
    products = np.reshape(profile.products, (_PARTS, _PARTS))
    steps = np.eye(_PARTS) - np.roll(np.eye(_PARTS), 1, axis=1)  # a step follows a step
    matrix = products + _SMOOTHING * float(np.trace(products)) / _PARTS * (steps.T @ steps)
    matrix += 1e-9 * np.eye(_PARTS)
    activity, busy = (
        solve_within_bounds(matrix, np.array(target)) for target in (profile.activity, profile.busy)
    )
    is_busy = busy >= MIN_BUSY_RATIO
    if is_busy.sum() < _PARTS // 2:
        return None
    level = (activity / np.maximum(busy, MIN_BUSY_RATIO))[is_busy]
    highest = float(np.sort(level)[-(_PARTS // 4) :].mean())
    usual = float(level[level >= PARTIAL_RATIO * highest].mean())
    if _compute_f(profile, products, activity, busy) < _MIN_F:
        return None
    waiting = np.sort(level[level < BUSY_WAIT_RATIO * usual])
    if not waiting.size:
        return None
    # The parts beside a short wait blur it, and beside a long one it can be fitted too low.
    least = DEFAULT_BUSY_WAIT_RATIO * usual
    return usual, max(float(waiting[0]), least) if waiting.size > 2 else least


def _compute_f(profile: StepProfile, products: Float, activity: Float, busy: Float) -> float:
    """Compute the F value of parts that differ against parts equally active while busy.

    activity, busy: float64[parts], fitted.
    """
    target = np.array(profile.activity)
    equal = busy * float(busy @ target) / max(float(busy @ products @ busy), 1e-9)
    residual, equal_residual = (
        max(profile.squares + float(fitted @ (products @ fitted - 2 * target)), 0.0)
        for fitted in (activity, equal)
    )
    noise = residual / (profile.windows - _PARTS)
    return (equal_residual - residual) / (_PARTS - 1) / max(noise, 1e-9)
