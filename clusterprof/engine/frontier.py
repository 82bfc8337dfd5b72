"""Jobs of which nobody marked the operations between ranks: their steps stand for these.

    steps of all ranks ──> do they end together? ──> operations ──> blame as ever (`engine.peers`)
                           no: nothing is said       families instead of leaves of waiting

Ranks are *synchronous* when their steps carry the same numbers and end together: in nine of ten
steps the distance between the ends of two ranks is, within 5 ms or a tenth of a step, that of the
32 steps around it; and it does not wander off, as that of ranks which are only equally fast does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from clusterprof.attribution.blame import UNKNOWN_PEER
from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.frontier import GROUP, TICK_NS
from clusterprof.attribution.ledger import RankBooks, charged
from clusterprof.attribution.partial import SHARE, Partial, merge
from clusterprof.attribution.unmarked import ASLEEP, PERHAPS, REASONS, SENDING, SPINNING
from clusterprof.engine.jobs import UNCLEAR
from clusterprof.engine.node import NodeResult
from clusterprof.engine.perhaps import FEWEST_STEPS, TOGETHER_RATIO, borne_out, kept_together
from clusterprof.engine.spill import Place, Reader
from clusterprof.timeline.model import SOURCE_DEVICE_SAMPLES, Int
from clusterprof.timeline.operation_rows import (
    ARRIVE,
    HEAD_ROWS,
    SEQUENCE,
    STAY,
    RankOperations,
    read_block,
)
from clusterprof.timeline.periods import SURE_FROM, Period

NETWORK = "network"
APART_NS, APART_RATIO = 5_000_000, 0.1
AROUND = 32
_ALIKE_RATIO = 0.1
"""Periods of ranks; one may show at a multiple of another's, which falls on a sample."""
_WANDERS = 2.5
"""Over 16 steps the distance of ranks that know nothing of each other grows 4 times as much as over
one, that of synchronous ranks not at all."""
_WANDERS_RATIO = 0.01  # of a step: less than that is jitter


@dataclass(frozen=True, slots=True)
class Stepped:
    """The nodes with steps in place of operations, where these stand for them."""

    nodes: tuple[NodeResult, ...]
    jobs: frozenset[int] = frozenset()
    """Numbers of the jobs in which they do."""
    whole: frozenset[int] = frozenset()
    """Those of them of which all ranks were recorded."""
    members: Mapping[tuple[int, int], Int] = field(default_factory=dict)
    """Ranks of the whole world of each, by (job, group)."""
    notes: tuple[str, ...] = ()


def stepped(nodes: Sequence[NodeResult], place: Place, troubled: Collection[int] = ()) -> Stepped:
    """Let the steps of synchronous jobs without marked operations stand for these."""
    by_job: dict[int, list[RankBooks]] = {}
    for node in nodes:
        for one in node.books:
            if one.job != UNCLEAR:
                by_job.setdefault(one.job, []).append(one)
    chosen: set[int] = set()
    spun: set[int] = set(troubled)
    notes = []
    for job, books in by_job.items():
        with_steps = [one for one in books if one.frontier is not None]
        if len(with_steps) < 2 or any(one.operations is not None for one in books):
            continue
        if not any(one.partial.unexplained.keys() & set(REASONS) for one in with_steps):
            continue  # nobody was seen to wait: without a device, or for nothing
        if all(one.marked for one in with_steps):
            with Reader(place) as reader:
                ends = [_ends(one.frontier, reader)[:2] for one in with_steps if one.frontier]
            if not (together(ends) or kept_together(ends, [_own_ns(one) for one in with_steps])):
                notes.append(_ALONE)
                continue
            notes.append(_STEPS)
        elif any(one.marked for one in with_steps):
            continue
        else:
            alike, note = _alike([one.period for one in with_steps])
            notes.append(note)
            if not alike:
                continue
        chosen.add(job)
        if any(one.perhaps is not None for one in with_steps) and job not in spun:
            with Reader(place) as reader:
                if borne_out([_spun(one, reader) for one in with_steps]):
                    spun.add(job)
    members = {
        (job, GROUP): np.arange(max(one.place.world_size or 0 for one in by_job[job]))
        for job in chosen
    }
    moved = tuple(
        replace(
            node,
            books=tuple(
                _by_steps(one, one.job in spun) if one.job in chosen else one for one in node.books
            ),
        )
        for node in nodes
    )
    whole = {job for job in chosen if len(by_job[job]) >= members[job, GROUP].size}
    return Stepped(moved, frozenset(chosen), frozenset(whole), members, tuple(dict.fromkeys(notes)))


