"""Output of nvidia-smi and `dcgmi dmon` for the GPUs of one host.

## How to make the file

    fields=timestamp,uuid,utilization.gpu,memory.used,power.draw,clocks.sm
    fields=$fields,clocks_event_reasons.active
    nvidia-smi --query-gpu=$fields --format=csv -l 1 > gpus.csv
    nvidia-smi dmon -o DT > dmon.txt

## How to analyze it

    clusterprof analyze gpus.csv

## What is read

* `nvidia-smi --query-gpu=… --format=csv` with its header line, with or without units
* `nvidia-smi dmon` and `nvidia-smi pmon`
* `nvidia-smi -q -x`: one document, or a log of many; a document that declares an entity is refused
* `dcgmi dmon`

## How the numbers are computed

Each file is one host, whose name is not in the file. Times are those of the clock of that host, in
an unknown time zone. Without times, sweeps are assumed to be one second apart, which is the default
of the tools, and a note says so. `N/A` is unknown, not zero.

## What it cannot see

Utilization is the driver's: a kernel was resident at some time in the last window of 1/6 s to 1 s.
Activity between sweeps is not visible. From `pmon` only the number of processes per device is used.
Instances of a GPU (MIG) are left out. The output has no ranks or steps, so no loss is claimed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar
from xml.parsers import expat

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import name_trace
from clusterprof.analysis.importers.metrics.labeled_series import DCGM_FIELDS
from clusterprof.analysis.importers.metrics.labeled_series import DCGM_SHORT_NAMES as _SHORT
from clusterprof.analysis.importers.metrics.metric_readings import (
    MAX_DEVICES_PER_SWEEP,
    MAX_TIME_NS,
    DeviceReadings,
    MetricMapping,
    parse_quantity,
    parse_time,
    read_stripped_lines,
)

_PERCENT, _MEGA, _MIB = 0.01, 1e6, float(1 << 20)
BUSY = MetricMapping("gpu.busy_ratio", _PERCENT)
MEMORY_BUSY = MetricMapping("gpu.memory_busy_ratio", _PERCENT)
MEMORY_USED = MetricMapping("gpu.memory_used_bytes", _MIB)
MEMORY_TOTAL = MetricMapping("gpu.memory_total_bytes", _MIB)
POWER = MetricMapping("gpu.power_watts")
POWER_FALLBACK = MetricMapping("gpu.power_watts", choice=1)
POWER_LIMIT = MetricMapping("gpu.power_limit_watts")
POWER_LIMIT_FALLBACK = MetricMapping("gpu.power_limit_watts", choice=1)
TEMPERATURE = MetricMapping("gpu.temperature_celsius")
SM_CLOCK = MetricMapping("gpu.sm_clock_hertz", _MEGA)
SM_CLOCK_MAX = MetricMapping("gpu.sm_clock_max_hertz", _MEGA)
MEMORY_CLOCK = MetricMapping("gpu.memory_clock_hertz", _MEGA)
THROTTLE = MetricMapping("gpu.throttle_bits")
GENERATION = MetricMapping("gpu.pcie_generation_count")
WIDTH = MetricMapping("gpu.pcie_width_count")
REPLAYS = MetricMapping("gpu.pcie_replays_total")
CORRECTED = MetricMapping("gpu.ecc_corrected_total")
UNCORRECTED = MetricMapping("gpu.ecc_uncorrected_total")
PROCESSES = MetricMapping("gpu.processes_count")

QUERY_METRICS: dict[str, MetricMapping] = {
    "utilization.gpu": BUSY,
    "utilization.memory": MEMORY_BUSY,
    "memory.used": MEMORY_USED,
    "memory.total": MEMORY_TOTAL,
    "power.draw": POWER,
    "power.draw.average": POWER_FALLBACK,
    "enforced.power.limit": POWER_LIMIT,
    "power.limit": POWER_LIMIT_FALLBACK,
    "temperature.gpu": TEMPERATURE,
    "clocks.sm": SM_CLOCK,
    "clocks.current.sm": SM_CLOCK,
    "clocks.max.sm": SM_CLOCK_MAX,
    "clocks.mem": MEMORY_CLOCK,
    "clocks.current.memory": MEMORY_CLOCK,
    "clocks_throttle_reasons.active": THROTTLE,
    "clocks_event_reasons.active": THROTTLE,
    "pcie.link.gen.current": GENERATION,
    "pcie.link.gen.gpucurrent": GENERATION,
    "pcie.link.width.current": WIDTH,
    "ecc.errors.corrected.volatile.total": CORRECTED,
    "ecc.errors.uncorrected.volatile.total": UNCORRECTED,
}
"""Fields of `--query-gpu`, without the unit in brackets."""

MONITOR_METRICS: dict[str, MetricMapping] = {
    "sm": BUSY,
    "mem": MEMORY_BUSY,
    "pwr": POWER,
    "gtemp": TEMPERATURE,
    "temp": TEMPERATURE,
    "mclk": MEMORY_CLOCK,
    "pclk": SM_CLOCK,
    "fb": MEMORY_USED,
    "sbecc": CORRECTED,
    "dbecc": UNCORRECTED,
    "pci": REPLAYS,
    "rxpci": MetricMapping("gpu.pcie_receive_bytes_per_second", _MEGA),
    "txpci": MetricMapping("gpu.pcie_transmit_bytes_per_second", _MEGA),
}
"""Columns of `dmon`."""

DCGMI_METRICS: dict[str, MetricMapping] = {
    short: DCGM_FIELDS["DCGM_FI_" + field] for short, field in _SHORT.items()
}
"""Columns of `dcgmi dmon`."""

_CLOCK_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
CLOCK_REASON_BITS: dict[str, int] = {
    f"{folder}/{start}_{name}": bit
    for name, bit in _CLOCK_BITS.items()
    for folder, start in (
        ("clocks_event_reasons", "clocks_event_reason"),
        ("clocks_throttle_reasons", "clocks_throttle_reason"),
    )
}

_KB = 1e3
XML_METRICS: dict[str, MetricMapping] = {
    "utilization/gpu_util": BUSY,
    "utilization/memory_util": MEMORY_BUSY,
    "fb_memory_usage/used": MEMORY_USED,
    "fb_memory_usage/total": MEMORY_TOTAL,
    "pci/rx_util": MetricMapping("gpu.pcie_receive_bytes_per_second", _KB),
    "pci/tx_util": MetricMapping("gpu.pcie_transmit_bytes_per_second", _KB),
    "pci/replay_counter": REPLAYS,
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen": GENERATION,
    "pci/pci_gpu_link_info/link_widths/current_link_width": WIDTH,
    "clocks/sm_clock": SM_CLOCK,
    "clocks/mem_clock": MEMORY_CLOCK,
    "max_clocks/sm_clock": SM_CLOCK_MAX,
    "temperature/gpu_temp": TEMPERATURE,
    "gpu_power_readings/power_draw": POWER,
    "power_readings/power_draw": POWER,
    "gpu_power_readings/instant_power_draw": POWER,
    "gpu_power_readings/average_power_draw": POWER_FALLBACK,
    "gpu_power_readings/current_power_limit": POWER_LIMIT,
    "power_readings/enforced_power_limit": POWER_LIMIT,
    "power_readings/power_limit": POWER_LIMIT_FALLBACK,
    "ecc_errors/volatile/dram_correctable": MetricMapping(CORRECTED.signal, part="dram"),
    "ecc_errors/volatile/sram_correctable": MetricMapping(CORRECTED.signal, part="sram"),
    "ecc_errors/volatile/dram_uncorrectable": MetricMapping(UNCORRECTED.signal, part="dram"),
    "ecc_errors/volatile/sram_uncorrectable": MetricMapping(UNCORRECTED.signal, part="sram"),
    "remapped_rows/remapped_row_corr": MetricMapping("gpu.remapped_rows_corrected_count"),
    "remapped_rows/remapped_row_unc": MetricMapping("gpu.remapped_rows_uncorrected_count"),
}
"""Elements of `-q -x`, by the path below a GPU."""

_DEVICE = re.compile(r"[0-9]{1,6}")
_DAY_NS = 86_400_000_000_000
_MAX_HEAD_LINES = 20


def parse_monitor_heads(line: bytes) -> list[str] | None:
    """Parse the column names in the head of a table; None for any other line."""
    text = line.decode("latin-1").strip()
    if not text.startswith("#") or len(text) > 4096:
        return None
    heads = text.lstrip("# ").split()
    if heads[:1] == ["Entity"] and any(head in DCGMI_METRICS for head in heads):
        return heads
    lowercase = [head.lower() for head in heads]
    is_known = any(head in MONITOR_METRICS for head in lowercase) or "pid" in lowercase
    return lowercase if "gpu" in lowercase and is_known else None


def is_monitor(head: bytes) -> bool:
    """Return whether a file begins with a monitor table."""
    lines = head.split(b"\n")[:_MAX_HEAD_LINES]
    return any(parse_monitor_heads(line) is not None for line in lines)


def read_monitor(source: Source, devices: DeviceReadings) -> None:
    """Read all rows of a monitor table.

    #Date       Time        gpu   pwr gtemp mtemp    sm   mem
    #YYYYMMDD   HH:MM:SS    Idx     W     C     C     %     %
     20260321   15:22:47      0   612    61    88    97    41

    #Entity   GPUTL   POWER
    ID                    W
    GPU 0        97   612.4
    """
    reader = _MonitorReader(devices)
    for line in read_stripped_lines(source, devices.account):
        text = line.decode("latin-1").strip()
        if text.startswith("#"):
            reader.heads = parse_monitor_heads(line) or reader.heads
        elif text and not text.startswith(("ID", "Id")):
            reader.read_row(text.split())
    reader.finish_sweep()


class _MonitorReader:
    """Reader of the rows of a monitor table."""

    def __init__(self, devices: DeviceReadings) -> None:
        self.heads: list[str] = []
        self._devices = devices
        self._processes: Counter[str] = Counter()
        self._seen: set[tuple[str, str]] = set()
        self._last: tuple[str, str] | None = None
        self._sweep_time: tuple[int, bool] = (0, False)
        self._clock: list[int] = [0, 0]
        """Time of day of the last row in ns; ns of the days before."""

    def read_row(self, cells: list[str]) -> None:
        account = self._devices.account
        if self.heads[:1] == ["Entity"]:
            if len(cells) > 1 and cells[0].startswith("GPU"):  # "GPU 0" is one cell
                cells = [f"gpu{cells[1]}" if cells[0] == "GPU" else " ".join(cells[:2]), *cells[2:]]
            if len(cells) == len(self.heads) and cells[0].lower().startswith("gpu"):
                self._add_readings(cells[0], dict(zip(self.heads[1:], cells[1:])), DCGMI_METRICS)
                return
        elif self.heads:
            row = dict(zip(self.heads, cells))
            if len(cells) >= len(self.heads) and _DEVICE.fullmatch(row.get("gpu", "")):
                if "pid" in row:
                    self._count_process(row)
                else:
                    self._add_readings(f"gpu{row['gpu']}", row, MONITOR_METRICS)
                return
        account.skipped["lines that are not rows of a table"] += 1

    def _add_readings(
        self, device: str, row: dict[str, str], names: dict[str, MetricMapping]
    ) -> None:
        self._devices.next_in_sweep(device)
        t_ns, zoned = self._get_row_time(row)
        values = {names[head]: parse_quantity(cell) for head, cell in row.items() if head in names}
        self._devices.add_row(device, t_ns, values, zoned)

    def _count_process(self, row: dict[str, str]) -> None:
        """Count the processes of each device from the rows of `pmon`."""
        process = (row["gpu"], row["pid"])
        was_seen = process in self._seen or len(self._seen) >= MAX_DEVICES_PER_SWEEP
        if was_seen or (self._last and int(row["gpu"]) < int(self._last[0])):
            self.finish_sweep()
            self._devices.new_sweep()
        self._sweep_time = self._get_row_time(row)
        self._seen.add(process)
        self._last = process
        self._processes[f"gpu{row['gpu']}"] += row["pid"].isdecimal()

    def finish_sweep(self) -> None:
        """Record the number of processes of each device."""
        for device, count in self._processes.items():
            self._devices.add_row(
                device, self._sweep_time[0], {PROCESSES: float(count)}, self._sweep_time[1]
            )
        self._processes = Counter()
        self._seen = set()
        self._last = None

    def _get_row_time(self, row: dict[str, str]) -> tuple[int, bool]:
        """Return the time of a row and whether its zone is known; without a date, from day 0."""
        date, time = row.get("date", ""), row.get("time", "")
        if len(date) == 8 and date.isdecimal():
            parsed = parse_time(f"{date[:4]}-{date[4:6]}-{date[6:]}T{time}")
            if parsed is not None:
                return parsed
        parts = time.split(":")
        if len(parts) == 3 and all(part.isdecimal() and len(part) <= 2 for part in parts):
            hours, minutes, seconds = map(int, parts)
            day_ns = (hours * 3600 + minutes * 60 + seconds) * 1_000_000_000
            if day_ns < self._clock[0] - _DAY_NS // 2:
                self._clock[1] += _DAY_NS
            self._clock[0] = day_ns
            return day_ns + self._clock[1], False
        return self._devices.sweep_ns(), False


_SAME_SWEEP_NS = 100_000_000
_DEVICE_FIELDS = ("uuid", "gpu_uuid", "index", "pci.bus_id", "gpu_bus_id")
_OTHER_FIELDS = ("timestamp", "name", "gpu_name", *_DEVICE_FIELDS)


def parse_query_heads(line: bytes) -> list[str] | None:
    """Parse the column names without units; None if the line is not the head of a query table."""
    if len(line) > 1 << 14:
        return None
    heads = [head.split("[")[0].strip().lower() for head in line.decode("latin-1").split(",")]
    field_count = sum(head in QUERY_METRICS for head in heads)
    return (
        heads
        if field_count and field_count + sum(head in _OTHER_FIELDS for head in heads) >= 2
        else None
    )


def read_query(source: Source, devices: DeviceReadings) -> None:
    """Read all rows of a query table, one per GPU and sweep.

    timestamp, index, utilization.gpu [%], memory.used [MiB], power.draw [W]
    2026/01/06 15:13:03.389, 0, 97 %, 71234 MiB, 612.40 W
    """
    account = devices.account
    heads: list[str] | None = None
    last_ns = 0
    position = 0
    for line in read_stripped_lines(source, account):
        line = line.lstrip(b"\0")  # a log that was emptied while nvidia-smi wrote it
        if not line.strip():
            continue
        new_heads = parse_query_heads(line)
        if new_heads is not None:  # heads again, in concatenated files
            heads = new_heads
            continue
        cells = line.decode("utf-8", "replace").split(",")
        if heads is None or len(cells) != len(heads):
            account.skipped["rows with more or fewer columns than the first line"] += 1
            continue
        row = {head: cell.strip() for head, cell in zip(heads, cells)}
        zoned, t_ns = False, None
        if "timestamp" in row:
            time = parse_time(row["timestamp"])
            if time is None:
                account.skipped["rows with an impossible time"] += 1
                continue
            t_ns, zoned = time
        device = next((row[field] for field in _DEVICE_FIELDS if row.get(field)), "")
        if not device:
            position = position + 1 if t_ns is not None and t_ns - last_ns < _SAME_SWEEP_NS else 0
            device = str(position)
        last_ns = t_ns or 0
        devices.next_in_sweep(device)
        values: dict[MetricMapping, float] = {
            QUERY_METRICS[head]: parse_quantity(cell)
            for head, cell in row.items()
            if head in QUERY_METRICS
        }
        name = row.get("name", "") or row.get("gpu_name", "")
        devices.add_row(
            f"gpu{device}" if device.isdecimal() else device,
            devices.sweep_ns() if t_ns is None else t_ns,
            values,
            zoned,
            name=name,
            uuid=row.get("uuid", "") or row.get("gpu_uuid", ""),
        )


_END_TAG = b"</nvidia_smi_log>"
_ROOT = "nvidia_smi_log"
_MAX_DEPTH = 32
_MAX_TEXT = 512
_MAX_TAG = 128
_MAX_DOCUMENT_BYTES = 8 << 20
_MAX_FIELDS = 8192
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


def is_xml(head: bytes) -> bool:
    """Return whether a file begins with an nvidia-smi document."""
    return b"<nvidia_smi_log" in head[:4096]


def read_xml(source: Source, devices: DeviceReadings) -> None:
    """Read all documents, one per sweep; damaged ones are noted in the account.

    Raises: CannotImportError when a document declares an entity.
    """
    account = devices.account
    for document in _split_documents(source):
        if devices.sweep or account.read["documents"]:
            devices.new_sweep()
        reader = _DocumentReader(devices)
        try:
            reader.parse(document)
        except (expat.ExpatError, ValueError, LookupError) as error:
            account.cut = account.cut or f"damaged or cut off within a document ({error})"
            continue
        account.read["documents"] += 1


def _split_documents(source: Source) -> Iterator[bytes]:
    """Yield the documents one by one; at most 8 MiB if there is no end tag."""
    partial = b""
    for block in source.blocks(1 << 20):
        *documents, partial = (partial + block).split(_END_TAG)
        for document in documents:
            yield document.strip() + _END_TAG
        if len(partial) > _MAX_DOCUMENT_BYTES:
            break
    if partial.strip():
        yield partial.strip()


class _DocumentReader:
    """Reader of the fields of each GPU, by path."""

    def __init__(self, devices: DeviceReadings) -> None:
        self._devices = devices
        self._path: list[str] = []
        self._text = ""
        self._gpu: dict[str, str] | None = None
        self._bus = ""
        self._time: tuple[int, bool] | None = None
        self._processes = 0

    def parse(self, document: bytes) -> None:
        parser = expat.ParserCreate()
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.EntityDeclHandler = _check_no_entities
        parser.StartElementHandler = self._begin
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.Parse(document, True)

    def _begin(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self._path) >= _MAX_DEPTH:
            raise ValueError("nested too deeply")
        if len(tag) > _MAX_TAG:
            raise ValueError("an implausibly long tag")
        self._path.append(tag)
        self._text = ""
        if self._path == [_ROOT, "gpu"]:
            self._gpu, self._bus, self._processes = {}, attributes.get("id", ""), 0

    def _characters(self, text: str) -> None:
        if len(self._text) < _MAX_TEXT:
            self._text += text

    def _end(self, tag: str) -> None:
        path, text = self._path, self._text.strip()
        if path == [_ROOT, "timestamp"]:
            self._time = _parse_timestamp(text)
        elif path == [_ROOT, "gpu"]:
            self._add_device()
        elif self._gpu is not None:
            self._processes += path[2:] == ["processes", "process_info"]
            if text and len(self._gpu) < _MAX_FIELDS:
                self._gpu["/".join(path[2:])] = text
        path.pop()
        self._text = ""

    def _add_device(self) -> None:
        fields, self._gpu = self._gpu or {}, None
        if self._time is None and self._devices.sweep:
            self._devices.account.skipped["GPUs of documents without a time, except the first"] += 1
            return
        values: dict[MetricMapping, float] = {
            meaning: parse_quantity(fields[path])
            for path, meaning in XML_METRICS.items()
            if path in fields
        }
        reasons = [path for path in CLOCK_REASON_BITS if path in fields]
        if reasons:
            active_bits = (CLOCK_REASON_BITS[path] for path in reasons if fields[path] == "Active")
            values[THROTTLE] = float(sum(active_bits))
        if "processes" in fields or self._processes:
            values[PROCESSES] = float(self._processes)
        t_ns, zoned = self._time or (0, False)
        uuid = fields.get("uuid", "")
        self._devices.add_row(
            uuid or self._bus or "gpu0",
            t_ns,
            values,
            zoned,
            name=fields.get("product_name", ""),
            uuid=uuid,
            pci_address=self._bus,
        )


def _check_no_entities(*_: object) -> None:
    raise CannotImportError("the document declares an entity, which nvidia-smi never does", "")


def _parse_timestamp(text: str) -> tuple[int, bool] | None:
    """Parse `Fri Aug  4 11:44:30 2023`, whose time zone is unknown."""
    fields = text.split()
    if len(fields) != 5 or fields[1] not in _MONTHS or not fields[2].isdecimal():
        return None
    month = _MONTHS.index(fields[1]) + 1
    time = parse_time(f"{fields[4]}-{month:02}-{int(fields[2]):02}T{fields[3]}")
    return time if time is not None and time[0] < MAX_TIME_NS else None


class NvidiaSmi:
    """Importer of the output of NVIDIA's command line tools."""

    name: ClassVar[str] = "nvidia_smi"
    title: ClassVar[str] = "output of nvidia-smi or dcgmi"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file has the root element of the document, or the heads of a table."""
        return is_xml(head) or is_monitor(head) or _is_query(head)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the host.

        Raises: CannotImportError when the file holds no GPU readings.
        """
        source, account = sources[0], accounts[0]
        devices = DeviceReadings(account)
        if is_xml(source.head):
            read_xml(source, devices)
        elif is_monitor(source.head):
            read_monitor(source, devices)
        else:
            read_query(source, devices)
        has_nodes = False
        for node in devices.nodes(self.name, name_trace(source.path)):
            has_nodes = True
            yield node
        if not has_nodes:
            raise CannotImportError("the file holds no GPU readings", "")


_MAX_LINES_BEFORE_QUERY = 200
"""Lines that a table of processes, or what a script prints, may put before the heads of a query."""


def _is_query(head: bytes) -> bool:
    lines = head.lstrip().split(b"\n", _MAX_LINES_BEFORE_QUERY)[:_MAX_LINES_BEFORE_QUERY]
    return any(parse_query_heads(line) is not None for line in lines)
