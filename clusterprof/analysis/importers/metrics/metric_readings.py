"""Metric readings by host, signal and device, in packed columns until the file has ended.

    readings = MetricReadings()
    mapping = MetricMapping("gpu.power_watts")
    column = readings.column("gpu-node-1", mapping, "GPU-c4529c8d")
    column.add(t_ns, 113.6)
    for node in readings.nodes("prometheus", account): ...

A signal may be the sum of several foreign values (user and nice make `cpu.user_ns_total`), and may
exist in several forms, of which the best is taken.

`DeviceReadings` collects the readings of one host by device, in sweeps where the file shows no
times. `read_stripped_lines` reads a stream that may be larger than memory, `parse_time` times as
foreign files write them.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import Float, Int, NodeTables

_SignalSeries = tuple[str, str, Int, Float]
MAX_COLUMNS = 1 << 17
MAX_COLUMNS_PER_HOST = 1 << 13
"""Largest number of columns of one host: a thousand CPUs in six states, and all devices."""
MAX_HOSTS = 1 << 14
MAX_REFUSED_COLUMNS = 1 << 16
"""Number of columns that may be refused for lack of room before reading stops."""
MAX_READINGS = 1 << 26
"""Largest number of readings: 16 bytes each, 1 GiB."""
# DCGM's values for "not available": 32-bit, 64-bit and floating point (dcgm_structs.h).
_BLANK_32, _BLANK_64, _BLANK_FLOAT = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 140737488355328.0
_BLANKS = (
    (_BLANK_32, _BLANK_32 + 15),
    (_BLANK_64, float(1 << 63)),
    (_BLANK_FLOAT, _BLANK_FLOAT + 15),
)
ALL_CPUS = "all"
"""Device id of the CPU times of a whole node."""
_CPU_TIME_SIGNALS = frozenset(
    f"cpu.{w}_ns_total" for w in ("user", "system", "idle", "iowait", "steal")
)
SWEEP_NS = 1_000_000_000
"""Time between two sweeps of a tool that prints no times, in ns: its default interval."""
MAX_DEVICES_PER_SWEEP = 1 << 16
"""Largest number of devices, or of processes, in one sweep."""
_MISSING_VALUES = ("", "-", "n/a", "[n/a]", "[not supported]", "not supported", "[unknown error]")
_MAX_ROUNDED_RATIO = 1.001  # allows for a share that its source rounded up


@dataclass(frozen=True, slots=True)
class MetricMapping:
    """Mapping of a foreign metric to one of our signals."""

    signal: str
    scale: float = 1.0
    """Value in our unit = foreign value × scale."""
    part: str = ""
    """Name of a part; values of several parts at one time are added."""
    choice: int = 0
    """Preference among several forms of one signal: the lowest with readings is taken."""
    parts: tuple[str, ...] = ()
    """All parts of the signal; if one is missing the signal is left out."""


class ReadingColumn:
    """Readings of one foreign metric."""

    __slots__ = ("meaning", "t_ns", "values")

    def __init__(self, meaning: MetricMapping) -> None:
        self.meaning = meaning
        self.t_ns = array("q")
        self.values = array("d")

    def add(self, t_ns: int, value: float) -> None:
        """Add a reading in the foreign unit."""
        self.t_ns.append(t_ns)
        self.values.append(value)


@dataclass(slots=True)
class HostReadings:
    """Devices and columns of one node."""

    devices: dict[str, dict[str, str]] = field(default_factory=dict)
    columns: dict[tuple[str, str, int, str], ReadingColumn] = field(default_factory=dict)
    """By signal, device, choice and part."""


class MetricReadings:
    """All readings of some files."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostReadings] = {}
        self.has_wall_clock = True
        """False if the time zone of the times is unknown."""
        self._columns = self._devices = self._refused = 0

    def column(self, host: str, meaning: MetricMapping, device: str) -> ReadingColumn | None:
        """Return the column for the readings of a metric; None if there is no room for it.

        Raises: CannotImportError when too many columns were refused.
        """
        host_readings = self.hosts.get(host)
        key = (meaning.signal, device, meaning.choice, meaning.part)
        column = host_readings.columns.get(key) if host_readings is not None else None
        if column is None:
            if self._columns >= MAX_COLUMNS or (
                len(self.hosts) >= MAX_HOSTS
                if host_readings is None
                else len(host_readings.columns) >= MAX_COLUMNS_PER_HOST
            ):
                self._refused += 1
                if self._refused > MAX_REFUSED_COLUMNS:
                    raise CannotImportError(
                        f"more than {MAX_COLUMNS:,} series, {MAX_COLUMNS_PER_HOST:,} of one host"
                        f" or {MAX_HOSTS:,} hosts",
                        "give fewer hosts, devices or metrics",
                    )
                return None
            host_readings = host_readings or self.hosts.setdefault(host, HostReadings())
            self._columns += 1
            column = host_readings.columns[key] = ReadingColumn(meaning)
        return column

    def device(self, host: str, id_: str, **facts: str) -> None:
        """Add facts about an accelerator; empty facts are left out."""
        if self._devices >= MAX_COLUMNS or (
            host not in self.hosts and len(self.hosts) >= MAX_HOSTS
        ):
            return
        devices = self.hosts.setdefault(host, HostReadings()).devices
        self._devices += id_ not in devices
        devices.setdefault(id_, {}).update({k: v for k, v in facts.items() if v})

    @property
    def readings(self) -> int:
        """Number of readings."""
        return sum(len(c.t_ns) for host in self.hosts.values() for c in host.columns.values())

    def nodes(self, source: str, account: Account, key: str = "") -> Iterator[NodeTables]:
        """Yield a node for every host with readings; the account counts what was left out."""
        busy_ratios: list[float] = []
        for name, host in sorted(self.hosts.items()):
            node = NodeTables(name, source, 0 if self.has_wall_clock else None, name or key)
            has_readings = False
            series = list(_select_series(host, account))
            for signal, device, t_ns, values in (*series, *_sum_cores(series)):
                if np.isnan(values).all():  # the parts were never read at the same time
                    continue
                node.add_series(signal, device, t_ns, values)
                has_readings = True
                if signal == "gpu.busy_ratio":
                    busy_ratios.append(float(np.nanmean(values)))
            for id_, facts in sorted(host.devices.items()):
                node.add_device(id_, **facts)
            if has_readings:
                yield node
        if busy_ratios:
            account.notes.append(_describe_utilization(busy_ratios, len(self.hosts)))
            account.answers.append(account.notes[-1])


