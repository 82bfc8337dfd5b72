"""Tracks by the names of their process and thread: Ascend, JAX (XLA), rocprof, and streams.

    role = classify_track("/device:TPU:0", "XLA Ops")       # OPERATIONS
    tracks = TrackEvents(gathered)
    tracks.add(role, track, "fusion.3", start_ns, duration_ns)
    tracks.finish()

Kineto states the category of an event, other profilers only name the track it is on. An event of a
named track becomes an event of the category that `GatheredEvents` understands, on the integer
clock of the trace. Tracks of an accelerator that nothing here understands are found too: without
them its idle time is unknown, so such a trace is refused.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.kineto import classify
from clusterprof.analysis.importers.kineto.event_stream import (
    MAX_INTEGER,
    Args,
    Document,
    Event,
    EventStream,
)
from clusterprof.analysis.importers.kineto.gather import MAX_THREADS, GatheredEvents

Int = NDArray[np.int64]

# Role of a track.
DEVICE = 1
"""Streams of an accelerator: kernels, copies, communication."""
OPERATIONS = 2
"""Operations of an XLA program, nested: a loop contains its body."""
COMMUNICATION = 3
CALLS = 4
"""Calls into the device runtime."""
HOST = 5
MARKERS = 6
"""Ranges that the user named."""
STEPS = 7
PROGRAMS = 8
"""Executions of XLA programs."""
DERIVED = 9
"""Views of other tracks, counters: no work of their own."""
DEVICE_ROLES = (DEVICE, OPERATIONS, COMMUNICATION)

_XLA_DEVICE = re.compile(r"/device:(GPU|TPU):(\d{1,5})$", re.IGNORECASE)
_NUMBERED_GPU = re.compile(r"(?:\d+ )?GPU ?(\d{1,5})$", re.IGNORECASE)
_ACCELERATOR = re.compile(
    r"(?<![a-z])(?:[gnthx]pu|mlu|gcu|mtia|musa|neuron|gaudi|habana|ascend|accelerator|device)"
    r"(?![a-z]{3})",
    re.IGNORECASE,
)
_STREAM = re.compile(r"(?:stream|queue|hw queue)\b", re.IGNORECASE)
_PROCESS_ROLES = (
    (re.compile(r"Ascend Hardware"), DEVICE),
    (re.compile(r"(?:HCCL|Communication)$"), COMMUNICATION),
    (re.compile(r"CANN$|.*\b(?:HIP|HSA)[ _]API"), CALLS),
    (re.compile(r"Overlap Analysis|NPU[ _]MEM|AI Core|HBM|LLC|/host:(?!CPU)|/device:CUSTOM"), DERIVED),
    (re.compile(r"Python|/host:CPU"), HOST),
    (re.compile(r".*Markers and Ranges"), MARKERS),
    (re.compile(r"(?:\d+ )?COPY$"), DEVICE),
)
_XLA_LINES = {"XLA Ops": OPERATIONS, "XLA Modules": PROGRAMS, "Steps": STEPS}
_WAITING_TASK = re.compile(
    r"(?:event|notify)[_ ]?(?:wait|record|reset)|WRITE_VALUE|PLACE_HOLDER|"
    r"(?:in|out)feed(?:[-.\d]|$)|capture_(?:wait|record)",
    re.IGNORECASE,
)
_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|"
    r"hcom_|allreduce|allgather|reducescatter|alltoall",
    re.IGNORECASE,
)
_COPY = re.compile(r"memcpy|memset|copybuffer|fillbuffer|PCIE_DMA|SDMA|copy(?:[HD]to|$)", re.IGNORECASE)
_TO_DEVICE, _TO_HOST = re.compile(r"H(?:ost)?(?:2|to)D", re.I), re.compile(r"D(?:evice)?(?:2|to)H", re.I)
_MAX_NESTED_EVENTS = 4 << 20
_BATCH = 4096
_MIN_PROGRAM_RUNS = 3
_MAX_TRACKS_NAMED = 3
_MIN_EPOCH_NS = 10**18  # smaller times do not count from 1970
_MAX_FLOAT = 4e15
_ASCEND_DEVICE_BITS = 31  # of a pid: process, layer, device


def classify_track(process: str, thread: str) -> int | None:
    """Return the role of a track by the names of its process and thread; None if unknown."""
    if _XLA_DEVICE.match(process):
        return DEVICE if _STREAM.match(thread) else _XLA_LINES.get(thread, DERIVED)
    if _NUMBERED_GPU.match(process):
        return DEVICE
    role = next((role for pattern, role in _PROCESS_ROLES if pattern.match(process)), None)
    if role is None and _ACCELERATOR.search(process) and _STREAM.match(thread):
        return DEVICE
    return role


def is_accelerator(process: str) -> bool:
    """Return whether the name of a process or category is that of an accelerator."""
    return _ACCELERATOR.search(process) is not None


@dataclass(frozen=True, slots=True)
class Track:
    """One track: the line of one thread, stream or engine."""

    pid: int | str
    tid: int | str
    process: str
    thread: str


@dataclass(slots=True)
class _Nested:
    """Operations of one track in the order of the file."""

    track: Track
    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    name: array[int] = field(default_factory=lambda: array("q"))


class TrackEvents:
    """Events of named tracks, handed on to `GatheredEvents` in its categories."""

    def __init__(
        self, gathered: GatheredEvents, ascend_pids: Sequence[int | str] = ()
    ) -> None:
        """Prepare for the events of one file.

        ascend_pids: pids of the processes that are Ascend devices.
        """
        self._gathered, self._ascend_pids = gathered, ascend_pids
        self._batch: list[Event] = []
        self._nested: dict[Track, _Nested] = {}
        self._names: dict[str, int] = {}
        self._devices: dict[tuple[int | str, str], int | str] = {}
        self._steps: dict[Track, list[tuple[int, int, int]]] = {}
        self._programs: dict[Track, dict[str, list[tuple[int, int]]]] = {}
        self._host_steps: dict[Track, list[tuple[int, int, int]]] = {}
        self._nested_count = 0
        self.base_ns: int | None = None
        """The clock of the trace at the zero of the events that were handed on, in ns."""

    def add(
        self,
        role: int | None,
        track: Track,
        name: str,
        start_ns: int,
        duration_ns: int,
        link: int = -1,
        size: int = -1,
        task: str = "",
        step: int = -1,
    ) -> None:
        """Add an event of a track.

        link: correlation id. size: bytes copied. task: kind of hardware task, where the profiler
        states one. step: number of the step that the event marks. All -1 or empty if unknown.
        """
        if self.base_ns is None:
            self.base_ns = start_ns
        if role == DEVICE:
            self._add_work(track, name, start_ns, duration_ns, link, size, task)
        elif role == COMMUNICATION and _COLLECTIVE.search(name):
            self._emit("device_comm", track, name, start_ns, duration_ns, link, self._device(track))
        elif role == OPERATIONS:
            self._add_operation(track, name, start_ns, duration_ns)
        elif role == CALLS:
            self._emit("track_runtime", track, name, start_ns, duration_ns, link)
        elif role == STEPS and name.strip().isdecimal() and len(name) < 17:
            row = (start_ns, start_ns + duration_ns, int(name))
            self._steps.setdefault(track, []).append(row)
        elif role == PROGRAMS:
            runs = self._programs.setdefault(track, {})
            runs.setdefault(name.partition("(")[0], []).append((start_ns, start_ns + duration_ns))
        elif role in (HOST, MARKERS):
            if step >= 0:
                row = (start_ns, start_ns + duration_ns, step)
                self._host_steps.setdefault(track, []).append(row)
            elif link >= 0 and role == HOST:  # a call that launched work
                self._emit("track_runtime", track, name, start_ns, duration_ns, link)
            elif not name.startswith("$"):  # not a Python function
                kind = "cpu_op" if role == HOST else "user_annotation"
                self._emit(kind, track, name, start_ns, duration_ns)

    def skip(self, reason: str) -> None:
        """Count an event that is left out."""
        self._gathered.account.skipped[reason] += 1

    def add_of_category(
        self, category: str, track: Track, name: str, start_ns: int, duration_ns: int, link: int
    ) -> bool:
        """Add an event of a category that Kineto has too; return whether it is one."""
        if not self._gathered.kinds[category].known:
            return False
        if self.base_ns is None:
            self.base_ns = start_ns
        on_device = self._gathered.kinds[category][name] in range(1, classify.COPY_OUT + 1)
        device = self._device(track) if on_device else -1
        self._emit(category, track, name, start_ns, duration_ns, link, device)
        return True

    def _add_work(
        self, track: Track, name: str, start_ns: int, duration_ns: int, link: int, size: int, task: str
    ) -> None:
        if _WAITING_TASK.search(task) or _WAITING_TASK.match(name):
            self.skip("tasks in which the device waits")
            return
        category = "kernel"
        if _COLLECTIVE.search(name) or "COMMUNICATION" in task:
            category = "device_comm"
        elif _COPY.search(name) or _COPY.search(task):
            category, into = "gpu_memcpy", _TO_DEVICE.search(name)
            name = "HtoD" if into else "DtoH" if _TO_HOST.search(name) else name
        self._emit(category, track, name, start_ns, duration_ns, link, self._device(track), size)

    def _add_operation(self, track: Track, name: str, start_ns: int, duration_ns: int) -> None:
        self._nested_count += 1
        if self._nested_count > _MAX_NESTED_EVENTS:
            raise CannotImportError(
                f"more than {_MAX_NESTED_EVENTS:,} XLA operations", "profile fewer steps"
            )
        nested = self._nested.setdefault(track, _Nested(track))
        nested.start.append(start_ns)
        nested.end.append(start_ns + duration_ns)
        nested.name.append(self._names.setdefault(name, len(self._names)))

    def _device(self, track: Track) -> int | str:
        """Return the key of a track's device: its number, or its name."""
        known = self._devices.get((track.pid, track.process))
        if known is None:
            known = self._devices[track.pid, track.process] = self._name_device(track)
        return known

    def _name_device(self, track: Track) -> int | str:
        xla, gpu = _XLA_DEVICE.match(track.process), _NUMBERED_GPU.match(track.process)
        if xla is not None:
            return int(xla[2]) if xla[1].upper() == "GPU" else f"tpu{int(xla[2])}"
        if gpu is not None:
            return int(gpu[1])
        if not track.process.startswith(("Ascend", "HCCL", "Communication")):
            return track.process[:40]
        # the communication of a device is a process of its own; its pid ends in the device's bits
        same = [at for at, pid in enumerate(self._ascend_pids) if _is_same_device(pid, track.pid)]
        return f"npu{same[0] if same else 0}"

    def _emit(
        self,
        category: str,
        track: Track,
        name: str,
        start_ns: int,
        duration_ns: int,
        link: int = -1,
        device: int | str = -1,
        size: int = -1,
    ) -> None:
        base_ns = self.base_ns or 0
        times = (start_ns - base_ns) / 1000, duration_ns / 1000
        args = Args(link if -1 < link < MAX_INTEGER else -1, device, size)
        pid, tid = convert_track_ids(track)
        self._batch.append(Event("X", category, name, pid, tid, *times, args))
        if len(self._batch) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self._gathered.take(batch)
        self._gathered.kinds.check_refills()

    def finish(self) -> None:
        """Hand on what had to wait for the end of the file: nested operations and steps."""
        names = list(self._names)
        for nested in self._nested.values():
            columns = (np.frombuffer(c, np.int64) for c in (nested.start, nested.end, nested.name))
            device = self._device(nested.track)
            for start, end, number in flatten_nested(*columns):
                name = names[number]
                if _WAITING_TASK.match(name):
                    self.skip("operations that wait for the host")
                    continue
                is_comm = _COLLECTIVE.search(name) is not None and "-start" not in name
                kind = "device_comm" if is_comm else "kernel"
                self._emit(kind, nested.track, name, start, end - start, -1, device)
        for track, start, end, number in self._find_steps():
            self._emit("user_annotation", track, f"ProfilerStep#{number}", start, end - start)
        self._flush()

    def _find_steps(self) -> Iterator[tuple[Track, int, int, int]]:
        """Yield the steps of the first device, else those of the host, else the runs of a program."""
        account = self._gathered.account
        for tracks, source in (
            (self._steps, "the profile's steps of the first device"),
            (self._host_steps, "the steps that the program marked (step_num)"),
        ):
            if tracks:
                track = min(tracks, key=lambda track: track.process)
                rows = sorted({row[2]: row for row in sorted(tracks[track])}.values())
                account.notes.append(f"steps are {source}; each lasts until the next begins")
                break
        else:
            if not self._programs:
                return
            track = min(self._programs, key=lambda track: track.process)
            runs = self._programs[track]
            name = max(runs, key=lambda name: sum(end - start for start, end in runs[name]))
            if len(runs[name]) < _MIN_PROGRAM_RUNS:
                return
            rows = [(start, end, i) for i, (start, end) in enumerate(sorted(runs[name]), 1)]
            account.notes.append(
                f"no steps are marked: each run of the program {name[:60]} is one step and lasts"
                " until the next begins"
            )
        for row, following in zip(rows, [*rows[1:], None]):
            end = row[1] if following is None else max(following[0], row[0])
            yield track, row[0], end, row[2]


