"""Traces of the PyTorch profiler (Kineto) in Chrome JSON.

## How to make the file

In the training script:

    handler = torch.profiler.tensorboard_trace_handler("traces/")
    with torch.profiler.profile(schedule=torch.profiler.schedule(5, 5, 20),
                                on_trace_ready=handler) as profiler:
        for batch in loader:
            train_on(batch)
            profiler.step()

## How to analyze it

    clusterprof analyze traces/

## What is read

Files of `export_chrome_trace` and `tensorboard_trace_handler` from PyTorch 1.8 and later, plain or
packed with gzip, zstd or zip: the object with `traceEvents`, and the bare list of old versions. One
file is one rank. The rank is in `distributedInfo` or in the file name (`rank3`, `rank-3`,
`rank_3`). Devices of NVIDIA, AMD, Intel and others, traces without a device, and several devices in
one file are supported.

Traces that name their tracks instead of stating categories are read as well, each track by the
names of its process and thread: `trace_view.json` of torch_npu and MindStudio (Ascend Hardware,
CANN, Communication), `.trace.json.gz` of JAX (/device:TPU:0, XLA Ops, Steps), the JSON of rocprof
(GPU0, HIP API), and streams or queues of any process named after an accelerator. If a trace has
work of an accelerator on tracks that are not understood, it is refused, and the tracks are named:
nothing else shows how busy the accelerator was.

## How the numbers are computed

* **Busy**: a device is busy while any of its streams runs a kernel, a copy or a memset. It is idle
  for the rest of the window. The window lasts from the start of the first `ProfilerStep#` to the
  end of the last. In a trace without these, steps end with the optimizer step. If there is no
  optimizer step either, everything from the first to the last work on the device is one step. If
  the device is far behind its host, each step lasts until the work launched in it has ended.
* **Exposed communication**: the time of a kernel of NCCL, RCCL, oneCCL and the like in which no
  other kernel ran on the device. A concurrent copy hides nothing. Two concurrent operations count
  once. Lost time is idle time plus exposed communication and copies.
* **Late host**: a gap is a time of more than 1 µs in which the device is idle. The host was late if
  the call that launched the next work (found by correlation id) had not ended when the gap began.
  The call of a copy between host and device may return only after the copy, so such a copy was
  launched late if its call had not begun. The gap is `starved` until that call ends, and is split
  by the activity of the host: loading of kernels and capture of graphs, waits, memory calls,
  copies, launching (operators with a launch in them, pauses of up to 1 ms), Python functions of the
  thread of the steps (`with_stack=True`), other operators. Functions and operators of the model are
  overhead of launching if the host makes its next call within 20 ms; in a longer stretch, and in an
  operator of 1 ms, it computes. In other gaps, work was already queued.
* **Exposed copies**: the time in which only copies between host and device ran, outside waits for
  data. It is lost time, too.
* **Data waits** are `enumerate(DataLoader)#….__next__` on the thread of the steps. Operators that
  ran inside it without worker processes count as loading.
* **Device waits** are synchronizing calls, and copies from the device whose call returned only
  after the copy. Copies to the device with this property count as `h2d`.
* **Lines of code**: with stacks (`with_stack=True`), the functions of the thread of the steps, and
  of threads that load data, share the lost time out among the functions that ran in it. A function
  shorter than 0.1 ms counts for the one around it. The line of a function is its first one.
* **Named tracks**: tasks in which a stream only waits (`EVENT_WAIT`, `Notify_Wait`), and `infeed`
  and `outfeed` of a TPU, are idle time. Of nested XLA operations each instant counts for the
  innermost. Overlap Analysis and other derived tracks are not counted.
* **Collective operations** are matched by process group and sequence number. Kernels without these
  are matched by their order in the group, or by their order among the operations of one kind,
  counted from the first one whose launch is in the trace.
* **Annotated ranges** (`record_function`) name time of the step thread that nothing else explains.

## What it cannot see

The trace does not show loader worker processes, Python between operators, storage, the network, or
other processes. Steps without the profiler are missing. The profiler makes launches slower.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from clusterprof.analysis.importers.core import text
from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.columns import select_dtype
from clusterprof.analysis.importers.core.host_activity import (
    HostCalls,
    HostWork,
    LaunchActivity,
    add_host_work,
    build_host_activity,
)
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.kineto import classify, host_spans
from clusterprof.analysis.importers.kineto import device_gaps as kineto_device
from clusterprof.analysis.importers.kineto.device_gaps import (
    DeviceWork,
    RuntimeCalls,
    find_launch_calls,
    find_starved_gaps,
)
from clusterprof.analysis.importers.kineto.event_columns import (
    EventTable,
    GatheredEvents,
    Int,
    count_values,
    join_interval_sets,
    join_sorted_chunks,
)
from clusterprof.analysis.importers.kineto.event_stream import (
    CommonEventDecoder,
    Document,
    EventStream,
)
from clusterprof.analysis.importers.kineto.host_spans import (
    HostTimeline,
    Marks,
    add_host_spans,
    find_blocking_copies,
)
from clusterprof.analysis.importers.kineto.identity import (
    TraceIdentity,
    compute_wall_offset,
    read_identity,
)
from clusterprof.analysis.importers.kineto.named_tracks import TrackNames, TrackStream, read_tracks
from clusterprof.analysis.importers.kineto.stacks import (
    add_function_stacks,
    find_annotated_ranges,
    find_functions,
)
from clusterprof.probe import layout

_EVENT_PATTERN = re.compile(
    rb'"cat"\s*:\s*"(?:Operator|Kernel|Runtime|Memcpy|Memset|cpu_op|kernel|cuda_runtime|'
    rb'hip_runtime|xpu_runtime|gpu_memcpy|gpu_memset|python_function|user_annotation)"'
)
_TRACK_PATTERN = re.compile(
    rb'"name"\s*:\s*"(?:Ascend Hardware|CANN|Overlap Analysis|/device:[A-Z]{3}:\d+|/host:CPU)'
)
_TEXT_TIMES = re.compile(rb'"ts"\s*:\s*"')
_CHROME_KEYS = (b'"ph"', b'"pid"', b'"ts"')
_DOCUMENT_KEYS = (b'"traceEvents"', b'"deviceProperties"', b'"distributedInfo"')


class Kineto:
    """Importer of PyTorch profiler traces."""

    name: ClassVar[str] = "kineto"
    title: ClassVar[str] = "PyTorch profiler (Kineto) trace"
    reads_windows: ClassVar[bool] = True
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file has keys or categories that all profiler traces contain."""
        start = head.lstrip(b" \t\r\n\xef\xbb\xbf")[:1]
        if start == b"{":
            return any(word in head for word in _DOCUMENT_KEYS)
        if start != b"[":
            return False
        has_tracks = b'"process_name"' in head and _TRACK_PATTERN.search(head) is not None
        has_tasks = b'"Task Type"' in head and b'"ph"' in head  # of Ascend, names at the end
        return has_tracks or has_tasks or _EVENT_PATTERN.search(head) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the node of each file.

        Raises: CannotImportError when a file holds nothing usable.
        """
        for source, account in zip(sources, accounts):
            yield _import_file(source, account)


class ChromeTrace(Kineto):
    """Chrome traces of other programs, whose devices are known by the names of their tracks.

    ## How to make the file

    Write a list of events in the Trace Event Format: complete events (`X`), pairs of begin and end
    (`B`, `E`), or asynchronous pairs (`b`, `e`). Name the process of each device:

        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "GPU 0"}}

    ## How to analyze it

        clusterprof analyze trace.json

    ## What is read

    Tracks of processes named `GPU 0`, and of streams or queues of processes named after any
    accelerator: each event is work of the device. Otherwise the same as of the PyTorch profiler.

    ## What it cannot see

    Tracks without names: whether they are a device or its host is unknown. A trace that has only
    such tracks is refused.
    """

    name: ClassVar[str] = "chrome"
    title: ClassVar[str] = "Chrome trace (Trace Event Format)"

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file is a list of events, which no other format is."""
        start = head.lstrip(b" \t\r\n\xef\xbb\xbf")[:1]
        return start == b"[" and all(key in head for key in _CHROME_KEYS)


