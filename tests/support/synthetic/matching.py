"""Match the collective spans of many ranks, all in memory: what the stream must give too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.collectives.matching import ClockOffset, RankEntry
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.collectives.rows import BLOCK_ROWS, RankRowBuilder
from clusterprof.analysis.timeline.collectives.stream import OperationStream
from clusterprof.analysis.timeline.model import Int


@dataclass(frozen=True, slots=True)
class CollectiveSpans:
    """Spans of collective operations, n rows in any order."""

    rank: Int
    """Process: 0 … ranks - 1 over all jobs; a restarted process is another one."""
    global_rank: Int
    """Rank number within its job."""
    job: Int
    arrive_ns: Int
    leave_ns: Int
    blocked_ns: Int
    when_ns: Int
    """`leave_ns` on a roughly common clock; the offset is constant for each rank."""
    group: Int
    sequence: Int
    bytes: Int
    operation: Int
    peer: Int
    """Global rank of the other side of a send or receive, -1 for everything else."""
    source: Int

    def take(self, rows: Int | NDArray[np.bool_]) -> CollectiveSpans:
        """Return some of the rows."""
        return CollectiveSpans(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Result of matching."""

    operations: Operations
    unmatched: Mapping[str, int]
    """Reason -> spans left out."""


def concat_spans(*parts: CollectiveSpans) -> CollectiveSpans:
    """Concatenate spans."""
    return CollectiveSpans(
        *(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(CollectiveSpans))
    )


class _InMemory:
    """A store that keeps everything."""

    why_full = ""

    def put(self, data: bytes) -> bytes:
        """Return the data."""
        return data


def match_spans(
    spans: CollectiveSpans,
    members: Mapping[tuple[int, int], Int] | None = None,
    block_rows: int = BLOCK_ROWS,
) -> MatchResult:
    """Match spans in memory to operations; the block size does not change the result.

    members: the global ranks of each announced (job, group), int64[k]; if missing, the
    members are those that were seen.
    """
    stream = OperationStream(build_rank_entries(spans, block_rows), members or {}, (0,), get_block)
    parts = list(stream.read_batches(1 << 62))
    ops = concat_operations(
        [part.operations for part in parts], [part.at_arrive[:, 0] for part in parts]
    )
    return MatchResult(ops, stream.unmatched)


def build_rank_entries(spans: CollectiveSpans, block_rows: int = BLOCK_ROWS) -> list[RankEntry]:
    """Build the rows of each rank from spans; their time spent holds `source`."""
    rank_spans = (spans.take(np.flatnonzero(spans.rank == rank)) for rank in np.unique(spans.rank))
    entries = [_build_rank_entry(part, block_rows) for part in rank_spans]
    return [entry for entry in entries if entry is not None]


def get_block(place: int | bytes, length: int) -> bytes:
    """Return the data of a block that is kept in memory."""
    assert isinstance(place, bytes) and len(place) == length
    return place


def _build_rank_entry(spans: CollectiveSpans, block_rows: int) -> RankEntry | None:
    spans = spans.take(np.argsort(spans.leave_ns, kind="stable"))
    rows = RankRowBuilder(_InMemory(), block_rows)
    code = spans.operation | (spans.peer + 1) << 16
    table = (
        spans.arrive_ns,
        spans.leave_ns,
        spans.group,
        spans.sequence,
        spans.bytes,
        code,
        spans.blocked_ns,
    )
    source = spans.source[None, :]
    rows.add(np.stack(table), source, source)
    operations = rows.finish()
    first = {name: int(getattr(spans, name)[0]) for name in ("rank", "global_rank", "job")}
    shift_ns = int(spans.when_ns[0] - spans.leave_ns[0])
    return (
        None
        if operations is None
        else RankEntry(**first, clock_offset=ClockOffset(shift_ns=shift_ns), operations=operations)
    )


def concat_operations(parts: list[Operations], sources: list[Int]) -> Operations:
    """Concatenate batches of operations and renumber their source rows, int64[n]."""
    no_rows = np.zeros(0, np.int64)
    size = np.concatenate([np.diff(part.first) for part in parts] or [no_rows])
    first = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    rest = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts] or [no_rows])
        for field in fields(Operations)
        if field.name not in ("first", "source")
    }
    return Operations(first=first, source=np.concatenate([*sources, no_rows]), **rest)