def _is_same_device(pid: int | str, other: int | str) -> bool:
    both = isinstance(pid, int) and isinstance(other, int)
    return pid == other or (both and (int(pid) ^ int(other)) & _ASCEND_DEVICE_BITS == 0)


def convert_track_ids(track: Track) -> tuple[int | str, int | str]:
    """Return process and thread of a track; all tracks of one trace belong to one process."""
    return 1, f"{track.pid}/{track.tid}"


def flatten_nested(start: Int, end: Int, name: Int) -> Iterator[tuple[int, int, int]]:
    """Yield the time that each nested event has for itself, without those inside it.

    start, end: int64[n], ns. name: int64[n]. Yields start, end (ns) and name.
    """
    open_events: list[tuple[int, int]] = []  # end and name
    reached = 0
    order = np.lexsort((-end, start))
    rows = zip(start[order].tolist(), end[order].tolist(), name[order].tolist())
    for begin, finish, number in rows:
        while open_events and open_events[-1][0] <= begin:
            closed = open_events.pop()
            if closed[0] > reached:
                yield reached, closed[0], closed[1]
                reached = closed[0]
        if open_events and begin > reached:
            yield reached, begin, open_events[-1][1]
        reached = max(reached, begin) if open_events else begin
        open_events.append((finish, number))
    while open_events:
        closed = open_events.pop()
        if closed[0] > reached:
            yield reached, closed[0], closed[1]
            reached = closed[0]


