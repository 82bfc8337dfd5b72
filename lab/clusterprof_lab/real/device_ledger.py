"""The ledger of a job: every nanosecond of a device inside steps is compute, or lost to a cause.

The time of each rank from its first step to its last is cut into pieces: the device computed (its
log), was in an operation with other ranks, or was idle. An idle piece is charged to what the host
did at that time. The last rank to arrive at an operation makes the others wait; the wait is exactly
the difference of what they had spent since all ranks were last together. What the late rank spent
more than the others shares this wait in proportion, under the same culprits. Integers throughout:
the lost time adds up to the nanosecond.

    device log   compute        idle             operation 7       idle
    host                        data wait        (not used)        checkpoint
    charged      -              the loader's     late rank's,      checkpoint
                                own time         then transfer
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from clusterprof_lab.real.stopwatches import Incarnation, Item, Phase
from clusterprof_lab.truth import OTHER

WORK, TRANSFER = "work", "transfer"
STORAGE, DECODE, BLOCKED, CONTENTION, LOOP = "storage", "decode", "blocked", "contention", "loop"
HAND_OVER = "hand-over"
"""Parts whose leaf depends on what was injected; anything else is a leaf already. A batch is handed
over from its last item until the training process has it. The loop's time in the first step is
start-up: threads, buckets and states are made there."""
THROTTLED, COPY, STARTUP = "device-throttled", "h2d-copy", "startup"
NOBODY, OWN = -1, -2
Key = tuple[str, int, int, int]
Weights = tuple[tuple[str, int], ...]
Sums = dict[tuple[str, int], int]
"""(part, culprit) -> ns."""


class Segment(NamedTuple):
    """A segment of one device's time; an operation when `key` is set."""

    start_ns: int
    end_ns: int
    weights: Weights
    key: Key | None = None


