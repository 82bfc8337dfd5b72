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
* tables of loggers that name quantity and unit: `gpu_util_pct`, `mem_used_mb`, `temp_c`, `power_w`,
  with a time in seconds since the start (`elapsed_sec`)
* such tables without a unit of the utilization (`gpu_utilization`, `gpu_usage:0` with the device
  behind a colon, `Utilization` beside `GPU_ID`), if a value above 1 shows that it is in percent

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
zone, and times since the start, are not aligned with the clocks of other hosts. Of a quoted cell
with line breaks the first line counts.

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
from clusterprof.analysis.importers.metrics.labeled_series import (
    HOST_LABELS,
    find_gpu,
    find_host,
    find_mapping,
    is_known,
)
from clusterprof.analysis.importers.metrics.metric_readings import (
    MAX_COLUMNS,
    MAX_READINGS,
    MetricMapping,
    MetricReadings,
    ReadingColumn,
    parse_quantity,
    parse_time,
    read_stripped_lines,
)
from clusterprof.analysis.importers.metrics.prometheus import parse_labels

_PERCENT, _MEGA, _MB = 0.01, 1e6, 1e6
TIME_COLUMNS = ("timestamp", "time", "_timestamp", "time (s)", "date", "datetime")
_GPU_COLUMNS = frozenset(("gpu", "card", "gpu_id", "UUID", "uuid"))
_GPU_NUMBER_HEADS = ("gpu_id", "gpu id", "gpu_index", "gpu index")
LABEL_COLUMNS = (*HOST_LABELS, *_GPU_COLUMNS, "device", "modelName")
_METRIC_HEAD = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?")
_ELAPSED_HEAD = re.compile(r"(?:elapsed|time_elapsed|uptime)_?(?:time_?)?(?:s|secs?|seconds?)")
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
_PERCENT_UNIT = r"_?(?:pct|percent|perc|%)"
_BYTES_BY_UNIT = {"b": 1.0, "bytes": 1.0, "mb": 1e6, "gb": 1e9, "mib": 2.0**20, "gib": 2.0**30}
_NAMED_QUANTITIES = (
    (rf"gpu_(?:util|utilization|usage|load|busy){_PERCENT_UNIT}", "gpu.busy_ratio"),
    (rf"(?:util|utilization)_gpu{_PERCENT_UNIT}", "gpu.busy_ratio"),
    (r"gpu_(?:util|utilization|usage|load|busy)(?P<share>)", "gpu.busy_ratio"),
    (r"(?:gpu_)?(?:mem|memory|vram)_used_(?P<unit>{units})", "gpu.memory_used_bytes"),
    (r"(?:gpu_)?(?:mem|memory|vram)_total_(?P<unit>{units})", "gpu.memory_total_bytes"),
    (r"(?:gpu_)?temp(?:erature)?_c(?:elsius)?", "gpu.temperature_celsius"),
    (r"(?:gpu_)?power(?:_draw)?_w(?:atts?)?", "gpu.power_watts"),
)
"""Heads that name a quantity with its unit, in lower case with underscores. A share without a unit
(group `share`) needs a value above 1 to be percent: else whether 1 is all or one percent would be a
guess.
"""
_BARE_SHARE = "util|utilization"
"""Heads that name a share of a GPU only beside a column that names the GPU."""
_DEVICE_BEHIND = re.compile(r"([^:]+):(\d{1,4})")


def _parse_named_quantity(cell: str, has_gpu_column: bool) -> ReadingColumnHead | None:
    """Parse a head like `gpu_util_pct`, `Mem Used (MB)`, `gpu_usage:0`; None for any other."""
    split = _DEVICE_BEHIND.fullmatch(cell)
    device = f"gpu{split[2]}" if split else ""
    name = re.sub(r"[^a-z0-9%]+", "_", (split[1] if split else cell).lower()).strip("_")
    if has_gpu_column and re.fullmatch(_BARE_SHARE, name):
        name = f"gpu_{name}"
    for pattern, signal in _NAMED_QUANTITIES:
        match = re.fullmatch(pattern.replace("{units}", "|".join(_BYTES_BY_UNIT)), name)
        if match is not None:
            groups = match.groupdict()
            unit = groups.get("unit")
            scale = _BYTES_BY_UNIT[unit] if unit else _PERCENT if signal.endswith("ratio") else 1.0
            mapping = MetricMapping(signal, scale)
            return ReadingColumnHead(mapping, device=device, has_unit="share" not in groups)
    return None


@dataclass(frozen=True, slots=True)
class ReadingColumnHead:
    """One column of readings."""

    meaning: MetricMapping | None
    """Mapping to our signal; None if it depends on the labels in a row."""
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    has_unit: bool = True
    """False if it is a share that only the values show to be in percent."""


@dataclass(frozen=True, slots=True)
class TableHeads:
    """Meaning of the columns of a table."""

    time: int
    labels: Mapping[int, str]
    readings: Mapping[int, ReadingColumnHead]
    vendor: str
    is_elapsed: bool = False
    """True if times count from the start of the table, not from 1970."""
    default_device: str = ""
    """Device of the rows where no column names one."""

    def resolve_reading(
        self, number: int, row: Mapping[str, str]
    ) -> tuple[str, MetricMapping, str] | None:
        """Return host, mapping and device of a reading in a row; None if it has no signal."""
        reading = self.readings[number]
        host = find_host(row)[0]
        if reading.meaning is not None:
            device = reading.device or find_gpu(row) or self.default_device
            return (host, reading.meaning, device) if device else None
        labels = {**row, **reading.labels}
        mapping = find_mapping(reading.name, labels)
        return (find_host(labels)[0], *mapping) if mapping else None


