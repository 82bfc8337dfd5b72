"""Spans of one thread laid out so that on every lane they nest: beside or inside, never across.

a |-----------|             lane 0    a contains c
c    |----|
b          |-------|        lane 1    b crosses a: it lies beside it
"""

from __future__ import annotations

REMEMBERED = 4096
"""Spans a lane knows one by one; of older ones only the time they cover together."""


class Lanes:
    """Takes spans in the order in which they ended, as recordings have them."""

    def __init__(self) -> None:
        self._lanes: list[list[tuple[int, int]]] = []

    def place(self, start_ns: int, end_ns: int) -> int:
        """Return the number of the first lane on which a span crosses no other."""
        for number, lane in enumerate(self._lanes):
            if _fits(lane, start_ns, end_ns):
                return number
        self._lanes.append([(start_ns, end_ns)])
        return len(self._lanes) - 1


def _fits(lane: list[tuple[int, int]], start_ns: int, end_ns: int) -> bool:
    """Put the span on the lane if it fits; the lane keeps the outermost spans, by time."""
    at = len(lane)
    while at and lane[at - 1][0] > start_ns and lane[at - 1][1] <= end_ns:
        at -= 1  # inside the new one
    if at and lane[at - 1][1] > start_ns:
        return False  # across, around (it came late), or begun at the same instant
    lane[at:] = [(start_ns, end_ns)]
    if len(lane) > REMEMBERED:
        half = REMEMBERED // 2
        lane[:half] = [(lane[0][0], lane[half - 1][1])]
    return True