class TrackNames:
    """Names of the tracks of a trace, and which of them have events that nothing has read."""

    def __init__(self) -> None:
        self.processes: dict[int | str, str] = {}
        self.threads: dict[tuple[int | str, int | str], str] = {}
        self.unread: Counter[tuple[int | str, int | str]] = Counter()
        self.unread_categories: Counter[str] = Counter()

    def note(self, events: Sequence[Event], gathered: GatheredEvents) -> None:
        """Note the names in a block of events, and its events of no known category."""
        if not events or not hasattr(events[0], "cat"):
            return
        kinds = gathered.kinds
        for event in events:
            if event.ph == "M":
                self._name(event)
            elif event.ph == "X" and not (event.cat and kinds[event.cat].known):
                if len(self.unread) < MAX_THREADS:
                    self.unread[event.pid, event.tid] += 1
                if event.cat:
                    self.unread_categories[event.cat] += 1

    def _name(self, event: Event) -> None:
        name = event.args.name if event.args is not None else None
        if not isinstance(name, str) or len(self.threads) + len(self.processes) > MAX_THREADS:
            return
        if event.name == "process_name":
            self.processes[event.pid] = name[:200]
        elif event.name == "thread_name":
            self.threads[event.pid, event.tid] = name[:200]

    def track(self, pid: int | str, tid: int | str) -> Track:
        """Return a track with its names."""
        return Track(pid, tid, self.processes.get(pid, ""), self.threads.get((pid, tid), ""))

    def has_unread_device(self) -> bool:
        """Return whether a known track of an accelerator has events that nothing has read."""
        return any(self._role(key) in DEVICE_ROLES for key in self.unread)

    def _role(self, key: tuple[int | str, int | str]) -> int | None:
        track = self.track(*key)
        return classify_track(track.process, track.thread)

    def check_understood(self, account: Account) -> None:
        """Check that no track of an accelerator is left that nothing understands.

        Raises: CannotImportError that names such tracks.
        """
        names: Counter[str] = Counter()
        for key, count in self.unread.items():
            track = self.track(*key)
            if self._role(key) is None and is_accelerator(track.process):
                names[f"{track.process} / {track.thread or track.tid}"] += count
        for category, count in self.unread_categories.items():
            if is_accelerator(category) and not names:
                names[f"category {category}"] += count
        if names:
            listed = ", ".join(f"{name[:60]!r}" for name, _ in names.most_common(_MAX_TRACKS_NAMED))
            raise CannotImportError(
                f"the trace has {sum(names.values()):,} events of an accelerator on tracks that are"
                f" not understood ({listed}): how busy it was is unknown",
                "export a trace in which its work has the category kernel, or is on threads named"
                " 'stream …'",
            )


