"""Operations that some never left: who waits for whom, and who waits for nobody.

    rank 0   in all_reduce 812 of the world since 90 s
    rank 1   in all_reduce 812 of the world since 90 s      waits for rank 2
    rank 2   in recv 40 from rank 3 since 95 s              waits for rank 3
    rank 3   not in any operation                           everybody waits for it

The roots are the ranks that others wait for and that wait in no operation themselves: a crash, an
endless loop, a stuck read. Ranks that wait for each other in a circle took different operations in
different order, and no root exists; the circle is said instead. Where all members of an operation
are in it and none leaves, it is the operation that hangs: the network, or a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that arrived and had not left when its recording ended."""

    rank: int
    team: int
    number: int
    """Of the operation in its team; members wait for each other only in the same one."""
    since_ns: int
    """How long it had been waiting at the end, on its own clock."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Who waits for a rank, or a circle of ranks, in the end."""

    roots: tuple[int, ...]
    """One rank that waits for nobody, or a circle (`circle`)."""
    circle: bool
    waiting: tuple[int, ...]
    """Ranks that wait for it, directly or through others; longest first."""
    waiting_ns: int
    """What they waited together; a rank that waits for several roots counts for each."""
    recorded: bool
    """False when the root has no recording: what it did is not known."""
    inside: bool = False
    """True when the roots are all the members of one operation, which have all come to it."""


def hangs(
    stuck: Sequence[Stuck], members: Mapping[int, Sequence[int]], recorded: frozenset[int]
) -> tuple[Hang, ...]:
    """Return who keeps whom, most waited for first. `members` are those of each team."""
    waits_for, there = _waits_for(stuck, members)
    since = {one.rank: one.since_ns for one in stuck}
    reached = {rank: _reached(rank, waits_for) for rank in waits_for}
    found: dict[tuple[int, ...], set[int]] = {}
    inside = {there[rank] for rank, others in waits_for.items() if not others}
    for rank, others in reached.items():
        if there[rank] in inside:
            found.setdefault(there[rank], set()).add(rank)
        for root in others:
            if root not in waits_for:
                found.setdefault((root,), set()).add(rank)
            elif there[root] in inside:
                found.setdefault(there[root], set()).add(rank)
            elif root in reached[root]:
                circle = tuple(sorted(o for o in reached[root] if root in reached.get(o, ())))
                # A circle some of whose ranks also wait for somebody outside has its root there.
                if not any(o not in waits_for or there[o] in inside for o in reached[root]):
                    found.setdefault(circle, set()).add(rank)
    out = [
        Hang(
            roots,
            len(roots) > 1 and roots not in inside,
            tuple(sorted(ranks, key=lambda rank: (-since[rank], rank))),
            sum(since[rank] for rank in ranks),
            all(root in recorded for root in roots),
            roots in inside,
        )
        for roots, ranks in found.items()
    ]
    return tuple(sorted(out, key=lambda hang: (-hang.waiting_ns, hang.roots)))


def _waits_for(
    stuck: Sequence[Stuck], members: Mapping[int, Sequence[int]]
) -> tuple[dict[int, frozenset[int]], dict[int, tuple[int, ...]]]:
    """For each stuck rank: which members of its team are not in the same operation, and who is."""
    there: dict[tuple[int, int], set[int]] = {}
    for one in stuck:
        there.setdefault((one.team, one.number), set()).add(one.rank)
    absent = {key: frozenset(members.get(key[0], ())) - ranks for key, ranks in there.items()}
    return (
        {one.rank: absent[(one.team, one.number)] for one in stuck},
        {one.rank: tuple(sorted(there[(one.team, one.number)])) for one in stuck},
    )


def _reached(rank: int, waits_for: Mapping[int, frozenset[int]]) -> set[int]:
    """Return everybody a rank waits for, directly or through others."""
    seen: set[int] = set()
    ahead = list(waits_for[rank])
    while ahead:
        one = ahead.pop()
        if one not in seen:
            seen.add(one)
            ahead.extend(waits_for.get(one, ()))
    return seen
