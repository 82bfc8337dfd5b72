"""Output of rocm-smi for the AMD GPUs of one host, as CSV or JSON.

## How to make the file

    while sleep 1; do
        date -u +%Y-%m-%dT%H:%M:%SZ; rocm-smi --showuse --showmemuse --showpower --json
    done > gpus.json

## How to analyze it

    clusterprof analyze gpus.json

## What is read

`rocm-smi --csv` and `rocm-smi --json` with any of `--showuse`, `--showmemuse`, `--showmeminfo
vram`, `--showpower`, `--showmaxpower`, `--showtemp`, `--showclocks` and `--showreplaycount`: one
sweep, or many in sequence. A line before a sweep that holds only a time gives its time.

## How the numbers are computed

Each file is one host, whose name is not in the file. Without times, sweeps are assumed to be one
second apart, and a note says so. `N/A` is unknown, not zero: the second die of a package (MI250)
has no power reading, because the reading of the first die covers both. `GPU memory use (%)` of old
versions means how busy the memory was, not how full. So does `GPU Memory Read/Write Activity (%)`
of newer versions.

## What it cannot see

Utilization is the driver's: work was resident at some time in its last window. Activity between
sweeps is not visible. The fill level of the memory in percent (`VRAM%`) is left out; the bytes are
read. The output has no ranks or steps, so no loss is claimed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import name_trace, parse_json, read_lines
from clusterprof.analysis.importers.metrics.metric_readings import (
    DeviceReadings,
    MetricMapping,
    parse_quantity,
    parse_time,
)

_PERCENT, _MEGA = 0.01, 1e6
METRICS: dict[str, MetricMapping] = {
    "gpu use (%)": MetricMapping("gpu.busy_ratio", _PERCENT),
    "gpu memory use (%)": MetricMapping("gpu.memory_busy_ratio", _PERCENT),
    "gpu memory read/write activity (%)": MetricMapping("gpu.memory_busy_ratio", _PERCENT),
    "vram total used memory (b)": MetricMapping("gpu.memory_used_bytes"),
    "vram total memory (b)": MetricMapping("gpu.memory_total_bytes"),
    "average graphics package power (w)": MetricMapping("gpu.power_watts"),
    "current socket graphics package power (w)": MetricMapping("gpu.power_watts", choice=1),
    "max graphics package power (w)": MetricMapping("gpu.power_limit_watts"),
    "temperature (sensor junction) (c)": MetricMapping("gpu.temperature_celsius"),
    "temperature (sensor edge) (c)": MetricMapping("gpu.temperature_celsius", choice=1),
    "sclk clock speed:": MetricMapping("gpu.sm_clock_hertz", _MEGA),
    "mclk clock speed:": MetricMapping("gpu.memory_clock_hertz", _MEGA),
    "pcie replay count": MetricMapping("gpu.pcie_replays_total"),
}
_PRODUCT_KEYS = ("card series", "device name", "card model")
_CARD = re.compile(r"card(\d{1,4})$")
_JSON_CARD = re.compile(rb'"card\d{1,4}"\s*:\s*\{')
_CLOCK = re.compile(r"\(?\s*(\d+(?:\.\d+)?)\s*Mhz\s*\)?$", re.IGNORECASE)
_MAX_HEAD_LINES = 20
_MAX_DOCUMENT_BYTES = 1 << 20


class RocmSmi:
    """Importer of rocm-smi output."""

    name: ClassVar[str] = "rocm_smi"
    title: ClassVar[str] = "output of rocm-smi"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file has the heads of the table, or a card with a known reading."""
        lines = head.split(b"\n")
        if any(_parse_heads(_decode_line(line)) is not None for line in lines[:_MAX_HEAD_LINES]):
            return True
        low = head.lower()
        has_metric = any(b'"' + name.encode() + b'"' in low for name in METRICS)
        return has_metric and _JSON_CARD.search(head) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the host.

        Raises: CannotImportError when the file holds no GPU readings.
        """
        source, account = sources[0], accounts[0]
        sweeps = _Sweeps(account)
        for line in read_lines(source, account):
            sweeps.read_line(line)
        sweeps.finish_document()
        has_nodes = False
        for node in sweeps.devices.nodes(self.name, name_trace(source.path)):
            has_nodes = True
            yield node
        if not has_nodes:
            raise CannotImportError("the file holds no GPU readings", "")


class _Sweeps:
    """Reader of tables and documents, line by line."""

    def __init__(self, account: Account) -> None:
        self.devices = DeviceReadings(account)
        self._account = account
        self._heads: list[str] | None = None
        self._document: list[bytes] = []
        self._depth = self._size = 0
        self._time: tuple[int, bool] | None = None

    def read_line(self, line: bytes) -> None:
        """Read a line."""
        if self._document or line.lstrip()[:1] == b"{":
            self._read_document_line(line)
            return
        text = _decode_line(line)
        if not text:
            return
        time = parse_time(text) if "," not in text else None
        heads = _parse_heads(text)
        if time is not None:
            self._time = time
        elif heads is not None:
            self._heads = heads
        elif self._heads and text.startswith("card"):
            self._read_row(_split_cells(text))
        else:
            self._account.skipped["lines that are not rows of a table"] += 1

    def _read_document_line(self, line: bytes) -> None:
        """Read a line of a document, which ends when all opened braces are closed."""
        self._document.append(line)
        self._size += len(line)
        self._depth += line.count(b"{") - line.count(b"}")
        if self._depth <= 0 or self._size > _MAX_DOCUMENT_BYTES:
            self.finish_document()

    def finish_document(self) -> None:
        """Read the open document, if there is one."""
        if not self._document:
            return
        value = parse_json(b"\n".join(self._document))
        self._document, self._depth, self._size = [], 0, 0
        if not isinstance(value, dict):
            self._account.skipped["documents that are not JSON"] += 1
            return
        for card, properties in value.items():
            if isinstance(properties, dict):
                self._read_card(
                    card, {str(name): str(value_) for name, value_ in properties.items()}
                )

    def _read_row(self, cells: Sequence[str]) -> None:
        assert self._heads is not None
        if len(cells) != len(self._heads):
            self._account.skipped["rows with more or fewer columns than the head"] += 1
            return
        row = dict(zip(self._heads, cells))
        self._read_card(row.pop("device", ""), row)

    def _read_card(self, card: str, properties: Mapping[str, str]) -> None:
        """Read one card; a card that was already seen begins the next sweep."""
        match = _CARD.match(card)
        if match is None:
            return  # "system" holds versions
        readings = {name.strip().lower(): value for name, value in properties.items()}
        self.devices.next_in_sweep(card)
        t_ns, zoned = self._time or (self.devices.sweep_ns(), False)
        values = {
            METRICS[name]: _parse_value(text) for name, text in readings.items() if name in METRICS
        }
        name = next(
            (readings[key] for key in _PRODUCT_KEYS if readings.get(key, "N/A") != "N/A"), ""
        )
        facts = {"vendor": "amd", **({"name": name[:200]} if name else {})}
        self.devices.add_row(f"gpu{int(match[1])}", t_ns, values, zoned, **facts)


def _parse_heads(text: str) -> list[str] | None:
    """Return the names of the columns; None if the text is not the head of a table."""
    if not text.startswith("device,"):
        return None
    heads = _split_cells(text)
    return heads if any(head.strip().lower() in METRICS for head in heads) else None


def _split_cells(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []


def _decode_line(line: bytes) -> str:
    return line.decode("utf-8", "replace").replace("\0", "").strip()


def _parse_value(text: str) -> float:
    clock = _CLOCK.match(text.strip())
    return float(clock[1]) if clock else parse_quantity(text)
