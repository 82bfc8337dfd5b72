"""What the network of a node did while its ranks were in operations with each other.

    read at          0 s       1 s       2 s       3 s
    a counter         0        50        80        90
    in operations                  ====          =
    counts                          30        10         40 in 2 s

What a counter grew by between two readings counts as a whole when a rank of the node was in an
operation at any time between them: operations are shorter than that, and where in between it grew
nobody knows. A gauge counts where the counters of its time do. Memory does not depend on the length
of the recording: sums, the least and the most, and how often each size was read, in classes.

A counter of bytes that grew by many times what its link carries has jumped, and nothing is known of
that time: no driver's slip is anybody's traffic. Links are RDMA ports and NICs with hardware below
them; what other devices say of their speed is made up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe.layout import COLLECTIVE
from clusterprof.timeline.model import Chunk, Float, Int
from clusterprof.timeline.series import differences

PREFIXES = ("network.", "tcp.", "rdma.")
HOLD_NS = 30_000_000_000
"""Readings are judged this long after them: an operation is only known once it has ended."""
CLOSE_NS = 50_000_000
"""Operations that follow each other more closely are one: no two readings lie between them."""
JUMPED_RATIO = 8.0
"""Growth over what the link carries meanwhile: beyond this the counter has jumped. Less may be a
card that hands its counts on late, or a speed that is not the link's."""
_SPEED_OF = {
    f"{kind}.{way}_bytes_total": f"{kind}.link_bytes_per_second"
    for kind in ("network", "rdma")
    for way in ("receive", "transmit")
}
_CLASSES_PER_OCTAVE = 8
_SECOND_NS = 1e9
_Key = tuple[str, str]


@dataclass(slots=True)
class Spread:
    """How often values of each size were seen; classes are 9 % wide."""

    least: float = math.inf
    most: float = -math.inf
    count: int = 0
    classes: dict[int, int] = field(default_factory=dict)

    def add(self, values: Float) -> None:
        """Add readings that are known."""
        if not values.size:
            return
        least, most = float(values.min()), float(values.max())
        self.least, self.most = min(self.least, least), max(self.most, most)
        self.count += values.size
        if least == most:  # a link's speed, a round trip that never changes
            found = [(_class(np.array([least]))[0].item(), values.size)]
        else:
            found = list(zip(*(c.tolist() for c in np.unique(_class(values), return_counts=True))))
        for one, n in found:
            self.classes[one] = self.classes.get(one, 0) + n

    def quantile(self, part: float) -> float:
        """Return the value that `part` of the readings do not exceed; 9 % too much at worst."""
        seen = 0
        for one in sorted(self.classes):
            seen += self.classes[one]
            if seen >= part * self.count:
                edge = 2.0 ** (one / _CLASSES_PER_OCTAVE)
                return float(min(max(edge, self.least), self.most))
        return math.nan


def _class(values: Float) -> Int:
    octaves = np.log2(np.maximum(values, 1e-9))
    return np.ceil(octaves * _CLASSES_PER_OCTAVE - 1e-9).astype(np.int64)


@dataclass(slots=True)
class Count:
    """By how much a counter grew in the time of operations."""

    total: float = 0.0
    covered_ns: int = 0
    """Length of the intervals between readings that counted."""
    per_second: Spread = field(default_factory=Spread)
    """Of intervals, of counters of bytes: growth over length."""


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """Readings in the time of operations, by signal and device; small, so that it can travel."""

    counts: Mapping[_Key, Count] = field(default_factory=dict)
    levels: Mapping[_Key, Spread] = field(default_factory=dict)

    def devices(self, *names: str) -> list[str]:
        """Return the devices of which there is a reading of one of these signals, sorted."""
        return sorted({d for n, d in (*self.counts, *self.levels) if n in names})

    def total(self, name: str, device: str) -> float | None:
        """Return by how much a counter grew; None when it was not read."""
        found = self.counts.get((name, device))
        return None if found is None else found.total

    def per_second(self, name: str, device: str) -> float | None:
        """Return how fast a counter grew on the whole; None when it was not read."""
        found = self.counts.get((name, device))
        if found is None or not found.covered_ns:
            return None
        return found.total / found.covered_ns * _SECOND_NS


@dataclass(frozen=True, slots=True)
class _Times:
    """When some signals were read: of one collector all at the same times."""

    known: int
    """How many of them are to be judged."""
    inside: NDArray[np.bool_]
    """Where a rank was in an operation between two of these."""
    length_ns: Int
    """Of the intervals inside."""