def split_by_weight(ns: int, weights: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Split `ns` by weight into integers with the same sum: the largest remainders round up."""
    total = sum(weight for _, weight in weights)
    if total <= 0:
        return [(OTHER, ns)]
    parts = [(ns * weight // total, ns * weight % total) for _, weight in weights]
    missing = ns - sum(part for part, _ in parts)
    order = sorted(range(len(parts)), key=lambda row: -parts[row][1])[:missing]
    return [(name, parts[row][0] + (row in order)) for row, (name, _) in enumerate(weights)]


def split_steps(life: Incarnation) -> list[Segment]:
    """Split the steps of a rank's incarnation into segments without gap or overlap."""
    out: list[Segment] = []
    host = list(_iterate_host_activity(life))
    fixed = [
        Segment(operation.come_ns, operation.left_ns, (), operation.key)
        for operation in life.operations
    ]
    for busy in life.busy:
        if busy.what == "compute":
            useful = busy.end_ns - busy.start_ns - busy.slowed_ns
            weights = ((WORK, useful), (THROTTLED, busy.slowed_ns))
            fixed.append(Segment(busy.start_ns, busy.end_ns, weights))
    at_ns = life.began_ns
    for piece in sorted(fixed):
        start_ns, end_ns = max(piece.start_ns, at_ns), min(piece.end_ns, life.ended_ns)
        # An operation of no length is one all the same: somebody came last.
        if end_ns < start_ns or (end_ns == start_ns and piece.key is None):
            continue
        out += _charge_idle(at_ns, start_ns, host)
        out.append(piece._replace(start_ns=start_ns, end_ns=end_ns))
        at_ns = end_ns
    return out + _charge_idle(at_ns, life.ended_ns, host)


def _charge_idle(start_ns: int, end_ns: int, host: Sequence[Segment]) -> list[Segment]:
    """Charge a gap to the host's activity; `host` is sorted and has no gaps."""
    out = []
    first = max(0, bisect_right(host, start_ns, key=lambda piece: piece.start_ns) - 1)
    for row in range(first, len(host)):
        piece = host[row]
        if piece.start_ns >= end_ns:
            break
        begin_ns, until_ns = max(piece.start_ns, start_ns), min(piece.end_ns, end_ns)
        if begin_ns < until_ns:
            out.append(Segment(begin_ns, until_ns, piece.weights))
    return out


def _iterate_host_activity(life: Incarnation) -> Iterator[Segment]:
    """Yield the host's activity from the first step to the last: faults, copies, phases, loop."""
    claims = [Segment(start, end, ((cause, 1),)) for start, end, cause in life.injected]
    claims += [
        Segment(busy.start_ns, busy.end_ns, ((COPY, 1),))
        for busy in life.busy
        if busy.what == "copy"
    ]
    step = 0
    for phase in life.phases:
        if phase.name == "data_wait":
            items = life.batches[step] if step < len(life.batches) else []
            then = step + life.workers
            behind = life.batches[then] if step < then < len(life.batches) else []
            claims += _split_data_wait(phase, items, behind, first=step == 0)
            step += 1
        else:
            claims.append(Segment(phase.start_ns, phase.end_ns, ((phase.name, 1),)))
    at_ns = life.began_ns
    for piece in _make_disjoint(claims):
        yield from _iterate_script_time(life, at_ns, piece.start_ns)
        if piece.end_ns > at_ns:
            yield piece._replace(start_ns=max(at_ns, piece.start_ns))
            at_ns = piece.end_ns
    yield from _iterate_script_time(life, at_ns, life.ended_ns)


def _make_disjoint(claims: Sequence[Segment]) -> list[Segment]:
    """Give time that is claimed twice to the first claim; return the pieces by time."""
    edges = sorted({t for claim in claims for t in (claim.start_ns, claim.end_ns)})
    place = {t: row for row, t in enumerate(edges)}
    owner: list[Segment | None] = [None] * len(edges)
    for claim in claims:
        for row in range(place[claim.start_ns], place[claim.end_ns]):
            owner[row] = owner[row] or claim
    return [
        Segment(edges[row], edges[row + 1], claim.weights)
        for row, claim in enumerate(owner)
        if claim is not None
    ]


def _iterate_script_time(life: Incarnation, start_ns: int, end_ns: int) -> Iterator[Segment]:
    """Yield the script's own time, step by step; without a CPU it is contention."""
    at_ns, before_ns, delay_ns = start_ns, life.began_ns, 0
    for end_of_step_ns, so_far_ns in zip(life.loop_ends_ns, life.delays_ns, strict=True):
        stop_ns = min(end_ns, end_of_step_ns)
        if stop_ns > at_ns:
            inside = [
                phase for phase in life.phases if before_ns <= phase.start_ns < end_of_step_ns
            ]
            length_ns = end_of_step_ns - before_ns - sum(o.end_ns - o.start_ns for o in inside)
            late_ns = so_far_ns - delay_ns - sum(phase.delay_ns for phase in inside)
            late_ns = max(0, min(late_ns, length_ns)) if delay_ns else 0
            own = STARTUP if before_ns == life.began_ns and life.steps > 1 else LOOP
            yield Segment(at_ns, stop_ns, ((own, length_ns - late_ns), (CONTENTION, late_ns)))
            at_ns = stop_ns
        before_ns, delay_ns = end_of_step_ns, so_far_ns
    if end_ns > at_ns:
        yield Segment(at_ns, end_ns, ((LOOP, 1),))


def _split_data_wait(
    phase: Phase, items: Sequence[Item], behind: Sequence[Item], first: bool
) -> list[Segment]:
    """Cut a wait for a batch by what was done for that batch meanwhile.

    When it is made, its worker goes on to the batch `behind`; while it decodes, the thread that
    sends the finished one has to wait for its interpreter.
    """
    out: list[Segment] = []
    for item in items:
        read_ns = item.read_ns - item.begun_ns
        read_late_ns = min(item.read_delay_ns, read_ns)
        user_ns = min(item.read_user_ns, read_ns - read_late_ns)
        rest_ns = read_ns - read_late_ns - user_ns
        parts = ((STORAGE, rest_ns), (CONTENTION, read_late_ns), (DECODE, user_ns))
        out.append(Segment(item.begun_ns, item.read_ns, parts))
        out.append(_split_decoding(item, BLOCKED))
    out += [_split_decoding(item, HAND_OVER) for item in behind]
    inside = [
        piece._replace(start_ns=begin, end_ns=end)
        for piece in out
        if (begin := max(piece.start_ns, phase.start_ns)) < (end := min(piece.end_ns, phase.end_ns))
    ]
    if first and items and items[0].begun_ns > phase.start_ns:
        # The workers do not exist yet.
        early = min(items[0].begun_ns, phase.end_ns)
        inside.append(Segment(phase.start_ns, early, ((STARTUP, 1),)))
    # What is left of the wait: items are put together, packed, sent and unpacked.
    rest_ns = phase.end_ns - phase.start_ns - sum(piece.end_ns - piece.start_ns for piece in inside)
    late_ns = min(phase.delay_ns, rest_ns)
    way = ((HAND_OVER, rest_ns - late_ns), (CONTENTION, late_ns))
    return [*inside, Segment(phase.start_ns, phase.end_ns, way)]


def _split_decoding(item: Item, rest: str) -> Segment:
    decode_ns = item.made_ns - item.read_ns
    busy_ns = min(item.decode_cpu_ns, decode_ns)
    late_ns = min(item.decode_delay_ns, decode_ns - busy_ns)
    parts = ((DECODE, busy_ns), (CONTENTION, late_ns), (rest, decode_ns - busy_ns - late_ns))
    return Segment(item.read_ns, item.made_ns, parts)


def sum_losses(lives: Mapping[int, Incarnation]) -> list[Sums]:
    """Return what each rank lost, by (part, culprit): OWN is itself, NOBODY no rank."""
    cut = {rank: split_steps(life) for rank, life in lives.items()}
    members: dict[Key, dict[int, Segment]] = defaultdict(dict)
    for rank, rank_pieces in cut.items():
        for piece in rank_pieces:
            if piece.key is not None:
                members[piece.key][rank] = piece
    rows: dict[int, Iterator[Segment]] = {
        rank: iter(rank_pieces) for rank, rank_pieces in cut.items()
    }
    spent: dict[int, Sums] = {rank: defaultdict(int) for rank in lives}
    lost: dict[int, Sums] = {rank: defaultdict(int) for rank in lives}
    whole = {"device", "all"}
    for key in _order_operations(cut, members):
        for rank in members[key]:
            for piece in rows[rank]:
                if piece.key == key:
                    break
                _add_spent(piece, spent[rank], lost[rank])
        _charge_operation(members[key], spent, lost)
        if key[0] in whole and len(members[key]) == len(lives):
            common_ns = min(member.end_ns for member in members[key].values())
            for rank, piece in members[key].items():
                spent[rank] = defaultdict(int, {(TRANSFER, NOBODY): piece.end_ns - common_ns})
    for rank, row in rows.items():
        for piece in row:
            _add_spent(piece, spent[rank], lost[rank])
    return [dict(lost[rank]) for rank in sorted(lives)]


def _order_operations(
    cut: Mapping[int, Sequence[Segment]], members: Mapping[Key, Mapping[int, Segment]]
) -> Iterator[Key]:
    """Yield the operations so that those of each rank come in its own order.

    A sender may go on before its receiver has come: times alone do not order them.
    """
    left = {
        rank: deque(piece.key for piece in rank_pieces if piece.key)
        for rank, rank_pieces in cut.items()
    }
    while any(left.values()):
        heads = {row[0] for row in left.values() if row}
        ready = [key for key in heads if all(left[rank][0] == key for rank in members[key])]
        key = min(ready or heads, key=lambda key: max(o.start_ns for o in members[key].values()))
        for rank in members[key]:
            left[rank].remove(key)
        yield key


def _add_spent(piece: Segment, spent: Sums, lost: Sums) -> None:
    for part, ns in split_by_weight(piece.end_ns - piece.start_ns, piece.weights):
        spent[part, OWN] += ns
        if part != WORK:
            lost[part, OWN] += ns


def _charge_operation(
    members: Mapping[int, Segment], spent: Mapping[int, Sums], lost: Mapping[int, Sums]
) -> None:
    """Charge an operation: the waits until the last rank has arrived, then the transfer."""
    latest_ns = max(member.start_ns for member in members.values())
    last = next(rank for rank, piece in members.items() if piece.start_ns == latest_ns)
    shares_by_rank = {}
    for rank, piece in members.items():
        wait_ns = max(0, min(latest_ns, piece.end_ns) - piece.start_ns)  # a sender need not wait
        shares_by_rank[rank] = _split_wait(rank, last, spent, wait_ns)
        shares_by_rank[rank].append(((TRANSFER, NOBODY), piece.end_ns - piece.start_ns - wait_ns))
    for rank, shares in shares_by_rank.items():
        for key, ns in shares:
            lost[rank][key] += ns
            spent[rank][key] += ns


def _split_wait(
    rank: int, last: int, spent: Mapping[int, Sums], wait_ns: int
) -> list[tuple[tuple[str, int], int]]:
    """Split a wait in proportion to what the last rank spent more of."""
    if not wait_ns:
        return []
    mine, more = spent[rank], {}
    for (part, culprit), ns in spent[last].items():
        usual = mine.get((part, culprit), 0)
        # What the last waited because of this rank is compared with what this rank itself spent.
        usual += mine.get((part, OWN), 0) if culprit == rank else 0
        key = (part, last if culprit == OWN else culprit)
        more[key] = more.get(key, 0) + max(ns - usual, 0)
    keys = [key for key, ns in more.items() if ns]
    parts = split_by_weight(wait_ns, [(str(row), more[key]) for row, key in enumerate(keys)])
    return [(keys[int(row)] if row != OTHER else (OTHER, NOBODY), ns) for row, ns in parts]