def _sum_cores(series: list[_SignalSeries]) -> Iterator[_SignalSeries]:
    """Sum the CPU times of the cores to those of the node, where these are not recorded."""
    for signal in sorted({entry[0] for entry in series if entry[0] in _CPU_TIME_SIGNALS}):
        cores = [(t_ns, values) for name, _, t_ns, values in series if name == signal]
        if all(device != ALL_CPUS for name, device, *_ in series if name == signal):
            yield (signal, ALL_CPUS, *_sum_tables(cores))


def _describe_utilization(busy_ratios: list[float], hosts: int) -> str:
    mean = sum(busy_ratios) / len(busy_ratios)
    spread = (
        f" (from {min(busy_ratios):.0%} to {max(busy_ratios):.0%})"
        if max(busy_ratios) - min(busy_ratios) > 0.01
        else ""
    )
    devices = f"{len(busy_ratios)} device" + "s" * (len(busy_ratios) > 1)
    nodes = f" of {hosts} nodes" if hosts > 1 else ""
    verb, owner = ("were", "their") if len(busy_ratios) > 1 else ("was", "its")
    return f"{devices}{nodes} {verb} busy {mean:.0%} of the time by {owner} readings{spread}"


def _select_series(host: HostReadings, account: Account) -> Iterator[_SignalSeries]:
    """Select the best form of each signal of a host and add up its parts."""
    forms: dict[tuple[str, str], dict[int, list[ReadingColumn]]] = defaultdict(dict)
    for (signal, device, choice, _), column in host.columns.items():
        forms[signal, device].setdefault(choice, []).append(column)
    for (signal, device), choices in sorted(forms.items()):
        for _, columns in sorted(choices.items()):
            tables = [_convert_readings(column, account) for column in columns]
            tables = [(t, v) for t, v in tables if t.size and not np.isnan(v).all()]
            if len(tables) < len(columns[0].meaning.parts or (1,)):
                if tables:
                    account.skipped[f"values without the other parts of {signal}"] += len(tables)
                continue
            yield (signal, device, *_sum_tables(tables))
            break


