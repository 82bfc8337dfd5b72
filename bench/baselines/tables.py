"""The tables that a recording is read into: series of nodes, spans of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clusterprof.trace.schema import SPAN_FIELDS

START, END, KIND, A, B, C, D = range(7)
"""Columns of a table of spans."""
NO_SPANS = np.zeros((0, len(SPAN_FIELDS)), np.int64)


@dataclass(frozen=True)
class Series:
    """Readings of one signal of one device; those that failed are left out."""

    t_ns: np.ndarray
    values: np.ndarray

    def get_growth(self) -> float:
        """What a counter grew by from the first reading to the last."""
        return float(self.values[-1] - self.values[0]) if len(self.values) > 1 else 0.0

    def at(self, t_ns: np.ndarray) -> np.ndarray:
        """Values of a counter at times, evenly spread between readings."""
        return np.interp(t_ns, self.t_ns, self.values)


@dataclass
class Node:
    """One machine."""

    name: str
    cpus: int
    series: dict[tuple[str, str], Series] = field(default_factory=dict)
    """(signal, device) -> readings."""
    run_delay_ns: dict[int, float] = field(default_factory=dict)
    """By process: how long its main thread was ready and had no CPU, while it was sampled."""
    span_ns: tuple[int, int] = (0, 0)
    """First and last reading."""


@dataclass
class Rank:
    """One training process; a restarted one goes on in the same tables."""

    rank: int
    node: Node
    device: str
    spans: np.ndarray
    """int64[n, 7] by start, on true time."""
    fetches: np.ndarray
    """Spans of loading, its own and its workers'; int64[m, 7]."""
    workers: tuple[int, ...]
    """Pids of its loader's workers."""
    steps: np.ndarray
    """int64[s, 2]: start and end of each step; of the whole recording when no step is known."""

    def of(self, *kinds: int) -> np.ndarray:
        """Return its spans of some kinds."""
        return self.spans[np.isin(self.spans[:, KIND], kinds)]

    def sum_by_step(self, table: np.ndarray) -> np.ndarray:
        """Return ns of each step that spans of a table, sorted by start, cover."""
        ends = np.maximum.accumulate(table[:, END])
        starts = np.maximum(table[:, START], np.concatenate([ends[:1] * 0, ends[:-1]]))
        upto = np.concatenate([[0], np.cumsum(ends - starts)])

        def until(t: np.ndarray) -> np.ndarray:
            before = np.searchsorted(starts, t, "right")
            last = np.maximum(before - 1, 0)
            over = np.where(before > 0, ends[last] - t, 0) if len(table) else np.zeros_like(t)
            return upto[before] - np.maximum(over, 0)

        return until(self.steps[:, 1]) - until(self.steps[:, 0])

    @property
    def in_step_ns(self) -> int:
        """Time in steps."""
        return int((self.steps[:, 1] - self.steps[:, 0]).sum())


@dataclass(eq=False)
class RecordingTables:
    """One recording."""

    ranks: dict[int, Rank]
    nodes: list[Node]
    groups: dict[int, frozenset[int]]
    """Announced process groups."""

    @property
    def in_step_ns(self) -> int:
        """Time in steps of all ranks."""
        return sum(rank.in_step_ns for rank in self.ranks.values())

    def list_node_ranks(self, node: Node) -> tuple[int, ...]:
        """Return the ranks that ran there."""
        return tuple(sorted(number for number, rank in self.ranks.items() if rank.node is node))
