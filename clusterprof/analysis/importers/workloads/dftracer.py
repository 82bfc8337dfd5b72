"""DFTracer traces: reads, loading and computation of training processes, call by call.

## How to make the file

    export DFTRACER_ENABLE=1 DFTRACER_INC_METADATA=1
    DFTRACER_LOG_FILE=traces/trace DFTRACER_DATA_DIR=all python train.py

## How to analyze it

    clusterprof analyze traces/

## What is read

`.pfw` and `.pfw.gz` of all versions, also of its predecessor (DLIO Profiler): one event of the
Chrome format per line, in microseconds, after a first line `[`; commas after the events, a closing
`]`, several events on a line, and numbers written as text are accepted. A file that was never
closed is read to its last whole line. Each process writes a file; give the folder with all files of
the job.

* The host comes from `HH`, the file systems from the paths of `FH`; old files have both in each
  event (`hostname`, `fname`). Rank and size of the job come
  from a file name as DLIO writes it (`trace-3-of-8.pfw`); with other names the rank is unknown.
* Reads, opens and status calls on files (categories POSIX and STDIO), items (`__getitem__`,
  `data.item`) and waits for batches: the `NAME.iter` of a loop (`NAME.yield` is its body).
* Computation (`TorchFramework.compute`; category `compute`: the words `forward`, `backward`, `step`
  in the name), epochs, evaluations, checkpoints, copies to the device (`cpu-gpu-transfer`).
* All functions of the application of 50 us or more, as lines of code.

All other events are counted and left out, among them aggregated ones (`dur_sum`): sums of an
interval have no start and no end. A file that has only these is refused. A process that only loads
is a dataloader worker of its parent.

## How the numbers are computed

A step ends with the last computation before the next wait for data, and begins where the previous
step ended. The first step of an epoch begins with the epoch. Steps are numbered from 1 in the order
of time, because the numbers in the file are those of the loader, which runs ahead.

The wait for data is the time of the training process in `__getitem__` and in the loop over the
loader, without computation. It is split in two: *reading*, in which at least one file system call
was running, and *computing* (decoding, copying, Python), in which none was. Waits for worker
processes are split by the activity of all workers together.

DLIO emulates computation by a sleep, so its accelerator is marked as emulated: busy while DLIO
sleeps, idle otherwise. For other programs the device is not visible. Their loss is at most the time
that the host spent in waits.

## What it cannot see

The device; reads by memory mapping; the network. Collective operations of the AI annotations are
left out. The file system is guessed from the path: names such as `lustre`, `gpfs` and `nfs` count
as network file systems, `/tmp` and similar paths as local ones, all others as unknown.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.stacks import TRACER_FILE, CallLog, add_stack_samples
from clusterprof.analysis.importers.core.text import convert_to_ns, guess_file_system, read_lines
from clusterprof.analysis.timeline.intervals import (
    Intervals,
    find_intersection,
    measure_overlap,
    merge_intervals,
    subtract_intervals,
)
from clusterprof.probe import layout

MICROSECOND_NS = 1000
MAX_NAMES = 1_000_000
"""Largest number of files and hosts whose names are kept."""
MAX_CLASSES = MAX_PROCESSES = 65_536
_AROUND_EVENTS = b"[], \t\r"
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
_AGGREGATED = "aggregated events, which have no start and no end"
_TOO_MANY_PROCESSES = f"events of more than {MAX_PROCESSES:,} processes"

Value = int | float | str | bool | None
Key = str


class _Arguments(msgspec.Struct):
    """Used fields of `args`; versions before 2 write hashes as numbers."""

    hhash: Value = None
    fhash: Value = None
    hostname: Value = None
    fname: Value = None
    name: Value = None
    value: Value = None
    ret: Value = None
    size: Value = None
    ppid: Value = None
    dur_sum: Value = None


class _Line(msgspec.Struct):
    name: str
    ph: str
    cat: str = ""
    pid: Value = None
    tid: Value = None
    ts: Value = None
    dur: Value = None
    args: _Arguments = msgspec.field(default_factory=_Arguments)


(WAIT, ITEM, COMPUTE, FORWARD, BACKWARD, OPTIMIZER, EPOCH, EVALUATION, CHECKPOINT, TRANSFER) = (
    range(10)
)

_IO = ("POSIX", "STDIO")
_LOADERS = ("data_loader", "dataloader", "fetch", "data")
_PHASES = {"compute": COMPUTE, "forward": FORWARD, "backward": BACKWARD, "step": OPTIMIZER}
_TRANSFER_NAME = re.compile(r"(?:cpu|host)\W?(?:to\W?)?(?:gpu|device)\W?(?:transfer|copy)$", re.I)
_DLIO = ("dlio_benchmark", "ai_framework")
_READ_CALLS = frozenset(("read", "pread", "readv", "preadv"))
_INPUT_CALLS = _READ_CALLS | {
    *("fread", "open", "openat", "fopen", "close", "fclose", "lseek", "fseek", "access"),
    *("stat", "lstat", "fstat", "xstat", "lxstat", "fxstat", "fxstatat"),
    *("opendir", "readdir", "closedir"),
}


@dataclass(slots=True)
class TracedProcess:
    """One process and its recorded activity."""

    pid: int
    host: Key
    parent: int = 0
    rank: int | None = None
    world: int | None = None
    kinds: array[int] = field(default_factory=lambda: array("q"))
    """WAIT, ITEM, …: the kind of each entry of `spans`."""
    spans: array[int] = field(default_factory=lambda: array("q"))
    """Two numbers each: start and end in ns."""
    reads: array[int] = field(default_factory=lambda: array("q"))
    """Four numbers each: start and end in ns, bytes, kind of file system."""
    calls: CallLog = field(default_factory=CallLog)
    """Functions of the application."""
    emulated: bool = False
    """True for a DLIO process, which emulates computation by a sleep."""


class TracedJob:
    """All files of a job, read one by one."""

    def __init__(self) -> None:
        self.processes: dict[tuple[Key, int], TracedProcess] = {}
        self.hosts: dict[Key, str] = {}
        self.files: dict[Key, int] = {}
        """Kind of file system by hash."""
        self._decode: Callable[[bytes], _Line] = msgspec.json.Decoder(_Line).decode
        self._decode_list: Callable[[bytes], list[_Line]] = msgspec.json.Decoder(list[_Line]).decode
        self._classes: dict[tuple[str, str], int | None] = {}
        self._uncached_events = 0

    def read(self, source: Source, account: Account) -> None:
        """Read one file."""
        rank, world = parse_rank(source.path.name)
        for line in read_lines(source, account):
            line = line.strip(_AROUND_EVENTS)
            if not line:
                continue
            for event in self._decode_line(line, account):
                if event.ph == "M":
                    self._record_name(event)
                elif event.ph == "X":
                    self._add_event(event, account, rank, world)
                elif event.args.dur_sum is not None:
                    account.skipped[_AGGREGATED] += 1
                else:
                    account.skipped["events of other kinds"] += 1

    def _decode_line(self, line: bytes, account: Account) -> list[_Line]:
        """Decode the events of a line: mostly one, of a whole list on one line all."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return [self._decode(line)]
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._decode_list(b"[" + line + b"]")
        account.skipped["lines that are not events"] += 1
        return []

    def _record_name(self, event: _Line) -> None:
        value, name = _check_key(event.args.value), event.args.name
        if value is None or not isinstance(name, str):
            return
        if event.name == "HH" and len(self.hosts) < MAX_NAMES:
            self.hosts[value] = name
        elif event.name == "FH" and len(self.files) < MAX_NAMES:
            self.files[value] = guess_file_system(name)

    def _add_event(
        self, event: _Line, account: Account, rank: int | None, world: int | None
    ) -> None:
        pid = _convert_integer(event.pid)
        start, length = (
            convert_to_ns(_convert_integer(value), MICROSECOND_NS)
            for value in (event.ts, event.dur)
        )
        if start is None or length is None or not isinstance(pid, int):
            account.skipped["events without a time, a duration or a process"] += 1
            return
        if start < 0 or length < 0 or abs(pid) >= 1 << 31:
            account.skipped["events with a negative time or an invalid process"] += 1
            return
        process = self._get_process(event, pid, account)
        if process is None:
            return
        if rank is not None and process.rank is None:
            process.rank, process.world = rank, world
        if event.cat in _IO:
            self._add_input(event, process, start, start + length, account)
            return
        process.emulated |= event.cat in _DLIO
        parent = _convert_integer(event.args.ppid)
        if event.name == "start" and isinstance(parent, int):
            process.parent = parent
        tid = _convert_integer(event.tid)
        thread = tid if isinstance(tid, int) and abs(tid) < 1 << 62 else 0
        if not process.calls.add(thread, start, start + length, TRACER_FILE, event.name):
            account.skipped["function calls beyond the limit"] += 1
        kind = self._label_event(event)
        if kind is None or not length:
            return
        process.kinds.append(kind)
        process.spans.extend((start, start + length))
        account.read[_READ_LABELS[kind]] += 1

    def _label_event(self, event: _Line) -> int | None:
        """Return the kind of an event; None if it has none.

        Raises: CannotImportError when too many events have distinct names.
        """
        key = (event.cat, event.name)
        if key in self._classes:
            return self._classes[key]
        kind = label_event(*key)
        if len(self._classes) < MAX_CLASSES:
            self._classes[key] = kind
            return kind
        self._uncached_events += 1
        if self._uncached_events > MAX_NAMES:
            raise CannotImportError(
                f"more than {MAX_NAMES:,} events with distinct names",
                "use event names that do not contain a counter or a time",
            )
        return kind

    def describe_events(self) -> str:
        """Describe the events, none of which shows a training loop."""
        names = [f"{name} ({kind})" for kind, name in self._classes if kind != "dftracer"]
        suffix = ", …" if len(names) > 6 else ""
        listed = f"the events are {', '.join(names[:6])[:400]}{suffix}"
        return listed if names else "the traces hold only reads"

    def _get_process(self, event: _Line, pid: int, account: Account) -> TracedProcess | None:
        host = _check_key(event.args.hhash)
        name = event.args.hostname
        if host is None and isinstance(name, str) and len(self.hosts) < MAX_NAMES:
            host = name[:253]
            self.hosts[host] = host
        key = ("" if host is None else host, pid)
        if key not in self.processes:
            if len(self.processes) >= MAX_PROCESSES:
                account.skipped[_TOO_MANY_PROCESSES] += 1
                if account.skipped[_TOO_MANY_PROCESSES] > MAX_NAMES:
                    raise CannotImportError(_TOO_MANY_PROCESSES, "give the traces of fewer nodes")
                return None
            self.processes[key] = TracedProcess(key[1], key[0])
        return self.processes[key]

    def _add_input(
        self, event: _Line, process: TracedProcess, start: int, end: int, account: Account
    ) -> None:
        name = event.name.strip("_").removesuffix("64")
        if name not in _INPUT_CALLS:
            account.skipped["writes and other system calls"] += 1
            return
        has_bytes = name in _READ_CALLS or name == "fread"
        count = _convert_integer(event.args.ret) if has_bytes else 0
        size = _convert_integer(event.args.size) if name == "fread" else 1
        bytes_ = count * size if isinstance(count, int) and isinstance(size, int) else 0
        kind = self._find_file_system(event.args)
        process.reads.extend((start, end, min(max(bytes_, 0), 1 << 50), kind))
        account.read["reads, opens and status calls"] += 1

    def _find_file_system(self, args: _Arguments) -> int:
        """Find the kind of file system of an event: of its path, or of the path with its hash."""
        if not isinstance(args.fname, str):
            return self.files.get(_check_key(args.fhash) or "", 0)
        kind = self.files.get(args.fname)
        if kind is None:
            kind = guess_file_system(args.fname)
            if len(self.files) < MAX_NAMES:
                self.files[args.fname] = kind
        return kind


