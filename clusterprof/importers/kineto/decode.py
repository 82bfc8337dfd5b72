"""Blocks of events as typed values; what a block cannot give at once is looked at one by one.

msgspec reads a block of some megabytes in one call and makes only what is asked for. JSON that is
not quite JSON (NaN, bad UTF-8, control characters) or not quite the format (text for a number) goes
through the tolerant way, event by event; what even that cannot read is counted and left out.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

MANY_BITS = 1 << 62


class Args(msgspec.Struct, gc=False, frozen=True):
    """What is asked of an event's arguments."""

    correlation: int = -1
    device: int | str = -1
    bytes: int = -1


class CommArgs(Args, gc=False, frozen=True):
    """The same, with what is said of operations between ranks."""

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
    "", "cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime",
    "cuda_driver", "ac2g", "async", "fwdbwd", "cpu_instant_event", "python_function", "overhead",
    "gpu_user_annotation", "cuda_sync", "cuda_event", "Trace", "Operator", "Kernel", "Runtime",
    "Memcpy", "Memset", "xpu_runtime", "hip_runtime", "privateuse1_runtime",
]  # fmt: skip


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
    """One event of a block in which operations between ranks say what they are."""

    args: CommArgs | None = NO_ARGS


class _Usual(Event, gc=False):
    """One event of a usual category: words that are known are not made anew."""

    ph: _PHASES = "X"
    cat: _CATEGORIES = ""


class _UsualComm(CommEvent, gc=False):
    ph: _PHASES = "X"
    cat: _CATEGORIES = ""


class Document(msgspec.Struct, gc=False):
    """What stands beside the events, and at the end of a file the last of them."""

    events: list[Event] = msgspec.field(default_factory=list, name="traceEvents")
    device_properties: Any = msgspec.field(default=None, name="deviceProperties")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    base_ns: Any = msgspec.field(default=None, name="baseTimeNanoseconds")
    runtime: Any = msgspec.field(default=None, name="hip_runtime_version")


class CommDocument(Document, gc=False):
    """The same, with what is said of operations between ranks."""

    events: list[CommEvent] = msgspec.field(default_factory=list, name="traceEvents")  # type: ignore[assignment]


_DOCUMENT = msgspec.json.Decoder(Document)
_COMM_DOCUMENT = msgspec.json.Decoder(CommDocument)
_PLAIN, _COMM = msgspec.json.Decoder(list[Event]), msgspec.json.Decoder(list[CommEvent])
_USUAL = msgspec.json.Decoder(list[_Usual])
_USUAL_COMM = msgspec.json.Decoder(list[_UsualComm])
BAD = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)
SAYS_COMM = b'"Collective name"'


def document(text: bytes) -> Document | None:
    """Return a whole document, None when it is none."""
    try:
        return (_COMM_DOCUMENT if SAYS_COMM in text else _DOCUMENT).decode(text)
    except BAD:
        return None


def fast(text: bytes) -> Sequence[Event] | None:
    """Return the events of a JSON list, None when it is not that."""
    says = SAYS_COMM in text
    for decoder in (_USUAL_COMM if says else _USUAL, _COMM if says else _PLAIN):
        try:
            return decoder.decode(text)  # type: ignore[no-any-return]
        except BAD:
            continue
    return None


def one(text: bytes, skipped: Counter[str]) -> Event | None:
    """Return one event, read tolerantly; None when it cannot be read."""
    try:
        value = json.loads(text.decode("utf-8", "replace"), strict=False)
    except RecursionError:
        skipped["nested too deep"] += 1
        return None
    except (ValueError, OverflowError):
        skipped["not JSON"] += 1
        return None
    if not isinstance(value, dict):
        skipped["not an event"] += 1
        return None
    args = value.get("args")
    said = args if isinstance(args, dict) else {}
    ph, cat, name = (_text(value.get(key)) for key in ("ph", "cat", "name"))
    pid, tid = _name(value.get("pid")), _name(value.get("tid"))
    ts, dur = _real(value.get("ts")), _real(value.get("dur"))
    return CommEvent(ph, cat, name, pid, tid, ts, dur, _comm_args(said))


def _comm_args(said: Mapping[str, Any]) -> CommArgs:
    words = ("Collective name", "Process Group Name", "Process Group Ranks")
    name, group, ranks = (_text(said[key]) if key in said else None for key in words)
    numbers = ("In msg nelems", "Seq", "Src Rank", "Dst Rank")
    elements, sequence, source, target = (_whole(said.get(key)) for key in numbers)
    return CommArgs(
        _whole(said.get("correlation")), _name(said.get("device")), _whole(said.get("bytes")),
        name, group, ranks, elements, _text(said.get("dtype")), sequence, source, target,
    )  # fmt: skip


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:200]


def _name(value: Any) -> int | str:
    """A number or a word by which processes, threads and devices are told apart."""
    if isinstance(value, bool) or value is None:
        return -1
    if isinstance(value, int):
        return value if abs(value) < MANY_BITS else -1
    return value if isinstance(value, str) else -1


def _whole(value: Any) -> int:
    """A count; -1 for what is none, or more than 64 bits hold."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return -1
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < MANY_BITS
    return value if fits else -1


def _real(value: Any) -> float:
    """A time in microseconds; NaN for what is none."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
