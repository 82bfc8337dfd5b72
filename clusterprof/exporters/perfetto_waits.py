"""Lost time and waits of ranks for each other, from what the analysis found.

    rank 0   lost time    |storage|unattributed|        one block per stretch of the run and cause
             waits        |== waits for rank 3 ==|
                                                 | flow: victim to culprit
    rank 3   late         |== late: storage =====x

A block of lost time is as long as the time lost in its stretch; where inside of the stretch it was
lost the blocks do not say, the spans do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterprof.exporters.base import Run, RunNode
from clusterprof.exporters.lanes import Lanes
from clusterprof.exporters.perfetto_packets import Packets, event, hashed
from clusterprof.exporters.perfetto_spans import Groups
from clusterprof.exporters.protobuf import varint
from clusterprof.history import History, RankHistory, Wait
from clusterprof.renderers.text_safety import safe_text

LOST, WAITS, LATE = "lost time", "waits for ranks", "late for others"
_ABOUT = {
    LOST: "Lost device time by cause. A block is as long as what was lost in its stretch of the"
    " run; within the stretch the blocks stand one behind the other.",
    WAITS: "The longest waits of this rank for another one.",
    LATE: "Others waited for this rank to come.",
}


def packets_of(run: Run, node: RunNode, packets: Packets, groups: Groups) -> Iterator[list[bytes]]:
    """Yield the packets of one node's ranks, a few at a time; nothing without a history."""
    history = run.report.history
    if history is None:
        return
    start_ns = run.start_ns()
    places = {rank.place for rank in node.ranks}
    for place in sorted(places):
        if place < len(history.ranks):
            track = packets.child(groups.rank(place)[1], LOST, _ABOUT[LOST])
            yield from _lost(history, history.ranks[place], start_ns, packets, track)
    for place in sorted(places):
        own = [wait for wait in history.waits if wait.victim == place and wait.duration_ns > 0]
        yield _waits(own, run, start_ns, packets, groups, place)
        late = [wait for wait in history.waits if wait.culprit == place and wait.duration_ns > 0]
        yield _late(late, run, start_ns, packets, groups, place)


def _lost(
    history: History, rank: RankHistory, start_ns: int, packets: Packets, track: int
) -> Iterator[list[bytes]]:
    for stretch in range(history.stretches):
        at_ns = start_ns + stretch * history.stretch_ns
        out: list[bytes] = []
        for cause, lost in rank.lost:
            lost_ns = lost[stretch]
            if lost_ns > 0:
                out.append(event(varint(at_ns), packets.begin(track, safe_text(cause, 100))))
                at_ns += lost_ns
                out.append(event(varint(at_ns), packets.end(track)))
        if out:
            yield out


def flow_of(run: Run, wait: Wait) -> int:
    """Return the id of the arrow of one wait: alike in the files of both nodes."""
    victim = run.at(wait.victim)
    who = (victim[0].key, victim[1].pid) if victim else ("", wait.victim)
    return hashed(63, "flow", *who, wait.start_ns)


def _waits(
    waits: Sequence[Wait], run: Run, start_ns: int, packets: Packets, groups: Groups, place: int
) -> list[bytes]:
    lanes, out = Lanes(), []
    for wait in sorted(waits, key=lambda one: (one.start_ns + one.duration_ns, -one.start_ns)):
        begin_ns = start_ns + wait.start_ns
        end_ns = begin_ns + wait.duration_ns
        lane = lanes.place(begin_ns, end_ns)
        title = f"{WAITS} ({lane + 1})" if lane else WAITS
        track = packets.child(groups.rank(place)[1], title, _ABOUT[WAITS])
        found = None if wait.culprit is None else run.at(wait.culprit)
        notes = [] if wait.step is None else [packets.annotated("step", wait.step)]
        if found is not None:
            notes.append(packets.annotated("culprit_node", safe_text(found[0].name, 100)))
        whose = f" for {_name(run, wait.culprit)}"
        if wait.culprit is None and wait.cause:  # data on their way, and the like: nobody's
            whose = ""
        name = f"waits{whose}" + (f": {safe_text(wait.cause, 100)}" if wait.cause else "")
        flows = [flow_of(run, wait)] if found is not None else []
        out.append(event(varint(begin_ns), packets.begin(track, name, *notes, flows=flows)))
        out.append(event(varint(end_ns), packets.end(track)))
    return out


def _late(
    waits: Sequence[Wait], run: Run, start_ns: int, packets: Packets, groups: Groups, place: int
) -> list[bytes]:
    """One slice while somebody waited, and at its end, where the late one came, all arrows."""
    out = []
    for some in _together(waits):
        begin_ns = start_ns + some[0].start_ns
        end_ns = start_ns + max(one.start_ns + one.duration_ns for one in some)
        track = packets.child(groups.rank(place)[1], LATE, _ABOUT[LATE])
        causes = dict.fromkeys(safe_text(one.cause, 100) for one in some if one.cause)
        name = "late: " + (", ".join(causes) or "cause unknown")
        notes = [packets.annotated("ranks_that_waited", len({one.victim for one in some}))]
        flows = [flow_of(run, one) for one in some if run.at(one.victim) is not None]
        out.append(event(varint(begin_ns), packets.begin(track, name, *notes)))
        out.append(event(varint(end_ns), packets.instant(track, "comes last", flows=flows)))
        out.append(event(varint(end_ns), packets.end(track)))
    return out


def _together(waits: Sequence[Wait]) -> list[list[Wait]]:
    """Waits that overlap, by start."""
    groups: list[list[Wait]] = []
    until_ns = -1
    for wait in sorted(waits, key=lambda one: (one.start_ns, one.victim)):
        if not groups or wait.start_ns >= until_ns:
            groups.append([])
        groups[-1].append(wait)
        until_ns = max(until_ns, wait.start_ns + wait.duration_ns)
    return groups


def _name(run: Run, place: int | None) -> str:
    found = None if place is None else run.at(place)
    if found is None:
        return "a rank not known"
    rank = found[1]
    return f"rank {rank.rank}" if rank.rank is not None else f"pid {rank.pid}"
