"""Spans in the order of the ring, and the events of processes and groups."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from clusterprof.agent.processes import registry
from clusterprof.agent.processes.span_rings import LONG_OPERATION_NS
from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Event, Spans
from clusterprof_lab.synth.activity_counters import ROW, ThreadTrack
from clusterprof_lab.synth.record_tables import get_start_ticks
from clusterprof_lab.synth.recorder_view import RecorderView
from clusterprof_lab.synth.story import Rank

Int = NDArray[np.int64]

_OF_ANOTHER = (layout.EXPOSED, layout.EXPOSED_COLLECTIVE)  # field a: the number of another span


class Ring:
    """The spans of one process, of whichever thread; `take` drains them."""

    def __init__(self, sight: RecorderView, tracks: Sequence[ThreadTrack]) -> None:
        self.track, self._sight = tracks[0], sight
        pid = self.track.thread.pid
        until_ns = min(sight.end_ns, sight.exits.get(pid, sight.end_ns))
        table = np.concatenate([_make_spans(sight, track) for track in tracks], axis=1)
        order = np.argsort(table[1], kind="stable")  # a span is written when it ends
        _renumber(table, order)
        table = table[:, order]
        self.table = table[:, table[1] <= until_ns]
        # What ended before the recorder came is not read, and has its numbers.
        self._seen = int(np.searchsorted(self.table[1], sight.start_ns))
        self.unfinished = [
            column
            for column in table[:, table[1] > until_ns].T.tolist()
            if column[2] == layout.COLLECTIVE and column[0] <= until_ns
        ]
        self._dropped = 0

    def take(self, until_ns: int) -> Spans | None:
        """Return what ended up to then and was not overwritten; None when there is nothing."""
        first, last = self._seen, int(np.searchsorted(self.table[1], until_ns, side="right"))
        if last == first:
            return None
        self._seen = last
        ratio = self._sight.seen.lost_spans_ratio
        lost = int(self._sight.random.binomial(last - first, ratio)) if ratio else 0
        self._dropped += lost
        first += lost
        if first == last:
            return None
        dropped, self._dropped = self._dropped, 0
        columns = {
            name: array("q", self.table[row, first:last].tobytes())
            for row, name in enumerate(SPAN_FIELDS)
        }
        kinds = {kind for kind in columns["kind"] if kind >= layout.FIRST_USER_KIND}
        names = {kind: f"user-{kind - layout.FIRST_USER_KIND}" for kind in sorted(kinds)}
        ticks = get_start_ticks(self.track)
        return Spans(self.track.thread.pid, ticks, first + 1, dropped, names, columns)


def _make_spans(sight: RecorderView, track: ThreadTrack) -> Int:
    """int64[fields, n]: the spans of a thread on its node's clock.

    What a fetch used of CPU and disk is filled in where the story leaves it to the acts (all 0).
    """
    table = np.array(track.thread.marks, np.int64).reshape(-1, len(SPAN_FIELDS)).T.copy()
    table[0], table[1] = sight.clock.read(table[0]), sight.clock.read(table[1])
    bare = (table[2] == layout.FETCH) & (table[4:7] == 0).all(axis=0)
    if bare.any():
        used = track.compute_counters(table[1, bare], sight.codes) - track.compute_counters(
            table[0, bare], sight.codes
        )
        for field, name in ((4, "user"), (5, "system"), (6, "read_bytes")):
            table[field, bare] = np.rint(used[ROW[name]]).astype(np.int64)
    return table


def _renumber(table: Int, order: Int) -> None:
    """A measured wait names the span by its place among the marks of the story, from 1."""
    rows = np.flatnonzero(np.isin(table[2], _OF_ANOTHER))
    if len(rows) and (np.diff(order) != 1).any():
        number = np.empty(len(order) + 1, np.int64)
        number[order + 1] = np.arange(1, len(order) + 1)
        known = (table[3, rows] >= 1) & (table[3, rows] <= len(order))
        table[3, rows[known]] = number[table[3, rows[known]]]


def make_rings(sight: RecorderView) -> list[Ring]:
    """Return the rings of all processes that marked anything."""
    if sight.seen.explain_missing("spans"):
        return []
    by_pid: dict[int, list[ThreadTrack]] = {}
    for number in sight.recorded:
        track = sight.tracks[number]
        by_pid.setdefault(track.thread.pid, []).append(track)
    return [
        Ring(sight, tracks) for tracks in by_pid.values() if any(t.thread.marks for t in tracks)
    ]


def make_events(sight: RecorderView, all_rings: list[Ring]) -> list[Event]:
    """Return registrations, groups, operations under way and exits, by time."""
    tracks = {id(track.thread): track for track in sight.tracks}
    listed: list[Event] = []
    local = {rank.rank: number for number, rank in enumerate(_group_by_rank(sight))}
    for rank in sight.ranks:
        track = tracks[id(rank.main)]
        t_ns = max(sight.start_ns, track.born_ns)
        if t_ns > sight.end_ns or sight.exits.get(rank.main.pid, t_ns) < sight.start_ns:
            continue
        registration = {
            "pid": rank.main.pid,
            "started_ticks": get_start_ticks(track),
            "role": "python",
            "device": rank.device,
            "variables": _make_variables(sight, rank, local[rank.rank], len(local)),
        }
        listed.append(
            Event(t_ns, "process-registered", registry.parse_registration(registration) or {})
        )
        for group, ranks in rank.groups.items():
            announcement = {"pid": rank.main.pid, "group": group, "ranks": list(ranks)}
            listed.append(Event(t_ns, "group-announced", registry.parse_group(announcement) or {}))
        listed += _make_exit(sight, rank, track)
    for ring in all_rings:
        listed += _make_unfinished(sight, ring)
    return sorted(listed, key=lambda event: event.t_ns)


def _group_by_rank(sight: RecorderView) -> list[Rank]:
    first: dict[int, Rank] = {}
    for rank in sorted(sight.every, key=lambda rank: rank.rank):
        first.setdefault(rank.rank, rank)
    return list(first.values())


def _make_variables(sight: RecorderView, rank: Rank, local: int, locals_: int) -> dict[str, str]:
    """What torchrun tells a worker."""
    nodes = list(sight.story.nodes)
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(sight.story.world_size or len({r.rank for r in sight.story.ranks})),
        "LOCAL_WORLD_SIZE": str(locals_),
        "GROUP_RANK": str(nodes.index(rank.node)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": sight.story.job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        **rank.variables,
    }


def _make_exit(sight: RecorderView, rank: Rank, track: ThreadTrack) -> Iterator[Event]:
    exit_ns = sight.exits.get(rank.main.pid)
    if exit_ns is None or exit_ns > sight.end_ns:
        return
    code = rank.exit_code
    attributes = {
        "pid": rank.main.pid,
        "started_ticks": get_start_ticks(track),
        "wait_status": code << 8 if code >= 0 else -code,
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
    }
    yield Event(exit_ns, "process-exited", attributes)


def _make_unfinished(sight: RecorderView, ring: Ring) -> Iterator[Event]:
    """The operation that had begun last and did not end; the recorder says so once."""
    for start_ns, _, _, group, number, size, operation in ring.unfinished[-1:]:
        over_ns = sight.exits.get(ring.track.thread.pid, sight.end_ns)
        t_ns = min(max(start_ns + LONG_OPERATION_NS, sight.start_ns), over_ns, sight.end_ns)
        attributes = {
            "pid": ring.track.thread.pid,
            "started_ticks": get_start_ticks(ring.track),
            "start_ns": start_ns,
            "group": group,
            "number": number,
            "bytes": size,
            "operation": operation,
        }
        yield Event(t_ns, "operation-under-way", attributes)
