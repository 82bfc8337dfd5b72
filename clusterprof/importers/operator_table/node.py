"""An operator table as one node of ours: steps, work, messages, operations of teams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.base import Account
from clusterprof.importers.operator_table.table import Place, Row, Table, places_in_order
from clusterprof.importers.tables import NodeTables, group_number
from clusterprof.probe import layout
from clusterprof.timeline.intervals import Intervals, union

Int = NDArray[np.int64]
_WORK = {
    "forward-compute": layout.FORWARD, "backward-compute": layout.BACKWARD,
    "optimizer": layout.OPTIMIZER, "gc": layout.GC,
}  # fmt: skip
_COMPUTING = ("forward-compute", "backward-compute", "optimizer")
_MESSAGES = {
    "forward-send": (layout.SEND, 1, 0), "forward-recv": (layout.RECV, -1, 0),
    "backward-send": (layout.SEND, -1, 1), "backward-recv": (layout.RECV, 1, 1),
}  # fmt: skip
"""Operation, the way to its peer in stages, and its direction."""
_TEAMS = {
    "params-all-gather": (layout.ALL_GATHER, "stage"),
    "grads-reduce-scatter": (layout.REDUCE_SCATTER, "stage"),
    "embedding-grads-all-reduce": (layout.ALL_REDUCE, "ends"),
    "optimizer-clip-main-grad": (layout.ALL_REDUCE, "all"),
}  # fmt: skip
_ALONE = "layernorm-grads-all-reduce"  # between tensor-parallel ranks, of which one is in the table


def node_of(table: Table, account: Account) -> NodeTables | None:
    """Return the job; None when nothing was computed."""
    lengths = _lengths(table)
    computed = any(ops.get(name) for ops in table.rows.values() for name in _COMPUTING)
    if not lengths or not computed:
        return None
    numbers = sorted(lengths)
    length = np.array([lengths[one][1] - lengths[one][0] for one in numbers], np.int64)
    ends = np.cumsum(length)
    begins = ends - length
    # From a time of the file to ours: steps lie one after the other.
    shift = {one: int(begins[at]) - lengths[one][0] for at, one in enumerate(numbers)}
    order = {one: at for at, one in enumerate(numbers)}
    ranks = dict(places_in_order(table))
    node = NodeTables("", "operator-table", key="operator-table")
    for place, rank in ranks.items():
        device = f"gpu{rank}"
        node.device(device)
        node.rank(rank + 1, rank, len(ranks), device)
        node.spans(rank + 1, layout.STEP, begins, ends, np.array(numbers), 2, -1, -1)
        _add(node, table.rows[place], place, ranks, shift, order, int(ends[-1]))
    account.read["ranks"] += len(ranks)
    account.read["steps"] += len(numbers)
    left_out = {
        name
        for ops in table.rows.values()
        for name in ops
        if name not in (*_WORK, *_MESSAGES, *_TEAMS)
    } - {_ALONE}
    for name in sorted(left_out)[:8]:
        rows = sum(len(ops[name]) for ops in table.rows.values() if name in ops)
        account.skipped[f"operations called {name[:40]}"] += rows
    account.notes.append(
        "steps are timed from their own beginnings: they are laid one after the other"
    )
    return node


def _lengths(table: Table) -> dict[int, tuple[int, int]]:
    """When each step began and ended, in the file's time, of all ranks together."""
    found: dict[int, tuple[int, int]] = {}
    for operations in table.rows.values():
        for rows in operations.values():
            for row in rows:
                low, high = found.get(row.step, (row.start_ns, row.end_ns))
                found[row.step] = min(low, row.start_ns), max(high, row.end_ns)
    return {step: both for step, both in found.items() if both[1] > both[0]}