_READ_LABELS = {
    WAIT: "waits for a batch",
    ITEM: "items loaded",
    COMPUTE: "computations",
    FORWARD: "forward passes",
    BACKWARD: "backward passes",
    OPTIMIZER: "optimizer steps",
    EPOCH: "epochs",
    EVALUATION: "evaluations",
    CHECKPOINT: "checkpoints",
    TRANSFER: "copies to the device",
}


def label_event(category: str, name: str) -> int | None:
    """Label an event of the application with its kind; None if it has none."""
    last = name.rpartition(".")[2]
    if category in _LOADERS:
        if last in ("__getitem__", "item"):
            return ITEM
        return WAIT if last in ("iter", "fetch") else None
    if category == "ai_framework":
        return COMPUTE if last == "compute" else None
    if category == "compute":
        return _find_phase(last)
    if category == "checkpoint":
        return CHECKPOINT if last in ("save_checkpoint", "capture", "checkpoint") else None
    if (category == "device" and last == "transfer") or _TRANSFER_NAME.search(name):
        return TRANSFER
    if category in ("pipeline", "dlio_benchmark"):
        if last in ("_eval", "evaluate", "test"):
            return EVALUATION
        return EPOCH if last in ("_train", "epoch") or name == "epoch.block" else None
    return WAIT if last == "iter" and last != name else None  # of the loop NAME, as NAME.yield is