def _import_file(source: Source, account: Account) -> NodeTables:
    gathered, names = GatheredEvents(account), TrackNames()
    if _TEXT_TIMES.search(source.head):  # as torch_npu writes them
        for events in TrackStream(source, Account(source.path)).events():
            names.note(events, gathered)
    if not names.has_unread_device():
        trace = EventStream(source, account, CommonEventDecoder(gathered.kinds).events)
        for events in trace.events():
            names.note(events, gathered)
            gathered.take(events)
            gathered.kinds.check_refills()
            del events  # freed before the next block is decoded
        gathered.finish()
        document = trace.document
    if names.has_unread_device():  # a track is known once all names are read
        gathered, document = read_tracks(source, account, names)
    if not gathered.devices:
        names.check_understood(account)
        if "/host:CPU" in names.processes.values():  # of JAX
            raise CannotImportError(
                "the trace has no work of a TPU or GPU; profile on the device, until after"
                " block_until_ready"
            )
        if math.isnan(gathered.origin_us) and names.unread:
            names.raise_unnamed()
        if gathered.launches:
            account.notes.append(f"{gathered.launches:,} {_ONLY_LAUNCHES}")
            account.answers.append(account.notes[-1])
    text.set_eager_release()
    return build_node(gathered, document, source)


FIRST_EXTRA_DEVICE_PID = 1 << 23
"""First pid given to further devices of a process, each shown as a separate process; above all real
pids.
"""
_EMPTY = np.zeros(0, np.int64)
_ONLY_LAUNCHES = (
    "launches and not one kernel: the device was used, but its work is not in the trace. Check"
    " ProfilerActivity.CUDA, and that the driver permits tracing (CUPTI, rocprofiler)"
)
_DATA_WAITS = (classify.LOADER_WITHOUT_WORKERS, classify.LOADER_WITH_WORKERS)


