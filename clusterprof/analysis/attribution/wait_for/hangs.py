"""Find the roots of hangs: the ranks that operations without end wait for.

    rank 0   in all_reduce 812 of the world since 90 s
    rank 1   in all_reduce 812 of the world since 90 s      waits for rank 2
    rank 2   in recv 40 from rank 3 since 95 s              waits for rank 3
    rank 3   not in any operation                           all others wait for it

Roots are ranks that others wait for and that wait in no operation themselves: a crash,
an endless loop, a stuck read. Ranks that wait for each other in a cycle called
different operations in different order; there is no root, and the cycle is reported
instead. If all members of an operation are in it and none leaves, the operation itself
hangs: the network or a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StuckRank:
    """A rank that arrived at an operation and had not left it when its recording ended."""

    rank: int
    group: int
    number: int
    """Number of the operation in its process group; members wait for each other only in the
    same one.
    """
    since_ns: int
    """How long it had been waiting at the end, ns, on its own clock."""


@dataclass(frozen=True, slots=True)
class Hang:
    """A root, one rank or a cycle of ranks, and the ranks that wait for it in the end."""

    roots: tuple[int, ...]
    """One rank that waits for no other, the ranks of a cycle (`is_cycle`), or all members of
    an operation (`is_complete`).
    """
    is_cycle: bool
    waiting: tuple[int, ...]
    """Ranks that wait for the root, directly or through others; longest first."""
    waiting_ns: int
    """Sum of their waits; a rank that waits for several roots counts for each."""
    recorded: bool
    """False if the root has no recording: what it did is not known."""
    is_complete: bool = False
    """True if the roots are all members of one operation and all have arrived at it."""


def find_hangs(
    stuck: Sequence[StuckRank], members: Mapping[int, Sequence[int]], recorded: frozenset[int]
) -> tuple[Hang, ...]:
    """Find the roots of all waits that did not end, longest total wait first.

    members: ranks of each process group. recorded: ranks that have a recording.
    """
    waits_for, present = _find_absent_members(stuck, members)
    since = {entry.rank: entry.since_ns for entry in stuck}
    reached = {rank: _find_reachable(rank, waits_for) for rank in waits_for}
    waiting_by_roots: dict[tuple[int, ...], set[int]] = {}
    complete = {present[rank] for rank, awaited in waits_for.items() if not awaited}
    for rank, awaited in reached.items():
        if present[rank] in complete:
            waiting_by_roots.setdefault(present[rank], set()).add(rank)
        for root in awaited:
            if root not in waits_for:
                waiting_by_roots.setdefault((root,), set()).add(rank)
            elif present[root] in complete:
                waiting_by_roots.setdefault(present[root], set()).add(rank)
            elif root in reached[root]:
                cycle = tuple(sorted(o for o in reached[root] if root in reached.get(o, ())))
                # A cycle with ranks that also wait for a rank outside of it has its root there.
                if not any(o not in waits_for or present[o] in complete for o in reached[root]):
                    waiting_by_roots.setdefault(cycle, set()).add(rank)
    out = [
        Hang(
            roots,
            len(roots) > 1 and roots not in complete,
            tuple(sorted(ranks, key=lambda rank: (-since[rank], rank))),
            sum(since[rank] for rank in ranks),
            all(root in recorded for root in roots),
            roots in complete,
        )
        for roots, ranks in waiting_by_roots.items()
    ]
    return tuple(sorted(out, key=lambda hang: (-hang.waiting_ns, hang.roots)))


def _find_absent_members(
    stuck: Sequence[StuckRank], members: Mapping[int, Sequence[int]]
) -> tuple[dict[int, frozenset[int]], dict[int, tuple[int, ...]]]:
    """Return per stuck rank the absent and the present members of its operation."""
    present: dict[tuple[int, int], set[int]] = {}
    for entry in stuck:
        present.setdefault((entry.group, entry.number), set()).add(entry.rank)
    absent = {key: frozenset(members.get(key[0], ())) - ranks for key, ranks in present.items()}
    return (
        {entry.rank: absent[(entry.group, entry.number)] for entry in stuck},
        {entry.rank: tuple(sorted(present[(entry.group, entry.number)])) for entry in stuck},
    )


def _find_reachable(rank: int, waits_for: Mapping[int, frozenset[int]]) -> set[int]:
    """Return all ranks that a rank waits for, directly or through others."""
    reachable: set[int] = set()
    pending = list(waits_for[rank])
    while pending:
        peer = pending.pop()
        if peer not in reachable:
            reachable.add(peer)
            pending.extend(waits_for.get(peer, ()))
    return reachable
