"""One rank while its node is read: what settles with each chunk, and its books at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clusterprof.attribution.device import sample_times
from clusterprof.attribution.frontier import Frontier
from clusterprof.attribution.ledger import RankBooks, RankName, keep_books
from clusterprof.attribution.local import settle
from clusterprof.attribution.lost import lost_pieces
from clusterprof.attribution.over_time import Times
from clusterprof.attribution.partial import EMPTY, Partial, merge
from clusterprof.attribution.precedence import SPENT_ON
from clusterprof.attribution.regions import RankState
from clusterprof.attribution.spent import Spending
from clusterprof.attribution.step_blocks import StepBlocks
from clusterprof.attribution.window import Window
from clusterprof.timeline.identity import place_of
from clusterprof.timeline.model import Rank
from clusterprof.timeline.operation_rows import Store


@dataclass(frozen=True, slots=True)
class Asked:
    """What is wanted of a node."""

    limits: Mapping[str, Any]
    store: Store
    history: bool
    window: Window
    since_ns: int | None


@dataclass(frozen=True, slots=True)
class OpenRank:
    """A rank that may still go on."""

    state: RankState
    partial: Partial
    pending: Partial
    """Stretches that count only if another step ends after them."""
    rank: Rank
    """As last seen."""
    spending: Spending
    frontier: Frontier
    blocks: StepBlocks
    times: Times | None
    """None when nobody asked when what was lost."""
    window: Window


def advanced(one: OpenRank | None, rank: Rank, asked: Asked, last: bool) -> OpenRank:
    """Take what a chunk says of a rank; None = it is new. `last`: nothing follows."""
    if not sample_times(rank).size:  # known by name and never sampled is not measured
        rank = replace(rank, device="")
    if one is None:
        state = RankState(settled_ns=asked.since_ns)
        one = OpenRank(state, EMPTY, EMPTY, rank, *_noted(asked))
        return _settled(one, rank, asked.limits, last)
    if rank.marked and not one.rank.marked:
        # The first span: what was guessed of the time before is dropped, it was start-up.
        state = RankState(first_ns=one.state.first_ns, last_ns=one.state.last_ns)
        one = OpenRank(state, EMPTY, EMPTY, rank, *_noted(asked))
    # A chunk in which a rank says nothing does not make it a rank without a probe or a device.
    rank = replace(
        rank,
        rank=rank.rank if rank.rank is not None else one.rank.rank,
        marked=rank.marked or one.rank.marked,
        device=rank.device or one.rank.device,
        emulated=rank.emulated or one.rank.emulated,
    )
    return _settled(one, rank, asked.limits, last)


def _noted(asked: Asked) -> tuple[Spending, Frontier, StepBlocks, Times | None, Window]:
    spending = Spending(SPENT_ON, asked.store)
    times = Times(asked.store) if asked.history else None
    frontier = Frontier(spending.categories, asked.store)
    return spending, frontier, StepBlocks(), times, asked.window


def _settled(one: OpenRank, rank: Rank, limits: Mapping[str, Any], last: bool) -> OpenRank:
    found, state = lost_pieces(rank, one.state, last, one.window)
    partial, pending = one.partial, one.pending
    for region, lost, account in found:
        told = one.spending, one.frontier, one.blocks, one.times
        if region.end_ns == region.start_ns:
            new = Partial(totals={"not_asked": account.not_asked_ns})
            for book in () if region.tentative else told:
                if book is not None:
                    book.confirm()
        else:
            new = settle(rank, region, lost, account, limits, *told)
        if region.tentative:
            pending = merge(pending, new)
        else:
            partial, pending = merge(partial, pending, new), EMPTY
    told = one.spending, one.frontier, one.blocks, one.times
    return OpenRank(state, partial, pending, rank, *told, one.window)


def closed(one: OpenRank, limits: Mapping[str, Any]) -> RankBooks:
    """Settle a rank to the end; what lies after its last step is outside, whatever it was."""
    one = _settled(one, one.rank, limits, last=True)
    rank = one.rank
    node = rank.chunk.header.node
    place = place_of(rank.main.registration)
    name = RankName(
        node=node.get("display") or node.get("hostname", ""),
        rank=rank.rank,
        pid=rank.pid,
        device=rank.device,
        marked=rank.marked,
        emulated=rank.emulated,
        has_peers=(place.world_size or 1) > 1,
        identity=dict(rank.main.registration.get("variables", {})),
        place=place,
        started_ticks=rank.main.started_ticks,
    )
    books = keep_books(name, one.state, one.partial, one.spending.operations())
    steps, perhaps = one.frontier.operations()
    times = None if one.times is None else one.times.done()
    period, blocks = one.frontier.period(), one.blocks.done()
    return replace(
        books,
        frontier=steps,
        perhaps=perhaps,
        period=period,
        times=times,
        blocks=blocks,
        own_steps=one.spending.own(),
    )
