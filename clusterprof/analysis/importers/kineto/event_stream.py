"""Split a trace into blocks of whole events in bounded memory, whatever they contain.

    {"schemaVersion": 1, …, "traceEvents": [ {…}, {…}, | {…}, {…}, | {…} ], "x": …}
     head                                    block       block      rest

A block ends at the text that separates events in this file (`},` and the beginning of the next
event, learned from the first two). Decoding the block as JSON proves that
the cut was right: cut in the middle of an event it would not be valid JSON. A block that fails is
searched for its events byte by byte, with respect to strings.

msgspec decodes a block of some megabytes in one call and builds only the requested fields. JSON
that is slightly invalid (NaN, bad UTF-8, control characters) or deviates from the format (text for
a number) is decoded tolerantly, event by event; what even that cannot read is counted and left out.

Blocks of common events are decoded in one call, with only the needed fields.

    decoder = CommonEventDecoder(kinds)
    decoder.events(b'[{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 7, …}, …]')

`cat` selects the type of an event, so nothing is built for flow events and the like, and no
arguments for operators. msgspec looks up names while it decodes: `name` of an event is a member of
an Enum whose `kind` is that of `analysis.importers.kineto.classify`. A block with anything uncommon
in it (another category, half of an event, text for a number) gives None; `parse_events` decodes
that block.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.kineto import classify

MAX_INTEGER = 1 << 62


class Args(msgspec.Struct, gc=False, frozen=True):
    """Arguments of an event that the analysis uses."""

    correlation: int = -1
    device: int | str = -1
    bytes: int = -1
    name: Any = None


class CommArgs(Args, gc=False, frozen=True):
    """Event arguments, with the description of a communication operation."""

    collective: str | None = msgspec.field(default=None, name="Collective name")
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    elements: int = msgspec.field(default=-1, name="In msg nelems")
    dtype: str | None = None
    sequence: int = msgspec.field(default=-1, name="Seq")
    source: int = msgspec.field(default=-1, name="Src Rank")
    target: int = msgspec.field(default=-1, name="Dst Rank")


NO_ARGS = CommArgs()
_PHASES = Literal[
    "X", "B", "E", "i", "I", "M", "s", "t", "f", "C", "b", "n", "e", "P", "N", "O", "D"
]
_CATEGORIES = Literal[
    "",
    "cpu_op",
    "user_annotation",
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_runtime",
    "cuda_driver",
    "ac2g",
    "async",
    "fwdbwd",
    "cpu_instant_event",
    "python_function",
    "overhead",
    "gpu_user_annotation",
    "cuda_sync",
    "cuda_event",
    "Trace",
    "Operator",
    "Kernel",
    "Runtime",
    "Memcpy",
    "Memset",
    "xpu_runtime",
    "hip_runtime",
    "privateuse1_runtime",
]


class Event(msgspec.Struct, gc=False):
    """One event; times are microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: float = math.nan
    dur: float = math.nan
    args: Args | None = NO_ARGS


class CommEvent(Event, gc=False):
    """One event of a block that describes communication operations."""

    args: CommArgs | None = NO_ARGS


class _CommonEvent(Event, gc=False):
    """One event of a common category; phase and category are literals, not new strings."""

    ph: _PHASES = "X"
    cat: _CATEGORIES = ""


class _CommonCommEvent(CommEvent, gc=False):
    ph: _PHASES = "X"
    cat: _CATEGORIES = ""


class Document(msgspec.Struct, gc=False):
    """Metadata around the events, and at the end of a file the last events."""

    events: list[Event] = msgspec.field(default_factory=list, name="traceEvents")
    device_properties: Any = msgspec.field(default=None, name="deviceProperties")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    base_ns: Any = msgspec.field(default=None, name="baseTimeNanoseconds")
    runtime: Any = msgspec.field(default=None, name="hip_runtime_version")


class CommDocument(Document, gc=False):
    """Document whose events describe communication operations."""

    events: list[CommEvent] = msgspec.field(default_factory=list, name="traceEvents")  # type: ignore[assignment]