def _find_phase(name: str) -> int | None:
    """Find the phase in the name of a computation, like `model-compute-backward-prop`."""
    words = re.findall(r"[a-z]+", name.lower())
    phases = (phase for word, phase in _PHASES.items() if word in words and phase != COMPUTE)
    return next(phases, COMPUTE if "compute" in words else None)


def _check_key(value: Value) -> Key | None:
    """Return a hash as text: one file writes the same hash as a number and as text."""
    if isinstance(value, float) and value == value and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    return str(value)


def _convert_integer(value: Value) -> Value:
    """Convert digits in a text to an integer; old files write numbers as text."""
    is_integer = isinstance(value, str) and _INTEGER.fullmatch(value) is not None
    return int(value) if is_integer else value  # type: ignore[arg-type]


def parse_rank(name: str) -> tuple[int | None, int | None]:
    """Parse rank and size of the job from a file name as written by DLIO: trace-3-of-8.pfw."""
    match = re.search(r"-(\d{1,7})-of-(\d{1,7})\.pfw", name)
    return (int(match[1]), int(match[2])) if match else (None, None)


MIN_WALL_CLOCK_NS = 1_000_000_000 * 1_000_000_000  # earlier times do not count from 1970
MAX_ITEM_GAP_NS = 1_000_000
"""Longest gap in ns between two items of one wait: the items of a batch follow each other closely.
"""
_SPAN_KINDS = (
    (FORWARD, layout.FORWARD),
    (BACKWARD, layout.BACKWARD),
    (OPTIMIZER, layout.OPTIMIZER),
    (EVALUATION, layout.EVAL),
    (TRANSFER, layout.H2D),
    (CHECKPOINT, layout.CHECKPOINT),
)
_UNKNOWN_SIZE_KINDS = (TRANSFER, CHECKPOINT)


