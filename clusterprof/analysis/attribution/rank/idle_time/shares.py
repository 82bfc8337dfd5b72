"""Allocate idle device time to host phases by the idle share that each phase has over the run.

A window between two device samples is often longer than the phases of a step, so it does not
say in which of them the device was idle. Many windows together do, because they contain the
phases in different parts:

    window   data wait  compute  idle           idle = p * data wait + q * compute
    1               60      140    80
    2              120       80   130           least squares: p = 1.0, q = 0.14
    3               10      190    37

While the main thread launches work its device is busy, and while it sleeps outside any known wait
(a timer, an upload) often not. How long it slept in each window is known from its counters, so both
have a share of their own. Shares lie between 0 and 1. A window's idle time is its expectation by
these shares, plus the difference to what was measured, which goes to phases in proportion to the
variance of a share (p * (1 - p)): a phase in which the device is always idle, or never, takes none
of it. Until enough windows were seen, phases are filled in a fixed order.

Where phases always come in the same parts, windows do not say which of them was idle. There the
shares stay near those of a queue: each step launches the same amount of work, evenly over the time
in which its host launches, and the device is busy until its queue is empty.

    host     launch 20 | wait 80          work of 50 per step
    device   busy 50       | idle 50      launching: 0, waiting: 50 / 80

If a queue predicts the windows of the first minute better than the shares do, it is followed
itself (`queue`); in jobs of several ranks the shares become the means of what it predicts.

Two things are known beforehand. A host waits for its device only as long as that works, so a marked
wait has no share, unless the device copies much: it is idle then, and its host waits. And once such
a wait is over the queue is empty: the idle time of a sleeping thread is placed after it, as far as
there is room.

The shares of the first minute are learned from all its windows before any is divided. Windows of
another kind, such as those of the first steps, are left out of that; later ones count less, the
further they are from the others. Later the equations are updated at fixed numbers of windows, so
that where a recording is cut into chunks changes nothing.

Source: Lawson and Hanson, "Solving Least Squares Problems" (1974), for least squares with
bounds (`util.statistics`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.rank.host_phases import FILL_ORDER, allocate_by_phase
from clusterprof.analysis.attribution.rank.idle_time.queue import (
    ASLEEP,
    DeviceQueue,
    LaunchRows,
    compute_launched_steps,
    follow_queue,
    place_sleep,
    separate_sleep,
)
from clusterprof.analysis.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_COPY,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_H2D,
    PHASE_HIDDEN_COLLECTIVE,
    PHASE_LOCK,
    PHASE_STARTUP,
    PHASE_SYNC,
    Float,
    Int,
)
from clusterprof.util.statistics import solve_within_bounds

PHASES = ASLEEP + 1
MIN_WINDOWS = 16
"""Number of windows before shares are estimated."""
_UPDATE_INTERVAL = 1024
_MIN_GAIN_RATIO = 0.5
"""Shares of a queue are given up if the squared differences become this small a part."""
_MIN_VARIANCE = 0.01
"""Least variance of a share: the difference of a window must fit somewhere."""
_ROUNDING = 0.02
"""A share this near to 0 or 1 is 0 or 1: samples are not exact to a percent."""
_ROUNDS = 8
_RIDGE = 1e-3
"""Least weight of what is assumed of a phase, for phases that windows do not distinguish."""
_ASSUMED_DEVIATION = 0.1
"""Standard deviation of what is assumed. It weighs more, the worse shares describe the windows."""
_MIN_SPREAD, _MAX_SPREADS = 0.05, 3.0
"""A window that differs by more spreads than this is of another kind."""
_LEARNING_ROUNDS, _MEDIAN_OF_NORMAL = 4, 0.6745
_ASSUMED = {
    PHASE_STARTUP: 1.0,
    PHASE_CHECKPOINT: 1.0,
    PHASE_H2D: 1.0,
    PHASE_DATA_WAIT: 1.0,
    PHASE_GC: 1.0,
    PHASE_LOCK: 1.0,
    PHASE_COLLECTIVE: 1.0,
    PHASE_COMPUTE: 0.0,
    PHASE_HIDDEN_COLLECTIVE: 0.0,
    PHASE_COPY: 0.0,
    PHASE_SYNC: 0.0,
}
"""Idle share assumed where nothing is launched: of a wait all, of others the mean."""


@dataclass(frozen=True, slots=True)
class PhaseShares:
    """Idle share of each phase so far, and the sums of the equations behind it."""

    windows: int = 0
    products: tuple[float, ...] = (0.0,) * (PHASES * PHASES)
    """Sum over windows of the product of each two phases' parts of the window."""
    idle_products: tuple[float, ...] = (0.0,) * PHASES
    """Sum over windows of the product of a phase's part and the idle part."""
    idle_squares: float = 0.0
    """Sum over windows of the squared idle part."""
    shares: tuple[float, ...] = ()
    """Idle share of each phase as of the last update; empty = not known yet."""
    assumed: tuple[float, ...] = ()
    """Idle share of each phase by the queue, NaN where it says nothing; empty = not known yet."""
    from_queue: bool = False
    """True if the shares are the means of what a queue of the device predicts."""
    spread: float = 1.0
    """Usual difference of a window's idle part from its expectation."""
    copying: bool = False
    """True if the device copies much; a wait for it may then be a wait for a copy."""