def _add(
    node: NodeTables,
    operations: Mapping[str, Sequence[Row]],
    place: Place,
    ranks: Mapping[Place, int],
    shift: Mapping[int, int],
    order: Mapping[int, int],
    until_ns: int,
) -> None:
    """Add what one rank did."""
    rank = ranks[place]
    pid, device = rank + 1, f"gpu{rank}"
    tables = {name: _table(rows, shift) for name, rows in operations.items()}
    for name, kind in _WORK.items():
        if name in tables and tables[name].shape[1]:
            node.spans(pid, kind, tables[name][2], tables[name][3])
    computing = _union(tables.get(name) for name in _COMPUTING)
    per_step = 1 + max(
        (int(t[1].max()) for n, t in tables.items() if n in _MESSAGES and t.size), default=0
    )
    received = {*_starts(tables.get("forward-recv")), *_starts(tables.get("backward-recv"))}
    for name, (operation, way, direction) in _MESSAGES.items():
        found = tables.get(name)
        peer = _neighbour(place, way, ranks)
        if found is None or not found.size or peer is None:
            continue
        sends = operation == layout.SEND
        alone = np.array([not (sends and start in received) for start in found[2].tolist()])
        team = _pipeline(place, ranks)
        group = group_number(f"{direction}:{','.join(map(str, team))}")
        node.group(pid, group, team)
        number = np.array([order[step] for step in found[0].tolist()]) * per_step + found[1]
        _exchange(node, pid, found, alone, group, number, operation, peer)
    for name, (operation, who) in _TEAMS.items():
        found = tables.get(name)
        team = _team(who, place, ranks)
        if found is None or not found.size or len(team) < 2 or rank not in team:
            continue
        group = group_number(f"{name}:{','.join(map(str, team))}")
        node.group(pid, group, team)
        number = np.array([order[step] for step in found[0].tolist()])
        node.collectives(pid, found[2], found[3], group, number, -1, operation)
    node.busy(device, *computing, 0, until_ns)


def _exchange(
    node: NodeTables, pid: int, found: Int, alone: NDArray[np.bool_], group: int, number: Int,
    operation: int, peer: int,
) -> None:  # fmt: skip
    """Add messages of one kind. What is sent together with a receive is issued, and waited for when
    the receive is over: the wait itself is the receive's."""
    one = found[:, alone]
    node.collectives(pid, one[2], one[3], group, number[alone], -1, operation, peer=peer)
    start, end, number = found[2, ~alone], found[3, ~alone], number[~alone]
    for form, at in ((layout.ISSUE, start), (layout.WAIT, end)):
        form_ = operation | form << layout.FORM_SHIFT | (peer + 1) << layout.PEER_SHIFT
        node.spans(pid, layout.COLLECTIVE, at, at, group, number, -1, form_)


def _table(rows: Sequence[Row], shift: Mapping[int, int]) -> Int:
    """Step, sequence, start and end of rows in order, on our clock; those of no length not."""
    some = [
        (row.step, max(row.sequence, 0), *(t + shift[row.step] for t in (row.start_ns, row.end_ns)))
        for row in rows if row.end_ns > row.start_ns and row.step in shift
    ]  # fmt: skip
    table = np.array(sorted(some, key=lambda one: one[2]), np.int64).reshape(-1, 4).T
    return table


def _union(tables: Iterable[Int | None]) -> Intervals:
    return union(*((one[2], one[3]) for one in tables if one is not None))


def _starts(table: Int | None) -> list[int]:
    return [] if table is None else table[2].tolist()


def _neighbour(place: Place, way: int, ranks: Mapping[Place, int]) -> int | None:
    """The rank of the next or the last stage; round the corner where stages hold several chunks."""
    stages = 1 + max(stage for stage, _ in ranks)
    return ranks.get(((place[0] + way) % stages, place[1]))


def _pipeline(place: Place, ranks: Mapping[Place, int]) -> list[int]:
    return sorted(rank for (_, copy), rank in ranks.items() if copy == place[1])


def _team(who: str, place: Place, ranks: Mapping[Place, int]) -> list[int]:
    last = max(stage for stage, _ in ranks)
    if who == "all":
        return sorted(ranks.values())
    if who == "ends":
        return sorted(r for (s, copy), r in ranks.items() if copy == place[1] and s in (0, last))
    return sorted(rank for (stage, _), rank in ranks.items() if stage == place[0])
