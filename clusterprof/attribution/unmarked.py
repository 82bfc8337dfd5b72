"""Lost time that may be waiting for other ranks, in operations that nobody marked.

    idle, inside a step, the main thread asleep        a collective in which the host waits
    the same, and the node sends                       one, or data on their way
    busy, computing nothing (`spinning`)               one in which the device waits

One rank alone cannot know: the main thread sleeps for other reasons too. So this is a reason for
time to be unattributed, until all ranks lie side by side (`frontier`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.attribution.partial import SHARE, Partial
from clusterprof.probe import layout
from clusterprof.timeline.feeding_blocked import surroundings
from clusterprof.timeline.feeding_samples import sampled
from clusterprof.timeline.feeding_shares import UNKNOWN
from clusterprof.timeline.identity import place_of
from clusterprof.timeline.model import (
    PHASE_COMPUTE,
    PHASE_NONE,
    PHASE_PERHAPS,
    PHASE_SPINNING,
    SOURCE_DEVICE_SAMPLES,
    Float,
    Int,
    Lost,
    Rank,
)
from clusterprof.timeline.series import rise

ASLEEP, SENDING, SPINNING = "asleep", "sending", "spinning"  # their names in the books
PERHAPS = "perhaps-spinning"
SURELY = "surely_asleep"
"""Name of a total in ns * SHARE: sleep while the device idled for sure."""
REASONS = ASLEEP, SENDING, SPINNING, PERHAPS
ASLEEP_AT_LEAST_RATIO = 0.5
SENT_AT_LEAST_BYTES_PER_SECOND = 100_000_000
SENT_AT_LEAST_RATIO = 0.25  # of the rate of the fastest link, where it is known


def has_peers(rank: Rank) -> bool:
    """True when the launcher says that there are other ranks."""
    return (place_of(rank.main.registration).world_size or 1) > 1


def marks_operations(rank: Rank) -> bool:
    """True when the rank marked an operation with others: then it waits in these alone."""
    table = rank.main.spans.get(layout.COLLECTIVE)
    return table is not None and bool((table.a != 0).any())


def unmarked(rank: Rank, lost: Lost, left: Int) -> tuple[Int, Int, Int, Int]:
    """Return in which part of each piece the rank may have waited asleep, spinning, or perhaps so.

    int64[n], in 1/SHARE, together no more than `left`, the part that no cause has claimed. Last
    comes the part of the first in which it slept for sure.
    """
    spins = np.where(lost.phase == PHASE_SPINNING, left, 0)
    perhaps = np.where(lost.phase == PHASE_PERHAPS, left, 0)
    asleep, surely = (
        np.minimum(np.rint(part * SHARE).astype(np.int64), left)
        for part in slept(rank, lost, left > 0)
    )
    return asleep, spins, perhaps, surely


def waiting(part: Partial, rank: Rank, lost: Lost, left: Int, unknown: str) -> tuple[Partial, Int]:
    """Tell what may be waiting for other ranks from what nothing is known of (`unknown`).

    Second comes the part of each piece, in 1/SHARE.
    """
    asleep, spins, perhaps, surely = unmarked(rank, lost, left)
    sleeps = SENDING if asleep.any() and sends(rank, lost, asleep) else ASLEEP
    pairs = (sleeps, asleep), (SPINNING, spins), (PERHAPS, perhaps)
    moved = {name: int((lost.lost_ns * units).sum()) for name, units in pairs}
    share = asleep + spins + perhaps
    unexplained = {**part.unexplained, **moved}
    unexplained[unknown] = unexplained.get(unknown, 0) - sum(moved.values())
    totals = {SURELY: int((lost.lost_ns * surely).sum())}
    left_over = {reason: n for reason, n in unexplained.items() if n}
    return replace(part, totals={**part.totals, **totals}, unexplained=left_over), share


def without_sleep(rank: Rank, lost: Lost, startup: Float) -> Float:
    """Return what `startup` claims of each piece less the host's sleep.

    Who sleeps in the first step may wait for another that starts: that is told by all ranks.
    """
    return startup * (1.0 - slept(rank, lost, startup > 0)[0])


def slept(rank: Rank, lost: Lost, which: NDArray[np.bool_]) -> tuple[Float, Float]:
    """Return which part of the chosen pieces the host may have slept in an operation that was not
    marked, and which part it surely slept while its device idled: float64[n] each, 0 to 1.

    Of 100 ns with 20 idle and 90 asleep that is all, and (20 + 90 - 100) / 20.
    """
    out, surely = np.zeros((2, lost.start_ns.size))
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not has_peers(rank) or marks_operations(rank):
        return out, surely
    inside = lost.phase == (PHASE_COMPUTE if rank.marked else PHASE_NONE)
    rows = np.flatnonzero(inside & (lost.source == SOURCE_DEVICE_SAMPLES) & which)
    if rows.size:
        start, end = lost.start_ns[rows], lost.end_ns[rows]
        asleep = sampled(rank.main, start, end, surroundings(rank.chunk))[:, UNKNOWN]
        asleep[(asleep < ASLEEP_AT_LEAST_RATIO) | ~_counted(thread.t_ns, start, end)] = 0.0
        # A device idles while its host sleeps rather than while that gives it something to do.
        idle = lost.lost_ns[rows] / np.maximum(end - start, 1)
        out[rows] = np.minimum(asleep / idle, 1.0)
        surely[rows] = np.clip((asleep + idle - 1.0) / idle, 0.0, 1.0)
    return out, surely


def sends(rank: Rank, lost: Lost, asleep: Int) -> bool:
    """True when the node sends about as much as it receives, and enough to be waited for.

    Who loads from far away receives much more than it sends.
    """
    slept_s = float((lost.lost_ns * (asleep / SHARE)).sum()) / 1e9
    if slept_s <= 0:
        return False
    ends = lost.start_ns[:1], lost.end_ns[-1:]
    sent, got = (
        sum(
            float(np.nan_to_num(rise(series, *ends)).sum())
            for (name, _), series in rank.chunk.series.items()
            if name == signal.name
        )
        for signal in (signals.NET_TRANSMIT, signals.NET_RECEIVE)
    )
    least = max(SENT_AT_LEAST_BYTES_PER_SECOND, SENT_AT_LEAST_RATIO * _link_rate(rank))
    return sent >= least * slept_s and 4 * sent >= got


def _link_rate(rank: Rank) -> float:
    """Bytes per second of the node's fastest link; 0 when it is not known."""
    rates = [
        float(np.nanmax(series.values))
        for (name, _), series in rank.chunk.series.items()
        if name == signals.NET_LINK_SPEED.name and not np.isnan(series.values).all()
    ]
    return max(rates, default=0.0)


def _counted(t_ns: Int, start_ns: Int, end_ns: Int) -> np.ndarray:
    """True for intervals between the first and the last sample of a thread."""
    if len(t_ns) < 2:
        return np.zeros(len(start_ns), np.bool_)
    return (start_ns >= t_ns[0]) & (end_ns <= t_ns[-1])