@dataclass(slots=True)
class _Device:
    """Work of one device and the process that launched it."""

    number: int
    key: object
    work: DeviceWork
    pid: int
    """Process that launched the work, as named in the trace."""


def build_node(
    gathered: GatheredEvents,
    document: Document,
    source: Source,
    importer: str = "kineto",
    step_marks: tuple[str, str] = host_spans.PROFILER_STEPS,
) -> NodeTables:
    """Build the node of a trace.

    importer: name of the importer. step_marks: what marks steps in the format, and how to get it.

    Raises: CannotImportError when the trace has no events of the profiler, or neither steps nor
    work.
    """
    account = gathered.account
    identity = read_identity(source, document)
    if math.isnan(gathered.origin_us):
        raise CannotImportError(
            "the file has no event of the PyTorch profiler (kernel, cuda_runtime, cpu_op, …)",
            "export with torch.profiler's export_chrome_trace or tensorboard_trace_handler",
        )
    low = _find_first_ns(gathered)
    wall_ns = compute_wall_offset(document, gathered.origin_us)
    calls, marks = _take_calls(gathered, low), _take_marks(gathered.marks, low)
    functions = _take_marks(gathered.functions, low)
    for stretches in (*gathered.busy_host.values(), *gathered.operators.values()):
        stretches.shift(-low)
    text.trim_heap()
    devices = _drop_idle_devices(list(_split_devices(gathered, calls, low)), gathered)
    calls = replace(calls, link=_EMPTY)  # the correlation ids are not needed any more
    text.trim_heap()
    node = NodeTables(
        _select_hostname(identity, gathered),
        importer,
        None if wall_ns is None else wall_ns + low,
        key=f"rank{identity.rank}" if identity.rank is not None else text.name_trace(source.path),
    )
    windows = _find_windows(devices)
    processes: list[_Device | None] = [*devices] or [None]
    for index, device in enumerate(processes):
        window = windows.get(device.pid) if device else None
        _add_process(
            node, gathered, identity, calls, marks, functions, device, index, step_marks, window
        )
    if len(devices) > 1:
        account.notes.append(f"{len(devices)} devices in the trace: each is shown as a process")
    if identity.rank is None:
        account.notes.append("neither the trace nor its file name contains the rank")
    elif identity.rank_from_name:
        account.notes.append(f"rank {identity.rank} is taken from the file name only")
    return node


