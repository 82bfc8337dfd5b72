"""Operations between ranks on a device's timeline: which they are, and what of them is exposed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterprof.importers.base import Account
from clusterprof.importers.kineto import words
from clusterprof.importers.kineto.columns import Cover, Int, covered, joined
from clusterprof.importers.kineto.gaps import Work
from clusterprof.importers.kineto.said import Comm
from clusterprof.importers.tables import NodeTables, group_number
from clusterprof.probe import layout

_WHOLE_LIST = re.compile(r"\[?\s*\d{1,9}(?:\s*,\s*\d{1,9})*\s*\]?$")
_MEMBERS_AT_MOST = 1 << 17


@dataclass(frozen=True, slots=True)
class Exposed:
    """Kernels of operations, sorted by start; n rows."""

    at: Int
    """Row of `Work`."""
    start: Int
    end: Int
    first: Int
    """The first instant at which the device did not compute; `end` when there is none."""
    exposed: Int
    """How long the device computed nothing, of two operations at once counted once."""


def exposed(work: Work) -> Exposed:
    """Return the operations of a device and how much of each no kernel hid."""
    at = np.flatnonzero(work.kind == words.COMM)
    start, end = work.start[at], work.ends(at)
    if not at.size:
        return Exposed(at, start, end, end, start)
    other = Cover(*covered(_beside(work, joined(start, end))))
    before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
    own = np.minimum(np.maximum(start, before), end)
    alone = end - own - other.within(own, end)
    return Exposed(at, start, end, np.minimum(other.first_free(own), end), alone)


def _beside(work: Work, some: tuple[Int, Int]) -> Iterator[tuple[Int, Int]]:
    """Yield the kernels that ran during some stretches of time: no others can hide anything."""
    for start, end in work.pieces(words.KERNEL):
        row = np.searchsorted(some[1], start, side="right")
        here = np.append(some[0], end.max(initial=0))[row] < end
        yield start[here], end[here]


class Groups:
    """The process groups of one rank, by what the trace says of them."""

    def __init__(self, distributed: Mapping[str, Any], rank: int | None, world: int | None) -> None:
        self.rank, self.world = rank, world
        self._of_name: dict[str, list[int]] = {}
        config = distributed.get("pg_config")
        for one in config if isinstance(config, list) else ():
            if isinstance(one, dict) and isinstance(ranks := one.get("ranks"), list):
                listed = [r for r in ranks if isinstance(r, int) and not isinstance(r, bool)]
                if len(listed) == one.get("pg_size", len(listed)):
                    self._of_name[str(one.get("pg_name", ""))] = listed
        self.members: dict[int, list[int]] = {}
        self._known: dict[tuple[str | None, str | None, int], int] = {}

    def number(self, comm: Comm) -> int:
        """Return the number of the group in which an operation is."""
        key = (comm.group, comm.ranks, comm.operation if comm.group is None else 0)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._find(comm)
        return known

    def _find(self, comm: Comm) -> int:
        ranks = self._of_name.get(comm.group or "", [])
        if comm.ranks and _WHOLE_LIST.match(comm.ranks.strip()):
            ranks = [int(one) for one in re.findall(r"\d+", comm.ranks)][:_MEMBERS_AT_MOST]
        if comm.group is None:  # nobody says: all ranks, and each sort of operation by itself
            number = group_number(f"{self.world}:{comm.operation}")
            ranks = list(range(min(self.world or 0, _MEMBERS_AT_MOST)))
        elif ranks:
            number = group_number(ranks)
        else:
            number = group_number(f"{self.world}:{comm.group}:{comm.ranks or ''}")
        if ranks:
            self.members[number] = ranks
        return number


def laid(
    node: NodeTables, pid: int, found: Exposed, said: list[Comm], groups: Groups, account: Account
) -> None:
    """Lay the operations of one process."""
    if not found.at.size:
        return
    group = np.array([groups.number(one) for one in said], np.int64)
    operation = np.array([one.operation for one in said], np.int64)
    size = np.array([one.bytes for one in said], np.int64)
    sequence = np.array([one.sequence for one in said], np.int64)
    peer = np.array([_peer(one, groups.rank) for one in said], np.int64)
    message = (operation == layout.SEND) | (operation == layout.RECV)
    number = _numbers(group, sequence, operation, peer, message)
    row = node.spans(
        pid, layout.COLLECTIVE, found.start, found.end, group, number, size,
        operation | (peer + 1) << layout.PEER_SHIFT,
    )  # fmt: skip
    rows = row + np.arange(found.at.size)
    node.spans(
        pid, layout.EXPOSED_COLLECTIVE, np.minimum(found.first, found.end), found.end, rows,
        found.exposed,
    )  # fmt: skip
    for one, members in groups.members.items():
        node.group(pid, one, members)
    account.read["operations between ranks"] += found.at.size
    if any(one.group is None for one in said):
        account.notes.append(
            "operations between ranks do not say which they are: those of a kind are taken for the"
            " same on all ranks in the order in which they came"
        )


def _peer(one: Comm, rank: int | None) -> int:
    """The other rank of a message; -1 where it is not said."""
    if one.operation == layout.SEND:
        return one.target if 0 <= one.target != rank else -1
    if one.operation == layout.RECV:
        return one.source if 0 <= one.source != rank else -1
    return -1


def _numbers(group: Int, sequence: Int, operation: Int, peer: Int, message: Int) -> Int:
    """Number the operations of each group: by what the trace says, else in their order.

    -1 for messages of which nobody says to whom.
    """
    said = (sequence >= 0) & ~message
    which = np.unique(group, return_inverse=True)[1].reshape(-1)
    if message.any():
        key = np.stack([which, np.where(message, operation, 0), np.where(message, peer, -1)])
        which = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
    number = np.empty(group.size, np.int64)
    order = np.argsort(which, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
        if said[rows].all() and np.unique(sequence[rows]).size == rows.size:
            number[rows] = sequence[rows]
        else:
            number[rows] = np.arange(rows.size)
    return np.where(message & (peer < 0), -1, number)
