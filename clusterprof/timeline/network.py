"""What the network of a node did while its ranks were in operations with each other.

    read at          0 s       1 s       2 s       3 s
    a counter         0        50        80        90
    in operations                  ====          =
    counts                          30        10         40 in 2 s

What a counter grew by between two readings counts as a whole when a rank of the node was in an
operation at any time between them: operations are shorter than that, and where in between it grew
nobody knows. A gauge counts where the counters of its time do. Memory does not depend on the length
of the recording: sums, the least and the most, and how often each size was read, in classes.
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
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))
        self.count += values.size
        octaves = np.log2(np.maximum(values, 1e-9))
        number = np.ceil(octaves * _CLASSES_PER_OCTAVE - 1e-9).astype(np.int64)
        for one, n in zip(*(c.tolist() for c in np.unique(number, return_counts=True))):
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


@dataclass(slots=True)
class Count:
    """By how much a counter grew in the time of operations."""

    total: float = 0.0
    covered_ns: int = 0
    """Length of the intervals between readings that counted."""
    per_second: Spread = field(default_factory=Spread)
    """Of intervals: growth over length."""


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


class NetworkMeter:
    """Adds up the readings of one node, chunk by chunk."""

    def __init__(self) -> None:
        self._counts: dict[_Key, Count] = {}
        self._levels: dict[_Key, Spread] = {}
        self._open: dict[_Key, tuple[Int, Float, bool]] = {}
        self._begin = np.zeros(0, np.int64)
        self._end = np.zeros(0, np.int64)

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Pass chunks through and take what is in them."""
        for chunk in chunks:
            self.add(chunk)
            yield chunk

    def add(self, chunk: Chunk) -> None:
        """Take the readings and operations of a chunk."""
        self._join_operations(chunk)
        for key, series in chunk.series.items():
            if not key[0].startswith(PREFIXES):
                continue
            t_ns, values = series.t_ns, series.values
            known = self._open.get(key)
            if known is not None:
                new = t_ns > known[0][-1]
                t_ns = np.concatenate([known[0], t_ns[new]])
                values = np.concatenate([known[1], values[new]])
            if t_ns.size:
                self._open[key] = t_ns, values, series.is_counter
        self._settle(chunk.end_ns - HOLD_NS)

    def done(self) -> NodeNetwork:
        """Return what all chunks said."""
        self._settle(None)
        return NodeNetwork(self._counts, self._levels)

    def _join_operations(self, chunk: Chunk) -> None:
        """Take the operations of a chunk in: disjoint stretches, in order of time."""
        begin, end = [self._begin], [self._end]
        for process in chunk.processes.values():
            spans = process.spans.get(COLLECTIVE)
            if spans is not None:
                begin.append(spans.start_ns)
                end.append(spans.end_ns)
        start, stop = np.concatenate(begin), np.concatenate(end)
        order = np.argsort(start, kind="stable")
        start, stop = start[order], np.maximum.accumulate(stop[order])
        opens = np.ones(start.size, np.bool_)
        opens[1:] = start[1:] > stop[:-1]
        last = np.append(np.flatnonzero(opens)[1:], start.size)[: int(opens.sum())] - 1
        self._begin, self._end = start[opens], stop[last]

    def _settle(self, until_ns: int | None) -> None:
        """Judge the readings up to a time; None = all."""
        oldest = None
        for key, (t_ns, values, is_counter) in self._open.items():
            n = t_ns.size if until_ns is None else int(np.searchsorted(t_ns, until_ns, "right"))
            if n > 1:
                self._judge(key, t_ns[:n], values[:n], is_counter)
                t_ns, values = t_ns[n - 1 :], values[n - 1 :]
                self._open[key] = t_ns, values, is_counter
            oldest = int(t_ns[0]) if oldest is None else min(oldest, int(t_ns[0]))
        if until_ns is not None and oldest is not None:
            keep = self._end > oldest
            self._begin, self._end = self._begin[keep], self._end[keep]

    def _judge(self, key: _Key, t_ns: Int, values: Float, is_counter: bool) -> None:
        inside = self._in_operations(t_ns)
        if is_counter:
            growth, bad = differences(values)
            inside &= ~bad
            length = np.diff(t_ns)[inside]
            count = self._counts.setdefault(key, Count())
            count.total += float(growth[inside].sum())
            count.covered_ns += int(length.sum())
            count.per_second.add(growth[inside] * _SECOND_NS / np.maximum(length, 1))
        else:
            known = values[1:][inside]
            self._levels.setdefault(key, Spread()).add(known[~np.isnan(known)])

    def _in_operations(self, t_ns: Int) -> NDArray[np.bool_]:
        """bool[n - 1]: where a rank was in an operation between two readings."""
        at = np.searchsorted(self._end, t_ns[:-1], side="right")
        found = at < self._end.size
        if self._end.size:
            found &= self._begin[np.minimum(at, self._end.size - 1)] < t_ns[1:]
        return found
