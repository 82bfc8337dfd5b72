"""Operator tables of pipelined training jobs: computation, messages, collectives.

## How to make the file

ByteDance's StragglerAnalysis publishes such tables. There is no command that writes them for a job
of your own; a Parquet file with the columns below is read.

## How to analyze it

    clusterprof analyze job.parquet

## What is read

Parquet with the columns `dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, …` in
seconds (needs the package pyarrow), or the same data as a timeline: a list of Chrome events in
microseconds, with threads named `PP rank 1, TP rank 0, compute`.

Operations: forward- and backward-compute of every microbatch, forward- and backward-send and -recv,
params-all-gather, grads-reduce-scatter, embedding-grads-all-reduce, optimizer-clip-main-grad,
optimizer and gc. Of several files of one job (equal ranks and microbatches, common steps) the first
readable one is used, Parquet before timelines. A table of another job is left out and named;
`--strict` then fails.

## How the numbers are computed

The time of each step counts from its own beginning. Steps are placed one after the other, each as
long as the last rank needed, because the table does not contain the time between them. All ranks
are on one clock.

The device is busy while it computes. It waits in a message or collective while it does not
compute. A send and a receive that begin together are one exchange, and the wait belongs
to the receive. A timeline shows only the transfer of a message or collective, so its begin is moved
to the end of the previous operation.

Messages run between neighboring stages of one copy of the model, all-gather and reduce-scatter
between the copies of a stage, embedding-grads-all-reduce between the first and the last stage, and
gradient clipping between all ranks. If the ranks of a stage end their passes at different times
and go on at the same instant, they waited for the last of them in an operation that is not listed.
Work that a stage always has more of is `sync-imbalance`.

## What it cannot see

A table has only one rank of each tensor-parallel group. It has no host, storage or network data. It
shows that an operation took long, but not why.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables, compute_group_number
from clusterprof.analysis.importers.core.text import (
    convert_number,
    convert_to_ns,
    read_json_objects,
)
from clusterprof.analysis.importers.workloads.pipeline_stages import (
    MAX_POSITION,
    OperationRow,
    OperationTable,
    PipelinePosition,
    answer_heavy_stage,
    find_stage_waits,
    sum_stage_work,
)
from clusterprof.analysis.timeline.intervals import Intervals, merge_intervals
from clusterprof.probe import layout

SECOND_NS, MICROSECOND_NS = 1_000_000_000, 1000
LOCAL_OPERATIONS = ("forward-compute", "backward-compute", "optimizer", "gc")
"""Operations that one rank runs alone."""
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id")
_ROWS_PER_BATCH = 65_536
_THREAD = re.compile(r"PP rank (\d{1,6}), TP rank (\d{1,6})")


def read_parquet(source: Source, account: Account, table: OperationTable) -> None:
    """Read a parquet file into the table.

    Raises: CannotImportError when pyarrow is missing or the file is broken.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise CannotImportError(
            f"{source.path.name}: parquet needs the package pyarrow, which is not installed",
            "pip install pyarrow, or give the timeline as JSON instead",
        ) from error
    try:
        with parquet.ParquetFile(source.file) as file:
            names = [*COLUMNS, *(["rank"] if "rank" in file.schema_arrow.names else [])]
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=names):
                for row in batch.to_pylist():
                    _read_parquet_row(row, account, table)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise CannotImportError(f"{source.path.name}: {error}", "copy it again") from error


def _read_parquet_row(row: Mapping[str, Any], account: Account, table: OperationTable) -> None:
    start, length = (
        convert_to_ns(row["start_ts"], SECOND_NS),
        convert_to_ns(row["duration"], SECOND_NS),
    )
    step, stage, copy = (_convert_integer(row[name]) for name in ("step", "stage", "dp_rank"))
    if start is None or length is None or step is None or stage is None or copy is None:
        account.skipped["operations without a time, a step or a rank"] += 1
        return
    position, rank = (stage, copy), _convert_integer(row.get("rank"))
    if rank is not None and 0 <= rank < MAX_POSITION:
        table.ranks[position] = rank
    sequence = _convert_integer(row["seq_id"])
    entry = OperationRow(step, -1 if sequence is None else sequence, start, start + length)
    table.add(position, str(row["optype"]), entry, account)