def _convert_readings(readings: ReadingColumn, account: Account) -> tuple[Int, Float]:
    """Convert readings to our unit, sorted by time, one per time; NaN where invalid."""
    t_ns = np.frombuffer(readings.t_ns, np.int64) if readings.t_ns else np.empty(0, np.int64)
    raw = np.frombuffer(readings.values, np.float64) if readings.values else np.empty(0)
    signal = readings.meaning.signal
    with np.errstate(over="ignore", invalid="ignore"):
        scale = readings.meaning.scale
        values = raw / round(1 / scale) if scale < 1 else raw * scale  # 41 % becomes exactly 0.41
    invalid = ~np.isfinite(values)
    for low, high in _BLANKS:
        invalid |= (raw >= low) & (raw <= high)
    if not signal.endswith("_celsius"):
        invalid |= values < 0
    if signal.startswith("gpu.") and signal.endswith("_ratio"):
        invalid |= values > _MAX_ROUNDED_RATIO
        values = np.minimum(values, 1.0)
    _count_skipped(account, "values out of range or not available", invalid)
    values = np.where(invalid, np.nan, values)
    order = np.argsort(t_ns, kind="stable")
    t_ns, values = t_ns[order], values[order]
    last = np.append(t_ns[1:] != t_ns[:-1], True) if t_ns.size else np.empty(0, np.bool_)
    _count_skipped(account, "readings at the same time as a later one", ~last)
    return t_ns[last], values[last]


def _count_skipped(account: Account, why: str, skipped: NDArray[np.bool_]) -> None:
    if skipped.any():
        account.skipped[why] += int(skipped.sum())


def _sum_tables(tables: list[tuple[Int, Float]]) -> tuple[Int, Float]:
    """Sum tables at the times that all of them have."""
    t_ns, total = tables[0]
    for other_t_ns, other_values in tables[1:]:
        t_ns, own_rows, other_rows = np.intersect1d(t_ns, other_t_ns, True, return_indices=True)
        total = total[own_rows] + other_values[other_rows]
    return t_ns, total


MAX_LINE_BYTES = 1 << 20


def read_stripped_lines(source: Source, account: Account) -> Iterator[bytes]:
    """Yield the lines of a file without line ends; lines longer than 1 MiB are only counted."""
    partial = b""
    skipping = False
    for block in source.blocks(MAX_LINE_BYTES):
        first, *complete_lines = block.split(b"\n")
        if not complete_lines:
            skipping = skipping or len(partial) + len(first) > MAX_LINE_BYTES
            partial = b"" if skipping else partial + first
            continue
        if skipping or len(partial) + len(first) > MAX_LINE_BYTES:
            account.skipped["lines longer than a MiB"] += 1
            skipping = False
        else:
            yield (partial + first).rstrip(b"\r")
        partial = complete_lines.pop()
        for line in complete_lines:
            yield line.rstrip(b"\r")
    if skipping:
        account.skipped["lines longer than a MiB"] += 1
    elif partial:
        yield partial.rstrip(b"\r")


MAX_TIME_NS = 1 << 62
_UNIT_BY_SIZE = ((1e17, 1), (1e14, 1_000), (1e11, 1_000_000))


