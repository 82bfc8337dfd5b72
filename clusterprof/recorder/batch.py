"""What one collector has sampled since the last flush, kept as flat arrays and cut into columns.

A number that stays a Python object until the flush is in nobody's cache by then; in an array it
takes 8 bytes, and a column of it is one strided slice. A sample is packed by `struct`, which takes
a sixth of what an array takes to be extended by the same numbers.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import starmap
from typing import Any

from clusterprof.signals import Signal

_INTEGER_UNITS = frozenset({"ns", "bytes", "count", "bits"})


def codes_of(signals: Sequence[Any]) -> str:
    """Return the array typecode of each signal's column; raise TypeError for what is no signal."""
    for signal in signals:
        if not isinstance(signal, Signal):
            raise TypeError(f"not a signal: {signal!r}")
    return "".join("q" if signal.unit in _INTEGER_UNITS else "d" for signal in signals)


@lru_cache(maxsize=64)
def _packer(codes: str) -> Callable[..., bytes]:
    return struct.Struct(codes).pack


class Ticks:
    """Samples with fixed columns: one number per column and tick, or in its place a reason."""

    __slots__ = ("_codes", "_flat", "_pack", "_samples", "t_ns")

    def __init__(self, codes: str) -> None:
        """`codes`: the array typecode of each column."""
        self.t_ns = array("q")
        self._codes = codes
        self._pack = _packer(codes)
        self._flat: array[int] | None = array("q")  # floats too, as their bits
        self._samples: list[tuple[Any, ...]] = []  # once a value is no number of that type

    def add(self, t_ns: int, sample: Sequence[Any]) -> None:
        """Take one tick; raise ValueError when it has not one value per column."""
        if len(sample) != len(self._codes):
            raise ValueError(f"{len(sample)} values for {len(self._codes)} columns")
        if self._flat is not None:
            try:
                self._flat.frombytes(self._pack(*sample))
            except BaseException as error:
                self._unfold(self._flat)
                if not isinstance(error, struct.error | TypeError | OverflowError):
                    raise
        if self._flat is None:
            self._samples.append(tuple(sample))  # a collector may hand out the same list each time
        self.t_ns.append(t_ns)

    def numbers(self) -> list[Any] | None:
        """Return an array per column; None when something else than numbers is among them."""
        flat, width = self._flat, len(self._codes)
        if flat is None:
            return None
        columns: list[Any] = [flat[column::width] for column in range(width)]
        if "d" in self._codes:
            for column, code in enumerate(self._codes):
                if code == "d":
                    columns[column] = array("d", columns[column].tobytes())
        return columns

    def columns(self) -> list[tuple[Any, ...]]:
        """Return what was sampled, column by column, where `numbers` cannot."""
        return list(zip(*self._samples))

    def _unfold(self, flat: Any) -> None:
        self._samples = list(struct.iter_unpack(self._codes, flat.tobytes())) if flat else []
        self._flat = None


class Table:
    """Rows of integers that come and go."""

    __slots__ = ("_flat", "_pack", "_width", "t_ns")

    def __init__(self, width: int) -> None:
        self.t_ns = array("q")
        self._width = width
        self._pack = _packer("q" * width)
        self._flat = array("q")

    def add(self, t_ns: int, rows: Sequence[Sequence[int]]) -> None:
        """Take the rows of one tick; raise ValueError and take none when one of them is no row."""
        try:
            self._flat.frombytes(b"".join(starmap(self._pack, rows)))
        except struct.error as error:
            widths = set(map(len, rows))
            raise ValueError(f"rows of {widths} values for {self._width}: {error}") from error
        self.t_ns.append(t_ns)

    def numbers(self) -> list[Any] | None:
        """Return an array per column, None when there was no row."""
        flat, width = self._flat, self._width
        return [flat[column::width] for column in range(width)] if flat else None