def read_timeline(source: Source, account: Account, table: OperationTable) -> None:
    """Read a Chrome timeline into the table: threads are stages, processes are model copies."""
    stages: dict[tuple[Any, Any], int] = {}
    for event in read_json_objects(source, account):
        arguments = event.get("args")
        key = (event.get("pid"), event.get("tid"))
        if not isinstance(arguments, dict) or not isinstance(key[0], int):
            account.skipped["events without a process"] += 1
        elif event.get("ph") == "M":
            match = _THREAD.match(str(arguments.get("name")))
            if match and isinstance(key[1], int) and len(stages) < MAX_POSITION:
                if int(match[2]) == 0:
                    stages[key] = int(match[1])
                elif event.get("name") == "thread_name":
                    account.skipped["threads of further tensor-parallel ranks"] += 1
        elif event.get("ph") == "X":
            _read_timeline_row(event, arguments, key, account, table)
    _assign_stages(stages, account, table)


def _read_timeline_row(
    event: Mapping[str, Any],
    arguments: Mapping[str, Any],
    key: Any,
    account: Account,
    table: OperationTable,
) -> None:
    start = convert_to_ns(event.get("ts"), MICROSECOND_NS)
    length = convert_to_ns(event.get("dur"), MICROSECOND_NS)
    step, sequence = (
        _convert_integer(arguments.get("step")),
        _convert_integer(arguments.get("seq_id")),
    )
    if start is None or length is None or step is None or not isinstance(key[1], int):
        account.skipped["operations without a time, a step or a rank"] += 1
        return
    entry = OperationRow(step, -1 if sequence is None else sequence, start, start + length)
    # Threads may be named after their events: keyed by thread here, by stage at the end.
    if 0 <= key[0] < MAX_POSITION and 0 <= key[1] < MAX_POSITION:
        table.add((key[1], key[0]), str(event.get("name")), entry, account)
    else:
        account.skipped["operations with an invalid step, rank or number"] += 1


def _assign_stages(
    stages: Mapping[tuple[Any, Any], int], account: Account, table: OperationTable
) -> None:
    by_thread, table.rows = table.rows, defaultdict(lambda: defaultdict(list))
    for (thread, copy), operations in by_thread.items():
        stage = stages.get((copy, thread))
        if stage is None:
            account.skipped["operations of a thread without a stage"] += sum(
                map(len, operations.values())
            )
            continue
        for operation, rows in operations.items():
            table.rows[stage, copy][operation] += rows
    for operations in table.rows.values():
        _add_waits(operations)


def _add_waits(operations: Mapping[str, list[OperationRow]]) -> None:
    """Move the begin of communication operations to the end of the previous operation.

    A timeline shows only their transfer.
    """
    concurrent: dict[tuple[int, int], list[tuple[bool, OperationRow]]] = defaultdict(list)
    for name, rows in operations.items():
        for row in rows:
            concurrent[row.step, row.start_ns].append((name not in LOCAL_OPERATIONS, row))
    step, previous_end = -1, -1
    for next_step, start in sorted(concurrent):
        if next_step != step:
            step, previous_end = next_step, -1
        rows_of_start = concurrent[next_step, start]
        for is_waiting, row in rows_of_start:
            if is_waiting and 0 <= previous_end < start:
                row.start_ns = previous_end
        previous_end = max(previous_end, *(row.end_ns for _, row in rows_of_start))


def _convert_integer(value: Any) -> int | None:
    return int(value) if convert_number(value) is not None and value == int(value) else None


def iterate_positions(table: OperationTable) -> Iterator[tuple[PipelinePosition, int]]:
    """Iterate over the positions with their ranks; stages are numbered if ranks are unknown."""
    copies = 1 + max((copy for _, copy in table.rows), default=0)
    for stage, copy in sorted(table.rows):
        yield (stage, copy), table.ranks.get((stage, copy), stage * copies + copy)


