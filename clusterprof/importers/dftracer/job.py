"""DFTracer's processes as nodes of ours: steps, waits, and what stood behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from clusterprof.importers.base import Account
from clusterprof.importers.dftracer import events as seen
from clusterprof.importers.dftracer.events import Job, Key, Process
from clusterprof.importers.tables import NodeTables
from clusterprof.probe import layout
from clusterprof.timeline.intervals import Intervals, intersect, overlap_ns, subtract, union

WALL_CLOCK_NS = 1_000_000_000 * 1_000_000_000  # earlier times are counted from something else
CLOSE_NS = 1_000_000
"""Items of a batch come one after the other: a shorter silence between them is no end of a wait."""
_SPANS = (
    (seen.FORWARD, layout.FORWARD), (seen.BACKWARD, layout.BACKWARD),
    (seen.OPTIMIZER, layout.OPTIMIZER), (seen.EVALUATION, layout.EVAL),
    (seen.TRANSFER, layout.H2D), (seen.CHECKPOINT, layout.CHECKPOINT),
)  # fmt: skip
_MINUS_ONE = (seen.TRANSFER, seen.CHECKPOINT)


def nodes_of(job: Job, account: Account) -> Iterator[NodeTables]:
    """Yield the hosts of a job, with the processes that train."""
    training = {key: one for key, one in job.processes.items() if _trains(one)}
    workers: dict[tuple[Key, int], list[Process]] = {key: [] for key in training}
    for one in job.processes.values():
        owner = _owner(one, training)
        if owner is not None:
            workers[owner].append(one)
        elif not _trains(one) and one.kinds:
            account.skipped["processes that load for nobody we see"] += 1
    for host in dict.fromkeys(key[0] for key in training):
        name = job.hosts.get(host, "")
        first = min(int(one.spans[0]) for key, one in training.items() if key[0] == host)
        known = 0 if first > WALL_CLOCK_NS else None
        node = NodeTables(name, "dftracer", known, key=name or f"host-{str(host)[:16]}")
        here = [(one, workers[key]) for key, one in training.items() if key[0] == host]
        for one, theirs in sorted(here, key=lambda pair: (pair[0].rank or 0, pair[0].pid)):
            _add_rank(node, one, theirs, account)
        yield node


def _trains(one: Process) -> bool:
    """A process that loads items and neither waits for batches nor computes is a loader's."""
    return any(kind != seen.ITEM for kind in one.kinds)


def _owner(one: Process, training: dict[tuple[Key, int], Process]) -> tuple[Key, int] | None:
    """The process for which another one loads: its parent, or the only one on its host."""
    if _trains(one) or not one.kinds:
        return None
    if (one.host, one.parent) in training:
        return one.host, one.parent
    here = [key for key in training if key[0] == one.host]
    return here[0] if len(here) == 1 else None


def _set(one: Process, *kinds: int) -> Intervals:
    """When a process did something of some kinds."""
    table = np.array(one.spans, np.int64).reshape(-1, 2)
    rows = table[np.isin(np.array(one.kinds, np.int64), kinds)]
    return union((rows[:, 0], rows[:, 1]))


def _add_rank(node: NodeTables, one: Process, workers: Sequence[Process], account: Account) -> None:
    items, waits = _set(one, seen.ITEM), _set(one, seen.WAIT)
    computing = _set(one, seen.COMPUTE, seen.FORWARD, seen.BACKWARD, seen.OPTIMIZER)
    waiting = subtract(_closed(union(items, waits)), computing)
    device = ""
    if one.emulated:
        device = f"emulated-{one.pid if one.rank is None else one.rank}"
        node.device(device, vendor="emulated", name="DLIO's sleep", emulated=True)
    node.rank(one.pid, one.rank, one.world, device)
    steps = steps_of(_set(one, seen.EPOCH), waiting, computing)
    account.read["steps"] += steps.start_ns.size
    numbers = np.arange(1, steps.start_ns.size + 1)
    node.spans(one.pid, layout.STEP, *steps, numbers, 2, -1, -1)
    loaded_here = items.start_ns.size > 0
    owner = 0 if loaded_here else -1
    node.spans(one.pid, layout.DATA_WAIT, *waiting, -1, owner, 0 if loaded_here else -1, -1)
    for kind, ours in _SPANS:
        found = _set(one, kind)
        if found.start_ns.size:
            node.spans(one.pid, ours, *found, -1 if kind in _MINUS_ONE else 0)
    if loaded_here:
        _loading(node, one, items, [one])
    elif workers:
        _loading(node, one, waiting, workers)
    if one.emulated and computing.start_ns.size and steps.start_ns.size:
        low = min(int(computing.start_ns[0]), int(steps.start_ns[0]))
        node.busy(device, *computing, low, int(computing.end_ns[-1]))


