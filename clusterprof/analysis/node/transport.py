"""Pack the result of a node into few bytes: it travels from the worker that made it.

    int64 tables   as steps between values (timeline.collectives.int_table)
    all of it      pickled, then compressed

What is unpacked equals what was packed. `NodeResult` pickles itself so, whichever way results
travel. Members of process groups are kept as a range where their numbers are evenly spaced: each
node names all ranks of the job.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from clusterprof.analysis.timeline.collectives.int_table import pack_table, unpack_table
from clusterprof.analysis.timeline.model import Int
from clusterprof.trace.schema import Event

_MIN_PACKED_VALUES = 128
"""Values of a table below which unpacking it takes longer than it saves in bytes."""
_COMPRESSION_LEVEL = 1
"""Level 6 takes three times as long for 8 % less."""


class _Packer(pickle.Pickler):
    """Pickles int64 tables as steps between values, and data classes as calls of their type.

    The calls take a third of the time of the state that data classes with slots are given.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and _is_table(value):
            rows = value.reshape(1, -1) if value.ndim == 1 else value
            return _unpack_array, (pack_table(rows), value.ndim)
        type_: Any = type(value)
        read_fields = _find_field_reader(type_)
        return NotImplemented if read_fields is None else (type_, read_fields(value))


@cache
def _find_field_reader(type_: Any) -> Callable[[object], tuple[Any, ...]] | None:
    """Find a function that reads the arguments of a frozen data class; None for other types."""
    if not is_dataclass(type_) or type_.__reduce__ is not object.__reduce__:
        return None
    parts = fields(type_)
    is_plain = all(part.init and not part.kw_only for part in parts)
    is_frozen = getattr(type_, "__dataclass_params__").frozen  # noqa: B009 - not in its stub
    if not is_plain or not is_frozen or hasattr(type_, "__post_init__"):
        return None
    names = [part.name for part in parts]
    return lambda value: tuple([getattr(value, name) for name in names])


def _is_table(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype == np.int64 and array.ndim in (1, 2) and array.size >= _MIN_PACKED_VALUES


def _unpack_array(data: bytes, dimensions: int) -> Int:
    """Unpack int64[n] or int64[r, n]."""
    table = unpack_table(data)
    return table[0] if dimensions == 1 else table


def pack_fields(values: Sequence[object]) -> bytes:
    """Pack the fields of a result."""
    out = io.BytesIO()
    _Packer(out, 5).dump(tuple(values))
    return zlib.compress(out.getbuffer(), _COMPRESSION_LEVEL)


def unpack_fields(data: bytes) -> tuple[Any, ...]:
    """Unpack what `pack_fields` has packed; only for data of our own processes, as pickles are."""
    values: tuple[Any, ...] = pickle.loads(zlib.decompress(data))  # noqa: S301
    return values


def with_group_ranges(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events with the members of announced groups as ranges where they are evenly
    spaced.
    """
    return tuple(
        replace(event, attributes={**event.attributes, "ranks": convert_to_range(ranks)})
        if isinstance(ranks := event.attributes.get("ranks"), list)
        else event
        for event in events
    )


def convert_to_range(ranks: Sequence[int]) -> Sequence[int]:
    """Return rank numbers as a range if they are evenly spaced and ascend, else as a tuple."""
    if len(ranks) < 2 or not all(type(rank) is int for rank in ranks):
        return tuple(ranks)
    step = ranks[1] - ranks[0]
    short = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
    return short if len(short) == len(ranks) and list(short) == list(ranks) else tuple(ranks)