def _by_steps(one: RankBooks, spun: bool) -> RankBooks:
    """`spun`: what perhaps was waiting was."""
    if spun and one.perhaps is not None:
        return replace(one, operations=one.perhaps)
    return replace(one, operations=one.frontier, perhaps=None)


_STEPS = (
    "no operations between ranks were marked: who waited for whom is told by their steps, and what"
    " was waited for by family"
)
_STRETCHES = (
    "neither steps nor operations between ranks were marked: who waited for whom is told by who"
    " waited least; "
)
_ALONE = (
    "no operations between ranks were marked, and their steps do not end together: time in which"
    " they slept inside steps has no cause"
)


def _alike(periods: Sequence[Period | None]) -> tuple[bool, str]:
    """Return whether steps, as far as they can be told, are equally long; and a note on them."""
    acf = min((one.acf if one is not None else 0.0) for one in periods)
    if acf < SURE_FROM:
        return True, f"{_STRETCHES}no step can be told, what repeats best does so by {acf:.2f}"
    length_s = [one.samples * TICK_NS / 1e9 for one in periods if one is not None]
    ratio = max(length_s) / min(length_s)
    if abs(ratio - round(ratio)) > _ALIKE_RATIO * round(ratio):
        said = f"{min(length_s):.1f} and {max(length_s):.1f} s"
        return False, f"ranks repeat every {said}: they do not wait for each other in every step"
    return True, f"{_STRETCHES}steps seem to take {min(length_s):.1f} s (autocorrelation {acf:.2f})"


def alone(nodes: Sequence[NodeResult]) -> tuple[NodeResult, ...]:
    """Charge what a device spun, where no other rank of its job was recorded, to those."""
    count = Counter(one.job for node in nodes for one in node.books)
    return tuple(
        replace(
            node,
            books=tuple(
                _unknown_peer(one) if count[one.job] == 1 and one.job != UNCLEAR else one
                for one in node.books
            ),
        )
        for node in nodes
    )