_DOCUMENT = msgspec.json.Decoder(Document)
_COMM_DOCUMENT = msgspec.json.Decoder(CommDocument)
_EVENT_LIST = msgspec.json.Decoder(list[Event])
_COMM_EVENT_LIST = msgspec.json.Decoder(list[CommEvent])
_COMMON_EVENT_LIST = msgspec.json.Decoder(list[_CommonEvent])
_COMMON_COMM_EVENT_LIST = msgspec.json.Decoder(list[_CommonCommEvent])
DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)
COMM_MARKER = b'"Collective name"'


def parse_document(text: bytes) -> Document | None:
    """Parse a whole JSON document; None if it is not one."""
    try:
        return (_COMM_DOCUMENT if COMM_MARKER in text else _DOCUMENT).decode(text)
    except DECODE_ERRORS:
        return None


def parse_events(text: bytes) -> Sequence[Event] | None:
    """Parse a JSON list of events; None if the text is not one."""
    has_comm = COMM_MARKER in text
    for decoder in (
        _COMMON_COMM_EVENT_LIST if has_comm else _COMMON_EVENT_LIST,
        _COMM_EVENT_LIST if has_comm else _EVENT_LIST,
    ):
        try:
            return decoder.decode(text)  # type: ignore[no-any-return]
        except DECODE_ERRORS:
            continue
    return None


def parse_event_tolerantly(text: bytes, skipped: Counter[str]) -> Event | None:
    """Parse one event tolerantly; None, counted in `skipped`, if it cannot be read."""
    try:
        value = json.loads(text.decode("utf-8", "replace"), strict=False)
    except RecursionError:
        skipped["nested too deeply"] += 1
        return None
    except (ValueError, OverflowError):
        skipped["not JSON"] += 1
        return None
    if not isinstance(value, dict):
        skipped["not an event"] += 1
        return None
    args = value.get("args")
    fields = args if isinstance(args, dict) else {}
    ph, cat, name = (_convert_to_text(value.get(key)) for key in ("ph", "cat", "name"))
    pid, tid = _convert_identifier(value.get("pid")), _convert_identifier(value.get("tid"))
    ts, dur = _convert_microseconds(value.get("ts")), _convert_microseconds(value.get("dur"))
    return CommEvent(ph, cat, name, pid, tid, ts, dur, _build_comm_args(fields))


def _build_comm_args(fields: Mapping[str, Any]) -> CommArgs:
    text_keys = ("Collective name", "Process Group Name", "Process Group Ranks")
    name, group, ranks = (
        _convert_to_text(fields[key]) if key in fields else None for key in text_keys
    )
    number_keys = ("In msg nelems", "Seq", "Src Rank", "Dst Rank")
    elements, sequence, source, target = (_convert_count(fields.get(key)) for key in number_keys)
    return CommArgs(
        _convert_count(fields.get("correlation")),
        _convert_identifier(fields.get("device")),
        _convert_count(fields.get("bytes")),
        fields.get("name"),
        name,
        group,
        ranks,
        elements,
        _convert_to_text(fields.get("dtype")),
        sequence,
        source,
        target,
    )


def _convert_to_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:200]


def _convert_identifier(value: Any) -> int | str:
    """Convert the id of a process, thread or device: a number or text, else -1."""
    if isinstance(value, bool) or value is None:
        return -1
    if isinstance(value, int):
        return value if abs(value) < MAX_INTEGER else -1
    return value if isinstance(value, str) else -1


def _convert_count(value: Any) -> int:
    """Convert a count; -1 if it is not one or does not fit into 64 bits."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return -1
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_INTEGER
    return value if fits else -1


def _convert_microseconds(value: Any) -> float:
    """Convert a time in microseconds; NaN if it is not a number."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


BLOCK_BYTES = 1 << 20
MAX_EVENT_BYTES = 8 << 20
MAX_METADATA_BYTES = 32 << 20
_EVENT_LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT_SEPARATOR = re.compile(rb'\}\s*,\s*\{\s*"\w')
_LIST_SEPARATOR = re.compile(rb"[,\s]*")
_MAX_START_CANDIDATES = 64
_MAX_START_BYTES = 1 << 12  # of the text that opens the list, white space included
_SPACE = b" \t\r\n\xef\xbb\xbf"


