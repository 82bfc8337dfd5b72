"""Records of many streams in stretches of time; a silent stream costs nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from clusterprof.trace.schema import Record


class Stream(Protocol):
    """What lies in order of time, and becomes records some at a time."""

    def next_ns(self, after_ns: int) -> Iterable[int]:
        """Return when it comes next, at or after an instant; nothing at its end."""
        ...

    def records(self, low_ns: int, high_ns: int) -> Iterable[Record]:
        """Return the records of [low_ns, high_ns)."""
        ...


def in_slices(streams: Sequence[Stream], first_ns: int, slice_ns: int) -> Iterator[list[Record]]:
    """Yield what several streams have in each stretch of time, in their order; none is empty.

    Stretches follow each other; a long silence is passed over. Many streams of few rows cost no
    more than few of many.
    """
    waiting = [(t, n) for n, one in enumerate(streams) for t in one.next_ns(first_ns)]
    heapq.heapify(waiting)
    low = first_ns
    while waiting:
        if waiting[0][0] >= low + slice_ns:
            low = waiting[0][0]
        high = low + slice_ns
        here = []
        while waiting and waiting[0][0] < high:
            here.append(heapq.heappop(waiting)[1])
        found: list[Record] = []
        for number in sorted(here):
            found += streams[number].records(low, high)
            for t in streams[number].next_ns(high):
                heapq.heappush(waiting, (t, number))
        yield found
        low = high
