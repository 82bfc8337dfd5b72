"""Network counters of a node during the collective operations of its ranks.

    read at          0 s       1 s       2 s       3 s
    a counter         0        50        80        90
    in operations                  ====          =
    counts                          30        10         40 in 2 s

The growth of a counter between two readings counts fully if a rank of the node was in
an operation at any time between them: operations are shorter than the sampling
interval, and where inside it the counter grew is unknown. A gauge counts where the
counters read at its time do. Memory does not depend on the length of the recording: it
holds sums, minimum, maximum and a histogram of values.

A byte counter that grew by many times the capacity of its link has jumped; that time
counts as unknown, because a driver error is not traffic. Links are RDMA ports and NICs
backed by hardware; the link speed that other devices report is not real.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.timeline.model import Chunk, Float, Int
from clusterprof.analysis.timeline.series import compute_differences
from clusterprof.probe.layout import COLLECTIVE
from clusterprof.util.statistics import find_quantile

PREFIXES = ("network.", "tcp.", "rdma.")
SETTLE_DELAY_NS = 30_000_000_000
"""Readings are evaluated this long after their time: an operation is known only after it
has ended.
"""
MERGE_GAP_NS = 50_000_000
"""Operations separated by less than this are merged: no two readings lie between them."""
COUNTER_JUMP_RATIO = 8.0
"""Growth relative to the capacity of the link above which a counter has jumped. Smaller
excesses may come from a card that reports late, or from a speed that is not the link's.
"""
_LINK_SPEED_SIGNALS = {
    f"{kind}.{way}_bytes_total": f"{kind}.link_bytes_per_second"
    for kind in ("network", "rdma")
    for way in ("receive", "transmit")
}
_CLASSES_PER_OCTAVE = 8
_SECOND_NS = 1e9
_Key = tuple[str, str]


@dataclass(slots=True)
class ValueHistogram:
    """Histogram of values; classes are 9 % wide."""

    lowest: float = math.inf
    highest: float = -math.inf
    count: int = 0
    classes: dict[int, int] = field(default_factory=dict)

    def add(self, values: Float) -> None:
        """Add available readings, float64[n]."""
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        self.count += values.size
        if low == high:  # a value that never changes: a link's speed, a round-trip time
            class_counts = [(_assign_classes(np.array([low]))[0].item(), values.size)]
        else:
            class_counts = list(
                zip(*(c.tolist() for c in np.unique(_assign_classes(values), return_counts=True)))
            )
        for size_class, n in class_counts:
            self.classes[size_class] = self.classes.get(size_class, 0) + n

    def quantile(self, fraction: float) -> float:
        """Return the value that this fraction of the readings does not exceed.

        At most 9 % too high. NaN if there are no readings.
        """
        size_class = find_quantile(self.classes, fraction)
        if size_class is None:
            return math.nan
        edge = 2.0 ** (size_class / _CLASSES_PER_OCTAVE)
        return float(min(max(edge, self.lowest), self.highest))


def _assign_classes(values: Float) -> Int:
    octaves = np.log2(np.maximum(values, 1e-9))
    return np.ceil(octaves * _CLASSES_PER_OCTAVE - 1e-9).astype(np.int64)


@dataclass(slots=True)
class CounterTotal:
    """Growth of a counter during operations."""

    total: float = 0.0
    covered_ns: int = 0
    """Total length of the intervals between readings that counted."""
    rate_histogram: ValueHistogram = field(default_factory=ValueHistogram)
    """For byte counters: growth per second of each interval."""


@dataclass(frozen=True, slots=True)
class NodeNetworkTotals:
    """Readings during operations, by signal and device; small enough to send between nodes."""

    counts: Mapping[_Key, CounterTotal] = field(default_factory=dict)
    levels: Mapping[_Key, ValueHistogram] = field(default_factory=dict)

    def devices(self, *names: str) -> list[str]:
        """Return the devices with a reading of one of these signals, sorted."""
        return sorted({d for n, d in (*self.counts, *self.levels) if n in names})

    def total(self, name: str, device: str) -> float | None:
        """Return by how much a counter grew; None if it was not read."""
        counter = self.counts.get((name, device))
        return None if counter is None else counter.total

    def per_second(self, name: str, device: str) -> float | None:
        """Return the overall growth per second of a counter; None if it was not read."""
        counter = self.counts.get((name, device))
        if counter is None or not counter.covered_ns:
            return None
        return counter.total / counter.covered_ns * _SECOND_NS


@dataclass(frozen=True, slots=True)
class _SettledTimes:
    """Reading times of the signals of one collector, which share them."""

    count: int
    """Number of readings to evaluate."""
    inside: NDArray[np.bool_]
    """True for intervals between two readings in which a rank was in an operation."""
    length_ns: Int
    """Lengths of the intervals inside operations."""


class NetworkMeter:
    """Accumulates the network readings of one node, chunk by chunk."""

    def __init__(self, throughout: bool = False) -> None:
        """Start empty.

        throughout: count all readings until an operation appears, then discard them.
        """
        self._throughout, self._is_off = throughout, False
        self._counts: dict[_Key, CounterTotal] = {}
        self._levels: dict[_Key, ValueHistogram] = {}
        self._open: dict[_Key, tuple[Int, Float]] = {}
        self._virtual_nics: frozenset[str] | None = None
        self._begin = np.zeros(0, np.int64)
        self._end = np.zeros(0, np.int64)

    def observe(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Yield the chunks unchanged and add each one."""
        for chunk in chunks:
            self.add(chunk)
            yield chunk
            del chunk  # else it stays while the next one is read

    def add(self, chunk: Chunk) -> None:
        """Add the readings and operations of a chunk."""
        if self._is_off:
            return
        if self._virtual_nics is None:
            nics = chunk.header.host.get("nics") or ()
            self._virtual_nics = frozenset(
                str(n.get("name")) for n in nics if not n.get("physical")
            )
        self._join_operations(chunk)
        if self._throughout and self._end.size:
            self._is_off = True
            self._counts, self._levels, self._open = {}, {}, {}
            return
        joined: dict[tuple[int, int], tuple[Int, NDArray[np.bool_]]] = {}
        for key, series in chunk.series.items():
            if not key[0].startswith(PREFIXES) or not series.t_ns.size:
                continue
            pending = self._open.get(key)
            if pending is None:
                self._open[key] = series.t_ns, series.values
                continue
            times = joined.get((id(pending[0]), id(series.t_ns)))
            if times is None:
                is_new = series.t_ns > pending[0][-1]
                times = np.concatenate([pending[0], series.t_ns[is_new]]), is_new
                joined[id(pending[0]), id(series.t_ns)] = times
            self._open[key] = times[0], np.concatenate([pending[1], series.values[times[1]]])
        self._settle(chunk.end_ns - SETTLE_DELAY_NS)

    def finish(self) -> NodeNetworkTotals:
        """Evaluate the remaining readings and return the totals of all chunks."""
        self._settle(None)
        return NodeNetworkTotals(self._counts, self._levels)

    def _join_operations(self, chunk: Chunk) -> None:
        """Merge the operations of a chunk into disjoint intervals sorted by time."""
        columns = [(self._begin, self._end)]
        for process in chunk.processes.values():
            spans = process.spans.get(COLLECTIVE)
            if spans is not None and spans.start_ns.size:
                columns.append(_merge_close_operations(spans.start_ns, spans.end_ns))
        start, stop = (np.concatenate(column) for column in zip(*columns))
        order = np.argsort(start, kind="stable")
        self._begin, self._end = _merge_close_operations(start[order], stop[order])

    def _settle(self, until_ns: int | None) -> None:
        """Evaluate the readings up to a time; None = all."""
        settled: dict[int, tuple[_SettledTimes, Int]] = {}
        before = dict(self._open)
        for key, (t_ns, values) in before.items():
            entry = settled.get(id(t_ns))
            if entry is None:
                times = self._select_settled_times(t_ns, until_ns)
                entry = settled[id(t_ns)] = times, t_ns[max(times.count - 1, 0) :]
            times, remaining_ns = entry
            if times.count > 1:
                limit = self._limit_growth(key, times.count, before)
                self._evaluate(key, times, values[: times.count], limit)
                self._open[key] = remaining_ns, values[times.count - 1 :]
        if until_ns is not None and settled:
            oldest = min(int(remaining_ns[0]) for _, remaining_ns in settled.values())
            keep = self._end > oldest - MERGE_GAP_NS
            self._begin, self._end = self._begin[keep], self._end[keep]

    def _select_settled_times(self, t_ns: Int, until_ns: int | None) -> _SettledTimes:
        n = t_ns.size if until_ns is None else int(np.searchsorted(t_ns, until_ns, "right"))
        t_ns = t_ns[:n]
        if self._throughout:
            return _SettledTimes(n, np.ones(max(n - 1, 0), np.bool_), np.diff(t_ns))
        index = np.searchsorted(self._end, t_ns[:-1], side="right")
        inside = index < self._end.size
        if self._end.size:
            inside &= self._begin[np.minimum(index, self._end.size - 1)] < t_ns[1:]
        return _SettledTimes(n, inside, np.diff(t_ns)[inside])

    def _limit_growth(
        self, key: _Key, rows: int, open_: Mapping[_Key, tuple[Int, Float]]
    ) -> Float | None:
        """Return the largest plausible growth between readings.

        None if the link speed is unknown.
        """
        name, device = key
        speed = open_.get((_LINK_SPEED_SIGNALS.get(name, ""), device))
        if speed is None or device in (self._virtual_nics or ()):
            return None
        t_ns, values = open_[key][0][:rows], speed[1][:rows]
        if not np.array_equal(t_ns, speed[0][:rows]):
            return None
        return np.fmax(values[1:], values[:-1]) * np.diff(t_ns) * (COUNTER_JUMP_RATIO / _SECOND_NS)

    def _evaluate(
        self, key: _Key, times: _SettledTimes, values: Float, limit: Float | None
    ) -> None:
        if not key[0].endswith("_total"):
            levels = values[1:][times.inside]
            self._levels.setdefault(key, ValueHistogram()).add(levels[~np.isnan(levels)])
            return
        count = self._counts.setdefault(key, CounterTotal())
        if values[0] == values[-1] and (values == values[0]).all():  # usual for errors
            count.covered_ns += int(times.length_ns.sum())
            if key[0].endswith("_bytes_total"):
                count.rate_histogram.add(np.zeros(times.length_ns.size))
            return
        growth, unusable = compute_differences(values)
        if limit is not None and (growth > limit).any():  # NaN, an unknown speed, is no jump
            unusable = unusable | (growth > limit)
        growth, length = growth[times.inside], times.length_ns
        if unusable.any():
            usable = ~unusable[times.inside]
            growth, length = growth[usable], length[usable]
        count.total += float(growth.sum())
        count.covered_ns += int(length.sum())
        if key[0].endswith("_bytes_total"):
            count.rate_histogram.add(growth * _SECOND_NS / np.maximum(length, 1))


def _merge_close_operations(start_ns: Int, end_ns: Int) -> tuple[Int, Int]:
    """Merge intervals, sorted by start, that overlap or nearly touch.

    The largest gap is `MERGE_GAP_NS`.
    """
    end_ns = np.maximum.accumulate(end_ns)
    opens = np.flatnonzero(start_ns[1:] > end_ns[:-1] + MERGE_GAP_NS) + 1
    first, last = np.append(0, opens), np.append(opens, start_ns.size) - 1
    if not start_ns.size:
        return start_ns, end_ns
    return start_ns[first], end_ns[last]


_SOCKETS = "sockets"  # the collector that lists the job's connections to other machines


def may_have_remote_connections(chunk: Chunk) -> bool:
    """Return whether the job may have a connection to another machine: it has, or is not seen."""
    is_listed = any(
        item.get("name") == _SOCKETS and item.get("status") == "available"
        for item in chunk.header.collectors
    )
    if not is_listed or any(gap.collector == _SOCKETS for gap in chunk.gaps):
        return True
    name = signals.TCP_JOB_RECEIVED.name
    received = [item for (signal, _), item in chunk.series.items() if signal == name]
    return any(item.values.size and item.values[-1] != item.values[0] for item in received)
