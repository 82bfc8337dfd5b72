"""The spans of the processes of a node, as the probe writes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe import layout
from clusterprof.probe.hooks.process_groups import compute_group_number
from clusterprof.trace.schema import SPAN_FIELDS
from clusterprof_lab.cluster.plan import ClusterPlan, Operation, Scope
from clusterprof_lab.cluster.window import NodeWindow, find_members, get_pid, get_worker_pid

Int = NDArray[np.int64]

ITEMS = 32
"""Samples of a batch."""
COPY_NS = 1_000_000
"""Of a batch to the device."""


def number_groups(plan: ClusterPlan, rank: int) -> dict[Scope, int]:
    """Return the numbers of a rank's process groups."""
    return {scope: compute_group_number(m) for scope, m in find_members(plan, rank).items()}


def build_rank_spans(window: NodeWindow, local: int, groups: dict[Scope, int]) -> Int:
    """Build the spans of a rank that end in the window, int64[fields, n], by end; times in ns."""
    steps, start = window.steps, window.start[:, local]
    before = window.wait_end[:, local]
    rows: list[tuple[object, ...]] = []
    if window.loads:
        pids = get_worker_pid(local, 0) + steps % window.plan.workers
        wait = (layout.DATA_WAIT, steps, pids, window.plan.workers, steps == 0)
        rows.append((start, before, *wait))
        rows.append((before, before + COPY_NS, layout.H2D, 1 << 24, 1, 0, 0))
        before = before + COPY_NS
    rank = window.node * window.plan.per_node + local
    numbers = _number_operations(window, rank, groups)
    for column, op in enumerate(window.operations):
        arrive, leave = window.arrive[:, local, column], window.leave[:, local, column]
        if op.work_kind:
            length = arrive - before
            for part in range(window.plan.modules):
                edges = [before + length * n // window.plan.modules for n in (part, part + 1)]
                rows.append((*edges, op.work_kind, 0, 0, 0, 0))
        rows.append((arrive, leave, layout.COLLECTIVE, *numbers[column]))
        before = leave
    end = window.end[:, local]
    rows.append((before, end - 1, layout.OPTIMIZER, 0, 0, 0, 0))
    rows.append((start, end, layout.STEP, steps, 0, 0, 0))
    table = np.empty((len(SPAN_FIELDS), len(steps), len(rows)), np.int64)
    for column, fields in enumerate(rows):
        for row, values in enumerate(fields):
            table[row, :, column] = values  # type: ignore[assignment]
    return _keep_ended(window, table.reshape(len(SPAN_FIELDS), -1))


def build_worker_spans(window: NodeWindow, local: int, worker: int) -> Int:
    """Build the spans of a worker that end in the window, int64[fields, n]; times in ns."""
    number, reading, edges = window.pieces[local, worker]
    table = np.zeros((len(SPAN_FIELDS), len(number)), np.int64)
    table[0], table[1], table[2], table[3] = edges[:, 0], edges[:, -1], layout.FETCH, ITEMS
    table[4], table[6] = edges[:, -1] - edges[:, 0] - reading, window.batch_bytes
    if window.begin_ns == 0:
        parent = get_pid(local)
        started = [0, 0, layout.WORKER_START, worker, window.plan.workers, parent, 0]
        table = np.concatenate([np.array([started], np.int64).T, table], axis=1)
    return _keep_ended(window, table)


def _keep_ended(window: NodeWindow, table: Int) -> Int:
    """Return the columns of int64[fields, n] that end in the window, by end; times in ns."""
    ended = table[:, (table[1] >= window.begin_ns) & (table[1] < window.end_ns)]
    return ended[:, np.argsort(ended[1], kind="stable")]


def _number_operations(
    window: NodeWindow, rank: int, groups: dict[Scope, int]
) -> list[tuple[object, ...]]:
    """Return group, number within it (int64[steps]), bytes and code of each operation of a step."""
    stage_ranks = window.plan.outer * window.plan.inner
    # Scopes with the same members are one group, as in a job on a single node: it counts on.
    keys: list[tuple[object, ...]] = []
    for op in window.operations:
        keys.append((groups[op.scope], op.stages if op.scope == "pair" else ()))
    numbered: list[tuple[object, ...]] = []
    for column, op in enumerate(window.operations):
        count, place = keys.count(keys[column]), keys[:column].count(keys[column])
        number = window.steps * count + place
        code, size = _encode_message(op, window.stage, rank, stage_ranks)
        numbered.append((groups[op.scope], number, size, code))
    return numbered


def _encode_message(op: Operation, stage: int, rank: int, stage_ranks: int) -> tuple[int, int]:
    """Return the code of an operation, with the peer of a message, and its bytes."""
    if op.scope != "pair":
        return op.code, op.size
    sender, receiver = op.stages
    sends = stage == sender
    peer = rank + (receiver - sender) * stage_ranks * (1 if sends else -1)
    code = (layout.SEND if sends else layout.RECV) | (peer + 1) << layout.PEER_SHIFT
    return code, op.size if sends else 0
