"""Ranks that came to an operation and never left it: who waits for whom when a recording ends.

What a rank was in is known from the word that the probe leaves when an operation begins (event
`operation-under-way`); `attribution.blame_hangs` follows who waits for whom. Only silence makes a
hang: a root that still spoke shortly before the end was at work, and the others waited for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from clusterprof.attribution.blame_hangs import Hang, Stuck, hangs
from clusterprof.engine.endings import Ending, UnderWay
from clusterprof.engine.node import NodeResult
from clusterprof.probe import layout

HANG_NS = 10_000_000_000
_LONGER = 2  # times the longest operation that ended
_PAIR = (layout.SEND, layout.RECV)
GROUP_ANNOUNCED = "group-announced"
Person = tuple[int, int]  # number of the job, global rank


@dataclass(frozen=True, slots=True)
class Recorded:
    """A rank whose recording lies here."""

    node: NodeResult
    ending: Ending

    @property
    def silent_ns(self) -> int:
        """How long it had said nothing when it was seen last."""
        return self.ending.seen_ns - self.ending.spoke_ns

    def ended_alone(self, waiting: Recorded) -> bool:
        """Return whether it ended by itself, well before one that waited was seen last.

        On two machines times are not compared: who is ended with the job gets the same signal.
        """
        mine, theirs = self.ending.exited, waiting.ending.exited
        if mine is None:
            return False
        boot = self.node.facts.boot_id
        if boot and boot == waiting.node.facts.boot_id:
            return self.ending.exited_ns < waiting.ending.seen_ns - HANG_NS // 2
        return theirs is None or mine.get("signal") != theirs.get("signal")

    def waited_ns(self, under_way: UnderWay) -> int:
        """How long it had been in an operation when it was seen last."""
        return self.ending.seen_ns - under_way.start_ns


@dataclass(frozen=True, slots=True)
class Standstill:
    """All who stood still when their recordings ended, by rank of their job."""

    people: tuple[Person, ...]
    """The numbers in `found` stand for these."""
    recorded: Mapping[Person, Recorded]
    found: tuple[Hang, ...] = ()
    at_work: tuple[Hang, ...] = ()
    """Those whose root was still at work."""
    stuck: Mapping[int, UnderWay] = field(default_factory=dict)


def standstill(nodes: Sequence[NodeResult]) -> Standstill:
    """Return who waits for whom at the end of the recordings, most waited for first."""
    recorded = dict(_recorded(nodes))
    people = _People(recorded, _announced(nodes, recorded))
    stuck: list[Stuck] = []
    operations: dict[int, UnderWay] = {}
    for person, one in recorded.items():
        under_way = one.ending.under_way or people.left_behind(person, one)
        if under_way is None:
            continue
        team = people.team(person, under_way, one.ending)
        if team is not None:
            number = people.number(person)
            stuck.append(Stuck(number, *team, one.waited_ns(under_way)))
            operations[number] = under_way
    seen = frozenset(people.number(person) for person in recorded)
    known = tuple(people.known)
    found = [
        one
        for one in hangs(stuck, people.members, seen)
        if any(_long(recorded[known[number]], operations[number]) for number in one.waiting)
    ]
    idle = tuple(one for one in found if not _at_work(one, known, recorded))
    busy = tuple(one for one in found if one not in idle)
    return Standstill(known, recorded, idle, busy, operations)


def _long(one: Recorded, under_way: UnderWay) -> bool:
    return one.waited_ns(under_way) >= max(HANG_NS, _LONGER * one.ending.longest_ns)


def _at_work(hang: Hang, people: Sequence[Person], recorded: Mapping[Person, Recorded]) -> bool:
    root = recorded.get(people[hang.roots[0]])
    if hang.circle or hang.inside or root is None:
        return False
    if root.ended_alone(recorded[people[hang.waiting[0]]]):
        return False
    return root.silent_ns < HANG_NS


def _recorded(nodes: Sequence[NodeResult]) -> Iterator[tuple[Person, Recorded]]:
    """Every rank that says who it is; of several processes of one rank the one seen last."""
    by_process = {
        (node.facts.key, one.ledger.pid, one.started_ticks): one.job
        for node in nodes
        for one in node.books
    }
    by_place = {
        (one.place.job, one.place.meets_at, one.place.world_size, one.place.restart): one.job
        for node in nodes
        for one in node.books
    }
    for node in nodes:
        for ending in sorted(node.endings, key=lambda one: one.seen_ns):
            place = ending.place
            alike = place.job, place.meets_at, place.world_size, place.restart
            process = node.facts.key, ending.pid, ending.started_ticks
            job = by_process.get(process, by_place.get(alike, -1))
            if job >= 0 and place.rank is not None:
                yield (job, place.rank), Recorded(node, ending)


def _announced(
    nodes: Sequence[NodeResult], recorded: Mapping[Person, Recorded]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """The global ranks of every group that was announced, by job and group."""
    jobs = {(one.node.facts.key, one.ending.pid): job for (job, _), one in recorded.items()}
    out = {}
    for node in nodes:
        for event in node.loaded.events:
            said = event.attributes
            job = jobs.get((node.facts.key, said.get("pid", -1)))
            if event.kind == GROUP_ANNOUNCED and job is not None:
                out[job, int(said["group"])] = tuple(int(rank) for rank in said["ranks"])
    return out


class _People:
    """Numbers for ranks, whether recorded or not, and for the teams they wait in."""

    def __init__(
        self,
        recorded: Mapping[Person, Recorded],
        announced: Mapping[tuple[int, int], tuple[int, ...]],
    ) -> None:
        self.known: dict[Person, int] = {}
        self._recorded = recorded
        self.members: dict[int, list[int]] = {}
        self._teams: dict[tuple[int, ...], int] = {}
        self._groups = {key: set(ranks) for key, ranks in announced.items()}
        for (job, rank), one in recorded.items():
            under_way = one.ending.under_way
            named = [*one.ending.reached, *([under_way.group] if under_way is not None else [])]
            for group in named:
                if (job, group) not in announced:
                    self._groups.setdefault((job, group), set()).add(rank)

    def number(self, person: Person) -> int:
        """Return the number of a rank."""
        return self.known.setdefault(person, len(self.known))

    def left_behind(self, person: Person, one: Recorded) -> UnderWay | None:
        """Return the last operation of a silent rank, if a member has not come so far.

        The host of a rank with a device leaves before the operation ends, and then stands still
        wherever it needs the result.
        """
        if one.silent_ns < HANG_NS:
            return None
        for group, left in sorted(one.ending.reached.items(), key=lambda i: -i[1].end_ns):
            if left.operation & layout.OPERATION_MASK in _PAIR or left.number < 0:
                continue
            for rank in self._groups.get((person[0], group), ()):
                other = self._recorded.get((person[0], rank))
                if other is not None and group in other.ending.reached:
                    began = other.ending.under_way
                    there = began is not None and began.group == group
                    if other.ending.reached[group].number + there < left.number:
                        return UnderWay(left.start_ns, group, left.number, left.operation)
        return None

    def team(self, person: Person, began: UnderWay, ending: Ending) -> tuple[int, int] | None:
        """Return the team a rank waits in and the number of the operation; None = not known."""
        job, rank = person
        if began.operation & layout.OPERATION_MASK in _PAIR:
            peer = (began.operation >> layout.PEER_SHIFT & layout.PEER_MASK) - 1
            if peer < 0:
                return None
            sends = began.operation & layout.OPERATION_MASK == layout.SEND
            giver, taker = (rank, peer) if sends else (peer, rank)
            return self._team((job, began.group, giver, taker), (giver, taker)), began.number
        ranks = self._groups.get((job, began.group), {rank})
        number = began.number
        if number < 0 and began.group in ending.reached:
            number = ending.reached[began.group].number + 1
        return self._team((job, began.group), sorted(ranks)), number

    def _team(self, key: tuple[int, ...], ranks: Sequence[int]) -> int:
        number = self._teams.setdefault(key, len(self._teams))
        if number not in self.members:
            self.members[number] = [self.number((key[0], rank)) for rank in ranks]
        return number