Int = NDArray[np.int64]
_SPAN_KINDS = {
    "forward-compute": layout.FORWARD,
    "backward-compute": layout.BACKWARD,
    "optimizer": layout.OPTIMIZER,
    "gc": layout.GC,
}
_PASSES = ("forward-compute", "backward-compute")
_COMPUTE_OPERATIONS = ("forward-compute", "backward-compute", "optimizer")
_MESSAGES = {
    "forward-send": (layout.SEND, 1, 0),
    "forward-recv": (layout.RECV, -1, 0),
    "backward-send": (layout.SEND, -1, 1),
    "backward-recv": (layout.RECV, 1, 1),
}
"""Message kind -> operation, offset of the peer's stage, and direction of the pass."""
_GROUP_OPERATIONS = {
    "params-all-gather": (layout.ALL_GATHER, "stage"),
    "grads-reduce-scatter": (layout.REDUCE_SCATTER, "stage"),
    "embedding-grads-all-reduce": (layout.ALL_REDUCE, "ends"),
    "optimizer-clip-main-grad": (layout.ALL_REDUCE, "all"),
}
_UNMATCHED_OPERATION = (
    "layernorm-grads-all-reduce"  # between tensor-parallel ranks: the table has only one
)


def build_node(table: OperationTable, account: Account) -> NodeTables | None:
    """Build the node of the job; None if no step has computation."""
    bounds = _find_step_bounds(table)
    computed = any(ops.get(name) for ops in table.rows.values() for name in _COMPUTE_OPERATIONS)
    if not bounds or not computed:
        return None
    numbers = sorted(bounds)
    length = np.array([bounds[step][1] - bounds[step][0] for step in numbers], np.int64)
    ends = np.cumsum(length)
    begins = ends - length
    # From the file's time to ours: steps are placed one after the other.
    shift = {step: int(begins[index]) - bounds[step][0] for index, step in enumerate(numbers)}
    order = {step: index for index, step in enumerate(numbers)}
    rank_by_position = dict(iterate_positions(table))
    node = NodeTables("", "operator-table", key="operator-table")
    stage_waits = find_stage_waits(
        table, (*_PASSES, *_MESSAGES), (*_GROUP_OPERATIONS, _UNMATCHED_OPERATION)
    )
    for position, rank in rank_by_position.items():
        device = f"gpu{rank}"
        node.add_device(device)
        _add_stage_waits(node, stage_waits[position], position, rank_by_position, shift, order)
        node.add_rank(rank + 1, rank, len(rank_by_position), device)
        node.add_spans(rank + 1, layout.STEP, begins, ends, np.array(numbers), 2, -1, -1)
        _add_rank(
            node, table.rows[position], position, rank_by_position, shift, order, int(ends[-1])
        )
    answer_heavy_stage(sum_stage_work(table, _COMPUTE_OPERATIONS), account)
    account.read["ranks"] += len(rank_by_position)
    account.read["steps"] += len(numbers)
    left_out = {
        name
        for ops in table.rows.values()
        for name in ops
        if name not in (*_SPAN_KINDS, *_MESSAGES, *_GROUP_OPERATIONS)
    } - {_UNMATCHED_OPERATION}
    for name in sorted(left_out)[:8]:
        rows = sum(len(ops[name]) for ops in table.rows.values() if name in ops)
        account.skipped[f"operations called {name[:40]}"] += rows
    account.notes.append(
        "each step is timed from its own beginning: steps are placed one after the other"
    )
    return node


def _add_stage_waits(
    node: NodeTables,
    waits: Sequence[tuple[int, int, int]],
    position: PipelinePosition,
    rank_by_position: Mapping[PipelinePosition, int],
    offset_by_step: Mapping[int, int],
    index_by_step: Mapping[int, int],
) -> None:
    """Add the unlisted waits of one rank for the others of its stage."""
    members = _list_group_ranks("stage", position, rank_by_position)
    rows = [
        (start + offset_by_step[step], end + offset_by_step[step], index_by_step[step])
        for step, start, end in waits
        if step in offset_by_step
    ]
    if not rows or len(members) < 2:
        return
    pid = rank_by_position[position] + 1
    group = compute_group_number(f"stage:{','.join(map(str, members))}")
    start, end, number = np.array(rows, np.int64).T
    node.add_group(pid, group, members, f"stage {position[0]}")
    node.add_collectives(pid, start, end, group, number, -1, layout.BARRIER)


def _find_step_bounds(table: OperationTable) -> dict[int, tuple[int, int]]:
    """Find when each step began and ended over all ranks, in the file's time."""
    bounds: dict[int, tuple[int, int]] = {}
    for operations in table.rows.values():
        for rows in operations.values():
            for row in rows:
                low, high = bounds.get(row.step, (row.start_ns, row.end_ns))
                bounds[row.step] = min(low, row.start_ns), max(high, row.end_ns)
    return {step: bound for step, bound in bounds.items() if bound[1] > bound[0]}


