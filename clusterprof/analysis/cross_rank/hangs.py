"""Find ranks that never left an operation, and which rank each waits for.

The probe leaves a word when an operation begins; from it the operation of a hung rank
is known (event `operation-under-way`). analysis.attribution.wait_for.hangs follows the wait-for
graph. Ranks are in the same operation if its group, its number and its kind are equal. Only a
root without activity makes a hang: a root that recorded a span shortly before the end was
working, and the others waited for it, unless it has gone on for many steps without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from clusterprof.analysis.attribution.wait_for.hangs import Hang, StuckRank, find_hangs
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.node.observations import OperationUnderWay, RankEnding
from clusterprof.probe import layout

HANG_NS = 10_000_000_000
"""Shortest wait, and shortest inactivity of its root, that counts as a hang, ns."""
MIN_DIVERGED_STEPS, _DIVERGED_FACTOR = 10, 2
"""Steps after its last operation from which on a rank has diverged: at least this many, and times
the most it ever marked between two operations."""
_LONGEST_OPERATION_FACTOR = 2  # times the longest operation that ended
_POINT_TO_POINT = (layout.SEND, layout.RECV)
GROUP_ANNOUNCED = "group-announced"
JobRank = tuple[int, int]  # number of the job, global rank


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """A rank that has a recording."""

    node: NodeResult
    ending: RankEnding

    @property
    def silent_ns(self) -> int:
        """Return the time from its last span to its last record, ns."""
        return self.ending.last_record_ns - self.ending.last_span_ns

    def ended_before(self, waiting: RecordedRank) -> bool:
        """Return whether this rank exited on its own, well before a waiting rank's last record.

        Times of two machines are not compared: a rank that was ended with its job got the same
        signal.
        """
        own_exit, waiting_exit = self.ending.exited, waiting.ending.exited
        if own_exit is None:
            return False
        boot = self.node.facts.boot_id
        if boot and boot == waiting.node.facts.boot_id:
            return self.ending.exited_ns < waiting.ending.last_record_ns - HANG_NS // 2
        return waiting_exit is None or own_exit.get("signal") != waiting_exit.get("signal")

    @property
    def has_diverged(self) -> bool:
        """Return whether it went on for many steps without an operation."""
        steps = self.ending.steps
        return steps.after_last >= max(MIN_DIVERGED_STEPS, _DIVERGED_FACTOR * steps.most)

    def waited_ns(self, under_way: OperationUnderWay) -> int:
        """Return how long the rank had been in an operation at its last record, ns."""
        return self.ending.last_record_ns - under_way.start_ns


@dataclass(frozen=True, slots=True)
class HangAnalysis:
    """Ranks that waited in an operation when their recordings ended."""

    ranks: tuple[JobRank, ...]
    """The ranks that the numbers in `hangs` and `under_way` stand for."""
    recorded: Mapping[JobRank, RecordedRank]
    hangs: tuple[Hang, ...] = ()
    waits_for_working: tuple[Hang, ...] = ()
    """Waits whose root was still working: no hangs."""
    under_way: Mapping[int, OperationUnderWay] = field(default_factory=dict)
    """Operation that each waiting rank was in, by its number."""


def analyze_hangs(nodes: Sequence[NodeResult]) -> HangAnalysis:
    """Find which rank waits for which at the end of the recordings, most awaited root first."""
    recorded = dict(_list_recorded_ranks(nodes))
    numbering = _RankNumbering(recorded, _read_group_members(nodes, recorded))
    stuck: list[StuckRank] = []
    operations: dict[int, OperationUnderWay] = {}
    for job_rank, recorded_rank in recorded.items():
        under_way = recorded_rank.ending.under_way or numbering.find_left_operation(
            job_rank, recorded_rank
        )
        if under_way is None:
            continue
        group = numbering.find_group(job_rank, under_way, recorded_rank.ending)
        if group is not None:
            number = numbering.number(job_rank)
            stuck.append(StuckRank(number, *group, recorded_rank.waited_ns(under_way)))
            operations[number] = under_way
    recorded_numbers = frozenset(numbering.number(job_rank) for job_rank in recorded)
    ranks = tuple(numbering.numbers)
    waits = [
        hang
        for hang in find_hangs(stuck, numbering.members, recorded_numbers)
        if any(
            _is_long_wait(recorded[ranks[number]], operations[number]) for number in hang.waiting
        )
    ]
    idle = tuple(hang for hang in waits if not _is_root_working(hang, ranks, recorded))
    busy = tuple(hang for hang in waits if hang not in idle)
    return HangAnalysis(ranks, recorded, idle, busy, operations)


def _is_long_wait(recorded: RecordedRank, under_way: OperationUnderWay) -> bool:
    return recorded.waited_ns(under_way) >= max(
        HANG_NS, _LONGEST_OPERATION_FACTOR * recorded.ending.longest_operation_ns
    )


def _is_root_working(
    hang: Hang, ranks: Sequence[JobRank], recorded: Mapping[JobRank, RecordedRank]
) -> bool:
    root = recorded.get(ranks[hang.roots[0]])
    if hang.is_cycle or hang.is_complete or root is None:
        return False
    if root.ended_before(recorded[ranks[hang.waiting[0]]]) or root.has_diverged:
        return False
    return root.silent_ns < HANG_NS


def _list_recorded_ranks(nodes: Sequence[NodeResult]) -> Iterator[tuple[JobRank, RecordedRank]]:
    """Yield every rank with a known number; of several processes of one rank the latest."""
    by_process = {
        (node.facts.key, rank.ledger.pid, rank.started_ticks): rank.job
        for node in nodes
        for rank in node.ranks
    }
    by_place = {
        (
            rank.job_position.job,
            rank.job_position.rendezvous,
            rank.job_position.world_size,
            rank.job_position.restart,
        ): rank.job
        for node in nodes
        for rank in node.ranks
    }
    for node in nodes:
        for ending in sorted(node.endings, key=lambda ending: ending.last_record_ns):
            job_position = ending.job_position
            job_key = (
                job_position.job,
                job_position.rendezvous,
                job_position.world_size,
                job_position.restart,
            )
            process = node.facts.key, ending.pid, ending.started_ticks
            job = by_process.get(process, by_place.get(job_key, -1))
            if job >= 0 and job_position.rank is not None:
                yield (job, job_position.rank), RecordedRank(node, ending)


def _read_group_members(
    nodes: Sequence[NodeResult], recorded: Mapping[JobRank, RecordedRank]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the global ranks of every announced process group, by job and group."""
    jobs = {(rank.node.facts.key, rank.ending.pid): job for (job, _), rank in recorded.items()}
    last: dict[tuple[int, int], Sequence[int]] = {}
    for node in nodes:
        for event in node.loaded.events:
            attributes = event.attributes
            job = jobs.get((node.facts.key, attributes.get("pid", -1)))
            if event.kind == GROUP_ANNOUNCED and job is not None:
                last[job, int(attributes["group"])] = attributes["ranks"]
    return {key: tuple(int(rank) for rank in ranks) for key, ranks in last.items()}