class EventStream:
    """Events of one file, block by block; its metadata is complete in `document` at the end."""

    parse_document = staticmethod(parse_document)
    parse_events = staticmethod(parse_events)
    parse_tolerantly = staticmethod(parse_event_tolerantly)

    def __init__(
        self,
        source: Source,
        account: Account,
        decode_common: Callable[[bytes], Sequence[Event] | None] | None = None,
    ) -> None:
        """Prepare to read a file.

        decode_common: decodes a block of common events and returns None for any other block
        (`CommonEventDecoder.events`).
        """
        self._source = source
        self._account = account
        self._decode_common = decode_common
        self.document = Document()

    def events(self) -> Iterator[Sequence[Event]]:
        """Yield the events some thousands at a time, in the order of the file.

        Raises: CannotImportError when the file has no list of events or an event is larger than 8
        MiB.
        """
        blocks = self._source.blocks(BLOCK_BYTES)
        tail = self._find_event_list(blocks)
        separator_match = _EVENT_SEPARATOR.search(tail, 0, 4 << 20)
        separator = separator_match.group() if separator_match else b""
        ended = False
        for block in blocks:
            cut = block.rfind(separator) if separator else -1
            if cut >= 0:
                document = (b"[", tail, memoryview(block)[: cut + 1], b"]")
                events = self._decode_block(b"".join(document))  # copied once
                if events is not None:
                    yield events
                    tail = block[block.find(b",", cut) + 1 :]
                    continue
            events, tail, ended = self._decode_by_object(tail + block)
            yield events
            if ended:
                break
            if len(tail) > MAX_EVENT_BYTES:
                raise CannotImportError(
                    f"an event of more than {MAX_EVENT_BYTES >> 20} MiB, too large"
                )
        if not ended:
            yield from self._read_last(tail)
        else:
            self._read_trailer(b'{"":0' + tail, blocks)

    def _find_event_list(self, blocks: Iterator[bytes]) -> bytes:
        """Return the bytes that follow the bracket which opens the list of events."""
        head, low, tries = b"", 0, 0
        for block in blocks:
            head += block
            if head.lstrip(_SPACE)[:1] == b"[":
                return head.lstrip(_SPACE)[1:]
            while tries < _MAX_START_CANDIDATES and (start := _EVENT_LIST_START.search(head, low)):
                text = head[: start.start()].strip(_SPACE).rstrip(b",") + b"}"
                header = self.parse_document(text)
                if header is not None:
                    self.document = header
                    return head[start.end() :]
                low, tries = start.end(), tries + 1  # the match was inside a string
            low = max(low, len(head) - _MAX_START_BYTES)
            if len(head) > MAX_METADATA_BYTES or tries == _MAX_START_CANDIDATES:
                break
        damaged_start = _EVENT_LIST_START.search(head)  # metadata damaged, events perhaps not
        if damaged_start is None:
            raise CannotImportError("the file has no list of events (traceEvents)")
        self._account.skipped["metadata before the events that is not JSON"] += 1
        return head[damaged_start.end() :]

    def _read_last(self, tail: bytes) -> Iterator[Sequence[Event]]:
        """Read the remaining events at the end of the file."""
        ending = self.parse_document(b'{"traceEvents":[' + tail)
        if ending is not None:
            self._merge_document(ending)
            yield ending.events
            return
        listed = self._decode_block(b"[" + tail)
        if listed is not None:
            yield listed
            return
        events, trailer, ended = self._decode_by_object(tail)
        yield events
        if ended:
            self._read_trailer(b'{"":0' + trailer, iter(()))
        elif trailer.strip(_SPACE + b","):
            self._account.cut = "cut off in the middle of an event; all events before it were read"
        else:
            self._account.cut = "cut off after an event; all events before that point were read"

    def _read_trailer(self, text: bytes, blocks: Iterator[bytes]) -> None:
        """Read the metadata that follows the events."""
        for block in blocks:
            text += block
            if len(text) > MAX_METADATA_BYTES:
                self._account.skipped["metadata after the events that is too long"] += 1
                return
        if text.strip(_SPACE) == b'{"":0':  # nothing follows a bare list
            return
        after = self.parse_document(text)
        if after is None:
            self._account.skipped["metadata after the events that is not JSON"] += 1
        else:
            self._merge_document(after)

    def _merge_document(self, after: Document) -> None:
        for name in ("device_properties", "distributed", "base_ns", "runtime"):
            value = getattr(after, name)
            if value is not None:
                setattr(self.document, name, value)

    def _decode_block(self, text: bytes) -> Sequence[Event] | None:
        """Return the events of a JSON list; None if the text is not one."""
        common = self._decode_common(text) if self._decode_common else None
        return self.parse_events(text) if common is None else common

    def _decode_by_object(self, text: bytes) -> tuple[list[Event], bytes, bool]:
        """Return the whole events of a block, the bytes after them, and whether the list ended."""
        spans, end, ended = find_list_objects(text)
        events, skipped = [], self._account.skipped
        for a, b in spans:
            decoded = self.parse_events(b"[" + text[a:b] + b"]")
            event = decoded[0] if decoded else self.parse_tolerantly(text[a:b], skipped)
            if event is not None:
                events.append(event)
        return events, text[end:], ended