def _add_rank(
    node: NodeTables,
    operations: Mapping[str, Sequence[OperationRow]],
    position: PipelinePosition,
    rank_by_position: Mapping[PipelinePosition, int],
    offset_by_step: Mapping[int, int],
    index_by_step: Mapping[int, int],
    until_ns: int,
) -> None:
    """Add the operations of one rank."""
    rank = rank_by_position[position]
    pid, device = rank + 1, f"gpu{rank}"
    tables = {name: _build_table(rows, offset_by_step) for name, rows in operations.items()}
    for name, kind in _SPAN_KINDS.items():
        if name in tables and tables[name].shape[1]:
            node.add_spans(pid, kind, tables[name][2], tables[name][3])
    computing = _merge_tables(tables.get(name) for name in _COMPUTE_OPERATIONS)
    per_step = 1 + max(
        (int(t[1].max()) for n, t in tables.items() if n in _MESSAGES and t.size), default=0
    )
    received = {
        *_list_starts(tables.get("forward-recv")),
        *_list_starts(tables.get("backward-recv")),
    }
    for name, (operation, stage_offset, direction) in _MESSAGES.items():
        operation_table = tables.get(name)
        peer = _find_neighbor(position, stage_offset, rank_by_position)
        if operation_table is None or not operation_table.size or peer is None:
            continue
        sends = operation == layout.SEND
        is_unpaired = np.array(
            [not (sends and start in received) for start in operation_table[2].tolist()]
        )
        members = _list_pipeline_ranks(position, rank_by_position)
        group = compute_group_number(f"{direction}:{','.join(map(str, members))}")
        node.add_group(pid, group, members)
        number = (
            np.array([index_by_step[step] for step in operation_table[0].tolist()]) * per_step
            + operation_table[1]
        )
        _add_messages(node, pid, operation_table, is_unpaired, group, number, operation, peer)
    for name, (operation, scope) in _GROUP_OPERATIONS.items():
        operation_table = tables.get(name)
        members = _list_group_ranks(scope, position, rank_by_position)
        if (
            operation_table is None
            or not operation_table.size
            or len(members) < 2
            or rank not in members
        ):
            continue
        group = compute_group_number(f"{name}:{','.join(map(str, members))}")
        node.add_group(pid, group, members, f"stage {position[0]}" if scope == "stage" else "")
        number = np.array([index_by_step[step] for step in operation_table[0].tolist()])
        node.add_collectives(
            pid, operation_table[2], operation_table[3], group, number, -1, operation
        )
    node.add_busy_time(device, *computing, 0, until_ns)


def _add_messages(
    node: NodeTables,
    pid: int,
    messages: Int,
    is_unpaired: NDArray[np.bool_],
    group: int,
    number: Int,
    operation: int,
    peer: int,
) -> None:
    """Add messages of one kind.

    A message sent together with a receive is issued, and its wait ends when the receive is over:
    the waiting time belongs to the receive.
    """
    unpaired = messages[:, is_unpaired]
    node.add_collectives(
        pid, unpaired[2], unpaired[3], group, number[is_unpaired], -1, operation, peer=peer
    )
    start, end, number = messages[2, ~is_unpaired], messages[3, ~is_unpaired], number[~is_unpaired]
    for call_form, t_ns in ((layout.ISSUE, start), (layout.WAIT, end)):
        form_ = operation | call_form << layout.FORM_SHIFT | (peer + 1) << layout.PEER_SHIFT
        node.add_spans(pid, layout.COLLECTIVE, t_ns, t_ns, group, number, -1, form_)


def _build_table(rows: Sequence[OperationRow], offset_by_step: Mapping[int, int]) -> Int:
    """Build int64[4, n]: step, sequence, start, end (ns, our clock), without empty rows."""
    values = [
        (
            row.step,
            max(row.sequence, 0),
            *(t + offset_by_step[row.step] for t in (row.start_ns, row.end_ns)),
        )
        for row in rows
        if row.end_ns > row.start_ns and row.step in offset_by_step
    ]
    table = (
        np.array(sorted(values, key=lambda row_values: row_values[2]), np.int64).reshape(-1, 4).T
    )
    return table