NO_SHARES = PhaseShares()


def allocate_by_shares(
    window: Int,
    phase: Int,
    room_ns: Int,
    idle_ns: Int,
    known: PhaseShares,
    asleep_ns: Int | None = None,
    learned: int = 0,
    drained: NDArray[np.bool_] | None = None,
) -> tuple[Int, PhaseShares]:
    """Allocate the idle time of each window to the rows in it; also return the updated shares.

    window, phase, room_ns: int64[n], rows of one window are contiguous. idle_ns:
    int64[windows]. asleep_ns: int64[windows], sleep of the main thread in PHASE_COMPUTE. learned:
    number of windows at the beginning from which the shares were learned. drained: bool[n], rows of
    PHASE_COMPUTE that begin with an empty queue; None = none. Returns int64[n], ns, at most the
    room.
    """
    parts_ns, cell, in_cell_ns = _sum_parts(window, phase, room_ns, idle_ns.size, asleep_ns)
    amounts_ns = np.zeros(parts_ns.shape)
    at = 0
    while at < idle_ns.size:
        room = _find_next_update(known.windows) - known.windows
        until = learned if at < learned else min(idle_ns.size, at + room)
        rows = slice(at, until)
        if known.shares:
            amounts_ns[rows] = _split_windows(parts_ns[rows], idle_ns[rows], known.shares)
        if at >= learned:
            known = _add_windows(known, *_compute_ratios(parts_ns[rows], idle_ns[rows]))
        at = until
    first_ns = np.zeros(room_ns.size)
    if drained is not None and drained.any():
        first_ns = place_sleep(window, room_ns, amounts_ns[:, ASLEEP], drained)
        amounts_ns[:, PHASE_COMPUTE] -= np.bincount(window, first_ns, minlength=idle_ns.size)
        in_cell_ns = in_cell_ns - np.bincount(cell, first_ns, minlength=in_cell_ns.size)
    amounts_ns[:, PHASE_COMPUTE] += amounts_ns[:, ASLEEP]
    # Within a phase by length; what rounding leaves, and windows before any share is known, go on.
    ratio = np.maximum(amounts_ns.ravel(), 0.0) / np.maximum(in_cell_ns, 1.0)
    placed_ns = first_ns + (room_ns - first_ns) * ratio[cell]
    out = np.minimum(np.floor(placed_ns).astype(np.int64), room_ns)
    left_ns = idle_ns - np.bincount(window, out, minlength=idle_ns.size).astype(np.int64)
    return out + allocate_by_phase(window, phase, room_ns - out, left_ns, FILL_ORDER), known


def learn_shares(
    window: Int,
    phase: Int,
    room_ns: Int,
    idle_ns: Int,
    step: Int,
    asleep_ns: Int | None = None,
    drained: NDArray[np.bool_] | None = None,
    copying: bool = False,
) -> PhaseShares:
    """Learn the shares of a run from its first windows.

    As `allocate_by_shares`; step: int64[n], number of steps begun. copying: as in `PhaseShares`.
    """
    rows = separate_sleep(LaunchRows(window, phase, room_ns, step), asleep_ns, drained)
    assumed = assume_queue(rows, int(idle_ns.sum()))
    if idle_ns.size < MIN_WINDOWS:
        return PhaseShares(assumed=assumed, copying=copying)
    parts_ns, _, _ = _sum_parts(window, phase, room_ns, idle_ns.size, asleep_ns)
    parts, idle = _compute_ratios(parts_ns, idle_ns)
    known = PhaseShares(assumed=assumed, copying=copying)
    # Begin with what is assumed: a fit to all windows would follow the first steps, in which a
    # phase that is otherwise short takes the whole window.
    shares = fill_assumed(assumed, float(idle.mean()))
    for _ in range(_LEARNING_ROUNDS):
        difference = np.abs(idle - parts @ shares)
        spread = max(float(np.median(difference)) / _MEDIAN_OF_NORMAL, _MIN_SPREAD)
        usual = difference <= _MAX_SPREADS * spread
        rare = 2 * parts[usual].sum(axis=0) < parts.sum(axis=0)
        # Nothing else shows what those phases are like; but they explain no more than their part.
        usual |= difference <= _MAX_SPREADS * spread + parts[:, rare].sum(axis=1)
        none = PhaseShares(assumed=assumed, spread=spread, copying=copying)
        known = _add_windows(none, parts[usual], idle[usual])
        shares = solve_shares(known)
    return update_shares(known)