def parse_heads(cells: Sequence[str]) -> TableHeads | None:
    """Parse the column heads; None if there is no time column or no GPU reading."""
    cells = [cell.strip().strip('"').lstrip("\ufeff") for cell in cells]
    time = next((index for index, cell in enumerate(cells) if cell.lower() in TIME_COLUMNS), None)
    elapsed = (index for index, cell in enumerate(cells) if _ELAPSED_HEAD.fullmatch(cell.lower()))
    is_elapsed = time is None
    if is_elapsed:
        time = next(elapsed, None)
    if time is None:
        return None
    labels = {
        index: "gpu" if cell.lower() in _GPU_NUMBER_HEADS else cell
        for index, cell in enumerate(cells)
        if cell in LABEL_COLUMNS or cell.lower() in _GPU_NUMBER_HEADS
    }
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
            return TableHeads(time, labels, readings, vendor, is_elapsed)
    has_gpu_column = bool(set(labels.values()) & _GPU_COLUMNS)
    named = {
        index: reading
        for index, cell in enumerate(cells)
        if (reading := _parse_named_quantity(cell, has_gpu_column)) is not None
    }
    signals = [(head.meaning.signal, head.device) for head in named.values() if head.meaning]
    is_known = any(signal == "gpu.busy_ratio" for signal, _ in signals)
    if not is_known or len(signals) > len(set(signals)):
        return None
    device = "" if has_gpu_column else "gpu0"
    return TableHeads(time, labels, named, "", is_elapsed, device)


def _parse_metric_head(cell: str) -> ReadingColumnHead | None:
    match = _METRIC_HEAD.fullmatch(cell)
    if match is None or not is_known(match[1]):
        return None
    return ReadingColumnHead(None, match[1], parse_labels(match[2] or ""))


_MAX_HEAD_LINES = 20
_OMNISTAT_HEAD = "metric"
_MAX_HEAD_ROWS = 10
_MAX_RECORD_LINES = 16
"""Largest number of lines of one row: a cell of readings has no more line breaks."""
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
    is_first_bad = True
    for number, text in _read_records(source, account):
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
            if heads is not None and is_first_bad:
                account.notes.append(
                    f"line {number:,} is the first that is not a row of the table:"
                    f" {len(cells)} cells below {width} heads"
                )
                is_first_bad = False
        else:
            yield heads, cells


def _read_records(source: Source, account: Account) -> Iterator[tuple[int, str]]:
    """Yield each row as text with the number of its first line; empty lines are left out.

    A quoted cell may have line breaks. A quote that is not closed within `_MAX_RECORD_LINES` lines
    opens nothing: its line stands alone.
    """
    waiting: list[tuple[int, str]] = []
    for number, line in enumerate(read_stripped_lines(source, account), 1):
        text = line.decode("utf-8", "replace").replace("\0", "").strip("\r")
        if not waiting and text.count('"') % 2 == 0:
            if text.strip():
                yield number, text
            continue
        waiting.append((number, text))
        if len(waiting) > 1 and text.count('"') % 2:
            account.skipped["line breaks within a cell"] += len(waiting) - 1
            yield waiting[0][0], "\n".join(text for _, text in waiting)
            waiting = []
        elif len(waiting) >= _MAX_RECORD_LINES:
            yield from waiting
            waiting = []
    yield from waiting


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
        return next(csv.reader(text.splitlines(keepends=True)), [])
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
            is_percent = _has_percent_shares(source, *table)
            _read_table(source, table[0], readings, account, is_percent)
        stem = name_trace(source.path)
        has_nodes = False
        for node in readings.nodes(self.name, account, stem):
            node.display_name = stem
            has_nodes = True
            yield node
        if not has_nodes:
            raise CannotImportError("the file holds no GPU readings", "")


def _has_percent_shares(source: Source, file_form: str, heads: TableHeads) -> bool:
    """Return whether a value above 1 shows that shares without a unit are in percent."""
    if all(head.has_unit for head in heads.readings.values()):
        return True
    return any(
        parse_quantity(cells[number]) > 1
        for row_heads, cells in read_rows(source, file_form, Account(source.path))
        for number, head in row_heads.readings.items()
        if not head.has_unit
    )


def _read_table(
    source: Source, file_form: str, readings: MetricReadings, account: Account, is_percent: bool
) -> None:
    """Read all rows; shares without a unit only if they are in percent."""
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
        readings.has_wall_clock &= zoned and not heads.is_elapsed
        account.read["rows"] += 1
        row = {name: cells[index] for index, name in heads.labels.items() if cells[index]}
        labels = tuple(row.values())
        for number in heads.readings:
            if not cells[number] or remaining_readings <= 0:
                continue
            if not is_percent and not heads.readings[number].has_unit:
                account.skipped["shares without a unit, none above 1"] += 1
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