def _merge_tables(tables: Iterable[Int | None]) -> Intervals:
    return merge_intervals(
        *(
            (operation_table[2], operation_table[3])
            for operation_table in tables
            if operation_table is not None
        )
    )


def _list_starts(table: Int | None) -> list[int]:
    return [] if table is None else table[2].tolist()


def _find_neighbor(
    position: PipelinePosition, stage_offset: int, ranks: Mapping[PipelinePosition, int]
) -> int | None:
    """Find the rank of the stage at an offset; wraps around where stages hold several chunks."""
    stages = 1 + max(stage for stage, _ in ranks)
    return ranks.get(((position[0] + stage_offset) % stages, position[1]))


def _list_pipeline_ranks(
    position: PipelinePosition, ranks: Mapping[PipelinePosition, int]
) -> list[int]:
    return sorted(rank for (_, copy), rank in ranks.items() if copy == position[1])


def _list_group_ranks(
    scope: str, position: PipelinePosition, ranks: Mapping[PipelinePosition, int]
) -> list[int]:
    last = max(stage for stage, _ in ranks)
    if scope == "all":
        return sorted(ranks.values())
    if scope == "ends":
        return sorted(r for (s, copy), r in ranks.items() if copy == position[1] and s in (0, last))
    return sorted(rank for (stage, _), rank in ranks.items() if stage == position[0])


_PARQUET = b"PAR1"
_FOOTER_BYTES = 256 << 10
_KEYS = (b'"model_chunk"', b'"mb_id"', b'"seq_id"', b'"PP rank ')


class OperatorTable:
    """Importer of parquet or timeline tables of a pipelined job."""

    name: ClassVar[str] = "operator-table"
    title: ClassVar[str] = "operator table of a pipelined job"
    reads_windows: ClassVar[bool] = True
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file is parquet with the columns, or events with microbatches."""
        if head.startswith(_PARQUET):
            return all(name.encode() in _read_footer(head, path) for name in COLUMNS)
        return head.lstrip()[:1] == b"[" and (
            all(key in head for key in _KEYS[:3]) or head.count(_KEYS[3]) > 1
        )

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the job as one node.

        Raises: CannotImportError when no file could be read or no step has computation.
        """
        table, problem, used = OperationTable(), None, ""
        for source, account in sorted(zip(sources, accounts), key=_get_priority):
            read_table = OperationTable()
            try:
                if source.head.startswith(_PARQUET):
                    read_parquet(source, account, read_table)
                else:
                    read_timeline(source, account, read_table)
            except CannotImportError as error:
                problem = problem or error
                account.refuse(error.message)
            if not table.count:
                table, used = read_table, source.path.name
            elif read_table.count:
                account.read.clear()
                if _is_same_job(table, read_table):
                    account.notes.append("not used: another table of the same job was read")
                else:
                    account.refuse(f"not used: it is of another job than {used}")
        node = build_node(table, accounts[0])
        if node is None:
            raise problem or CannotImportError(
                "the table has no step with computation", "export it again"
            )
        yield node


def _is_same_job(table: OperationTable, other: OperationTable) -> bool:
    """Return whether two tables have equal ranks and, in some step, equally many passes of each."""
    passes, other_passes = _count_passes(table), _count_passes(other)
    return table.rows.keys() == other.rows.keys() and any(
        passes[step] == count for step, count in other_passes.items() if step in passes
    )


def _count_passes(table: OperationTable) -> dict[int, Counter[tuple[PipelinePosition, str]]]:
    """Count the forward and backward passes of each rank, by step."""
    counts: dict[int, Counter[tuple[PipelinePosition, str]]] = defaultdict(Counter)
    for position, operations in table.rows.items():
        for name in ("forward-compute", "backward-compute"):
            for row in operations.get(name, ()):
                counts[row.step][position, name] += 1
    return counts


def _get_priority(pair: tuple[Source, Account]) -> tuple[bool, bool, str]:
    """Return the sort key of a file: parquet first, simulated "ideal" tables last."""
    source = pair[0]
    return ("ideal" in source.path.name, not source.head.startswith(_PARQUET), source.path.name)


def _read_footer(head: bytes, path: Path) -> bytes:
    """Read the end of a parquet file, which contains the column names."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _FOOTER_BYTES))
            return file.read()
    except OSError:
        return head  # a member of an archive: a short file is completely in its head
