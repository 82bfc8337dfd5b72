"""Lay what was gathered of one file as a node of ours: one process for each device in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from clusterprof.importers import heap
from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.columns import held_by
from clusterprof.importers.kineto import comms, steps, words
from clusterprof.importers.kineto.columns import Int, counts, covered
from clusterprof.importers.kineto.decode import Document
from clusterprof.importers.kineto.gaps import Calls, Host, Work, launched_by, starved
from clusterprof.importers.kineto.gather import Gathered, Table
from clusterprof.importers.kineto.host import Hosted, Marks, blocking_copies, lay_host
from clusterprof.importers.kineto.who import Who, wall_minus_origin_ns, who
from clusterprof.importers.tables import NodeTables
from clusterprof.probe import layout

MORE_DEVICES_PID = 1 << 23
"""Further devices of a process become processes of their own, above all pids that can be."""
_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class _Device:
    """Work of one device, and whose it is."""

    number: int
    key: object
    work: Work
    pid: int
    """Of the process that launched it, as the trace calls it."""


def laid(gathered: Gathered, document: Document, source: Source) -> NodeTables:
    """Return the node that a trace tells of. Raises CannotImportError when it tells nothing."""
    account = gathered.account
    told = who(source, document)
    if math.isnan(gathered.origin_us):
        raise CannotImportError(
            "no event in it that a profiler of PyTorch writes (kernel, cuda_runtime, cpu_op, …)",
            "export with torch.profiler's export_chrome_trace or tensorboard_trace_handler",
        )
    low = _lowest(gathered)
    wall_ns = wall_minus_origin_ns(document, gathered.origin_us)
    calls, marks = _calls(gathered, low), _marks(gathered, low)
    for stretches in (*gathered.busy_host.values(), *gathered.operators.values()):
        stretches.shift(-low)
    heap.trim()
    devices = list(_devices(gathered, calls, low))
    calls = replace(calls, link=_NONE)  # they have served
    heap.trim()
    node = NodeTables(
        _host_name(told, gathered), "kineto", None if wall_ns is None else wall_ns + low,
        key=f"rank{told.rank}" if told.rank is not None else source.path.name.partition(".")[0],
    )  # fmt: skip
    processes: list[_Device | None] = [*devices] or [None]
    for place, device in enumerate(processes):
        _lay_process(node, gathered, told, calls, marks, device, place)
    if len(devices) > 1:
        account.notes.append(f"{len(devices)} devices in it: each is shown as a process of its own")
    if told.rank is None:
        account.notes.append("neither the file nor its name says which rank it is of")
    elif told.rank_from_name:
        account.notes.append(f"rank {told.rank} is told by the file's name alone")
    return node


def _host_name(told: Who, gathered: Gathered) -> str:
    """The host in the file's name counts where its process is one of the trace's."""
    there = any(key[0] == told.host_pid for key in gathered.threads)  # type: ignore[index]
    return told.host if told.host_pid is not None and there else ""


def _lowest(gathered: Gathered) -> int:
    """The first instant of anything, so that no time is negative."""
    tables = (gathered.device, gathered.calls, gathered.marks)
    low = [at for table in tables if (at := table.start.lowest()) is not None]
    low += [int(s.done()[0][0]) for s in gathered.busy_host.values() if s.done()[0].size]
    return min(low, default=0)


def _calls(gathered: Gathered, low: int) -> Calls:
    table, gathered.calls = gathered.calls, Table()  # what is not needed any more goes at once
    return Calls(*_sorted(table, low))


def _marks(gathered: Gathered, low: int) -> Marks:
    start, took, *rest = _sorted(gathered.marks, low)
    return Marks(start, start + took, *rest)


def _sorted(table: Table, low: int) -> tuple[Int, Int, Int, Int, Int]:
    """Start, how long, kind, where and link, by start."""
    start = table.start.done().astype(np.int64, copy=False)
    start -= low
    order = _order(start)
    rest = (table.took, table.kind, table.where, table.link)
    took, kind, where, link = (column.done()[order] for column in rest)
    heap.trim()
    return start[order], took, kind, where, link


def _order(start: Int) -> Int | slice:
    """The rows by start."""
    if (start[1:] >= start[:-1]).all():
        return slice(None)
    return np.argsort(start, kind="stable").astype(held_by(0, start.size))


def _devices(gathered: Gathered, calls: Calls, low: int) -> Iterator[_Device]:
    """Yield the devices of a trace, the busiest first."""
    table, gathered.device = gathered.device, Table()
    start, took, kind, where, link = (
        column.done() for column in (table.start, table.took, table.kind, table.where, table.link)
    )
    heap.trim()
    names = list(gathered.devices)
    threads = [key[0] for key in gathered.threads]  # type: ignore[index]
    count = counts(where, len(names))
    copied, size = (column.done() for column in gathered.copied)
    for number in np.argsort(-count, kind="stable").tolist():
        if not count[number]:
            continue
        rows = np.flatnonzero(where == number).astype(held_by(0, where.size))
        begun = start[rows].astype(np.int64, copy=False)
        if rows.size == where.size:
            del start, where  # nobody else needs them
        begun -= low
        order = _order(begun)
        rows, begun = rows[order], begun[order]
        del order
        heap.trim()
        call = launched_by(calls, link[rows], begun)
        work = Work(begun, took[rows], kind[rows], copied, size, rows, call)
        thread = counts(calls.thread[call[call >= 0]])
        pid = threads[int(thread.argmax())] if thread.size else _first_pid(threads)
        yield _Device(number, names[number], work, pid)


def _first_pid(threads: list[object]) -> int:
    found = [one for one in threads if isinstance(one, int) and one > 0]
    return found[0] if found else 1


def _lay_process(
    node: NodeTables, gathered: Gathered, told: Who, calls: Calls, marks: Marks,
    device: _Device | None, place: int,
) -> None:  # fmt: skip
    """Lay one process: its rank, steps, waits, and what its device did."""
    account = gathered.account
    keys = list(gathered.threads)
    trace_pid = device.pid if device else _pid_of_marks(marks, keys)
    mine = np.array([key[0] == trace_pid for key in keys], np.bool_)  # type: ignore[index]
    pid = trace_pid if isinstance(trace_pid, int) and 0 < trace_pid < MORE_DEVICES_PID else 1
    if place:
        pid = MORE_DEVICES_PID + place
    id_ = ""
    if device is not None:
        id_ = f"gpu{device.key}" if isinstance(device.key, int) else str(device.key)[:40]
        node.device(id_, **told.devices.get(device.key, {}))  # type: ignore[call-overload]
    node.rank(pid, told.rank if not place else None, told.world_size, id_)
    own_calls = _of_threads(calls, mine)
    own_marks = marks.of_threads(mine)
    found = _steps(own_marks, device, account, gathered, mine)
    node.spans(pid, layout.STEP, found.start, found.end, found.number, 2, -1, -1)
    if not place:
        account.read["steps"] += found.start.size
    copies = blocking_copies(device.work, calls, own_calls) if device else None
    launches = counts(own_calls.thread, len(keys))
    work = [
        pair for number, pair in _covered(gathered, mine)
        if device is None or launches[number]
    ]  # fmt: skip
    hosted = Hosted(own_calls, own_marks, copies, work)
    lay_host(node, pid, hosted, _operators(gathered, mine), account)
    if device is not None:
        _lay_device(node, pid, id_, device, calls, hosted, found, told, gathered)


def _pid_of_marks(marks: Marks, keys: list[object]) -> int:
    """The process of the steps; without any, the first one."""
    step = marks.thread[marks.kind == words.STEP]
    at = step if step.size else marks.thread
    pids = [key[0] for key in keys]  # type: ignore[index]
    return pids[int(counts(at).argmax())] if at.size else _first_pid(pids)


def _of_threads(calls: Calls, mine: np.ndarray) -> Calls:
    keep = mine[calls.thread]
    if keep.all():
        return calls
    return Calls(calls.start[keep], calls.took[keep], calls.kind[keep], calls.thread[keep], _NONE)


def _covered(gathered: Gathered, mine: np.ndarray) -> Iterator[tuple[int, tuple[Int, Int]]]:
    for number, stretches in gathered.busy_host.items():
        if mine[number]:
            yield number, stretches.done()


def _operators(gathered: Gathered, mine: np.ndarray) -> dict[int, tuple[Int, Int]]:
    every = gathered.operators.items()
    return {number: stretches.done() for number, stretches in every if mine[number]}


def _steps(
    marks: Marks, device: _Device | None, account: Account, gathered: Gathered, mine: np.ndarray
) -> steps.Steps:  # fmt: skip
    """The steps of a process. Raises CannotImportError where nothing says when it worked."""
    which = marks.kind == words.STEP
    found = steps.marked(marks.start[which], marks.end[which], marks.number[which], account)
    if found is not None:
        return found
    optimizers = marks.end[marks.kind == words.OPTIMIZER]
    if device is not None:
        end = device.work.last_end()
        return steps.inferred(int(device.work.start[0]), end, optimizers, account)
    covered = [pair for _, pair in _covered(gathered, mine) if pair[0].size]
    if not covered:
        raise CannotImportError("neither steps nor work of a device or of operators in it")
    first = min(int(start[0]) for start, _ in covered)
    last = max(int(end[-1]) for _, end in covered)
    return steps.inferred(first, last, optimizers, account)


def _lay_device(
    node: NodeTables, pid: int, id_: str, device: _Device, calls: Calls, hosted: Hosted,
    found: steps.Steps, told: Who, gathered: Gathered,
) -> None:  # fmt: skip
    """Lay when a device was busy, why it was not, and its operations with other ranks."""
    work = device.work
    from_ns, until_ns = int(found.start[0]), int(found.end[-1])
    start, end = covered(work.pieces())
    low, high = min(from_ns, int(work.start[0])), max(until_ns, work.last_end())
    node.busy(id_, start, end, low, high)
    del start, end
    host = Host.of(
        hosted.work, hosted.calls, hosted.copies_in(), hosted.copies_out()
    )  # fmt: skip
    for gaps in starved(work, calls, host, from_ns, until_ns):
        did = (gaps.at_work, gaps.in_sync, gaps.in_alloc, gaps.in_copy)
        node.spans(pid, layout.STARVED, gaps.start, gaps.end, *did)
        gathered.account.read["gaps in which the host was late"] += gaps.start.size
    heap.trim()
    exposed = comms.exposed(work)
    rows = work.row[exposed.at]
    at = gathered.comm_rows.searchsorted(rows)
    if (at < gathered.comm_rows.size).all():
        said = [gathered.said.all[place] for place in gathered.comm_says[at].tolist()]
        groups = comms.Groups(told.distributed, told.rank, told.world_size)
        comms.laid(node, pid, exposed, said, groups, gathered.account)