def _closed(found: Intervals) -> Intervals:
    """The same, with short silences closed."""
    if found.start_ns.size < 2:
        return found
    far = np.flatnonzero(found.start_ns[1:] - found.end_ns[:-1] > CLOSE_NS)
    first, last = np.concatenate([[0], far + 1]), np.concatenate([far, [found.start_ns.size - 1]])
    return Intervals(found.start_ns[first], found.end_ns[last])


def steps_of(epochs: Intervals, waiting: Intervals, computing: Intervals) -> Intervals:
    """Return the steps: each ends with the last computing before the next wait.

    It begins where the one before ended; the first of an epoch where the epoch began, or with its
    first wait. Without computing a step lasts from wait to wait, without waits it is the computing.
    """
    if not computing.start_ns.size:
        return Intervals(waiting.start_ns[:-1], waiting.start_ns[1:])
    if not waiting.start_ns.size:
        return computing
    before = waiting.start_ns.searchsorted(computing.start_ns)  # waits that began before
    last = np.append(before[1:] != before[:-1], True) & (before > 0)
    end = computing.end_ns[last]
    if not end.size:
        return Intervals(waiting.start_ns[:-1], waiting.start_ns[1:])
    start = np.concatenate([waiting.start_ns[:1], end[:-1]])
    if epochs.start_ns.size:
        row = epochs.start_ns.searchsorted(end) - 1
        begun = epochs.start_ns[np.maximum(row, 0)]
        start = np.where((row >= 0) & (begun > start), begun, start)
        start[0] = min(start[0], begun[0]) if row[0] >= 0 else start[0]
    keep = end > start
    return Intervals(start[keep], end[keep])


def _loading(
    node: NodeTables, one: Process, stretches: Intervals, loaders: Iterable[Process]
) -> None:
    """Say what the loading threads did in each stretch: reads, and the rest of their items.

    Of several loaders each gets the same part of a stretch, for nobody knows whose batch it was.
    """
    if not stretches.start_ns.size:
        return
    reading = np.zeros(stretches.start_ns.size, np.int64)
    working = np.zeros(stretches.start_ns.size, np.int64)
    bytes_ = np.zeros(stretches.start_ns.size)
    where = np.zeros((stretches.start_ns.size, 4))
    for loader in loaders:
        items = _set(loader, seen.ITEM)
        rows = np.array(loader.reads, np.int64).reshape(-1, 4)
        within = intersect(items, union((rows[:, 0], rows[:, 1])))
        reading += overlap_ns(stretches, within)
        working += overlap_ns(stretches, items)
        place = stretches.start_ns.searchsorted(rows[:, 0], "right") - 1
        inside = (place >= 0) & (rows[:, 0] < stretches.end_ns[np.maximum(place, 0)])
        place, rows = place[inside], rows[inside]
        np.add.at(bytes_, place, rows[:, 2])
        np.add.at(where, (place, rows[:, 3]), rows[:, 1] - rows[:, 0] + 1)
    length = stretches.end_ns - stretches.start_ns
    some = working > 0
    part = np.divide(reading, working, out=np.zeros(working.size), where=some)
    covered = np.minimum(working, length)
    a = np.minimum(np.rint(part * covered).astype(np.int64), covered)
    kind = np.where(where.any(axis=1), where.argmax(axis=1), 0)
    node.spans(
        one.pid, layout.LOADING, stretches.start_ns[some], stretches.end_ns[some], a[some],
        (covered - a)[some], np.rint(bytes_[some]).astype(np.int64), kind[some],
    )  # fmt: skip
