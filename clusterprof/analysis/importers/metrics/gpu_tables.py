"""Tables of GPU readings with a column per device or metric.

## How to make the file

    amd-smi metric -w 1 --csv > gpus.csv

For Weights & Biases, in Python:

    run = wandb.Api().run("team/project/run")
    run.history(stream="system").to_csv("wandb.csv", index=False)

## How to analyze it

    clusterprof analyze gpus.csv

## What is read

CSV and JSON lines with a time column (`timestamp`, `time`, `_timestamp`) and columns of readings:

* DCGM fields by name, alone or as `DCGM_FI_DEV_GPU_UTIL{gpu="0"}`, with columns `Hostname`, `gpu`
  and `UUID` where there are any
* the output of `amd-smi metric --csv`
* the system metrics of a Weights & Biases run (`system.gpu.0.gpu`, …)
* the output of `omnistat-query --export`, which has several header rows

Header lines:

    timestamp,Hostname,gpu,DCGM_FI_DEV_GPU_UTIL            DCGM
    timestamp,gpu,gfx_activity,umc_activity,socket_power   amd-smi
    _timestamp,system.gpu.0.gpu,system.gpu.0.powerWatts    Weights & Biases

    metric,rocm_utilization_percentage,rocm_utilization_percentage     Omnistat
    instance,node01,node02
    card,0,0
    timestamp,,

## How the numbers are computed

Each host named in the table is a node. A table without host names is one node. Shares, memory and
clocks are converted to the units of clusterprof. `N/A` is unknown, not zero. Dates without a time
zone are not aligned with the clocks of other hosts.

## What it cannot see

Weights & Biases keeps means over 15 s or more. The tables have no ranks or steps, so no loss is
claimed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import name_trace
from clusterprof.analysis.importers.metrics.labelled_series import (
    HOST_LABELS,
    find_gpu,
    find_host,
    find_mapping,
    is_known,
)
from clusterprof.analysis.importers.metrics.prometheus import parse_labels
from clusterprof.analysis.importers.metrics.readings import (
    MAX_COLUMNS,
    MAX_READINGS,
    MetricMapping,
    MetricReadings,
    ReadingColumn,
    parse_quantity,
    parse_time,
    read_stripped_lines,
)

_PERCENT, _MEGA, _MB = 0.01, 1e6, 1e6
TIME_COLUMNS = ("timestamp", "time", "_timestamp", "time (s)", "date", "datetime")
LABEL_COLUMNS = (*HOST_LABELS, "gpu", "card", "gpu_id", "UUID", "uuid", "device", "modelName")
_METRIC_HEAD = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?")
_WANDB_HEAD = re.compile(r"(?:system[./])?gpu\.(\d{1,4})\.(\w+)")

AMD_SMI_METRICS: dict[str, MetricMapping] = {
    "gfx_activity": MetricMapping("gpu.busy_ratio", _PERCENT),
    "umc_activity": MetricMapping("gpu.memory_busy_ratio", _PERCENT),
    "socket_power": MetricMapping("gpu.power_watts"),
    "current_socket_power": MetricMapping("gpu.power_watts"),
    "average_socket_power": MetricMapping("gpu.power_watts", choice=1),
    "gfx_0_clk": MetricMapping("gpu.sm_clock_hertz", _MEGA),
    "mem_0_clk": MetricMapping("gpu.memory_clock_hertz", _MEGA),
    "hotspot": MetricMapping("gpu.temperature_celsius"),
    "edge": MetricMapping("gpu.temperature_celsius", choice=1),
    "used_vram": MetricMapping("gpu.memory_used_bytes", _MB),
    "total_vram": MetricMapping("gpu.memory_total_bytes", _MB),
}
WANDB_METRICS: dict[str, MetricMapping] = {
    "gpu": MetricMapping("gpu.busy_ratio", _PERCENT),
    "memory": MetricMapping("gpu.memory_busy_ratio", _PERCENT),
    "memoryAllocatedBytes": MetricMapping("gpu.memory_used_bytes"),
    "temp": MetricMapping("gpu.temperature_celsius"),
    "powerWatts": MetricMapping("gpu.power_watts"),
    "enforcedPowerLimitWatts": MetricMapping("gpu.power_limit_watts"),
    "smClock": MetricMapping("gpu.sm_clock_hertz", _MEGA),
    "memoryClock": MetricMapping("gpu.memory_clock_hertz", _MEGA),
    "correctedMemoryErrors": MetricMapping("gpu.ecc_corrected_total"),
    "uncorrectedMemoryErrors": MetricMapping("gpu.ecc_uncorrected_total"),
}


@dataclass(frozen=True, slots=True)
class ReadingColumnHead:
    """One column of readings."""

    meaning: MetricMapping | None
    """Mapping to our signal; None if it depends on the labels in a row."""
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    device: str = ""


@dataclass(frozen=True, slots=True)
class TableHeads:
    """Meaning of the columns of a table."""

    time: int
    labels: Mapping[int, str]
    readings: Mapping[int, ReadingColumnHead]
    vendor: str

    def resolve_reading(
        self, number: int, row: Mapping[str, str]
    ) -> tuple[str, MetricMapping, str] | None:
        """Return host, mapping and device of a reading in a row; None if it has no signal."""
        reading = self.readings[number]
        host = find_host(row)[0]
        if reading.meaning is not None:
            device = reading.device or find_gpu(row)
            return (host, reading.meaning, device) if device else None
        labels = {**row, **reading.labels}
        mapping = find_mapping(reading.name, labels)
        return (find_host(labels)[0], *mapping) if mapping else None


def parse_heads(cells: Sequence[str]) -> TableHeads | None:
    """Parse the column heads; None if there is no time column or no GPU reading."""
    cells = [cell.strip().strip('"').lstrip("\ufeff") for cell in cells]
    time = next((index for index, cell in enumerate(cells) if cell.lower() in TIME_COLUMNS), None)
    if time is None:
        return None
    labels = {index: cell for index, cell in enumerate(cells) if cell in LABEL_COLUMNS}
    dcgm = {
        index: reading
        for index, cell in enumerate(cells)
        if (reading := _parse_metric_head(cell)) is not None
    }
    wandb = {
        index: ReadingColumnHead(WANDB_METRICS[match[2]], device=f"gpu{match[1]}")
        for index, cell in enumerate(cells)
        if (match := _WANDB_HEAD.fullmatch(cell)) and match[2] in WANDB_METRICS
    }
    amd = {
        index: ReadingColumnHead(AMD_SMI_METRICS[cell])
        for index, cell in enumerate(cells)
        if cell in AMD_SMI_METRICS
    }
    for readings, vendor in ((dcgm, ""), (wandb, ""), (amd, "amd")):
        if len(readings) >= 2 or (readings and vendor == ""):
            return TableHeads(time, labels, readings, vendor)
    return None


def _parse_metric_head(cell: str) -> ReadingColumnHead | None:
    match = _METRIC_HEAD.fullmatch(cell)
    if match is None or not is_known(match[1]):
        return None
    return ReadingColumnHead(None, match[1], parse_labels(match[2] or ""))


_MAX_HEAD_LINES = 20
_OMNISTAT_HEAD = "metric"
_MAX_HEAD_ROWS = 10
_MAX_CACHED_KEYS = 1 << 18
"""Number of keys cached over all kinds of lines together."""


def find_heads(head: bytes) -> tuple[str, TableHeads] | None:
    """Find the form (`csv`, `json`, `omnistat`) and the columns at the beginning of a file."""
    lines = [line for line in head.split(b"\n")[:_MAX_HEAD_LINES] if line.strip()]
    if lines and lines[0].lstrip()[:1] == b"{":
        return _find_json_heads(lines)
    texts = [line.decode("utf-8", "replace").replace("\0", "").strip("\r") for line in lines]
    rows = [_split_cells(text) for text in texts]
    if rows and rows[0][:1] == [_OMNISTAT_HEAD]:
        heads = parse_omnistat_heads(rows)
        return ("omnistat", heads) if heads else None
    csv_heads = next((heads for row in rows if (heads := parse_heads(row)) is not None), None)
    return ("csv", csv_heads) if csv_heads else None


def _find_json_heads(lines: list[bytes]) -> tuple[str, TableHeads] | None:
    """Find the keys in the first JSON lines, any of which may have the readings."""
    for line in lines:
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        heads = parse_heads(list(map(str, record))) if isinstance(record, dict) else None
        if heads is not None:
            return "json", heads
    return None


def parse_omnistat_heads(rows: list[list[str]]) -> TableHeads | None:
    """Parse the head rows above `timestamp`; None if no metric is known."""
    head_rows: dict[str, list[str]] = {}
    for row in rows[:_MAX_HEAD_ROWS]:
        if row[:1] == ["timestamp"]:
            names = head_rows.pop(_OMNISTAT_HEAD, [])
            readings = {
                index: ReadingColumnHead(
                    None, name, {k: v[index] for k, v in head_rows.items() if index < len(v)}
                )
                for index, name in enumerate(names)
                if 0 < index < len(row) and is_known(name)
            }
            return TableHeads(0, {}, readings, "amd") if readings else None
        head_rows[row[0] if row else ""] = row
    return None


def read_rows(
    source: Source, file_form: str, account: Account
) -> Iterator[tuple[TableHeads, list[str]]]:
    """Yield each row with the heads of its columns."""
    if file_form == "json":
        yield from _read_json_rows(source, account)
        return
    heads: TableHeads | None = None
    width = 0
    head_rows: list[list[str]] = []
    for line in read_stripped_lines(source, account):
        text = line.decode("utf-8", "replace").replace("\0", "").strip("\r")
        if not text.strip():
            continue
        cells = _split_cells(text)
        if file_form == "omnistat" and heads is None and len(head_rows) < _MAX_HEAD_ROWS:
            head_rows.append(cells)
            heads = parse_omnistat_heads(head_rows)
            width = len(cells)
            continue
        new_heads = parse_heads(cells) if file_form == "csv" else None
        if new_heads is not None:
            heads, width = heads if new_heads == heads else new_heads, len(cells)
        elif heads is None or len(cells) != width:
            account.skipped["lines that are not rows of the table"] += 1
        else:
            yield heads, cells


def _read_json_rows(source: Source, account: Account) -> Iterator[tuple[TableHeads, list[str]]]:
    heads_by_keys: dict[tuple[str, ...], TableHeads | None] = {}
    remaining_keys = _MAX_CACHED_KEYS
    decode = msgspec.json.Decoder().decode
    for line in read_stripped_lines(source, account):
        if not line.strip():
            continue
        try:
            record = decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            account.skipped["lines that are not JSON"] += 1
            continue
        keys = tuple(record) if isinstance(record, dict) else ()
        if keys not in heads_by_keys and len(keys) <= remaining_keys:
            heads_by_keys[keys] = parse_heads(keys)
            remaining_keys -= len(keys)
        heads = heads_by_keys.get(keys)
        if heads is None:
            account.skipped["lines without readings"] += 1
            continue
        yield heads, ["" if value is None else str(value) for value in record.values()]


def _split_cells(text: str) -> list[str]:
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []


_Key = tuple[int, int, tuple[str, ...]]
_MAX_CACHED_HEADS = 1024
_MAX_KEYS = 2 * MAX_COLUMNS


class GpuTables:
    """Importer of tables with columns of GPU readings."""

    name: ClassVar[str] = "gpu_tables"
    title: ClassVar[str] = "table of GPU readings"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the column heads name known readings."""
        return find_heads(head) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node for each host.

        Raises: CannotImportError when the file holds no GPU readings.
        """
        source, account = sources[0], accounts[0]
        table = find_heads(source.head)
        readings = MetricReadings()
        if table is not None:
            _read_table(source, table[0], readings, account)
        stem = name_trace(source.path)
        has_nodes = False
        for node in readings.nodes(self.name, account, stem):
            node.display_name = stem
            has_nodes = True
            yield node
        if not has_nodes:
            raise CannotImportError("the file holds no GPU readings", "")


def _read_table(source: Source, file_form: str, readings: MetricReadings, account: Account) -> None:
    columns: dict[_Key, ReadingColumn | None] = {}
    remaining_readings = MAX_READINGS
    heads_by_id: dict[int, TableHeads] = {}  # keeps the heads alive, so that their ids stay unique
    for heads, cells in read_rows(source, file_form, account):
        if id(heads) not in heads_by_id:
            if len(heads_by_id) >= _MAX_CACHED_HEADS:
                heads_by_id.clear()
                columns.clear()
            heads_by_id[id(heads)] = heads
        time = parse_time(cells[heads.time])
        if time is None:
            account.skipped["rows with an impossible time"] += 1
            continue
        t_ns, zoned = time
        readings.has_wall_clock &= zoned
        account.read["rows"] += 1
        row = {name: cells[index] for index, name in heads.labels.items() if cells[index]}
        labels = tuple(row.values())
        for number in heads.readings:
            if not cells[number] or remaining_readings <= 0:
                continue
            key = (id(heads), number, labels)
            if key not in columns:
                if len(columns) >= _MAX_KEYS:
                    raise CannotImportError(f"more than {_MAX_KEYS:,} series", "give fewer")
                columns[key] = _get_column(heads, number, row, readings)
            column = columns[key]
            if column is not None:
                column.add(t_ns, parse_quantity(cells[number]))
                remaining_readings -= 1
    if remaining_readings <= 0:
        account.skipped["readings beyond the limit"] += 1


def _get_column(
    heads: TableHeads, number: int, row: dict[str, str], readings: MetricReadings
) -> ReadingColumn | None:
    identity = heads.resolve_reading(number, row)
    if identity is None:
        return None
    host, meaning, device = identity
    name = heads.readings[number].name
    vendor = heads.vendor or ("nvidia" if name.startswith("DCGM_") else "")
    if meaning.signal.startswith("gpu."):
        readings.device(host, device, vendor=vendor, name=row.get("modelName", ""))
    return readings.column(host, meaning, device)
