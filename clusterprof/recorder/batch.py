"""What one collector has sampled since the last flush, kept as flat arrays and cut into columns.

A number that stays a Python object until the flush is in nobody's cache by then; in an array it
takes 8 bytes, and a column of it is one strided slice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

from clusterprof.signals import Signal

_INTEGER_UNITS = frozenset({"ns", "bytes", "count", "bits"})


def codes_of(signals: Sequence[Any]) -> str:
    """Return the array typecode of each signal's column; raise TypeError for what is no signal."""
    for signal in signals:
        if not isinstance(signal, Signal):
            raise TypeError(f"not a signal: {signal!r}")
    return "".join("q" if signal.unit in _INTEGER_UNITS else "d" for signal in signals)


class Ticks:
    """Samples with fixed columns: one number per column and tick, or in its place a reason."""

    __slots__ = ("_codes", "_flat", "_samples", "t_ns")

    def __init__(self, codes: str) -> None:
        """`codes`: the array typecode of each column."""
        self.t_ns = array("q")
        self._codes = codes
        self._flat = array(codes[0]) if len(set(codes)) == 1 else None
        self._samples: list[tuple[Any, ...]] = []  # once a value is no number of that type

    def add(self, t_ns: int, sample: Sequence[Any]) -> None:
        """Take one tick; raise ValueError when it has not one value per column."""
        if len(sample) != len(self._codes):
            raise ValueError(f"{len(sample)} values for {len(self._codes)} columns")
        if self._flat is not None:
            try:
                self._flat.extend(sample)
            except BaseException as error:
                self._unfold(self._flat)
                if not isinstance(error, TypeError | OverflowError):
                    raise
        if self._flat is None:
            self._samples.append(tuple(sample))  # a collector may hand out the same list each time
        self.t_ns.append(t_ns)

    def numbers(self) -> list[Any] | None:
        """Return an array per column; None when something else than numbers is among them."""
        flat, width = self._flat, len(self._codes)
        return None if flat is None else [flat[column::width] for column in range(width)]

    def columns(self) -> list[tuple[Any, ...]]:
        """Return what was sampled, column by column, where `numbers` cannot."""
        return list(zip(*self._samples))

    def _unfold(self, flat: Any) -> None:
        width = len(self._codes)
        starts = range(0, len(self.t_ns) * width, width)  # behind them: half a tick
        self._samples = [tuple(flat[start : start + width]) for start in starts]
        self._flat = None


class Table:
    """Rows of integers that come and go."""

    __slots__ = ("_flat", "_width", "t_ns")

    def __init__(self, width: int) -> None:
        self.t_ns = array("q")
        self._width = width
        self._flat = array("q")

    def add(self, t_ns: int, rows: Sequence[Sequence[int]]) -> None:
        """Take the rows of one tick; raise and take none when one of them has another width."""
        if set(map(len, rows)) - {self._width}:
            raise ValueError(f"rows of {set(map(len, rows))} values for {self._width} columns")
        before = len(self._flat)
        try:
            self._flat.extend(chain.from_iterable(rows))
        except BaseException:
            del self._flat[before:]
            raise
        self.t_ns.append(t_ns)

    def numbers(self) -> list[Any] | None:
        """Return an array per column, None when there was no row."""
        flat, width = self._flat, self._width
        return [flat[column::width] for column in range(width)] if flat else None