def _unknown_peer(one: RankBooks) -> RankBooks:
    units = one.partial.unexplained.get(SPINNING, 0)
    if not units:
        return one
    claim = {(UNKNOWN_PEER, "C", SOURCE_DEVICE_SAMPLES): units}
    partial = merge(one.partial, Partial(claimed=claim, unexplained={SPINNING: -units}))
    left = {reason: ns for reason, ns in partial.unexplained.items() if ns}
    felt = {**one.felt, UNKNOWN_PEER: one.felt.get(UNKNOWN_PEER, 0) + units // SHARE}
    return charged(one, replace(partial, unexplained=left), felt, one.caused)


def together(ends: Sequence[tuple[Int, Int]]) -> bool:
    """Return whether ranks are synchronous; number and end of the steps of each."""
    numbers = ends[0][0]
    for own, _ in ends[1:]:
        numbers = np.intersect1d(numbers, own)
    most = max(number.size for number, _ in ends)
    if numbers.size < max(FEWEST_STEPS, TOGETHER_RATIO * most):
        return False
    table = np.stack([end[np.searchsorted(number, numbers)] for number, end in ends])
    middle = np.sort(table - table[:, :1], axis=0)[(len(ends) - 1) // 2]
    step_ns = float(np.median(np.diff(middle)))
    return all(_with(row - row[0] - middle, step_ns) for row in table)


def _own_ns(one: RankBooks) -> int:
    """What a rank lost by itself."""
    units = sum(one.partial.unexplained.get(name, 0) for name in REASONS)
    return one.partial.totals.get("lost", 0) - units // SHARE


def _with(apart_ns: Int, step_ns: float) -> bool:
    """`apart_ns`: from the middle rank's end of each step to another's."""
    allowed = max(APART_NS, APART_RATIO * step_ns)
    near = 0
    for at in range(0, apart_ns.size, AROUND):
        part = apart_ns[at : at + AROUND]
        near += int(np.count_nonzero(np.abs(part - np.median(part)) <= allowed))
    if near < TOGETHER_RATIO * apart_ns.size:
        return False
    far = AROUND // 2
    if apart_ns.size < 2 * far:
        return True
    once = np.median(np.abs(apart_ns[1:] - apart_ns[:-1]))
    later = np.median(np.abs(apart_ns[far:] - apart_ns[:-far]))
    return bool(later <= max(_WANDERS * once, _WANDERS_RATIO * step_ns))


def _ends(operations: RankOperations, reader: Reader) -> tuple[Int, Int, Int]:
    """Number and end of all steps of a rank, by number, and the time waited in each."""
    parts = [np.zeros((3, 0), np.int64)]
    for block in operations.blocks:
        kinds = max((int(c) for c in (*block.come, *block.go)), default=-1) + 1
        rows = np.zeros((HEAD_ROWS + 2 * kinds, block.rows), np.int64)
        read_block(reader.get(block.place, block.length), block, np.arange(kinds), rows)
        parts.append(np.stack([rows[SEQUENCE], rows[ARRIVE] + rows[STAY], rows[STAY]]))
    number, end, stay = np.concatenate(parts, axis=1)
    number, first = np.unique(number, return_index=True)
    return number, end[first], stay[first]


def _spun(one: RankBooks, reader: Reader) -> tuple[Int, Int, Int]:
    """Number and end of the steps of a rank, and for how long its device perhaps span in each."""
    assert one.frontier is not None
    number, end, stay = _ends(one.frontier, reader)
    if one.perhaps is None:
        return number, end, stay if SPINNING in one.partial.unexplained else 0 * stay
    more = _ends(one.perhaps, reader)[2]
    return number, end, more if SPINNING in one.partial.unexplained else more - stay


def taken_from(one: RankBooks, felt_ns: Mapping[str, int], rest_ns: int) -> dict[str, int]:
    """Return what each reason of a rank loses (in ns, negative) to what it felt and to `rest_ns`.

    Data on their way are taken from where the device spun or the node sent first; where it perhaps
    spun, only if its steps say so.
    """
    left = {name: one.partial.unexplained.get(name, 0) // SHARE for name in REASONS}
    if one.perhaps is None:
        left[PERHAPS] = 0
    out = dict.fromkeys(REASONS, 0)
    moved = felt_ns.get(NETWORK, 0)
    for ns, order in (
        (moved, (SPINNING, SENDING, ASLEEP, PERHAPS)),
        (sum(felt_ns.values()) + rest_ns - moved, (PERHAPS, ASLEEP, SENDING, SPINNING)),
    ):
        for name in order:
            part = min(ns, left[name])
            left[name] -= part
            out[name] -= part
            ns -= part
        assert ns == 0, "a rank waited for longer than it may have"
    return out


def shown_ns(books: Sequence[RankBooks], troubled: Collection[int]) -> dict[int, int]:
    """Return by job for how long data were on their way at most, as the least of its ranks shows.

    What all ranks of a job slept alike is not known to be waiting for data, unless devices spin,
    nodes send as fast as they can, or the network of the job is `troubled`: then there is no limit.
    """
    out: dict[int, int] = {}
    for one in books:
        if one.frontier is not None and one.job not in troubled:
            units = sum(one.partial.unexplained.get(name, 0) for name in (SENDING, SPINNING))
            out[one.job] = min(units // SHARE, out.get(one.job, units // SHARE))
    return out


def known_to_move(felt_ns: Mapping[str, int], shown: int | None) -> dict[str, int]:
    """Return what was felt, with no more data on their way than is shown; None = no limit."""
    out = dict(felt_ns)
    if shown is not None:
        out[NETWORK] = min(out.get(NETWORK, 0), shown)
    return {cause: ns for cause, ns in out.items() if ns}


def by_family(amounts: Mapping[str, int]) -> dict[str, int]:
    """Return amounts with what blame calls waiting and transfer under the names of families.

    Without marks it cannot be told what the work of a late rank was, nor what moved data. Time that
    was waited for ranks that were not recorded keeps its name.
    """
    out: Counter[str] = Counter()
    for cause, ns in amounts.items():
        family = CAUSES[cause].family if cause in CAUSES else ""
        general = family in ("network", "synchronization") and cause != UNKNOWN_PEER
        out[family if general else cause] += ns
    return {cause: ns for cause, ns in out.items() if ns}
