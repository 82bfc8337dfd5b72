"""The rows of everything drawn over time: ranks; nodes, where there are too many ranks.

Of a large job each node has a row, with the mean of its ranks, and so have the few ranks that the
report is about. Of more nodes than can be drawn, neighbours share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Rows:
    """One entry per row in every list."""

    MOST: ClassVar[int] = 1024
    """Rows of nodes, or of ranks as long as there are not more."""
    EXTRA: ClassVar[int] = 32
    """Rows of single ranks beside those of nodes."""

    by: str
    """"rank" or "node"."""
    first: list[int]
    last: list[int]
    """First and last node, by place in the list of nodes."""
    rank: list[int]
    """Place in `Report.ranks`; -1 for all ranks of the nodes."""
    members: list[list[int]]
    """Places in `Report.ranks`."""


def rows_of(nodes: Sequence[int], node_count: int, wanted: Sequence[int]) -> Rows:
    """Lay ranks, given by the place of their node, out as rows; `wanted` ranks get one anyway."""
    if len(nodes) <= Rows.MOST:
        places = list(range(len(nodes)))
        return Rows("rank", list(nodes), list(nodes), places, [[at] for at in places])
    each = -(-node_count // Rows.MOST)
    count = -(-node_count // each)
    members: list[list[int]] = [[] for _ in range(count)]
    for at, node in enumerate(nodes):
        members[node // each].append(at)
    first = [row * each for row in range(count)]
    last = [min(low + each, node_count) - 1 for low in first]
    ranks = [-1] * count
    for at in wanted[: Rows.EXTRA]:
        first.append(nodes[at])
        last.append(nodes[at])
        ranks.append(at)
        members.append([at])
    return Rows("node", first, last, ranks, members)