def build_nodes(job: TracedJob, account: Account) -> Iterator[NodeTables]:
    """Build a node for each host of a job, with its training processes."""
    training = {key: process for key, process in job.processes.items() if _is_training(process)}
    workers: dict[tuple[Key, int], list[TracedProcess]] = {key: [] for key in training}
    for process in job.processes.values():
        owner = _find_owner(process, training)
        if owner is not None:
            workers[owner].append(process)
        elif not _is_training(process) and process.kinds:
            account.skipped["loader processes whose training process is not in the traces"] += 1
    for host in dict.fromkeys(key[0] for key in training):
        name = job.hosts.get(host, "")
        first = min(int(process.spans[0]) for key, process in training.items() if key[0] == host)
        wall_offset = 0 if first > MIN_WALL_CLOCK_NS else None
        node = NodeTables(name, "dftracer", wall_offset, key=name or f"host-{str(host)[:16]}")
        on_host = [(process, workers[key]) for key, process in training.items() if key[0] == host]
        for process, loaders in sorted(on_host, key=lambda pair: (pair[0].rank or 0, pair[0].pid)):
            _add_rank(node, process, loaders, account)
        yield node


def _is_training(process: TracedProcess) -> bool:
    """Return whether a process trains: one that only loads items belongs to a data loader."""
    return any(kind != ITEM for kind in process.kinds)


def _find_owner(
    process: TracedProcess, training: dict[tuple[Key, int], TracedProcess]
) -> tuple[Key, int] | None:
    """Find the process that a loader serves: its parent, or the only one on its host."""
    if _is_training(process) or not process.kinds:
        return None
    if (process.host, process.parent) in training:
        return process.host, process.parent
    on_host = [key for key in training if key[0] == process.host]
    return on_host[0] if len(on_host) == 1 else None