class _TrackArgs(msgspec.Struct, gc=False):
    """Arguments of events on named tracks, in the spellings of the profilers."""

    name: Any = None
    task: Any = msgspec.field(default=None, name="Task Type")
    connection: Any = msgspec.field(default=None, name="connection_id")
    connection_text: Any = msgspec.field(default=None, name="Connection Id")
    correlation: Any = None
    correlation_id: Any = None
    step: Any = msgspec.field(default=None, name="step_num")
    size: Any = msgspec.field(default=None, name="size(B)")
    bytes: Any = None
    begin_ns: Any = msgspec.field(default=None, name="BeginNs")
    end_ns: Any = msgspec.field(default=None, name="EndNs")


_NO_ARGS = _TrackArgs()


class _TrackEvent(msgspec.Struct, gc=False):
    """One event whose times may be text."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: int | float | str | None = None
    dur: int | float | str | None = None
    args: _TrackArgs | None = None


class _TrackDocument(Document, gc=False):
    events: list[_TrackEvent] = msgspec.field(default_factory=list, name="traceEvents")  # type: ignore[assignment]


_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)
_DECODE_EVENTS = msgspec.json.Decoder(list[_TrackEvent]).decode
_DECODE_DOCUMENT = msgspec.json.Decoder(_TrackDocument).decode
_TEXT_TIME = re.compile(r"\s*(\d{1,19})(?:\.(\d{1,9})\d*)?\s*")


def _parse_track_events(text: bytes) -> Sequence[Any] | None:
    try:
        return _DECODE_EVENTS(text)
    except _DECODE_ERRORS:
        return None


def _parse_track_document(text: bytes) -> Any:
    try:
        return _DECODE_DOCUMENT(text)
    except _DECODE_ERRORS:
        return None


def _parse_track_event_tolerantly(text: bytes, skipped: Counter[str]) -> Any:
    try:
        value = json.loads(text.decode("utf-8", "replace"), strict=False)
        return msgspec.convert(value, _TrackEvent, strict=False)
    except (ValueError, RecursionError, OverflowError, msgspec.ValidationError):
        skipped["not an event"] += 1
        return None


class TrackStream(EventStream):
    """Events of a file with the arguments that named tracks need, and times that may be text."""

    parse_document = staticmethod(_parse_track_document)
    parse_events = staticmethod(_parse_track_events)
    parse_tolerantly = staticmethod(_parse_track_event_tolerantly)


def read_tracks(
    source: Source, account: Account, names: TrackNames
) -> tuple[GatheredEvents, Document]:
    """Read a file whose tracks are known by name.

    Returns the gathered events and the metadata of the file.

    Raises: CannotImportError when the file has no list of events.
    """
    account.read.clear()
    account.skipped.clear()
    gathered = GatheredEvents(account)
    ascend = sorted(
        (pid for pid, name in names.processes.items() if name.startswith("Ascend Hardware")), key=str
    )
    tracks = TrackEvents(gathered, ascend)
    roles: dict[tuple[int | str, int | str], tuple[int | None, Track]] = {}
    stream = TrackStream(source, account)
    for events in stream.events():
        for event in events:
            if event.ph != "X":
                continue
            key = (event.pid, event.tid)
            known = roles.get(key)
            if known is None:
                track = names.track(*key)
                known = classify_track(track.process, track.thread), track
                if len(roles) < MAX_THREADS:
                    roles[key] = known
            _add_event(tracks, event, *known)
    tracks.finish()
    gathered.finish()
    document = stream.document
    document.base_ns = tracks.base_ns if (tracks.base_ns or 0) > _MIN_EPOCH_NS else None
    return gathered, document


def _add_event(tracks: TrackEvents, event: Any, role: int | None, track: Track) -> None:
    args = event.args or _NO_ARGS
    start_ns, duration_ns = convert_time(event.ts), convert_time(event.dur)
    begin_ns, end_ns = convert_time(args.begin_ns, 1), convert_time(args.end_ns, 1)
    if begin_ns is not None and end_ns is not None and end_ns >= begin_ns:
        start_ns, duration_ns = begin_ns, end_ns - begin_ns
    if start_ns is None or duration_ns is None or duration_ns < 0:
        tracks.skip("without a usable time")
        return
    links = (args.connection, args.connection_text, args.correlation, args.correlation_id)
    link = next((n for value in links if (n := convert_time(value, 1)) is not None), -1)
    if event.cat and tracks.add_of_category(
        event.cat, track, event.name, start_ns, duration_ns, link
    ):
        return
    if role is None:
        tracks.skip("on tracks of no known role")
        return
    size, step = convert_time(args.size or args.bytes, 1), convert_time(args.step, 1)
    tracks.add(
        role,
        track,
        event.name,
        start_ns,
        duration_ns,
        link,
        -1 if size is None else size,
        args.task if isinstance(args.task, str) else "",
        -1 if step is None else step,
    )


def convert_time(value: Any, unit_ns: int = 1000) -> int | None:
    """Convert a time, by default in microseconds, to integer ns; None if it is not one.

    Text is converted exactly: a float does not hold the ns since 1970.
    """
    if isinstance(value, str):
        match = _TEXT_TIME.fullmatch(value)
        if match is None:
            return None
        fraction = int(match[2].ljust(9, "0")) * unit_ns if match[2] else 0
        ns = int(match[1]) * unit_ns + (fraction + 500_000_000) // 1_000_000_000
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    elif isinstance(value, int):
        ns = value * unit_ns
    elif abs(value) < _MAX_FLOAT:
        whole = math.floor(value)
        ns = whole * unit_ns + round((value - whole) * unit_ns)
    else:
        return None
    return ns if abs(ns) < MAX_INTEGER else None
