"""Tables of GPU readings: fields of DCGM, amd-smi, Omnistat, Weights & Biases.

## What is read

CSV and JSON lines with a column of times (`timestamp`, `time`, `_timestamp`) and columns of
readings: DCGM's fields by name, alone or as `DCGM_FI_DEV_GPU_UTIL{gpu="0"}` (with columns
`Hostname`, `gpu`, `UUID` if there are any); `amd-smi metric -w 1 --csv`; `omnistat-query --export`;
system metrics of a Weights & Biases run (`system.gpu.0.gpu`, …):

    run.history(stream="system").to_csv("wandb.csv", index=False)

## How it is understood

One node for each host the table names, else one for the file. Shares, memory and clocks get our
units. `N/A` is unknown, not zero. Dates without a zone are not tied to other hosts' clocks.

## Where it is blind

Weights & Biases keeps means of 15 s or more. TensorBoard's exports carry no names, and its event
files hold what the user logged: neither is read. Nothing tells of ranks or steps: no loss is
claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.gpu_tables.heads import Heads
from clusterprof.importers.gpu_tables.rows import found_heads, rows_of
from clusterprof.importers.nvidia_smi.readings import quantity
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.telemetry.gathered import (
    COLUMNS_AT_MOST,
    READINGS_AT_MOST,
    Column,
    Gathered,
)
from clusterprof.importers.telemetry.times import time_ns

_Key = tuple[int, int, tuple[str, ...]]
_TABLES_AT_ONCE = 1024
_KEYS_AT_MOST = 2 * COLUMNS_AT_MOST


class GpuTables:
    """Tables with columns of readings."""

    name: ClassVar[str] = "gpu_tables"
    title: ClassVar[str] = "table of GPU readings"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the heads of the columns."""
        return found_heads(head) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node for each host."""
        source, account = sources[0], accounts[0]
        found = found_heads(source.head)
        gathered = Gathered()
        if found is not None:
            _read(source, found[0], gathered, account)
        stem = source.path.name.split(".")[0]
        some = False
        for node in gathered.nodes(self.name, account, stem):
            node.shown = stem
            some = True
            yield node
        if not some:
            raise CannotImportError("no reading of a GPU was found", "")


def _read(source: Source, form: str, gathered: Gathered, account: Account) -> None:
    columns: dict[_Key, Column | None] = {}
    left = READINGS_AT_MOST
    alive: dict[int, Heads] = {}  # while they live, no others have their numbers
    for heads, cells in rows_of(source, form, account):
        if id(heads) not in alive:
            if len(alive) >= _TABLES_AT_ONCE:
                alive.clear()
                columns.clear()
            alive[id(heads)] = heads
        said = time_ns(cells[heads.time])
        if said is None:
            account.skipped["rows with an impossible time"] += 1
            continue
        t_ns, zoned = said
        gathered.wall &= zoned
        account.read["rows"] += 1
        row = {name: cells[at] for at, name in heads.labels.items() if cells[at]}
        who = tuple(row.values())
        for number in heads.readings:
            if not cells[number] or left <= 0:
                continue
            key = (id(heads), number, who)
            if key not in columns:
                if len(columns) >= _KEYS_AT_MOST:
                    raise CannotImportError(f"more than {_KEYS_AT_MOST:,} series", "give fewer")
                columns[key] = _column(heads, number, row, gathered)
            column = columns[key]
            if column is not None:
                column.add(t_ns, quantity(cells[number]))
                left -= 1
    if left <= 0:
        account.skipped["readings beyond the most that are read"] += 1


def _column(heads: Heads, number: int, row: dict[str, str], gathered: Gathered) -> Column | None:
    found = heads.of_row(number, row)
    if found is None:
        return None
    host, meaning, device = found
    name = heads.readings[number].name
    maker = heads.maker or ("nvidia" if name.startswith("DCGM_") else "")
    if meaning.signal.startswith("gpu."):
        gathered.device(host, device, vendor=maker, name=row.get("modelName", ""))
    return gathered.column(host, meaning, device)