def predict_by_shares(
    rows: tuple[Int, Int, Int], windows: int, asleep_ns: Int | None, known: PhaseShares
) -> Float:
    """Predict the idle time of each window from its phases: float64[windows], ns.

    rows: window, phase and length, ns.
    """
    if not known.shares:
        return np.full(windows, np.nan)
    parts_ns, _, _ = _sum_parts(*rows, windows, asleep_ns)
    return np.asarray(parts_ns @ np.array(known.shares), np.float64)


def _sum_parts(
    window: Int, phase: Int, room_ns: Int, windows: int, asleep_ns: Int | None
) -> tuple[Float, Int, Float]:
    """Return the parts of each window by phase, and the cell of each row with its room.

    float64[windows, phases], int64[n], float64[windows * phases], ns.
    """
    cell = window * PHASES + phase
    in_cell_ns: Float = np.bincount(cell, room_ns, minlength=windows * PHASES).astype(np.float64)
    parts_ns = in_cell_ns.reshape(-1, PHASES).copy()
    if asleep_ns is not None:
        parts_ns[:, ASLEEP] = np.minimum(asleep_ns, parts_ns[:, PHASE_COMPUTE])
        parts_ns[:, PHASE_COMPUTE] -= parts_ns[:, ASLEEP]
    return parts_ns, cell, in_cell_ns


def _compute_ratios(parts_ns: Float, idle_ns: Int) -> tuple[Float, Float]:
    """Divide the parts of windows, and their idle time, by their length."""
    length_ns = np.maximum(parts_ns.sum(axis=1), 1.0)
    return parts_ns / length_ns[:, None], np.minimum(idle_ns / length_ns, 1.0)