class _RankNumbering:
    """Numbers ranks, whether recorded or not, and the groups they wait in."""

    def __init__(
        self,
        recorded: Mapping[JobRank, RecordedRank],
        announced: Mapping[tuple[int, int], tuple[int, ...]],
    ) -> None:
        self.numbers: dict[JobRank, int] = {}
        self._recorded = recorded
        self.members: dict[int, list[int]] = {}
        self._group_numbers: dict[tuple[int, ...], int] = {}
        self._groups = {key: set(ranks) for key, ranks in announced.items()}
        for (job, rank), recorded_rank in recorded.items():
            under_way = recorded_rank.ending.under_way
            named = [
                *recorded_rank.ending.reached,
                *([under_way.group] if under_way is not None else []),
            ]
            for group in named:
                if (job, group) not in announced:
                    self._groups.setdefault((job, group), set()).add(rank)

    def number(self, job_rank: JobRank) -> int:
        """Return the number of a rank."""
        return self.numbers.setdefault(job_rank, len(self.numbers))

    def find_left_operation(
        self, job_rank: JobRank, recorded: RecordedRank
    ) -> OperationUnderWay | None:
        """Return the last operation of a silent rank if another member has not reached it.

        The host of a rank with a device leaves before the operation ends on the device, and
        then blocks wherever it needs the result. None when every member has reached the
        operation.
        """
        if recorded.silent_ns < HANG_NS:
            return None
        for group, left_operation in sorted(
            recorded.ending.reached.items(), key=lambda i: -i[1].end_ns
        ):
            if (
                left_operation.operation & layout.OPERATION_MASK in _POINT_TO_POINT
                or left_operation.number < 0
            ):
                continue
            for rank in self._groups.get((job_rank[0], group), ()):
                peer = self._recorded.get((job_rank[0], rank))
                if peer is not None and group in peer.ending.reached:
                    began = peer.ending.under_way
                    is_waiting = began is not None and began.group == group
                    if peer.ending.reached[group].number + is_waiting < left_operation.number:
                        return OperationUnderWay(
                            left_operation.start_ns,
                            group,
                            left_operation.number,
                            left_operation.operation,
                        )
        return None

    def find_group(
        self, job_rank: JobRank, began: OperationUnderWay, ending: RankEnding
    ) -> tuple[int, int] | None:
        """Return the group a rank waits in and the number of the operation; None = not known."""
        job, rank = job_rank
        if began.operation & layout.OPERATION_MASK in _POINT_TO_POINT:
            peer = (began.operation >> layout.PEER_SHIFT & layout.PEER_MASK) - 1
            if peer < 0:
                return None
            sends = began.operation & layout.OPERATION_MASK == layout.SEND
            sender, receiver = (rank, peer) if sends else (peer, rank)
            return self._number_group(
                (job, began.group, sender, receiver), (sender, receiver)
            ), began.number
        ranks = self._groups.get((job, began.group), {rank})
        number = began.number
        if number < 0 and began.group in ending.reached:
            number = ending.reached[began.group].number + 1
        # One operation has one kind: members in another wait for something else.
        kind = began.operation & layout.OPERATION_MASK
        return self._number_group((job, began.group, kind), sorted(ranks)), number

    def _number_group(self, key: tuple[int, ...], ranks: Sequence[int]) -> int:
        number = self._group_numbers.setdefault(key, len(self._group_numbers))
        if number not in self.members:
            self.members[number] = [self.number((key[0], rank)) for rank in ranks]
        return number