def _select_intervals(process: TracedProcess, *kinds: int) -> Intervals:
    """Select when a process did something of the given kinds, as a union of intervals."""
    table = np.array(process.spans, np.int64).reshape(-1, 2)
    rows = table[np.isin(np.array(process.kinds, np.int64), kinds)]
    return merge_intervals((rows[:, 0], rows[:, 1]))


def _add_rank(
    node: NodeTables, process: TracedProcess, workers: Sequence[TracedProcess], account: Account
) -> None:
    items, waits = _select_intervals(process, ITEM), _select_intervals(process, WAIT)
    computing = _select_intervals(process, COMPUTE, FORWARD, BACKWARD, OPTIMIZER)
    waiting = subtract_intervals(_merge_close(merge_intervals(items, waits)), computing)
    device = ""
    if process.emulated:
        device = f"emulated-{process.pid if process.rank is None else process.rank}"
        node.add_device(device, vendor="emulated", name="DLIO's sleep", emulated=True)
    node.add_rank(process.pid, process.rank, process.world, device)
    steps = find_steps(_select_intervals(process, EPOCH), waiting, computing)
    account.read["steps"] += steps.start_ns.size
    numbers = np.arange(1, steps.start_ns.size + 1)
    node.add_spans(process.pid, layout.STEP, *steps, numbers, 2, -1, -1)
    loaded_here = items.start_ns.size > 0
    owner = 0 if loaded_here else -1
    node.add_spans(process.pid, layout.DATA_WAIT, *waiting, -1, owner, 0 if loaded_here else -1, -1)
    for kind, span_kind in _SPAN_KINDS:
        if (intervals := _select_intervals(process, kind)).start_ns.size:
            size = -1 if kind in _UNKNOWN_SIZE_KINDS else 0
            node.add_spans(process.pid, span_kind, *intervals, size)
    if loaded_here:
        _add_loading(node, process, items, [process])
    elif workers:
        _add_loading(node, process, waiting, workers)
    if steps.start_ns.size:
        samples = process.calls.draw_samples((int(steps.start_ns[0]), int(steps.end_ns[-1])))
        add_stack_samples(node, process.pid, process.calls.table, [samples])
    if process.emulated and computing.start_ns.size and steps.start_ns.size:
        low = min(int(computing.start_ns[0]), int(steps.start_ns[0]))
        node.add_busy_time(device, *computing, low, int(computing.end_ns[-1]))


def _merge_close(intervals: Intervals) -> Intervals:
    """Merge intervals that are separated by short gaps."""
    if intervals.start_ns.size < 2:
        return intervals
    gap_rows = np.flatnonzero(intervals.start_ns[1:] - intervals.end_ns[:-1] > MAX_ITEM_GAP_NS)
    first, last = (
        np.concatenate([[0], gap_rows + 1]),
        np.concatenate([gap_rows, [intervals.start_ns.size - 1]]),
    )
    return Intervals(intervals.start_ns[first], intervals.end_ns[last])


def find_steps(epochs: Intervals, waiting: Intervals, computing: Intervals) -> Intervals:
    """Find the steps: each ends with the last computation before the next wait.

    It begins where the previous step ended; the first of an epoch where the epoch began, or with
    its first wait. Without computation a step lasts from wait to wait; without waits it is the
    computation. Intervals: int64[n] starts and ends, ns.
    """
    if not computing.start_ns.size:
        return Intervals(waiting.start_ns[:-1], waiting.start_ns[1:])
    if not waiting.start_ns.size:
        return computing
    before = waiting.start_ns.searchsorted(computing.start_ns)  # waits begun before each
    last = np.append(before[1:] != before[:-1], True) & (before > 0)
    end = computing.end_ns[last]
    if not end.size:
        return Intervals(waiting.start_ns[:-1], waiting.start_ns[1:])
    start = np.concatenate([waiting.start_ns[:1], end[:-1]])
    if epochs.start_ns.size:
        row = epochs.start_ns.searchsorted(end) - 1
        epoch_start = epochs.start_ns[np.maximum(row, 0)]
        start = np.where((row >= 0) & (epoch_start > start), epoch_start, start)
        start[0] = min(start[0], epoch_start[0]) if row[0] >= 0 else start[0]
    keep = end > start
    return Intervals(start[keep], end[keep])


