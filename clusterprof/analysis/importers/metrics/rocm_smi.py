"""rocm-smi: what it prints about the AMD GPUs of one host, as CSV or JSON.

## What is read

`rocm-smi --csv` and `--json` with any of `--showuse`, `--showmemuse`, `--showmeminfo vram`,
`--showpower`, `--showmaxpower`, `--showtemp`, `--showclocks`, `--showreplaycount`; one sweep or
many, one behind the other. A line with nothing but a time before a sweep says when it was. Best:

    while sleep 1; do
        date -u +%Y-%m-%dT%H:%M:%SZ; rocm-smi --showuse --showmemuse --showpower --json
    done > gpus.json

## How it is understood

Each file is one host, whose name it does not say. Without lines with times sweeps are taken to be a
second apart, and a note says so. `N/A` is unknown, not zero: the second die of a package (MI250)
has no power of its own, for that of the first is of both. `GPU memory use (%)` of old versions is
how busy the memory was, and not how full; so is `GPU Memory Read/Write Activity (%)` of newer ones.

## Where it is blind

Utilisation is the driver's: something was resident in its last window; what happened between sweeps
is not seen. How full the memory is in percent (`VRAM%`) is left out, the bytes are read. Nothing
tells of ranks or steps: no loss is claimed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.nvidia_smi.readings import Devices, quantity
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.telemetry.gathered import Meaning
from clusterprof.importers.telemetry.times import time_ns
from clusterprof.importers.text_lines import json_of, lines_of

_PERCENT, _MEGA = 0.01, 1e6
NAMES: dict[str, Meaning] = {
    "gpu use (%)": Meaning("gpu.busy_ratio", _PERCENT),
    "gpu memory use (%)": Meaning("gpu.memory_busy_ratio", _PERCENT),
    "gpu memory read/write activity (%)": Meaning("gpu.memory_busy_ratio", _PERCENT),
    "vram total used memory (b)": Meaning("gpu.memory_used_bytes"),
    "vram total memory (b)": Meaning("gpu.memory_total_bytes"),
    "average graphics package power (w)": Meaning("gpu.power_watts"),
    "current socket graphics package power (w)": Meaning("gpu.power_watts", choice=1),
    "max graphics package power (w)": Meaning("gpu.power_limit_watts"),
    "temperature (sensor junction) (c)": Meaning("gpu.temperature_celsius"),
    "temperature (sensor edge) (c)": Meaning("gpu.temperature_celsius", choice=1),
    "sclk clock speed:": Meaning("gpu.sm_clock_hertz", _MEGA),
    "mclk clock speed:": Meaning("gpu.memory_clock_hertz", _MEGA),
    "pcie replay count": Meaning("gpu.pcie_replays_total"),
}
_SERIES = ("card series", "device name", "card model")
_CARD = re.compile(r"card(\d{1,4})$")
_JSON_CARD = re.compile(rb'"card\d{1,4}"\s*:\s*\{')
_CLOCK = re.compile(r"\(?\s*(\d+(?:\.\d+)?)\s*Mhz\s*\)?$", re.IGNORECASE)
_LINES_LOOKED_AT = 20
_DOCUMENT_BYTES_AT_MOST = 1 << 20


class RocmSmi:
    """Output of AMD's older command line tool."""

    name: ClassVar[str] = "rocm_smi"
    title: ClassVar[str] = "output of rocm-smi"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the heads of the table, or a card with something known of it."""
        lines = head.split(b"\n")
        if any(_heads(_text(line)) is not None for line in lines[:_LINES_LOOKED_AT]):
            return True
        low = head.lower()
        there = any(b'"' + name.encode() + b'"' in low for name in NAMES)
        return there and _JSON_CARD.search(head) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the host."""
        source, account = sources[0], accounts[0]
        sweeps = _Sweeps(account)
        for line in lines_of(source, account):
            sweeps.line(line)
        sweeps.end()
        found = False
        for node in sweeps.devices.nodes(self.name, source.path.name.split(".")[0]):
            found = True
            yield node
        if not found:
            raise CannotImportError("no reading of a GPU was found", "")


class _Sweeps:
    """One line after the other, of tables and documents."""

    def __init__(self, account: Account) -> None:
        self.devices = Devices(account)
        self._account = account
        self._heads: list[str] | None = None
        self._document: list[bytes] = []
        self._depth = self._size = 0
        self._at: tuple[int, bool] | None = None

    def line(self, line: bytes) -> None:
        """Take a line."""
        if self._document or line.lstrip()[:1] == b"{":
            self._part(line)
            return
        text = _text(line)
        if not text:
            return
        said = time_ns(text) if "," not in text else None
        heads = _heads(text)
        if said is not None:
            self._at = said
        elif heads is not None:
            self._heads = heads
        elif self._heads and text.startswith("card"):
            self._row(_cells(text))
        else:
            self._account.skipped["lines that are no rows of a table"] += 1

    def _part(self, line: bytes) -> None:
        """A line of a document: it is over where as many braces were closed as opened."""
        self._document.append(line)
        self._size += len(line)
        self._depth += line.count(b"{") - line.count(b"}")
        if self._depth <= 0 or self._size > _DOCUMENT_BYTES_AT_MOST:
            self.end()

    def end(self) -> None:
        """Read the document that was under way."""
        if not self._document:
            return
        value = json_of(b"\n".join(self._document))
        self._document, self._depth, self._size = [], 0, 0
        if not isinstance(value, dict):
            self._account.skipped["documents that are no JSON"] += 1
            return
        for card, said in value.items():
            if isinstance(said, dict):
                self._card(card, {str(name): str(one) for name, one in said.items()})

    def _row(self, cells: Sequence[str]) -> None:
        assert self._heads is not None
        if len(cells) != len(self._heads):
            self._account.skipped["rows with more or fewer columns than the head"] += 1
            return
        row = dict(zip(self._heads, cells))
        self._card(row.pop("device", ""), row)

    def _card(self, card: str, said: Mapping[str, str]) -> None:
        """The readings of one card; the one that was seen already begins the next sweep."""
        match = _CARD.match(card)
        if match is None:
            return  # "system": versions
        known = {name.strip().lower(): value for name, value in said.items()}
        self.devices.next_in_sweep(card)
        t_ns, zoned = self._at or (self.devices.sweep_ns(), False)
        values = {NAMES[name]: _value(text) for name, text in known.items() if name in NAMES}
        name = next((known[one] for one in _SERIES if known.get(one, "N/A") != "N/A"), "")
        facts = {"vendor": "amd", **({"name": name[:200]} if name else {})}
        self.devices.row(f"gpu{int(match[1])}", t_ns, values, zoned, **facts)


def _heads(text: str) -> list[str] | None:
    """Return the names of the columns; None of what is no head of a table."""
    if not text.startswith("device,"):
        return None
    heads = _cells(text)
    return heads if any(head.strip().lower() in NAMES for head in heads) else None


def _cells(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").replace("\0", "").strip()


def _value(text: str) -> float:
    clock = _CLOCK.match(text.strip())
    return float(clock[1]) if clock else quantity(text)