def convert_epoch(value: float) -> int | None:
    """Convert a Unix time in s, ms, µs or ns to ns, by its size; None if it is not a time.

    Seconds reach 1e11 in the year 5138, and milliseconds did so in 1973: no reading is ambiguous.
    """
    if not math.isfinite(value) or value < 0:
        return None
    scale = next((scale for smallest, scale in _UNIT_BY_SIZE if value >= smallest), 1_000_000_000)
    integer_part = int(value)
    ns = integer_part * scale + round((value - integer_part) * scale)
    return ns if ns < MAX_TIME_NS else None


def parse_time(text: str) -> tuple[int, bool] | None:
    """Parse a time in digits or a calendar date; return ns, and whether its zone is known.

    `2026/01/06 15:13:03.389`, `2026-01-06T15:13:03Z`, `1767712383.4`; None for anything else.
    """
    text = text.strip()
    try:
        ns = convert_epoch(float(text))
    except ValueError:
        pass
    else:
        return None if ns is None else (ns, True)
    if len(text) > 64 or not text[:4].isdigit():
        return None
    try:
        when = datetime.fromisoformat(_normalize_iso(text))
    except ValueError:
        return None
    has_zone = when.tzinfo is not None
    since = when.replace(tzinfo=when.tzinfo or timezone.utc) - _EPOCH
    ns = (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
    return (ns, has_zone) if 0 <= ns < MAX_TIME_NS else None


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _normalize_iso(text: str) -> str:
    """Normalize to what Python 3.10 parses: `-` in dates, six decimals, a numeric zone."""
    text = text.replace("/", "-", 2).replace("Z", "+00:00")
    head, dot, tail = text.partition(".")
    digits = len(tail) - len(tail.lstrip("0123456789"))
    return head + (f".{tail[:digits][:6]:0<6}{tail[digits:]}" if dot else "")


def parse_quantity(text: str) -> float:
    """Parse the number in `97 %`, `16x`, `0x0000000000000040`; NaN if there is none."""
    word = text.strip()
    if word.lower() in _MISSING_VALUES:
        return math.nan
    word = word.split()[0]
    try:
        return float(int(word, 16)) if word[:2] == "0x" else float(word.rstrip("x%"))
    except (ValueError, OverflowError):
        return math.nan


class DeviceReadings:
    """Collector of readings by device; sweeps without times are one second apart."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._readings = MetricReadings()
        self._remaining_readings = MAX_READINGS
        self._sweep = 0
        self._seen: set[object] = set()
        self.has_no_times = False

    @property
    def sweep(self) -> int:
        """Number of the current sweep, from 0."""
        return self._sweep

    def next_in_sweep(self, device: object) -> None:
        """Set the device of the next row; a device seen already begins the next sweep."""
        if device in self._seen or len(self._seen) >= MAX_DEVICES_PER_SWEEP:
            self.new_sweep()
        self._seen.add(device)

    def new_sweep(self) -> None:
        """Begin the next sweep."""
        self._sweep += 1
        self._seen.clear()

    def sweep_ns(self) -> int:
        """Return the assumed time of a sweep without a time."""
        self.has_no_times = True
        return self._sweep * SWEEP_NS

    def add_row(
        self,
        device: str,
        t_ns: int,
        values: Mapping[MetricMapping, float],
        zoned: bool,
        **facts: str,
    ) -> None:
        """Add the readings of one device at one time."""
        self._readings.has_wall_clock &= zoned
        self._readings.device("", device, **{"vendor": "nvidia", **facts})
        self.account.read["rows"] += 1
        for meaning, value in values.items():
            column = self._readings.column("", meaning, device)
            if column is None or self._remaining_readings <= 0:
                self.account.skipped["readings beyond the limit"] += 1
                continue
            self._remaining_readings -= 1
            column.add(t_ns, value)

    def nodes(self, source: str, key: str) -> Iterator[NodeTables]:
        """Yield the node."""
        if self.has_no_times and self._sweep:
            self.account.notes.append(
                f"the file shows no times: its {self._sweep + 1:,} sweeps are assumed a second"
                " apart, the default of the tool"
            )
        for node in self._readings.nodes(source, self.account, key):
            node.display_name = key
            yield node