def _find_windows(devices: Sequence[_Device]) -> dict[int, tuple[int, int]]:
    """Find from when to when the devices of each process worked, ns, by pid."""
    windows: dict[int, tuple[int, int]] = {}
    for device in devices:
        start, end = int(device.work.start[0]), device.work.last_end()
        low, high = windows.get(device.pid, (start, end))
        windows[device.pid] = min(low, start), max(high, end)
    return windows


def _select_hostname(identity: TraceIdentity, gathered: GatheredEvents) -> str:
    """Return the hostname in the file name if its process is in the trace, else an empty text."""
    is_recorded = any(key[0] == identity.host_pid for key in gathered.threads)  # type: ignore[index]
    return identity.host if identity.host_pid is not None and is_recorded else ""


def _find_first_ns(gathered: GatheredEvents) -> int:
    """Find the first instant of all data, so that no time becomes negative."""
    tables = (gathered.device, gathered.calls, gathered.marks)
    low = [start for table in tables if (start := table.start.minimum()) is not None]
    low += [int(s.result()[0][0]) for s in gathered.busy_host.values() if s.result()[0].size]
    return min(low, default=0)


def _take_calls(gathered: GatheredEvents, low: int) -> RuntimeCalls:
    table, gathered.calls = gathered.calls, EventTable()  # free the columns once sorted
    return RuntimeCalls(*_sort_table(table, low))


def _take_marks(table: EventTable, low: int) -> Marks:
    start, duration, *columns = _sort_table(table, low)
    return Marks(start, start + duration, *columns)


def _sort_table(table: EventTable, low: int) -> tuple[Int, Int, Int, Int, Int]:
    """Return start, duration, kind, location and link, sorted by start."""
    start = table.start.result().astype(np.int64, copy=False)
    start -= low
    order = _sort_rows(start)
    columns = (table.duration, table.kind, table.location, table.link)
    duration, kind, where, link = (column.result()[order] for column in columns)
    text.trim_heap()
    return start[order], duration, kind, where, link


def _sort_rows(start: Int) -> Int | slice:
    """Return the rows sorted by start."""
    if (start[1:] >= start[:-1]).all():
        return slice(None)
    return np.argsort(start, kind="stable").astype(select_dtype(0, start.size))


def _split_devices(gathered: GatheredEvents, calls: RuntimeCalls, low: int) -> Iterator[_Device]:
    """Yield the devices of a trace, the one with most work first."""
    table, gathered.device = gathered.device, EventTable()
    start, duration, kind, where, link = (
        column.result()
        for column in (table.start, table.duration, table.kind, table.location, table.link)
    )
    text.trim_heap()
    names = list(gathered.devices)
    threads = [key[0] for key in gathered.threads]  # type: ignore[index]
    count = count_values(where, len(names))
    copied, size = (column.result() for column in gathered.copy_sizes)
    for number in np.argsort(-count, kind="stable").tolist():
        if not count[number]:
            continue
        rows = np.flatnonzero(where == number).astype(select_dtype(0, where.size))
        work_start = start[rows].astype(np.int64, copy=False)
        if rows.size == where.size:
            del start, where  # not needed any more: free the memory
        work_start -= low
        order = _sort_rows(work_start)
        rows, work_start = rows[order], work_start[order]
        del order
        text.trim_heap()
        call = find_launch_calls(calls, link[rows], work_start)
        work = DeviceWork(work_start, duration[rows], kind[rows], copied, size, rows, call)
        thread = count_values(calls.thread[call[call >= 0]])
        pid = threads[int(thread.argmax())] if thread.size else _find_first_pid(threads)
        yield _Device(number, names[number], work, pid)


