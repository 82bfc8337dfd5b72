"""Jobs of which nobody marked the operations between ranks: their steps stand for these.

    steps of all ranks ──> do they end together? ──> operations ──> blame as ever (`engine.peers`)
                           no: nothing is said       families instead of leaves of waiting

Which ranks are synchronous says `synchronous`, what becomes of steps that come apart `merged`.
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
from clusterprof.attribution.unmarked import (
    ASLEEP,
    PERHAPS,
    REASONS,
    SENDING,
    SPINNING,
    SURELY,
)
from clusterprof.engine.jobs import UNCLEAR
from clusterprof.engine.merged import ends_of, merged, steady, together_at
from clusterprof.engine.node import NodeResult
from clusterprof.engine.perhaps import borne_out, spins
from clusterprof.engine.spill import Place, Reader, Shelf
from clusterprof.engine.synchronous import kept_together, together
from clusterprof.timeline.model import SOURCE_DEVICE_SAMPLES, Int
from clusterprof.timeline.periods import SURE_FROM, Period

NETWORK = "network"
_ALIKE_RATIO = 0.1
"""Periods of ranks; one may show at a multiple of another's, which falls on a sample."""


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
    steady_ns: Mapping[int, int] = field(default_factory=dict)
    """By job: for how long all ranks waited alike in every step, all steps together."""


def stepped(nodes: Sequence[NodeResult], place: Place, troubled: Collection[int] = ()) -> Stepped:
    """Let the steps of synchronous jobs without marked operations stand for these."""
    by_job: dict[int, list[RankBooks]] = {}
    for node in nodes:
        for one in node.books:
            if one.job != UNCLEAR:
                by_job.setdefault(one.job, []).append(one)
    chosen: set[int] = set()
    spun: set[int] = set(troubled)
    numbers: dict[int, Int] = {}
    steady_ns: dict[int, int] = {}
    notes = []
    for job, books in by_job.items():
        with_steps = [one for one in books if one.frontier is not None]
        if len(with_steps) < 2 or any(one.operations is not None for one in books):
            continue
        if not any(one.partial.unexplained.keys() & set(REASONS) for one in with_steps):
            continue  # nobody was seen to wait: without a device, or for nothing
        if all(one.marked for one in with_steps):
            found = _in_step(with_steps, place)
            notes.append(_ALONE if found is None else _STEPS)
            if found is None:
                continue
            numbers[job], steady_ns[job] = found
        elif any(one.marked for one in with_steps):
            continue
        else:
            alike, note = _alike([one.period for one in with_steps])
            notes.append(note)
            if not alike:
                continue
        chosen.add(job)
        if job not in spun and _perhaps_spun(with_steps, place):
            spun.add(job)
    members = {
        (job, GROUP): np.arange(max(one.place.world_size or 0 for one in by_job[job]))
        for job in chosen
    }
    with Reader(place) as reader, Shelf(place) as shelf:
        moved = tuple(
            replace(
                node,
                books=tuple(
                    _merged(_by_steps(one, one.job in spun), numbers.get(one.job), reader, shelf)
                    if one.job in chosen
                    else one
                    for one in node.books
                ),
            )
            for node in nodes
        )
    whole = {job for job in chosen if len(by_job[job]) >= members[job, GROUP].size}
    notes = list(dict.fromkeys(notes))
    return Stepped(moved, frozenset(chosen), frozenset(whole), members, tuple(notes), steady_ns)


def _in_step(books: Sequence[RankBooks], place: Place) -> tuple[Int, int] | None:
    """Return the steps that synchronous ranks end together, and for how long all waited alike in
    every step; None for ranks that are not synchronous."""
    with Reader(place) as reader:
        table = [ends_of(one.frontier, reader) for one in books if one.frontier is not None]
    ends = [(number, end) for number, end, _ in table]
    own_ns = [_own_ns(one) for one in books]
    if not (together(ends) or kept_together(ends, own_ns, any(map(spins, books)))):
        return None
    return together_at(ends), steady(table)


def _perhaps_spun(books: Sequence[RankBooks], place: Place) -> bool:
    """Return whether devices span that perhaps did.

    Ranks of a job run one program: where one was seen to spin, the others do too.
    """
    if all(one.perhaps is None for one in books):
        return False
    with Reader(place) as reader:
        return any(map(spins, books)) or borne_out([_spun(one, reader) for one in books])


def _by_steps(one: RankBooks, spun: bool) -> RankBooks:
    """`spun`: what perhaps was waiting was."""
    if spun and one.perhaps is not None:
        return replace(one, operations=one.perhaps)
    return replace(one, operations=one.frontier, perhaps=None)


def _merged(one: RankBooks, numbers: Int | None, reader: Reader, shelf: Shelf) -> RankBooks:
    if numbers is None or one.operations is None:
        return one
    operations = merged(one.operations, numbers, reader, shelf)
    return replace(one, operations=operations)


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


def _own_ns(one: RankBooks) -> int:
    """What a rank lost by itself."""
    units = sum(one.partial.unexplained.get(name, 0) for name in REASONS)
    return one.partial.totals.get("lost", 0) - units // SHARE


def _spun(one: RankBooks, reader: Reader) -> tuple[Int, Int, Int]:
    """Number and end of the steps of a rank, and for how long its device perhaps span in each."""
    assert one.frontier is not None
    number, end, stay = ends_of(one.frontier, reader)
    if one.perhaps is None:
        return number, end, stay if SPINNING in one.partial.unexplained else 0 * stay
    more = ends_of(one.perhaps, reader)[2]
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


def shown_ns(
    books: Sequence[RankBooks],
    troubled: Collection[int],
    steady_ns: Mapping[int, int],
    sending_ns: Mapping[int, int],
) -> dict[int, int]:
    """Return by job for how long data were on their way at most, as the least of its ranks shows.

    What all ranks of a job slept alike is not known to be waiting for data, unless devices spin,
    nodes send as fast as they can, or the network of the job is `troubled`: then there is no limit.
    Else it is as far as they slept in every step (`steady_ns`), while their devices idled, and for
    no longer than the job's connections had data on their way (`sending_ns`).
    """
    out: dict[int, int] = {}
    for one in books:
        if one.frontier is not None and one.job not in troubled:
            names = SENDING, SPINNING, *((PERHAPS,) if one.perhaps is not None else ())
            units = sum(one.partial.unexplained.get(name, 0) for name in names)
            limits = steady_ns.get(one.job, 0), sending_ns.get(one.job, 0)
            slept_ns = one.partial.totals.get(SURELY, 0) // SHARE
            shown = units // SHARE + min(slept_ns, *limits)
            out[one.job] = min(shown, out.get(one.job, shown))
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
