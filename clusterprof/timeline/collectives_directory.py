"""Which channels there are over all ranks, known before any of their rows is read.

Each rank says what channels it has (`timeline.operation_rows`). Here they become channels that all
ranks share, with the members of each, and those are left out that cannot be matched honestly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.timeline.collectives_checks import off_by_some
from clusterprof.timeline.model import Int
from clusterprof.timeline.operation_rows import RankOperations
from clusterprof.timeline.operations import SEND, mixed


@dataclass(frozen=True, slots=True)
class Ahead:
    """A way from one clock onto another: a shift that grows evenly."""

    since_ns: int = 0
    shift_ns: int = 0
    drift: float = 0.0


@dataclass(frozen=True, slots=True)
class Person:
    """One process that has operations."""

    rank: int
    """Process: 0 … ranks - 1 over all jobs; a restarted process is another one."""
    global_rank: int
    """The number by which its job calls it."""
    job: int
    ahead: Ahead
    """What its clock must be put forward by to show roughly what all others do."""
    operations: RankOperations


@dataclass(frozen=True, slots=True)
class Directory:
    """Entries are the channels of each person, one after the other; channels are those of all."""

    base: Int
    """First entry of each person; one more at the end."""
    channel: Int
    """Channel of each entry; -1 = left out."""
    place: Int
    """Which of the channel's members, in the order of ranks, the entry's person is."""
    team: Int
    """Label of each channel's team."""
    members: Int
    """How many persons have rows in each channel."""
    wanted: Int
    """How many members its team has in all, as far as known."""
    unmatched: Mapping[str, int]
    """Reason -> rows that are left out for it."""


def directory(people: Sequence[Person], announced: Mapping[tuple[int, int], Int]) -> Directory:
    """Put the channels of all together. `announced`: global ranks of each (job, group)."""
    tables = [one.operations.channels for one in people]
    sizes = [len(table) for table in tables]
    group, peer, way, life = np.concatenate(tables).reshape(-1, 4).T
    count = np.concatenate([one.operations.counts for one in people])
    who = np.repeat(np.arange(len(people)), sizes)
    job, own = (
        np.repeat([getattr(one, name) for one in people], sizes) for name in ("job", "global_rank")
    )
    pair = way > 0
    giver, taker = np.where(way == SEND, own, peer), np.where(way == SEND, peer, own)
    low, high = np.minimum(giver, taker), np.maximum(giver, taker)
    none = np.zeros_like(low)
    of_group = mixed(job, group, none, none)
    team = np.where(pair, mixed(job, low, high, none + 1), of_group)
    numbers = np.where(pair, mixed(job, group, giver, taker), of_group)
    unmatched: dict[str, int] = {}
    good = np.ones(who.size, np.bool_)

    def leave_out(rows: np.ndarray, reason: str) -> None:
        rows = rows & good
        if count[rows].sum():
            unmatched[reason] = int(count[rows].sum())
        good[rows] = False

    leave_out((group == 0) & ~pair, "group-unknown")
    leave_out(pair & (peer < 0), "peer-unknown")
    leave_out(~_clear(who, numbers, life, good), "restart-unclear")
    leave_out(_skewed(people, who, team, mixed(numbers, life), good & ~pair), "sequence-skew")
    channel, place, first, members = _channels(mixed(numbers, life), who, good)
    wanted = _sizes(team, who, good, pair, job, group, announced)[first]
    base = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Directory(base, channel, place, team[first], members, wanted, unmatched)


def _clear(who: Int, numbers: Int, life: Int, good: np.ndarray) -> np.ndarray:
    """True where a rank began again as often as most of those it has operations with.

    A rank whose recording lacks the first beginning counts one less than the others: its numbers
    mean other operations.
    """
    clear = np.ones(who.size, np.bool_)
    if not life.any():
        return clear
    rows = np.flatnonzero(good)
    pair, of_pair = np.unique(mixed(who[rows], numbers[rows]), return_inverse=True)
    most = np.zeros(pair.size, np.int64)
    np.maximum.at(most, of_pair, life[rows])
    _, first = np.unique(of_pair, return_index=True)
    _, where = np.unique(numbers[rows][first], return_inverse=True)
    # The commonest count; of equally common ones the higher.
    codes, count = np.unique(where * (most.max() + 1) + most, return_counts=True)
    usual = np.zeros(where.max() + 1, np.int64)
    by_count = np.lexsort((codes, count))
    usual[codes[by_count] // (most.max() + 1)] = codes[by_count] % (most.max() + 1)
    clear[rows] = (most == usual[where])[of_pair]
    return clear


def _skewed(
    people: Sequence[Person], who: Int, team: Int, label: Int, asked: np.ndarray
) -> np.ndarray:
    """True for channels in which a rank's numbers are off, by the samples that all have kept."""
    out = np.zeros(who.size, np.bool_)
    base, entries, numbers, leaves = 0, [], [], []
    for one in people:
        at, number, leave = one.operations.samples
        entries.append(at + base)
        numbers.append(number)
        leaves.append(leave)
        base += len(one.operations.channels)
    entry, number, leave = (np.concatenate(parts) for parts in (entries, numbers, leaves))
    some = asked[entry]
    entry, number, leave = entry[some], number[some], leave[some]
    if not entry.size:
        return out
    op = np.unique(mixed(label[entry], number), return_inverse=True)[1]
    found = off_by_some(who[entry], team[entry], number, op, leave, np.ones(op.size, np.bool_))
    if found.any():
        bad = np.unique(mixed(who[entry[found]], team[entry[found]]))
        out = np.isin(mixed(who, team), bad) & asked
    return out


def _channels(label: Int, who: Int, good: np.ndarray) -> tuple[Int, Int, Int, Int]:
    """Number the channels; return those of the entries, their places, an entry and size of each."""
    channel, place = np.full(label.size, -1), np.zeros(label.size, np.int64)
    rows = np.flatnonzero(good)
    _, first, inverse, size = np.unique(
        label[rows], return_index=True, return_inverse=True, return_counts=True
    )
    channel[rows] = inverse
    order = np.argsort(inverse, kind="stable")  # entries stand in the order of persons
    start = np.cumsum(size) - size
    place[rows[order]] = np.arange(rows.size) - start[inverse[order]]
    return channel, place, rows[first], size


def _sizes(
    team: Int,
    who: Int,
    good: np.ndarray,
    pair: np.ndarray,
    job: Int,
    group: Int,
    announced: Mapping[tuple[int, int], Int],
) -> Int:
    """How many members the team of each entry has: announced, else seen; 2 for pairs."""
    labels, first, of_team = np.unique(team, return_index=True, return_inverse=True)
    seen = np.unique(of_team[good] * np.int64(who.max(initial=0) + 1) + who[good])
    wanted = np.bincount(seen // (who.max(initial=0) + 1), minlength=labels.size)
    wanted[pair[first]] = 2
    for number, row in enumerate(first.tolist()):
        ranks = announced.get((int(job[row]), int(group[row])))
        if ranks is not None and not pair[row]:
            wanted[number] = len(ranks)
    return wanted[of_team]