def _drop_idle_devices(devices: list[_Device], gathered: GatheredEvents) -> list[_Device]:
    """Drop devices that only copy while others compute, and have no steps: they are no ranks."""
    computing = [
        device
        for device in devices
        if device.number in gathered.step_threads or (device.work.kind < classify.COPY).any()
    ]
    if not computing or len(computing) == len(devices):
        return devices
    dropped = ", ".join(f"{device.key}" for device in devices if device not in computing)
    gathered.account.notes.append(f"devices that only copied are no ranks: {dropped[:200]}")
    return computing


def _find_first_pid(threads: list[object]) -> int:
    positive_pids = [pid for pid in threads if isinstance(pid, int) and pid > 0]
    return positive_pids[0] if positive_pids else 1


def _add_process(
    node: NodeTables,
    gathered: GatheredEvents,
    identity: TraceIdentity,
    calls: RuntimeCalls,
    marks: Marks,
    functions: Marks,
    device: _Device | None,
    index: int,
    step_marks: tuple[str, str],
    window: tuple[int, int] | None,
) -> None:
    """Add one process: its rank, steps, waits, and the activity of its device."""
    account = gathered.account
    keys = list(gathered.threads)
    trace_pid = device.pid if device else _find_step_pid(marks, keys)
    of_process = np.array([key[0] == trace_pid for key in keys], np.bool_)  # type: ignore[index]
    pid = trace_pid if isinstance(trace_pid, int) and 0 < trace_pid < FIRST_EXTRA_DEVICE_PID else 1
    if index:
        pid = FIRST_EXTRA_DEVICE_PID + index
    id_ = ""
    if device is not None:
        id_ = f"gpu{device.key}" if isinstance(device.key, int) else str(device.key)[:40]
        node.add_device(id_, **identity.devices.get(device.key, {}))  # type: ignore[call-overload]
    node.add_rank(pid, identity.rank if not index else None, identity.world_size, id_)
    own_calls = _select_calls_of_threads(calls, of_process)
    own_marks = marks.of_threads(of_process)
    process_steps = _find_steps(
        own_marks, device, calls, account, gathered, of_process, step_marks, window
    )
    node.add_spans(
        pid, layout.STEP, process_steps.start, process_steps.end, process_steps.number, 2, -1, -1
    )
    if not index:
        account.read["steps"] += process_steps.start.size
    copies = find_blocking_copies(device.work, calls) if device else None
    host_side = HostTimeline(own_calls, own_marks, copies)
    operators = _list_operator_intervals(gathered, of_process)
    add_host_spans(node, pid, host_side, operators, process_steps, account)
    own_functions = functions.of_threads(of_process), list(gathered.function_names)
    add_function_stacks(node, pid, *own_functions, host_side, process_steps, account)
    if device is not None:
        work = find_functions(host_side, functions, calls, device.work, operators)
        ranges = find_annotated_ranges(host_side, functions)
        activity = _find_host_activity(host_side, work, process_steps, operators, ranges)
        _add_device_activity(
            node, pid, id_, device, calls, host_side, activity, process_steps, identity, gathered
        )


def _find_host_activity(
    host_side: HostTimeline,
    functions: HostWork,
    process_steps: host_spans.ProfilerSteps,
    operators: dict[int, tuple[Int, Int]],
    ranges: HostWork,
) -> LaunchActivity:
    """Find what the host was doing."""
    calls = host_side.calls
    return build_host_activity(
        HostCalls(calls.start, calls.start + calls.duration, calls.kind, calls.thread),
        (host_side.copies_in(), host_side.copies_out()),
        host_side.residues(),
        functions,
        process_steps.end,
        operators,
        ranges=ranges,
    )


def _find_step_pid(marks: Marks, keys: list[object]) -> int:
    """Find the process of the steps; without any, the first one."""
    step = marks.thread[marks.kind == classify.STEP]
    threads = step if step.size else marks.thread
    pids = [key[0] for key in keys]  # type: ignore[index]
    return pids[int(count_values(threads).argmax())] if threads.size else _find_first_pid(pids)


def _select_calls_of_threads(calls: RuntimeCalls, of_process: np.ndarray) -> RuntimeCalls:
    keep = of_process[calls.thread]
    if keep.all():
        return calls
    return RuntimeCalls(
        calls.start[keep], calls.duration[keep], calls.kind[keep], calls.thread[keep], _EMPTY
    )


