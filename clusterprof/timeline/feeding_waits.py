"""Which worker each data wait was waiting for, and which of its fetches made the awaited batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe.layout import DATA_WAIT, FETCH, WORKER_START
from clusterprof.timeline.model import Int, Process, Rank, SpanTable

UNKNOWN_PID = 0
NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Waits:
    """The data waits of a rank, disjoint and sorted; n rows."""

    start_ns: Int
    end_ns: Int
    pid: Int
    """Process of the critical thread; 0 when it cannot be told."""
    identified: NDArray[np.bool_]
    """True where the span named it, or where only one process fetches at all."""


def waits_of(rank: Rank) -> Waits:
    """Return the waits and whom each was waiting for.

    A span that names no worker (-1) waited for the worker whose fetch was the last to end before
    the wait did; with no workers, for the main thread.
    """
    spans = rank.main.spans.get(DATA_WAIT)
    if spans is None or not len(spans.start_ns):
        none = np.zeros(0, np.int64)
        return Waits(none, none, none, none.astype(np.bool_))
    reach = np.maximum.accumulate(spans.end_ns)
    start = spans.start_ns.copy()
    np.maximum(start[1:], reach[:-1], out=start[1:])
    some = spans.end_ns > start  # a wait inside another one is the outer one's
    end, owner = spans.end_ns, spans.b
    if not some.all():
        start, end, owner = start[some], end[some], owner[some]
    pid = np.where(owner == 0, rank.pid, np.maximum(owner, UNKNOWN_PID))
    guess = owner < 0
    feeders = [p for p in (*rank.workers, rank.main) if fetches_of(p) is not None]
    if guess.any():
        pid[guess] = _last_to_finish(feeders, end[guess])
    identified = ~guess | (len(feeders) == 1)
    for one in distinct(pid):
        if one not in rank.chunk.processes:
            identified &= pid != one
    return Waits(start, end, pid, identified)


def distinct(pids: Int) -> list[int]:
    """Return the different values in rising order."""
    if pids.size and (pids == pids[0]).all():  # most ranks have one worker, or none
        return [int(pids[0])]
    return np.unique(pids).tolist()  # type: ignore[no-any-return]


def _last_to_finish(feeders: list[Process], end_ns: Int) -> Int:
    """The worker whose fetch ended last at or before each instant; 0 when there is none."""
    ends = [fetch.end_ns for p in feeders if (fetch := fetches_of(p)) is not None]
    if not ends:
        return np.full(len(end_ns), UNKNOWN_PID, np.int64)
    pids = np.repeat([p.pid for p in feeders], [len(e) for e in ends])
    all_ends = np.concatenate(ends)
    order = np.argsort(all_ends, kind="stable")
    row = np.searchsorted(all_ends[order], end_ns, side="right") - 1
    return np.where(row >= 0, pids[order][np.maximum(row, 0)], UNKNOWN_PID)


def fetches_of(process: Process) -> SpanTable | None:
    """Return the fetches of a process, disjoint and sorted; None when there are none."""
    spans = process.spans.get(FETCH)
    if spans is None or not len(spans.start_ns):
        return None
    if (spans.start_ns[1:] >= spans.end_ns[:-1]).all():
        return spans
    reach = np.maximum.accumulate(spans.end_ns)
    kept = np.append(True, spans.start_ns[1:] >= reach[:-1])
    columns = (getattr(spans, name)[kept] for name in SpanTable.__slots__)
    return SpanTable(*columns)


def began_ns(process: Process) -> int:
    """Return when a worker was ready to fetch; long ago when it did not say.

    Between the begin of its loop and its first fetch it sets itself up (`worker_init_fn`).
    """
    spans = process.spans.get(WORKER_START)
    if spans is None or not len(spans.start_ns):
        return int(NEVER)
    fetched = process.spans.get(FETCH)
    if fetched is not None and np.array_equal(fetched.sequence[:1], spans.sequence[-1:] + 1):
        return int(fetched.start_ns[0])
    return int(spans.start_ns[-1])


def ready_ns(fetches: SpanTable, wait_start_ns: Int, wait_end_ns: Int) -> tuple[Int, Int]:
    """Return when the awaited batch of each wait was ready, and until when that is certain.

    The batch was made by the last fetch that ended before the wait did. Where nothing ended
    before, it was never ready (the end of the wait). A fetch that ended before the wait began is
    certain only when no record is missing after it: the second array is 1 where it is, else 0.
    """
    row = np.searchsorted(fetches.end_ns, wait_end_ns, side="right") - 1
    known = row >= 0
    row = np.maximum(row, 0)
    ready = np.where(known, fetches.end_ns[row], wait_end_ns)
    following = np.minimum(row + 1, len(fetches.end_ns) - 1)
    whole = (following == row) | (fetches.sequence[following] == fetches.sequence[row] + 1)
    certain = known & ((ready > wait_start_ns) | whole)
    return ready, certain.astype(np.int64)
