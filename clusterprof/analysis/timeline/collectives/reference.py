"""Match the collective spans of many ranks to operations: same job, same group, same number.

What cannot be matched honestly is left out and counted with a reason:

| reason | what was seen |
|---|---|
| `group-unknown` | the span names no group |
| `number-unknown` | the span has no number |
| `peer-unknown` | a send or receive that does not say with whom |
| `issue-not-seen` · `wait-not-seen` | half of an asynchronous operation |
| `backwards` | it ends before it begins, or blocks for longer than it lasts |
| `seen-twice` | the same rank a second time in one operation |
| `another-operation` | its kind is not what most members of that number did |
| `restart-unclear` | the rank began again more or less often than the others of its group |
| `sequence-skew` | its numbers are off: its leaves fit the operation before or after |
| `too-late` | so many operations waited for it that they were settled without it |

Send and receive are matched by sender, receiver and number; both belong to the team of the pair.
An operation is settled when every member that was recorded has been read beyond it. Operations come
out in an order in which every member left them; clocks, roughly aligned or not at all, only help
to find it.

    spans of a rank ──> rows in blocks ──> directory of channels ──> windows ──> operations
                        operation_rows     collectives_directory     collectives_window, _stream
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.collectives_directory import Ahead, Person
from clusterprof.timeline.collectives_stream import Stream
from clusterprof.timeline.model import Int
from clusterprof.timeline.operation_rows import BLOCK_ROWS, RankRows
from clusterprof.timeline.operations import Operations


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Spans of collective operations, n rows in any order."""

    rank: Int
    """Process: 0 … ranks - 1 over all jobs; a restarted process is another one."""
    global_rank: Int
    """The number by which its job calls it."""
    job: Int
    arrive_ns: Int
    leave_ns: Int
    blocked_ns: Int
    when_ns: Int
    """`leave_ns` on a roughly common clock; of each rank the same time ahead or behind."""
    group: Int
    sequence: Int
    bytes: Int
    operation: Int
    peer: Int
    """Global rank of the other side of a send or receive, -1 for everything else."""
    source: Int

    def take(self, rows: Int | NDArray[np.bool_]) -> Arrivals:
        """Return some of the rows."""
        return Arrivals(*(getattr(self, one.name)[rows] for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Matched:
    """What spans became."""

    operations: Operations
    unmatched: Mapping[str, int]
    """Reason -> spans left out."""


def together(*parts: Arrivals) -> Arrivals:
    """Put spans behind each other."""
    return Arrivals(
        *(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Arrivals))
    )


class _InMemory:
    """A store that keeps everything."""

    why_full = ""

    def put(self, data: bytes) -> bytes:
        """Return the data."""
        return data


def match(
    spans: Arrivals,
    members: Mapping[tuple[int, int], Int] | None = None,
    block_rows: int = BLOCK_ROWS,
) -> Matched:
    """Match spans that are in memory to operations; how they are cut changes none of them.

    `members` holds the global ranks of each (job, group) that was announced; where it is missing
    the members are those who were seen.
    """
    stream = Stream(people_of(spans, block_rows), members or {}, (0,), in_memory)
    parts = list(stream.stretches(1 << 62))
    ops = joined([part.operations for part in parts], [part.at_arrive[:, 0] for part in parts])
    return Matched(ops, stream.unmatched)


def people_of(spans: Arrivals, block_rows: int = BLOCK_ROWS) -> list[Person]:
    """Return spans as rows of each rank; of what it had spent they hold `source`."""
    parts = (spans.take(np.flatnonzero(spans.rank == rank)) for rank in np.unique(spans.rank))
    people = [_person(part, block_rows) for part in parts]
    return [one for one in people if one is not None]


def in_memory(place: int | bytes, length: int) -> bytes:
    """Give back data that was kept in memory."""
    assert isinstance(place, bytes) and len(place) == length
    return place


def _person(spans: Arrivals, block_rows: int) -> Person | None:
    spans = spans.take(np.argsort(spans.leave_ns, kind="stable"))
    rows = RankRows(_InMemory(), block_rows)
    how = spans.operation | (spans.peer + 1) << 16
    table = (
        spans.arrive_ns, spans.leave_ns, spans.group, spans.sequence, spans.bytes, how,
        spans.blocked_ns,
    )  # fmt: skip
    source = spans.source[None, :]
    rows.add(np.stack(table), source, source)
    found = rows.finish()
    first = {name: int(getattr(spans, name)[0]) for name in ("rank", "global_rank", "job")}
    ahead_ns = int(spans.when_ns[0] - spans.leave_ns[0])
    return (
        None if found is None else Person(**first, ahead=Ahead(shift_ns=ahead_ns), operations=found)
    )


def joined(parts: list[Operations], sources: list[Int]) -> Operations:
    """Put stretches of operations behind each other, with new numbers of their rows."""
    none = np.zeros(0, np.int64)
    size = np.concatenate([np.diff(part.first) for part in parts] or [none])
    first = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    rest = {
        one.name: np.concatenate([getattr(part, one.name) for part in parts] or [none])
        for one in fields(Operations)
        if one.name not in ("first", "source")
    }
    return Operations(first=first, source=np.concatenate([*sources, none]), **rest)