def find_list_objects(text: bytes) -> tuple[list[tuple[int, int]], int, bool]:
    """Find the objects of a JSON list after its opening bracket, with respect to strings.

    Returns the start and end of each object as byte offsets, the offset where the search ended
    (behind the last object, or behind the closing bracket) and whether the list was closed.
    """
    data = np.frombuffer(text, np.uint8)
    outside = ~_mark_string_bytes(data)
    change = np.zeros(data.size, np.int8)
    change[((data == 123) | (data == 91)) & outside] = 1
    change[((data == 125) | (data == 93)) & outside] = -1
    places = np.flatnonzero(change)
    depth = np.cumsum(change[places], dtype=np.int32)
    closing = np.flatnonzero(depth < 0)
    ended = bool(closing.size)
    if ended:
        last = int(closing[0])
        end = int(places[last]) + 1
        places, depth = places[:last], depth[:last]
    opens = places[(depth == 1) & (change[places] == 1)]
    closes = places[(depth == 0) & (change[places] == -1)] + 1
    spans = list(zip(opens.tolist(), closes.tolist()))
    if not ended:
        end = int(closes[-1]) if closes.size else 0
        separator = _LIST_SEPARATOR.match(text, end)
        end = separator.end() if separator else end
    return spans, end, ended


def _mark_string_bytes(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mark the bytes inside strings; of the two quotes, the opening one."""
    quote = np.flatnonzero(data == 34)
    if not quote.size:
        return np.zeros(data.size, np.bool_)
    before = data[np.maximum(quote - 1, 0)]
    escapable = np.flatnonzero((before == 92) & (quote > 0))
    if escapable.size:
        keep = np.ones(quote.size, np.bool_)
        slash = np.flatnonzero(data == 92)
        breaks = np.concatenate([[True], np.diff(slash) > 1])
        first = np.maximum.accumulate(np.where(breaks, np.arange(slash.size), 0))
        run = np.arange(slash.size) - first + 1  # length of the run of backslashes up to each
        length = run[np.searchsorted(slash, quote[escapable] - 1)]
        keep[escapable] = length % 2 == 0
        quote = quote[keep]
    flips = np.zeros(data.size, np.int8)
    flips[quote] = 1
    return np.cumsum(flips, dtype=np.int32) % 2 == 1


MAX_TYPED_NAMES = 1 << 12
"""Number of names per category that msgspec looks up; further names are looked up in Python."""
_MISSES_PER_NAME = 8
_COMPLETE_PHASE = Literal["X"]
_UNPAIRED_PHASES = Literal[
    "X", "i", "I", "M", "s", "t", "f", "C", "b", "n", "e", "P", "N", "O", "D"
]


class _CallArgs(msgspec.Struct, gc=False, frozen=True):
    """Arguments of a runtime call that the analysis uses."""

    correlation: int = -1


_NO_CALL_ARGS = _CallArgs()


class Name(enum.Enum):
    """Names of one category: `value` is the text, `kind` its class."""

    kind: int
    category: ClassVar[Any]

    def __new__(cls, kind: int, text: str) -> Name:
        """Create one member."""
        member = object.__new__(cls)
        member._value_, member.kind = text, kind
        return member

    @classmethod
    def _missing_(cls, value: object) -> Name:
        """Make a name that is not a member: a new one, or one of too many."""
        return cls.category.make_unlisted_name(cls, value)  # type: ignore[no-any-return]


class _UnusedName:
    """Name of an event that the analysis does not use."""

    kind = classify.IGNORED


class _Category:
    """Names of one category as a type, rebuilt after many names that are not in it."""

    def __init__(self, name: str, kinds: classify.Kinds) -> None:
        self.name = name
        self._kinds = kinds
        self._misses = 0
        self.type = self._build_name_type([""])
        self._events: dict[bool, Any] = {}

    def events(self, has_comm: bool) -> Any:
        """Return the type of the category's events, valid until the type of names is rebuilt."""
        event_type = self._events.get(has_comm)
        if event_type is None:
            fields: list[Any] = [
                ("name", self.type),
                ("ph", _COMPLETE_PHASE, "X"),
                ("pid", int | str, -1),
                ("tid", int | str, -1),
                ("ts", float, math.nan),
                ("dur", float, math.nan),
            ]
            if self.name in classify.DEVICE_CATEGORIES:
                fields.append(("args", CommArgs if has_comm else Args, NO_ARGS))
            elif self.name in classify.RUNTIME_CATEGORIES:
                fields.append(("args", _CallArgs, _NO_CALL_ARGS))
            event_type = self._events[has_comm] = _build_event_type(self.name, fields, {})
        return event_type

    def _build_name_type(self, names: Sequence[str]) -> type[Name]:
        kinds = self._kinds[self.name]
        members = [(f"n{i}", (kinds[text], text)) for i, text in enumerate(names)]
        make: Any = Name
        name_type = make("_Names", members)
        name_type.category = self
        self._size = len(members)
        return name_type  # type: ignore[no-any-return]

    def make_unlisted_name(self, name_type: type[Name], text: object) -> Name:
        """Make a name that is not a member of the type."""
        assert isinstance(text, str)
        self._misses += 1
        name = object.__new__(name_type)
        name._name_ = name._value_ = text
        name.kind = self._kinds[self.name][text]
        return name

    def rebuild_if_outdated(self) -> bool:
        """Rebuild the type if that pays; return whether it was rebuilt."""
        if self._misses < _MISSES_PER_NAME * (self._size + 64) or self._size >= MAX_TYPED_NAMES:
            return False
        self._misses = 0
        self._events.clear()
        self.type = self._build_name_type(
            list(dict.fromkeys(["", *self._kinds[self.name]]))[:MAX_TYPED_NAMES]
        )
        return True


class CommonEventDecoder:
    """Decoder of the blocks of common events of one file."""

    def __init__(self, kinds: classify.Kinds) -> None:
        self._categories = [_Category(name, kinds) for name in classify.USED_CATEGORIES]
        self._decoders: dict[bool, Any] = {}

    def events(self, text: bytes) -> list[Event] | None:
        """Return the events of a JSON list; None if any of them is uncommon."""
        has_comm = COMM_MARKER in text
        decoder = self._decoders.get(has_comm)
        if decoder is None:
            decoder = self._decoders[has_comm] = self._build_decoder(has_comm)
        try:
            events = decoder.decode(text)
        except DECODE_ERRORS:
            return None
        if any([category.rebuild_if_outdated() for category in self._categories]):
            self._decoders.clear()
        return events  # type: ignore[no-any-return]

    def _build_decoder(self, has_comm: bool) -> Any:
        event_types = [category.events(has_comm) for category in self._categories]
        any_event: Any = Union[tuple(event_types + _build_unused_types())]  # noqa: UP007
        return msgspec.json.Decoder(list[any_event])


@cache
def _build_unused_types() -> list[Any]:
    return [
        _build_event_type(name, [("ph", _UNPAIRED_PHASES, "X")], {"name": _UnusedName})
        for name in classify.UNUSED_CATEGORIES
    ]


def _build_event_type(category: str, fields: list[Any], namespace: dict[str, Any]) -> Any:
    return msgspec.defstruct(
        "_Usual", fields, tag_field="cat", tag=category, gc=False, namespace=namespace
    )
