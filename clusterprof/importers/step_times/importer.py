"""Tables of step times: one row per rank and step.

## What is read

CSV (`,` `;` tab), JSON lines, a JSON list of objects, parquet where pyarrow is installed. Columns,
by these names or their like: `rank` (`worker`), `step` (`iteration`), and `duration` (`step_time`,
`batch_time`) or `start` and `end`; `host` and `job` if there are any. The unit stands in the name
(`step_time_ms`, `duration (s)`); instants without one are Unix times or dates. To write one:

    print(f"{rank},{step},{time.perf_counter() - began}", file=table)   # head: rank,step,duration_s

## How it is understood

The ranks of a synchronous job leave each step together. Of durations alone each is a rank's own
time: all begin a step together, and those who are done wait at its end for the slowest, which is
the culprit. With starts and ends steps lie where they were, and ranks wait where no step begins
before the last one ended everywhere. A step of which a rank is missing tells no wait.

## Where it is blind

Why a rank is slow is not in such a table. Times that include the wait for others are alike on all
ranks, and then nobody is slow. Ranks that do not wait for each other (parameter servers) are shown
as if they did when there are durations alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.step_times.laying import nodes_of
from clusterprof.importers.step_times.names import columns_of
from clusterprof.importers.step_times.reading import PARQUET, heads_of, parquet_words, tables_of
from clusterprof.importers.tables import NodeTables


class StepTimes:
    """Rank, step and how long it took."""

    name: ClassVar[str] = "step_times"
    title: ClassVar[str] = "table of step times"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the names of the columns."""
        if head[:4] == PARQUET:
            return columns_of(parquet_words(path)) is not None
        heads = heads_of(head)
        return heads is not None and columns_of(heads) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the nodes of every job in a table."""
        source, account = sources[0], accounts[0]
        tables = tables_of(source, account)
        if not tables:
            raise CannotImportError("the table has no row that can be used", "")
        stem = source.path.name.split(".")[0]
        for job, table in sorted(tables.items()):
            yield from nodes_of(table, f"{stem} {job}".strip(), self.name, account)
