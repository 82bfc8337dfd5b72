"""What the host of a device did that holds it up: waits for data and for the device, copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.base import Account
from clusterprof.importers.kineto import words
from clusterprof.importers.kineto.columns import Cover, Int, counts, joined
from clusterprof.importers.kineto.gaps import Calls, Work
from clusterprof.importers.tables import NodeTables
from clusterprof.probe import layout

_TOGETHER_NS = 5_000_000
"""Waits for the device closer than this are one `sync` span, as the probe lays them."""
_SECOND_NS = 1_000_000_000
_PLAIN = (
    (words.OPTIMIZER, layout.OPTIMIZER, 0, 0),
    (words.GC, layout.GC, -1, -1),
    (words.COMPILE, layout.COMPILE, -1, 0),
)


@dataclass(frozen=True, slots=True)
class Marks:
    """Ranges that say what a process did, sorted by start."""

    start: Int
    end: Int
    kind: Int
    thread: Int
    number: Int

    def of_threads(self, mine: NDArray[np.bool_]) -> Marks:
        """Return those of some threads."""
        keep = mine[self.thread]
        rest = (self.end, self.kind, self.thread, self.number)
        return Marks(self.start[keep], *(column[keep] for column in rest))

    def of(self, kind: int) -> tuple[Int, Int, Int]:
        """Return start, end and thread of one kind."""
        which = self.kind == kind
        return self.start[which], self.end[which], self.thread[which]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies whose call returned only when they were done: the host waited; n rows."""

    start: Int
    end: Int
    bytes: Int
    inwards: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hosted:
    """The host side of one process."""

    calls: Calls
    marks: Marks
    copies: Copies | None
    work: list[tuple[Int, Int]]
    """Of each thread that launches: when it was inside operators or calls."""

    def copies_in(self) -> tuple[Int, Int]:
        """When calls that copy to the device held the host up."""
        return self._copies(True)

    def copies_out(self) -> tuple[Int, Int]:
        """The same of copies from the device: they wait for all work before them."""
        return self._copies(False)

    def _copies(self, inwards: bool) -> tuple[Int, Int]:
        if self.copies is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        which = self.copies.inwards == inwards
        return self.copies.start[which], self.copies.end[which]


def blocking_copies(work: Work, calls: Calls, own: Calls) -> Copies:
    """Return the copies between host and device whose call did not return before they were done."""
    rows = np.flatnonzero(np.isin(work.kind, (words.COPY_IN, words.COPY_OUT)) & (work.call >= 0))
    call = work.call[rows]
    held = calls.ends(call) >= work.ends(rows)
    rows, call = rows[held], call[held]
    order = np.argsort(calls.start[call], kind="stable")
    rows, call = rows[order], call[order]
    return Copies(
        calls.start[call], calls.ends(call), work.bytes_of(rows), work.kind[rows] == words.COPY_IN
    )


def lay_host(
    node: NodeTables, pid: int, hosted: Hosted, operators: dict[int, tuple[Int, Int]],
    account: Account,
) -> None:  # fmt: skip
    """Lay the host's spans of one process."""
    main = _main_thread(hosted)
    _lay_loader(node, pid, hosted.marks, main, operators, account)
    start, end = hosted.calls.of(words.SYNC)
    out = hosted.copies_out()
    _lay_syncs(node, pid, np.concatenate([start, out[0]]), np.concatenate([end, out[1]]))
    if hosted.copies is not None:
        inwards = hosted.copies.inwards
        into = hosted.copies
        node.spans(pid, layout.H2D, into.start[inwards], into.end[inwards], into.bytes[inwards], 0)
    _lay_allocator(node, pid, hosted.calls)
    for kind, laid_as, a, b in _PLAIN:
        start, end, _ = hosted.marks.of(kind)
        if kind != words.OPTIMIZER:
            start, end = joined(start, end)
        node.spans(pid, laid_as, start, end, a, b)
    if hosted.copies is None:
        _lay_host_operations(node, pid, hosted.marks, main, account)


def _main_thread(hosted: Hosted) -> int:
    """The thread of the steps, else of the loader, else the one that calls the runtime most."""
    for kind in (words.STEP, words.LOADER_ALONE, words.LOADER_WORKERS, words.OPTIMIZER):
        thread = hosted.marks.of(kind)[2]
        if thread.size:
            return int(counts(thread).argmax())
    thread = hosted.calls.thread
    return int(counts(thread).argmax()) if thread.size else -1


def _lay_loader(
    node: NodeTables, pid: int, marks: Marks, main: int, operators: dict[int, tuple[Int, Int]],
    account: Account,
) -> None:  # fmt: skip
    """Lay waits for data, and what was computed in those in which nobody else loads."""
    for kind, loader, workers in ((words.LOADER_ALONE, 0, 0), (words.LOADER_WORKERS, -1, -1)):
        start, end, thread = marks.of(kind)
        here = thread == main
        if not here.all():
            account.skipped["waits for data of other threads than the steps'"] += int(
                np.count_nonzero(~here)
            )
            start, end = start[here], end[here]
        node.spans(pid, layout.DATA_WAIT, start, end, -1, loader, workers, -1)
        account.read["waits for data"] += start.size
        if kind == words.LOADER_ALONE and start.size and main in operators:
            computed = Cover(*operators[main]).within(start, end)
            node.spans(pid, layout.LOADING, start, end, 0, computed, 0, 0)


def _lay_syncs(node: NodeTables, pid: int, start: Int, end: Int) -> None:
    """Lay waits for the device, those close together as one."""
    some = end > start
    start, end = start[some], end[some]
    if not start.size:
        return
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.flatnonzero(np.concatenate([[True], start[1:] - reach[:-1] > _TOGETHER_NS]))
    waited = np.maximum(end - np.maximum(start, np.concatenate([[0], reach[:-1]])), 0)
    count = np.diff(np.append(opens, start.size))
    last = np.append(opens[1:], start.size) - 1
    ns = np.add.reduceat(waited, opens)
    node.spans(pid, layout.SYNC, start[opens], reach[last], ns, count)


def _lay_allocator(node: NodeTables, pid: int, calls: Calls) -> None:
    """Lay how often device memory was taken and given back, a second at a time."""
    taken, given = calls.of(words.ALLOC)[1], calls.of(words.FREE)[1]
    if not taken.size and not given.size:
        return
    seconds = np.unique(np.concatenate([taken, given]) // _SECOND_NS)
    mallocs = np.bincount(np.searchsorted(seconds, taken // _SECOND_NS), minlength=seconds.size)
    frees = np.bincount(np.searchsorted(seconds, given // _SECOND_NS), minlength=seconds.size)
    start = seconds * _SECOND_NS
    node.spans(pid, layout.ALLOCATOR, start, start + _SECOND_NS, -1, mallocs, frees, 0)


def _lay_host_operations(
    node: NodeTables, pid: int, marks: Marks, main: int, account: Account
) -> None:
    """Count operations between ranks that the host ran: only the main thread's can hold it up."""
    _, _, thread = marks.of(words.HOST_COMM)
    beside = int(np.count_nonzero(thread != main))
    if beside:
        account.skipped["operations between ranks of threads beside the steps'"] += beside
    if thread.size > beside:
        account.skipped["operations between ranks that the host ran"] += thread.size - beside