class NetworkMeter:
    """Adds up the readings of one node, chunk by chunk."""

    def __init__(self, throughout: bool = False) -> None:
        """`throughout`: all readings count, until an operation is seen; then there are none."""
        self._throughout, self._off = throughout, False
        self._counts: dict[_Key, Count] = {}
        self._levels: dict[_Key, Spread] = {}
        self._open: dict[_Key, tuple[Int, Float]] = {}
        self._made_up: frozenset[str] | None = None
        self._begin = np.zeros(0, np.int64)
        self._end = np.zeros(0, np.int64)

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Pass chunks through and take what is in them."""
        for chunk in chunks:
            self.add(chunk)
            yield chunk

    def add(self, chunk: Chunk) -> None:
        """Take the readings and operations of a chunk."""
        if self._off:
            return
        if self._made_up is None:
            nics = chunk.header.host.get("nics", ())
            self._made_up = frozenset(str(n.get("name")) for n in nics if not n.get("physical"))
        self._join_operations(chunk)
        if self._throughout and self._end.size:
            self._off = True
            self._counts, self._levels, self._open = {}, {}, {}
            return
        joined: dict[tuple[int, int], tuple[Int, NDArray[np.bool_]]] = {}
        for key, series in chunk.series.items():
            if not key[0].startswith(PREFIXES) or not series.t_ns.size:
                continue
            known = self._open.get(key)
            if known is None:
                self._open[key] = series.t_ns, series.values
                continue
            times = joined.get((id(known[0]), id(series.t_ns)))
            if times is None:
                new = series.t_ns > known[0][-1]
                times = np.concatenate([known[0], series.t_ns[new]]), new
                joined[id(known[0]), id(series.t_ns)] = times
            self._open[key] = times[0], np.concatenate([known[1], series.values[times[1]]])
        self._settle(chunk.end_ns - HOLD_NS)

    def done(self) -> NodeNetwork:
        """Return what all chunks said."""
        self._settle(None)
        return NodeNetwork(self._counts, self._levels)

    def _join_operations(self, chunk: Chunk) -> None:
        """Take the operations of a chunk in: disjoint stretches, in order of time."""
        found = [(self._begin, self._end)]
        for process in chunk.processes.values():
            spans = process.spans.get(COLLECTIVE)
            if spans is not None and spans.start_ns.size:
                found.append(_stretches(spans.start_ns, spans.end_ns))
        start, stop = (np.concatenate(column) for column in zip(*found))
        order = np.argsort(start, kind="stable")
        self._begin, self._end = _stretches(start[order], stop[order])

    def _settle(self, until_ns: int | None) -> None:
        """Judge the readings up to a time; None = all."""
        done: dict[int, tuple[_Times, Int]] = {}
        before = dict(self._open)
        for key, (t_ns, values) in before.items():
            found = done.get(id(t_ns))
            if found is None:
                times = self._judged(t_ns, until_ns)
                found = done[id(t_ns)] = times, t_ns[max(times.known - 1, 0) :]
            times, left = found
            if times.known > 1:
                most = self._most(key, times.known, before)
                self._judge(key, times, values[: times.known], most)
                self._open[key] = left, values[times.known - 1 :]
        if until_ns is not None and done:
            oldest = min(int(left[0]) for _, left in done.values())
            keep = self._end > oldest - CLOSE_NS
            self._begin, self._end = self._begin[keep], self._end[keep]

    def _judged(self, t_ns: Int, until_ns: int | None) -> _Times:
        n = t_ns.size if until_ns is None else int(np.searchsorted(t_ns, until_ns, "right"))
        t_ns = t_ns[:n]
        if self._throughout:
            return _Times(n, np.ones(max(n - 1, 0), np.bool_), np.diff(t_ns))
        at = np.searchsorted(self._end, t_ns[:-1], side="right")
        inside = at < self._end.size
        if self._end.size:
            inside &= self._begin[np.minimum(at, self._end.size - 1)] < t_ns[1:]
        return _Times(n, inside, np.diff(t_ns)[inside])

    def _most(self, key: _Key, known: int, open_: Mapping[_Key, tuple[Int, Float]]) -> Float | None:
        """By how much a counter can have grown between readings; None = nobody says."""
        name, device = key
        speed = open_.get((_SPEED_OF.get(name, ""), device))
        if speed is None or device in (self._made_up or ()):
            return None
        t_ns, values = open_[key][0][:known], speed[1][:known]
        if not np.array_equal(t_ns, speed[0][:known]):
            return None
        return np.fmax(values[1:], values[:-1]) * np.diff(t_ns) * (JUMPED_RATIO / _SECOND_NS)

    def _judge(self, key: _Key, times: _Times, values: Float, most: Float | None) -> None:
        if not key[0].endswith("_total"):
            known = values[1:][times.inside]
            self._levels.setdefault(key, Spread()).add(known[~np.isnan(known)])
            return
        count = self._counts.setdefault(key, Count())
        if values[0] == values[-1] and (values == values[0]).all():  # most faults never happen
            count.covered_ns += int(times.length_ns.sum())
            if key[0].endswith("_bytes_total"):
                count.per_second.add(np.zeros(times.length_ns.size))
            return
        growth, bad = differences(values)
        if most is not None and (growth > most).any():  # never where the speed is not known: NaN
            bad = bad | (growth > most)
        growth, length = growth[times.inside], times.length_ns
        if bad.any():
            good = ~bad[times.inside]
            growth, length = growth[good], length[good]
        count.total += float(growth.sum())
        count.covered_ns += int(length.sum())
        if key[0].endswith("_bytes_total"):
            count.per_second.add(growth * _SECOND_NS / np.maximum(length, 1))


def _stretches(start_ns: Int, end_ns: Int) -> tuple[Int, Int]:
    """Join intervals, sorted by start, that overlap or are closer than `CLOSE_NS`."""
    end_ns = np.maximum.accumulate(end_ns)
    opens = np.flatnonzero(start_ns[1:] > end_ns[:-1] + CLOSE_NS) + 1
    first, last = np.append(0, opens), np.append(opens, start_ns.size) - 1
    if not start_ns.size:
        return start_ns, end_ns
    return start_ns[first], end_ns[last]
