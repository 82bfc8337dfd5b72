"""Chrome traces whose tracks are known by name: their names first, then their events.

    names = TrackNames()
    names.note(events, gathered)                    # while the file is read as a Kineto trace
    if names.has_unread_device():
        gathered, document = read_tracks(source, account, names)
    names.check_understood(account)

The name of a track may follow its events, so such a file is read twice. Tracks of an accelerator
that nothing understands are found too: without them its idle time is unknown, so such a trace is
refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.kineto.begin_end_pairs import EventPairs
from clusterprof.analysis.importers.kineto.event_columns import MAX_THREADS, GatheredEvents
from clusterprof.analysis.importers.kineto.event_stream import Document, Event, EventStream
from clusterprof.analysis.importers.kineto.tracks import (
    AUTOGRAD_DEVICE,
    DEVICE,
    DEVICE_ROLES,
    NUMBERED_GPU,
    Track,
    TrackEvents,
    classify_track,
    convert_time,
    is_accelerator,
)

_COPIES = re.compile(r"(?:\d+ )?COPY$")
"""Process of rocprof for the copies of all devices."""
_AUTOGRAD_NOTE = (
    "the trace is of the first profiler of PyTorch (torch.autograd.profiler): its device times are"
    " those between CUDA events around each operator, so idle time within an operator counts as"
    " busy; record with torch.profiler to see kernels"
)
_MAX_TRACKS_NAMED = 3
_WORK_PHASES = ("X", "B", "b")
"""Complete events, and the beginnings of others: each is one piece of work."""
_MAX_ID_DIGITS = 16
_MIN_EPOCH_NS = 10**18  # smaller times do not count from 1970


def convert_id(value: int | str) -> int | str:
    """Return an id of a process or thread as a number where it is one.

    rocprof writes `"pid": "6"` into events and `"pid": 6` beside the name of the process.
    """
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < _MAX_ID_DIGITS
    return int(value) if is_number else value


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
            elif event.ph in _WORK_PHASES and not (event.cat and kinds[event.cat].known):
                if len(self.unread) < MAX_THREADS:
                    self.unread[event.pid, event.tid] += 1
                if event.cat:
                    self.unread_categories[event.cat] += 1

    def _name(self, event: Event) -> None:
        name = event.args.name if event.args is not None else None
        if not isinstance(name, str) or len(self.threads) + len(self.processes) > MAX_THREADS:
            return
        if event.name == "process_name":
            self.processes[convert_id(event.pid)] = name[:200]
        elif event.name == "thread_name":
            self.threads[convert_id(event.pid), convert_id(event.tid)] = name[:200]

    def track(self, pid: int | str, tid: int | str) -> Track:
        """Return a track with its names."""
        pid, tid = convert_id(pid), convert_id(tid)
        process = self.processes.get(pid, pid if isinstance(pid, str) else "")
        return Track(pid, tid, process, self.threads.get((pid, tid), ""))

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

    def raise_unnamed(self) -> NoReturn:
        """Refuse a trace whose tracks have no known name, and say what has to be named.

        Raises: CannotImportError always.
        """
        pids = sorted({pid for pid, _ in self.unread}, key=str)
        processes = [str(self.processes.get(pid) or pid) for pid in pids]
        if processes and all(map(_HOST_NAME.search, processes)):
            raise CannotImportError(
                f"the trace has {sum(self.unread.values()):,} events, all of the host"
                f" ({processes[0][:60]}): no work of an accelerator",
                "profile the device as well: ProfilerActivity.CUDA, in old versions use_cuda=True",
            )
        listed = ", ".join(
            f"{pid} ({self.processes[pid][:60]})" if self.processes.get(pid) else str(pid)
            for pid in pids[:_MAX_TRACKS_NAMED]
        )
        suffix = f" and {len(pids) - _MAX_TRACKS_NAMED} more" * (len(pids) > _MAX_TRACKS_NAMED)
        example = '{"ph": "M", "pid": %s, "name": "process_name", "args": {"name": "GPU 0"}}'
        raise CannotImportError(
            f"a Chrome trace of {sum(self.unread.values()):,} events without a known category, and"
            f" no process is named after an accelerator: {listed}{suffix}",
            f"name the process of each device: add {example % json.dumps(pids[0] if pids else 0)}"
            ' to the events; or give its kernels "cat": "kernel"',
        )


_HOST_NAME = re.compile(r"\bCPU\b|\bhost\b", re.IGNORECASE)
"""Of processes whose work is not that of an accelerator."""


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
    device: Any = msgspec.field(default=None, name="dev-id")
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
    id: Any = None


class _TrackDocument(Document, gc=False):
    events: list[_TrackEvent] = msgspec.field(default_factory=list, name="traceEvents")  # type: ignore[assignment]


_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)
_DECODE_EVENTS = msgspec.json.Decoder(list[_TrackEvent]).decode
_DECODE_DOCUMENT = msgspec.json.Decoder(_TrackDocument).decode


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
    gpus = [name for name in names.processes.values() if NUMBERED_GPU.match(name)]
    for pid, name in names.processes.items():
        if _COPIES.match(name) and len(gpus) == 1:  # of several devices it is not known whose
            names.processes[pid] = gpus[0]
    ascend = sorted(
        (pid for pid, name in names.processes.items() if name.startswith("Ascend Hardware")),
        key=str,
    )
    tracks = TrackEvents(gathered, ascend)
    roles: dict[tuple[int | str, int | str], tuple[int | None, Track]] = {}
    stream = TrackStream(source, account)
    pairs = EventPairs(account, "BEbe", _subtract_times)
    for events in stream.events():
        for event in (*(event for event in events if event.ph == "X"), *pairs.join(events)):
            key = (event.pid, event.tid)
            entry = roles.get(key)
            if entry is None:
                track = names.track(*key)
                entry = classify_track(track.process, track.thread), track
                if len(roles) < MAX_THREADS:
                    roles[key] = entry
            _add_event(tracks, event, *entry)
    if any(track.process == AUTOGRAD_DEVICE for _, track in roles.values()):
        account.notes.append(_AUTOGRAD_NOTE)
    pairs.finish()
    tracks.finish()
    gathered.finish()
    document = stream.document
    document.base_ns = tracks.base_ns if (tracks.base_ns or 0) > _MIN_EPOCH_NS else None
    return gathered, document


def _subtract_times(end: Any, start: Any) -> float:
    """Return the microseconds between two times of a trace; NaN if one of them is no time."""
    end_ns, start_ns = convert_time(end), convert_time(start)
    return math.nan if end_ns is None or start_ns is None else (end_ns - start_ns) / 1000


def _add_event(tracks: TrackEvents, event: Any, role: int | None, track: Track) -> None:
    args = event.args or _NO_ARGS
    if _COPIES.match(track.process) and (device := convert_time(args.device, 1)) is not None:
        role, track = DEVICE, replace(track, process=f"GPU {device}")
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
