"""What happened when: the stretches of all ranks on one clock of the run, waits, slow steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.over_time import IN_STEP, MAYBE, PEERS, PERHAPS, RankTimes
from clusterprof.attribution.stretch_table import FINEST_NS
from clusterprof.engine.aligned import Alignment
from clusterprof.engine.caused import doings_of, names_of
from clusterprof.engine.ended import ended_early
from clusterprof.engine.history_rows import Rows, laid_on, lost_by_stretch
from clusterprof.engine.node import NodeResult
from clusterprof.engine.peers import Across
from clusterprof.engine.spill import Place, Reader
from clusterprof.engine.waits import MOST_SLOW, LongWaits, slowest_of
from clusterprof.findings import UNATTRIBUTED
from clusterprof.history import WAITING, History, RankHistory, SlowStep, Wait
from clusterprof.timeline.model import Int
from clusterprof.timeline.packing import unpacked

MOST_STRETCHES = 240
FEWEST_STRETCHES = 30
MOST_CELLS = 240_000
"""Stretches times ranks; with more ranks there are fewer stretches, but no less than a few."""
MOST_ENDS, FEWEST_ENDS = 512, 32
"""Ends of steps of a rank."""
_NO_STEPS = "no time inside steps was seen"
_WALLS = "the nodes' clocks could not be laid over each other: times are those of their wall clocks"


def history_of(across: Across, place: Place, windowed: bool = False) -> History:
    """Return what happened when. `windowed`: only a part of the run was looked at.

    Needs nodes that were analysed with `history`, and what they have put at `place`.
    """
    nodes = across.nodes
    pairs = [(at, one) for at, node in enumerate(nodes) for one in node.books]
    books = [one for _, one in pairs]
    if across.clock is None or all(one.times is None for one in books):
        return History(None, 0, 0, (), why_missing=_NO_STEPS)
    try:
        with Reader(place) as reader:
            return _built(across, across.clock, pairs, reader, windowed)
    except OSError as error:
        return History(None, 0, 0, (), why_missing=f"it could not be read back: {error}")


def _built(
    across: Across,
    clock: Alignment,
    pairs: Sequence[tuple[int, RankBooks]],
    reader: Reader,
    windowed: bool,
) -> History:
    books = [one for _, one in pairs]
    tables = [_table(node, one, clock, reader) for node, one in pairs]
    known = [table for table in tables if table is not None]
    if not known:
        why = next((one.times.why for one in books if one.times and one.times.why), _NO_STEPS)
        return History(None, 0, 0, (), why_missing=why)
    start_ns = min(_started(across.nodes, clock), *(int(one.edges[0]) for one in known))
    begin_ns = (min(int(one.edges[0]) for one in known) - start_ns) if windowed else 0
    end_ns = max(int(one.edges[-1]) for one in known) - start_ns
    most = max(FEWEST_STRETCHES, min(MOST_STRETCHES, MOST_CELLS // len(books)))
    length = min(FINEST_NS, *(one.times.stretch_ns for one in known))
    while -(-end_ns // length) - begin_ns // length > most:
        length *= 2
    first, count = begin_ns // length, -(-end_ns // length) - begin_ns // length
    at_ns = start_ns + (first + np.arange(count + 1)) * length
    every = _every(books)
    own = [doing.own for doing in doings_of(books)]
    ranks = tuple(
        _rank(at, books[at], table, own[at], at_ns, (every, start_ns, reader))
        for at, table in enumerate(tables)
    )
    ended = ended_early(ranks, books, first * length, length, every)
    told = _Told(pairs, clock, start_ns, reader)
    whys = [one.times.why for one in books if one.times is not None and one.times.why]
    apart = len(across.nodes) > 1 and across.clock_bound_ns is None and _on_walls(clock)
    return History(
        started_at_ns=start_ns if _wall_known(across.nodes) else None,
        stretch_ns=length,
        stretches=count,
        ranks=ranks,
        waits=told.waits(across.waits),
        slow_steps=told.slow_steps(across.waits, books),
        step_every=every,
        why_missing=max(whys, default=_WALLS if apart else ""),
        begin_ns=first * length,
        ended=ended,
    )


@dataclass(frozen=True, slots=True)
class _Table:
    edges: Int
    """Of its stretches, by the clock of the run."""
    times: RankTimes
    whole: Int
    rest: Int
    clock: Alignment
    node: int


def _table(node: int, one: RankBooks, clock: Alignment, reader: Reader) -> _Table | None:
    times = one.times
    if times is None or times.place is None or not times.names:
        return None
    table = unpacked(reader.get(times.place, times.length))
    count = len(times.names)
    table = table.reshape(count, 2, -1)
    edges = times.begin_ns + (times.first + np.arange(table.shape[2] + 1)) * times.stretch_ns
    whole, rest = np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
    return _Table(clock.when_ns(node, edges), times, whole, rest, clock, node)


def _rank(
    at: int,
    one: RankBooks,
    table: _Table | None,
    own: Mapping[str, int],
    at_ns: Int,
    marks: tuple[int, int, Reader],
) -> RankHistory:
    if table is None:
        none = (0,) * (at_ns.size - 1)
        return RankHistory(at, none, (), ())
    rows = Rows(table.times.names, *laid_on(table.edges, table.whole, table.rest, at_ns))
    lost = lost_by_stretch(one, own, rows)
    order = sorted(lost, key=lambda name: (-int(lost[name].sum()), name))
    every, start_ns, reader = marks
    ends = [
        steps[2][steps[0] % every == 0]
        for steps in (_steps(block, reader) for block in table.times.blocks)
    ]
    own_ns = np.concatenate([np.zeros(0, np.int64), *ends])
    return RankHistory(
        rank=at,
        in_step_ns=tuple(rows.of((IN_STEP,))[0].tolist()),
        lost=tuple((name, tuple(lost[name].tolist())) for name in order),
        step_ends_ns=tuple((table.clock.when_ns(table.node, own_ns) - start_ns).tolist()),
    )


def _steps(block: tuple[int | bytes, int, int, int], reader: Reader) -> Int:
    return unpacked(reader.get(block[0], block[1]))


def _every(books: Sequence[RankBooks]) -> int:
    most = max(FEWEST_ENDS, min(MOST_ENDS, 4 * MOST_CELLS // len(books)))
    every = 1
    while max(one.ledger.steps for one in books) > most * every:
        every *= 2
    return every


def _started(nodes: Sequence[NodeResult], clock: Alignment) -> int:
    """The start of the first recording, by the clock of the run."""
    starts = []
    for at, node in enumerate(nodes):
        begin = node.loaded.header.started.get("monotonic_ns", node.loaded.first_ns)
        starts.append(int(clock.when_ns(at, np.array([int(begin)]))[0]))
    return min(starts)


def _wall_known(nodes: Sequence[NodeResult]) -> bool:
    return all(node.loaded.header.started.get("realtime_ns") for node in nodes)


def _on_walls(clock: Alignment) -> bool:
    """True when clocks of several machines are told by their wall clocks."""
    return len(clock.clocks.lines) > 1 and any(line is None for line in clock.clocks.lines)


@dataclass(frozen=True, slots=True)
class _Told:
    """Waits and slow steps, as the report has them."""

    pairs: Sequence[tuple[int, RankBooks]]
    clock: Alignment
    start_ns: int
    reader: Reader

    def waits(self, found: LongWaits | None) -> tuple[Wait, ...]:
        """Return the longest waits, by start."""
        if found is None:
            return ()
        books = [one for _, one in self.pairs]
        named = {at for at, one in enumerate(books) if one.caused}
        ids = names_of(books)
        out = [
            Wait(
                start_ns=self._when(one.victim, one.start_ns),
                duration_ns=one.duration_ns,
                victim=one.victim,
                culprit=one.culprit if one.culprit >= 0 else None,
                cause=_called(found.causes[one.cause], ids),
                step=self._step(one.victim, one.start_ns),
            )
            for one in found.longest(named)
        ]
        return tuple(sorted(out, key=lambda one: (one.start_ns, one.victim)))

    def _when(self, at: int, t_ns: int) -> int:
        return int(self.clock.when_ns(self.pairs[at][0], np.array([t_ns]))[0]) - self.start_ns

    def _step(self, at: int, t_ns: int) -> int | None:
        """The step of a rank in which an instant of its own clock lies."""
        times = self.pairs[at][1].times
        for block in times.blocks if times is not None else ():
            if block[3] > t_ns:
                number, start, end = _steps(block, self.reader)
                inside = np.flatnonzero((start <= t_ns) & (end > t_ns))
                return int(number[inside[0]]) if inside.size else None
        return None

    def slow_steps(
        self, found: LongWaits | None, books: Sequence[RankBooks]
    ) -> tuple[SlowStep, ...]:
        """Return the slowest steps of all jobs, slowest first."""
        last = {} if found is None else found.last_in()
        out = [
            self._slow(job, number, last)
            for job, numbers in slowest_of(books).items()
            for number in numbers
        ]
        out.sort(key=lambda step: (-step.duration_ns, step.number))
        return tuple(out[:MOST_SLOW])

    def _slow(self, job: int, number: int, last: Mapping[tuple[int, int], int]) -> SlowStep:
        lost: dict[str, int] = {}
        longest, rank = (0, 0, 0), None
        for at, (_, one) in enumerate(self.pairs):
            if one.job != job or one.times is None:
                continue
            for column in np.flatnonzero(one.times.slowest[0] == number)[:1].tolist():
                _, start_ns, duration_ns, *amounts = one.times.slowest[:, column].tolist()
                longest = max(longest, (duration_ns, -at, start_ns))
                rank = last.get((at, start_ns), rank)
                for name, ns in zip(one.times.names, amounts):
                    id_ = _row_called(one, name)
                    if id_ and ns:
                        lost[id_] = lost.get(id_, 0) + ns
        duration, at, start = longest[0], -longest[1], longest[2]
        lines = tuple(sorted(lost.items(), key=lambda line: (-line[1], line[0])))
        return SlowStep(number, self._when(at, start), duration, rank, lines)


def _called(cause: str, ids: Mapping[str, str]) -> str:
    """Return the id under which the report has a cause of waiting; "" when it is not known."""
    if cause in ids:
        return ids[cause]
    family = CAUSES[cause].family if cause in CAUSES else ""
    return family if family in ids.values() else cause if cause in CAUSES else ""


def _row_called(one: RankBooks, name: str) -> str:
    """Return the line of a rank's ledger that a row of its table belongs to; "" for none."""
    if name == PERHAPS:
        return WAITING if one.felt else ""
    if name == PEERS or (name == MAYBE and one.felt):
        return WAITING
    return next((b.id for b in one.buckets if name in b.leaves), UNATTRIBUTED)