def _find_next_update(windows: int) -> int:
    if windows >= _UPDATE_INTERVAL:
        return (windows // _UPDATE_INTERVAL + 1) * _UPDATE_INTERVAL
    update = MIN_WINDOWS
    while update <= windows:
        update *= 2
    return update


def _add_windows(known: PhaseShares, parts: Float, idle: Float) -> PhaseShares:
    """Add windows to the equations, and solve them when an update is due."""
    weight = np.ones(idle.size)
    if known.shares:
        difference = np.abs(idle - parts @ np.array(known.shares))
        weight = np.minimum(1.0, _MAX_SPREADS * known.spread / np.maximum(difference, 1e-9))
    weighted = parts * weight[:, None]
    products = np.reshape(known.products, (PHASES, PHASES)) + weighted.T @ parts
    idle_products = np.array(known.idle_products) + weighted.T @ idle
    windows = known.windows + idle.size
    is_due = windows == _find_next_update(known.windows)
    known = replace(
        known,
        windows=windows,
        products=tuple(products.ravel().tolist()),
        idle_products=tuple(idle_products.tolist()),
        idle_squares=known.idle_squares + float(weight @ idle**2),
    )
    return update_shares(known) if is_due else known


def update_shares(known: PhaseShares) -> PhaseShares:
    """Solve the equations as they are now, if enough windows were seen.

    Shares of a queue stay, unless others describe the windows far better.
    """
    if known.windows < MIN_WINDOWS:
        return known
    solved = solve_shares(known)
    if known.from_queue:
        is_better = _sum_squares(known, solved) < _MIN_GAIN_RATIO * _sum_squares(
            known, np.array(known.shares)
        )
        if not is_better:
            return known
    return replace(known, shares=tuple(solved.tolist()), from_queue=False)


def _sum_squares(known: PhaseShares, shares: Float) -> float:
    """Sum the squared differences of all windows so far to their expectation by the shares."""
    products = np.reshape(known.products, (PHASES, PHASES))
    return known.idle_squares + float(
        shares @ (products @ shares - 2 * np.array(known.idle_products))
    )


def follow_shares_of_queue(known: PhaseShares, rows: LaunchRows, queue: DeviceQueue) -> PhaseShares:
    """Replace the shares by those that a queue of the device predicts, if it is followed."""
    if not queue.work_ns:
        return known
    launched_steps, _ = compute_launched_steps(rows)
    predicted_ns, _ = follow_queue(launched_steps, rows.length_ns, queue.work_ns)
    shares = _compute_mean_shares(rows, predicted_ns)
    filled = np.where(np.isnan(shares), known.shares, shares)
    return replace(known, shares=tuple(filled.tolist()), from_queue=True)


def _compute_mean_shares(rows: LaunchRows, idle_ns: Int) -> Float:
    """Compute the idle share of each phase, NaN for phases that did not occur."""
    idle = np.bincount(rows.phase, idle_ns, minlength=PHASES)
    room = np.bincount(rows.phase, rows.length_ns, minlength=PHASES)
    return np.divide(idle, room, out=np.full(PHASES, np.nan), where=room > 0)


def assume_queue(rows: LaunchRows, idle_ns: int) -> tuple[float, ...]:
    """Compute the idle share of each phase if the device works off a queue; NaN = unknown.

    idle_ns: of all rows.
    """
    if not rows.phase.size:
        return ()
    launched_steps, _ = compute_launched_steps(rows)
    busy_ns = int(rows.length_ns.sum()) - idle_ns
    if not launched_steps.any() or busy_ns <= 0:
        return (np.nan,) * PHASES
    work_ns = round(busy_ns / float(launched_steps.sum()))
    predicted_ns, _ = follow_queue(launched_steps, rows.length_ns, work_ns)
    shares = _compute_mean_shares(rows, predicted_ns)
    shares[ASLEEP] = 1.0
    return tuple(shares.tolist())


def fill_assumed(assumed: tuple[float, ...], mean: float) -> Float:
    """Fill in the idle shares of which a queue says nothing: float64[k]; `mean` is that of all."""
    shares = np.array(assumed or (np.nan,) * PHASES)
    otherwise = [_ASSUMED.get(phase, mean) for phase in range(PHASES)]
    return np.where(np.isnan(shares), otherwise, shares)


def solve_shares(known: PhaseShares) -> Float:
    """Solve for the idle share of each phase by least squares with 0 <= share <= 1: float64[k].

    Phases that did not occur get the mean share of all.
    """
    products = np.reshape(known.products, (PHASES, PHASES))
    idle_products = np.array(known.idle_products)
    weight = float(products.sum())
    mean = float(idle_products.sum()) / weight if weight > 0 else 0.0
    shares = np.full(len(products), min(max(mean, 0.0), 1.0))
    occurs = np.diag(products) > 0
    if not known.copying:
        shares[PHASE_SYNC] = 0.0  # a host waits for its device only as long as that works
        occurs[PHASE_SYNC] = False
    (present,) = occurs.nonzero()
    matrix, target = products[np.ix_(present, present)], idle_products[present]
    assumed = fill_assumed(known.assumed, mean)[present]

    def solve(ridge: float) -> Float:
        stiff = matrix + ridge * np.eye(present.size)
        return solve_within_bounds(stiff, target + ridge * assumed)

    ridge = _RIDGE * float(np.trace(products)) / len(products) + 1e-12
    solved = solve(ridge)
    squares = known.idle_squares + float(solved @ (matrix @ solved - 2 * target))
    variance = max(squares, 0.0) / max(known.windows - present.size, 1)
    stiff = max(ridge, variance / _ASSUMED_DEVIATION**2)
    shares[present] = solved if stiff == ridge else solve(stiff)
    return np.where(shares < _ROUNDING, 0.0, np.where(shares > 1 - _ROUNDING, 1.0, shares))


def _split_windows(parts_ns: Int | Float, idle_ns: Int, shares: tuple[float, ...]) -> Float:
    """Return the idle time of each window by phase: float64[windows, phases], ns."""
    (present,) = parts_ns.any(axis=0).nonzero()
    out = np.zeros(parts_ns.shape)
    share, parts_ns = np.array(shares)[present], parts_ns[:, present]
    amounts_ns = parts_ns * share
    variance = np.maximum(share * (1 - share), _MIN_VARIANCE)
    for _ in range(_ROUNDS):
        missing_ns = idle_ns - amounts_ns.sum(axis=1)
        if np.abs(missing_ns).max(initial=0.0) < 1.0:
            break
        room = np.where(missing_ns[:, None] > 0, amounts_ns < parts_ns, amounts_ns > 0)
        weight = np.where(room, parts_ns * variance, 0.0)
        total = weight.sum(axis=1)
        step = np.divide(missing_ns, total, out=np.zeros_like(total), where=total > 0)
        amounts_ns = np.minimum(np.maximum(amounts_ns + weight * step[:, None], 0.0), parts_ns)
    out[:, present] = amounts_ns
    return out