def _list_busy_intervals(
    gathered: GatheredEvents, of_process: np.ndarray
) -> Iterator[tuple[int, tuple[Int, Int]]]:
    for number, stretches in gathered.busy_host.items():
        if of_process[number]:
            yield number, stretches.result()


def _list_operator_intervals(
    gathered: GatheredEvents, of_process: np.ndarray
) -> dict[int, tuple[Int, Int]]:
    operators = gathered.operators.items()
    return {number: stretches.result() for number, stretches in operators if of_process[number]}


def _find_steps(
    marks: Marks,
    device: _Device | None,
    calls: RuntimeCalls,
    account: Account,
    gathered: GatheredEvents,
    of_process: np.ndarray,
    step_marks: tuple[str, str],
    window: tuple[int, int] | None,
) -> host_spans.ProfilerSteps:
    """Find the steps of a process. window: from when to when its devices worked, ns.

    Raises: CannotImportError when nothing shows when the process worked.
    """
    which = marks.kind == classify.STEP
    if gathered.step_threads:
        threads = gathered.step_threads
        first = next(iter(threads.values()))
        which &= marks.thread == (first if device is None else threads.get(device.number, first))
    marked = host_spans.select_marked_steps(
        marks.start[which], marks.end[which], marks.number[which], account
    )
    if marked is not None:
        return marked if device is None else host_spans.extend_steps(marked, device.work, calls)
    optimizers = marks.end[marks.kind == classify.OPTIMIZER]
    if window is not None:
        return host_spans.infer_steps(*window, optimizers, account, step_marks)
    covered = [pair for _, pair in _list_busy_intervals(gathered, of_process) if pair[0].size]
    if not covered:
        raise CannotImportError("the trace has no steps, no device work and no operators")
    first = min(int(start[0]) for start, _ in covered)
    last = max(int(end[-1]) for _, end in covered)
    return host_spans.infer_steps(first, last, optimizers, account, step_marks)


def _add_device_activity(
    node: NodeTables,
    pid: int,
    id_: str,
    device: _Device,
    calls: RuntimeCalls,
    host_side: HostTimeline,
    activity: LaunchActivity,
    process_steps: host_spans.ProfilerSteps,
    identity: TraceIdentity,
    gathered: GatheredEvents,
) -> None:
    """Add the busy time of a device, its starved gaps, and its communication operations."""
    work = device.work
    from_ns, until_ns = int(process_steps.start[0]), int(process_steps.end[-1])
    start, end = join_sorted_chunks(work.chunks())
    low, high = min(from_ns, int(work.start[0])), max(until_ns, work.last_end())
    node.add_busy_time(id_, start, end, low, high)
    del start, end
    parts = []
    for gaps in find_starved_gaps(work, calls, activity, from_ns, until_ns):
        host_times = (gaps.launching, gaps.in_sync, gaps.in_memory, gaps.in_copy)
        node.add_spans(pid, layout.STARVED, gaps.start, gaps.end, *host_times)
        parts.append(activity.work.within(gaps.start, gaps.end))
        gathered.account.read["gaps with a late host"] += gaps.start.size
    add_host_work(node, pid, parts, list(gathered.function_names))
    waits = [host_side.marks.of(kind)[:2] for kind in _DATA_WAITS]
    kineto_device.add_exposed_copies(node, pid, work, join_interval_sets(waits))
    text.trim_heap()
    exposed = kineto_device.measure_exposed_collectives(work, (from_ns, until_ns))
    rows = work.row[exposed.row]
    index = gathered.comm_rows.searchsorted(rows)
    if (index < gathered.comm_rows.size).all():
        descriptions = [
            gathered.comm_table.all[number] for number in gathered.comm_index[index].tolist()
        ]
        groups = kineto_device.ProcessGroups(
            identity.distributed, identity.rank, identity.world_size
        )
        is_launched = work.call[exposed.row] >= 0
        kineto_device.add_collectives(
            node, pid, exposed, descriptions, groups, gathered.account, is_launched
        )
