"""Blocks of usual events, read at once into what is asked of each category.

    usual = Usual(kinds)
    usual.events(b'[{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 7, "dur": 2}, …]')

`cat` chooses the type of an event, so that of flows and the like nothing is made, and of operators
no arguments. A name is looked up while it is read, by msgspec and not by us: `name` of such an
event is a member of an Enum, whose `kind` is that of `words`. A block with anything unusual in it
(another category, half of an event, text for a number) gives None: `decode.fast` reads it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from clusterprof.importers.kineto import words
from clusterprof.importers.kineto.decode import BAD, NO_ARGS, SAYS_COMM, Args, CommArgs, Event

NAMES_AT_MOST = 1 << 12
"""So many names of a category are looked up by msgspec; the others by us."""
_MISSES_PER_NAME = 8
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
_CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "Runtime")
_ON_HOST = ("cpu_op", "user_annotation", "Operator", "python_function")
_QUIET = (
    "ac2g", "async", "fwdbwd", "cpu_instant_event", "overhead", "gpu_user_annotation", "cuda_sync",
    "cuda_event", "Trace", "async_gpu", "async_cpu_to_gpu", "forward_backward",
)  # fmt: skip
_WHOLE = Literal["X"]
_NO_HALF = Literal["X", "i", "I", "M", "s", "t", "f", "C", "b", "n", "e", "P", "N", "O", "D"]


class _Link(msgspec.Struct, gc=False, frozen=True):
    """What is asked of a call's arguments."""

    correlation: int = -1


_NO_LINK = _Link()


class Name(enum.Enum):
    """Names of one category: `value` is the text, `kind` its number in `words`."""

    kind: int
    category: ClassVar[Any]

    def __new__(cls, kind: int, text: str) -> Name:
        """One member."""
        one = object.__new__(cls)
        one._value_, one.kind = text, kind
        return one

    @classmethod
    def _missing_(cls, value: object) -> Name:
        """A name that is met for the first time, or among too many."""
        return cls.category.found(cls, value)  # type: ignore[no-any-return]


class _Nothing:
    """The name of an event of which nothing is asked."""

    kind = words.IGNORED


class _Category:
    """The names of one category as a type, made anew when many are met that are not in it."""

    def __init__(self, name: str, kinds: words.Kinds) -> None:
        self.name = name
        self._kinds = kinds
        self._missed = 0
        self.type = self._made([""])
        self._events: dict[bool, Any] = {}

    def events(self, says_comm: bool) -> Any:
        """Return the type of its events, as long as that of their names stays what it is."""
        known = self._events.get(says_comm)
        if known is None:
            fields: list[Any] = [
                ("name", self.type), ("ph", _WHOLE, "X"), ("pid", int | str, -1),
                ("tid", int | str, -1), ("ts", float, math.nan), ("dur", float, math.nan),
            ]  # fmt: skip
            if self.name in _ON_DEVICE:
                fields.append(("args", CommArgs if says_comm else Args, NO_ARGS))
            elif self.name in _CALLS:
                fields.append(("args", _Link, _NO_LINK))
            known = self._events[says_comm] = _struct(self.name, fields, {})
        return known

    def _made(self, names: Sequence[str]) -> type[Name]:
        known = self._kinds[self.name]
        members = [(f"n{i}", (known[text], text)) for i, text in enumerate(names)]
        make: Any = Name
        made = make("_Names", members)
        made.category = self
        self._size = len(members)
        return made  # type: ignore[no-any-return]

    def found(self, among: type[Name], text: object) -> Name:
        """Return a name that is none of the members."""
        assert isinstance(text, str)
        self._missed += 1
        one = object.__new__(among)
        one._name_ = one._value_ = text
        one.kind = self._kinds[self.name][text]
        return one

    def renewed(self) -> bool:
        """Make the type anew when that pays; say whether it was."""
        if self._missed < _MISSES_PER_NAME * (self._size + 64) or self._size >= NAMES_AT_MOST:
            return False
        self._missed = 0
        self._events.clear()
        self.type = self._made(list(dict.fromkeys(["", *self._kinds[self.name]]))[:NAMES_AT_MOST])
        return True


class Usual:
    """Reads the usual blocks of one file."""

    def __init__(self, kinds: words.Kinds) -> None:
        named = (*_ON_DEVICE, *_CALLS, *_ON_HOST)
        self._categories = [_Category(name, kinds) for name in named]
        self._quiet = [
            _struct(name, [("ph", _NO_HALF, "X")], {"name": _Nothing}) for name in _QUIET
        ]
        self._decoders: dict[bool, Any] = {}

    def events(self, text: bytes) -> list[Event] | None:
        """Return the events of a JSON list, None when not all are usual."""
        says_comm = SAYS_COMM in text
        decoder = self._decoders.get(says_comm)
        if decoder is None:
            decoder = self._decoders[says_comm] = self._decoder(says_comm)
        try:
            events = decoder.decode(text)
        except BAD:
            return None
        if any([one.renewed() for one in self._categories]):
            self._decoders.clear()
        return events  # type: ignore[no-any-return]

    def _decoder(self, says_comm: bool) -> Any:
        made = [one.events(says_comm) for one in self._categories] + self._quiet
        either: Any = made[0]
        for one in made[1:]:
            either = either | one
        return msgspec.json.Decoder(list[either])


def _struct(category: str, fields: list[Any], beside: dict[str, Any]) -> Any:
    return msgspec.defstruct(
        "_Usual", fields, tag_field="cat", tag=category, gc=False, namespace=beside
    )
