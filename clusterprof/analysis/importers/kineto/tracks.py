"""Tracks by the names of their process and thread: Ascend, JAX (XLA), rocprof, and streams.

    role = classify_track("/device:TPU:0", "XLA Ops")       # OPERATIONS
    tracks = TrackEvents(gathered)
    tracks.add(role, track, "fusion.3", start_ns, duration_ns)
    tracks.finish()

Kineto states the category of an event, other profilers only name the track it is on. An event of a
named track becomes an event of the category that `GatheredEvents` understands, on the integer
clock of the trace.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.kineto import classify
from clusterprof.analysis.importers.kineto.event_columns import GatheredEvents
from clusterprof.analysis.importers.kineto.event_stream import MAX_INTEGER, Args, Event

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
NUMBERED_GPU = re.compile(r"(?:\d+ )?GPU ?(\d{1,5})$", re.IGNORECASE)
_ACCELERATOR = re.compile(
    r"(?<![a-z])(?:[gnthx]pu|mlu|gcu|mtia|musa|neuron|gaudi|habana|ascend|accelerator|device)"
    r"(?![a-z]{3})",
    re.IGNORECASE,
)
_STREAM = re.compile(r"(?:stream|queue|hw queue)\b", re.IGNORECASE)
AUTOGRAD_DEVICE, AUTOGRAD_HOST = "CUDA functions", "CPU functions"
"""Processes of the profiler of PyTorch before 1.8; the thread of the first is the device."""
_PROCESS_ROLES = (
    (re.compile(AUTOGRAD_DEVICE), DEVICE),
    (re.compile(AUTOGRAD_HOST), HOST),
    (re.compile(r"Ascend Hardware"), DEVICE),
    (re.compile(r"(?:HCCL|Communication)$"), COMMUNICATION),
    (re.compile(r"CANN$|.*\b(?:HIP|HSA)[ _]API"), CALLS),
    (
        re.compile(r"Overlap Analysis|NPU[ _]MEM|AI Core|HBM|LLC|/host:(?!CPU)|/device:CUSTOM"),
        DERIVED,
    ),
    (re.compile(r"Python|/host:CPU"), HOST),
    (re.compile(r".*Markers and Ranges"), MARKERS),
)
_XLA_LINES = {"XLA Ops": OPERATIONS, "XLA Modules": PROGRAMS, "Steps": STEPS}
_WAITING_TASK = re.compile(
    r"(?:event|notify)[_ ]?(?:wait|record|reset)|WRITE_VALUE|PLACE_HOLDER|"
    r"(?:in|out)feed(?:[-.\d]|$)|capture_(?:wait|record)",
    re.IGNORECASE,
)
_AWAITED_WORK = re.compile(r"async-done(?:[.\d]|$)")
"""An operation in which the core waits for work that it does not name."""
_MESSAGE = re.compile(r"(?:send|recv)-done(?:[.\d]|$)")
COLLECTIVE = re.compile(
    r"async-collective-done|all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|"
    r"hcom_|allreduce|allgather|reducescatter|alltoall",
    re.IGNORECASE,
)
_COPY = re.compile(
    r"memcpy|memset|copybuffer|fillbuffer|PCIE_DMA|SDMA|copy(?:\w*to(?:device|host)|[HD]to|$)",
    re.IGNORECASE,
)
_TO_DEVICE, _TO_HOST = (
    re.compile(r"H(?:ost)?(?:2|to)D", re.I),
    re.compile(r"D(?:evice)?(?:2|to)H", re.I),
)
_PYTHON_FUNCTION = re.compile(r"\$(\S+):(\d{1,9}) (.+)")
"""Name of a Python function in a profile of JAX: `$api.py:3154 block_until_ready`."""
_MAX_NESTED_EVENTS, _MAX_MARKS = 4 << 20, 1 << 17
_BATCH = 4096
_MIN_PROGRAM_RUNS = 3
_MAX_FLOAT = 4e15
_TEXT_TIME = re.compile(r"\s*(\d{1,19})(?:\.(\d{1,9})\d*)?\s*")
_ASCEND_DEVICE_BITS = 31  # of a pid: process, layer, device


def classify_track(process: str, thread: str) -> int | None:
    """Return the role of a track by the names of its process and thread; None if unknown."""
    if _XLA_DEVICE.match(process):
        return DEVICE if _STREAM.match(thread) else _XLA_LINES.get(thread, DERIVED)
    if NUMBERED_GPU.match(process):
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

    def __init__(self, gathered: GatheredEvents, ascend_pids: Sequence[int | str] = ()) -> None:
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
        self._nested_count = self._marks = 0
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
        elif role == COMMUNICATION and COLLECTIVE.search(name):
            self._emit("device_comm", track, name, start_ns, duration_ns, link, self._device(track))
        elif role == OPERATIONS:
            self._add_operation(track, name, start_ns, duration_ns)
        elif role == CALLS:
            self._emit("track_runtime", track, name, start_ns, duration_ns, link)
        elif role in (STEPS, PROGRAMS) or step >= 0:
            self._add_mark(role, track, name, (start_ns, start_ns + duration_ns), step)
        elif role == HOST and link >= 0:  # a call that launched work
            self._emit("track_runtime", track, name, start_ns, duration_ns, link)
        elif role == HOST and (function := _PYTHON_FUNCTION.fullmatch(name)):
            name = f"{function[1]}({function[2]}): {function[3]}"
            self._emit("track_function", track, name, start_ns, duration_ns)
        elif role in (HOST, MARKERS) and not name.startswith("$"):
            kind = "cpu_op" if role == HOST else "user_annotation"
            self._emit(kind, track, name, start_ns, duration_ns)

    def _add_mark(
        self, role: int | None, track: Track, name: str, times: tuple[int, int], step: int
    ) -> None:
        """Add a step, or the run of a program. times: start and end, ns."""
        self._marks += 1
        if self._marks > _MAX_MARKS:
            self.skip("steps and programs beyond the limit")
        elif role == STEPS:
            if name.strip().isdecimal() and len(name) < 17:
                self._steps.setdefault(track, []).append((*times, int(name)))
        elif role == PROGRAMS:
            runs = self._programs.setdefault(track, {})
            runs.setdefault(name.partition("(")[0], []).append(times)
        elif role in (HOST, MARKERS):
            self._host_steps.setdefault(track, []).append((*times, step))

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
        self,
        track: Track,
        name: str,
        start_ns: int,
        duration_ns: int,
        link: int,
        size: int,
        task: str,
    ) -> None:
        if _WAITING_TASK.search(task) or _WAITING_TASK.match(name):
            self.skip("tasks in which the device waits")
            return
        category = "kernel"
        if COLLECTIVE.search(name) or "COMMUNICATION" in task:
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
        key = (track.tid if track.process == AUTOGRAD_DEVICE else track.pid, track.process)
        device = self._devices.get(key)
        if device is None:
            device = self._devices[key] = self._name_device(track)
        return device

    def _name_device(self, track: Track) -> int | str:
        xla, gpu = _XLA_DEVICE.match(track.process), NUMBERED_GPU.match(track.process)
        if xla is not None:
            return int(xla[2]) if xla[1].upper() == "GPU" else f"tpu{int(xla[2])}"
        if gpu is not None:
            return int(gpu[1])
        if track.process == AUTOGRAD_DEVICE and isinstance(track.tid, int):
            return track.tid
        if not track.process.startswith(("Ascend", "HCCL", "Communication")):
            return track.process[:40]
        # the communication of a device is a process of its own; its pid ends in the device's bits
        indices = [
            number
            for number, pid in enumerate(self._ascend_pids)
            if _is_same_device(pid, track.pid)
        ]
        return f"npu{indices[0] if indices else 0}"

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
                category, name = _label_operation(names[number])
                if category is None:
                    self.skip(name)
                else:
                    self._emit(category, nested.track, name, start, end - start, -1, device)
        for track, rows in self._find_steps():
            for row, following in zip(rows, [*rows[1:], None]):
                end = row[1] if following is None else max(following[0], row[0])
                self._emit("user_annotation", track, f"ProfilerStep#{row[2]}", row[0], end - row[0])
            self._flush()
            if track not in self._host_steps and self._device(track) in self._gathered.devices:
                device = self._gathered.devices[self._device(track)]
                thread = self._gathered.threads[convert_track_ids(track)]
                self._gathered.step_threads.setdefault(device, thread)
        self._flush()

    def _find_steps(self) -> Iterator[tuple[Track, list[tuple[int, int, int]]]]:
        """Yield the steps of each device, else of the host, else the runs of a program."""
        account = self._gathered.account
        for tracks, source in (
            (dict(sorted(self._steps.items(), key=_get_process)), "the profile's steps"),
            (
                dict(sorted(self._host_steps.items(), key=_get_process)[:1]),
                "the steps that the program marked (step_num)",
            ),
        ):
            for track, marked in tracks.items():
                yield track, sorted({row[2]: row for row in sorted(marked)}.values())
            if tracks:
                account.notes.append(f"steps are {source}; each lasts until the next begins")
                return
        programs = dict(sorted(self._programs.items(), key=_get_process))
        runs = next(iter(programs.values()), {})
        name = max(runs, key=lambda name: sum(end - start for start, end in runs[name]), default="")
        if len(runs.get(name, ())) < _MIN_PROGRAM_RUNS:
            return
        for track, runs in programs.items():
            if len(runs.get(name, ())) >= _MIN_PROGRAM_RUNS:
                numbered = enumerate(sorted(runs[name]), 1)
                yield track, [(start, end, number) for number, (start, end) in numbered]
        account.notes.append(
            f"no steps are marked: each run of the program {name[:60]} is one step and lasts"
            " until the next begins"
        )


def _get_process(item: tuple[Track, Any]) -> str:
    return item[0].process


def _label_operation(name: str) -> tuple[str | None, str]:
    """Return the category and name of an XLA operation; of a pure wait None and the reason."""
    if name.endswith((" HtoD", " DtoH")):  # the core waits for a copy from or to the host
        return "gpu_memcpy", name[-4:]
    if _WAITING_TASK.match(name):
        return None, "operations that wait for the host"
    if _AWAITED_WORK.match(name):
        return None, "operations that wait for work that the profile does not name (async-done)"
    if _MESSAGE.match(name) or (COLLECTIVE.search(name) and "-start" not in name):
        return "device_comm", name
    return "kernel", name


def _is_same_device(pid: int | str, other: int | str) -> bool:
    are_numbers = isinstance(pid, int) and isinstance(other, int)
    return pid == other or (are_numbers and (int(pid) ^ int(other)) & _ASCEND_DEVICE_BITS == 0)


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
        integer = math.floor(value)
        ns = integer * unit_ns + round((value - integer) * unit_ns)
    else:
        return None
    return ns if abs(ns) < MAX_INTEGER else None
