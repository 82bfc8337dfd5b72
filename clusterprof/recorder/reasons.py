"""Why numbers of one collector are missing: a gap when that is news, a mask where they stand."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from clusterprof.errors import Unavailable
from clusterprof.trace.schema import Gap, Record

_WHOLE = -1  # in the place of a column


class Reasons:
    """The reasons that hold now, by column and of the whole collector."""

    def __init__(self, collector: str, tell: Callable[[Record], None]) -> None:
        self._collector = collector
        self._tell = tell
        self._known: dict[int, Unavailable] = {}

    @property
    def whole(self) -> Unavailable | None:
        """Why the whole collector sees nothing at the moment."""
        return self._known.get(_WHOLE)

    def forget(self) -> None:
        """Tell everything anew: the columns are others."""
        self._known = {}

    def seen(self) -> None:
        """Note that the collector sees something."""
        if self._known:
            self._known.pop(_WHOLE, None)

    def seen_in_every_column(self) -> None:
        """Note that all numbers are there again."""
        if self._known:
            self._known = {column: why for column, why in self._known.items() if column < 0}

    def of_all(self, now_ns: int, reason: Unavailable) -> bool:
        """Tell why the whole collector sees nothing; False when that is known already."""
        if self._known.get(_WHOLE) == reason:
            return False
        self._known[_WHOLE] = reason
        self._gap(now_ns, "", "", reason)
        return True

    def pack(
        self,
        names: Sequence[tuple[str, str]],
        codes: str,
        t_ns: Sequence[int],
        columns: Sequence[Sequence[Any]],
    ) -> tuple[list[Any], list[bytes | None]]:
        """Return arrays and masks of columns of which some hold reasons in the place of numbers.

        `names`: signal and device of each; `codes`: the array typecode of each.
        """
        values: list[Any] = []
        masks: list[bytes | None] = []
        for index, (column, code) in enumerate(zip(columns, codes)):
            first = column[0]
            if isinstance(first, Unavailable) and column.count(first) == len(column):
                self._of_column(index, names, t_ns[0], first)
                values.append(array(code, bytes(8 * len(column))))
                masks.append(b"\1" * len(column))
                continue
            try:
                values.append(array(code, column))
                masks.append(None)
                self._known.pop(index, None)
            except (TypeError, OverflowError):
                packed, mask = self._mixed(index, names, code, t_ns, column)
                values.append(packed)
                masks.append(mask)
        return values, masks

    def _mixed(
        self,
        index: int,
        names: Sequence[tuple[str, str]],
        code: str,
        t_ns: Sequence[int],
        column: Sequence[Any],
    ) -> tuple[Any, bytes | None]:
        values: list[int | float] = []
        mask = bytearray(len(column))
        convert = int if code == "q" else float
        for row, value in enumerate(column):
            if not isinstance(value, Unavailable):
                try:
                    values.append(array(code, (convert(value),))[0])
                    self._known.pop(index, None)
                    continue
                except (TypeError, ValueError, OverflowError):
                    value = Unavailable("failed", f"no number that fits: {type(value).__name__}")
            mask[row] = 1
            values.append(0)
            self._of_column(index, names, t_ns[row], value)
        return array(code, values), bytes(mask) if any(mask) else None

    def _of_column(
        self, index: int, names: Sequence[tuple[str, str]], t_ns: int, why: Unavailable
    ) -> None:
        known = self._known.get(index)
        if known is not why and known != why:
            self._gap(t_ns, *names[index], why)
        self._known[index] = why  # this very one is told from the next by a look

    def _gap(self, t_ns: int, signal: str, device: str, why: Unavailable) -> None:
        self._tell(Gap(t_ns, self._collector, signal, device, why.kind, why.message, why.remedy))
