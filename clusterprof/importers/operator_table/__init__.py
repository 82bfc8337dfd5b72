"""Operator tables of pipelined training jobs: compute, messages and collectives of every step.

## What is read

Tables as ByteDance's StragglerAnalysis publishes them: parquet (`dp_rank, stage, rank, step,
optype, start_ts, duration, seq_id, …`, seconds; needs the package pyarrow) or the same as a
timeline (Chrome's list of events, microseconds, threads `PP rank 1, TP rank 0, compute`).
Operations: forward- and backward-compute of every microbatch, forward- and backward-send and
-recv, params-all-gather, grads-reduce-scatter, embedding-grads-all-reduce,
optimizer-clip-main-grad, optimizer and gc. Of several files of one job the first that can be read
is taken; parquet before timelines.

## How it is understood

Each step is timed from its own beginning, so steps are laid one after the other, as long as the
last rank needed; what lay between them is not in the table. All ranks are on one clock.

The device is busy computing, and stands still in messages and operations with others as far as it
does not compute meanwhile. A send and a receive that begin together are one exchange, and the wait
is the receive's. A timeline shows of an operation with others only the transfer: it is let begin
when the operation before it ended.
Messages go between neighbouring stages of one copy of the model, all-gather and reduce-scatter
between the copies of a stage, embedding-grads-all-reduce between first and last stage, the clipping
of gradients between all ranks. Work that a stage always has more of is `sync-imbalance`.

## Where it is blind

Only one rank of a tensor-parallel group is in a table. Host, storage and network are not. Why an
operation took long is not told, only that it did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.operator_table.node import node_of
from clusterprof.importers.operator_table.table import (
    COLUMNS,
    Table,
    read_parquet,
    read_timeline,
)
from clusterprof.importers.tables import NodeTables

_PARQUET = b"PAR1"
_FOOTER_BYTES = 256 << 10
_KEYS = (b'"model_chunk"', b'"mb_id"', b'"seq_id"', b'"PP rank ')


class OperatorTable:
    """Parquet or a timeline of a pipelined job."""

    name: ClassVar[str] = "operator-table"
    title: ClassVar[str] = "operator table of a pipelined job"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """Parquet with the columns of such a table, or events with a microbatch and a sequence."""
        if head.startswith(_PARQUET):
            return all(name.encode() in _footer(head, path) for name in COLUMNS)
        return head.lstrip()[:1] == b"[" and (
            all(key in head for key in _KEYS[:3]) or head.count(_KEYS[3]) > 1
        )

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the job as one node. Raises CannotImportError when no file could be read."""
        table, problem = Table(), None
        for source, account in sorted(zip(sources, accounts), key=_preferred):
            if table.count:
                account.notes.append("left out: another table of the same job was read")
                continue
            try:
                if source.head.startswith(_PARQUET):
                    read_parquet(source, account, table)
                else:
                    read_timeline(source, account, table)
            except CannotImportError as error:
                problem = problem or error
                account.refuse(error.message)
        node = node_of(table, accounts[0])
        if node is None:
            raise problem or CannotImportError(
                "no step in which anything was computed", "export it again"
            )
        yield node


def _preferred(pair: tuple[Source, Account]) -> tuple[bool, bool, str]:
    """Parquet first: it has the numbers of ranks. What is called ideal was never measured."""
    source = pair[0]
    return (
        "ideal" in source.path.name, not source.head.startswith(_PARQUET), source.path.name,
    )  # fmt: skip


def _footer(head: bytes, path: Path) -> bytes:
    """The end of a parquet file, where its columns are named."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _FOOTER_BYTES))
            return file.read()
    except OSError:
        return head  # a member of an archive: a short one is all here