def _add_loading(
    node: NodeTables, process: TracedProcess, windows: Intervals, loaders: Iterable[TracedProcess]
) -> None:
    """Add the activity of the loaders in each window: reads, and the rest of their items.

    Several loaders share each window in equal proportion, because the file does not tell whose
    batch it was.
    """
    if not windows.start_ns.size:
        return
    reading = np.zeros(windows.start_ns.size, np.int64)
    working = np.zeros(windows.start_ns.size, np.int64)
    bytes_ = np.zeros(windows.start_ns.size)
    file_system_ns = np.zeros((windows.start_ns.size, 4))
    for loader in loaders:
        items = _select_intervals(loader, ITEM)
        rows = np.array(loader.reads, np.int64).reshape(-1, 4)
        within = find_intersection(items, merge_intervals((rows[:, 0], rows[:, 1])))
        reading += measure_overlap(windows, within)
        working += measure_overlap(windows, items)
        window = windows.start_ns.searchsorted(rows[:, 0], "right") - 1
        inside = (window >= 0) & (rows[:, 0] < windows.end_ns[np.maximum(window, 0)])
        window, rows = window[inside], rows[inside]
        np.add.at(bytes_, window, rows[:, 2])
        np.add.at(file_system_ns, (window, rows[:, 3]), rows[:, 1] - rows[:, 0] + 1)
    length = windows.end_ns - windows.start_ns
    has_work = working > 0
    reading_share = np.divide(reading, working, out=np.zeros(working.size), where=has_work)
    covered = np.minimum(working, length)
    reading_ns = np.minimum(np.rint(reading_share * covered).astype(np.int64), covered)
    kind = np.where(file_system_ns.any(axis=1), file_system_ns.argmax(axis=1), 0)
    node.add_spans(
        process.pid,
        layout.LOADING,
        windows.start_ns[has_work],
        windows.end_ns[has_work],
        reading_ns[has_work],
        (covered - reading_ns)[has_work],
        np.rint(bytes_[has_work]).astype(np.int64),
        kind[has_work],
    )


_FIRST = re.compile(rb"\[?\s*\{([^\n]*)")
_PHASE = re.compile(rb'"ph"\s*:')
_ARGUMENTS, _HOST = re.compile(rb'"args"\s*:\s*\{'), re.compile(rb'"(?:hhash|hostname)"\s*:')
_CATEGORY = re.compile(rb'"cat"\s*:\s*"(?:dftracer|POSIX|STDIO)"')


class Dftracer:
    """Importer of the files of a DFTracer run."""

    name: ClassVar[str] = "dftracer"
    title: ClassVar[str] = "DFTracer trace"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the first event has the hash of its host or a category of the tracer."""
        first = _FIRST.match(head)
        if first is None or not _PHASE.search(first[1]):
            return False
        arguments = _ARGUMENTS.search(first[1])
        with_host = arguments is not None and _HOST.search(first[1], arguments.end()) is not None
        is_named = path.name.removesuffix(".gz").endswith(".pfw")
        return is_named or with_host or _CATEGORY.search(first[1]) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the hosts of the job.

        Raises: CannotImportError when no process of the job trains.
        """
        job = TracedJob()
        for source, account in zip(sources, accounts):
            job.read(source, account)
        node_count = 0
        for node in build_nodes(job, accounts[0]):
            node_count += 1
            yield node
        if not node_count and any(account.skipped[_AGGREGATED] for account in accounts):
            raise CannotImportError(
                f"the traces hold {_AGGREGATED}: trace again without aggregation"
                " (DFTRACER_ENABLE_AGGREGATION=0)"
            )
        if not node_count:
            raise CannotImportError(
                f"no event is a wait for a batch or a computation: {job.describe_events()}",
                "annotate the training loop, or trace DLIO: docs/importers/dftracer.md",
            )
        if any(process.emulated for process in job.processes.values()):
            accounts[0].notes.append(
                "DLIO sleeps instead of computing: its emulated accelerators count as busy then"
            )
