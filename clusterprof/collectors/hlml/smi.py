"""Gaudi by `hl-smi`, run anew every few seconds.

    $ hl-smi -Q index,uuid,name,bus_id,…,power.draw -f csv,noheader,nounits
    0, 01P0-HL3080A0-15-TNBS32-09-07-08, HL-325L, 0000:33:00.0, …, 225

Memory is in MiB, power in watts, temperatures in °C (System Management Interface Tool, Intel Gaudi
documentation). Units are accepted where a version prints them; anything that is no number is a
reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from clusterprof.collectors.hlml.where import INSTALL, TOOL
from clusterprof.errors import Unavailable
from clusterprof.linux.feed import FedDevice, Feed, Keeper, Value
from clusterprof.linux.programs import find
from clusterprof.linux.tool import run

EVERY_SECONDS, ANSWER_SECONDS = 5.0, 10.0
_SILENT_NS = 20_000_000_000
_MIB = 1 << 20
_FACTS = ("index", "uuid", "name", "bus_id", "driver_version", "module_id")
_VALUES: tuple[tuple[str, str, Callable[[float], Value]], ...] = (
    ("utilization.aip", "gpu.power_utilisation_ratio", lambda value: _share(value)),
    ("memory.used", "gpu.memory_used_bytes", lambda value: int(value * _MIB)),
    ("memory.total", "gpu.memory_total_bytes", lambda value: int(value * _MIB)),
    ("power.draw", "gpu.power_watts", lambda value: value),
    ("temperature.aip", "gpu.temperature_celsius", lambda value: value),
)
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:%|MiB|MB|W|C|°C)?\s*", re.ASCII)
_SAY_NOTHING = ("", "n/a", "[n/a]", "not supported", "[not supported]")


class Library:
    """The Gaudis that `hl-smi` knows; raises Unavailable when it knows none."""

    signals = tuple(signal for _, signal, _ in _VALUES)

    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        path = find(TOOL, os.environ)
        if path is None:
            raise Unavailable("absent", "hl-smi was not found", INSTALL)
        columns = ",".join([*_FACTS, *(column for column, _, _ in _VALUES)])
        self._argv = [path, "-Q", columns, "-f", "csv,noheader,nounits"]
        rows = parse(run(self._argv, ANSWER_SECONDS))
        self.inventory = [describe(facts) for facts, _ in rows]
        self._ids = [entry["id"] for entry in self.inventory]
        silent = Unavailable("failed", f"hl-smi has said nothing for {_SILENT_NS // 10**9} s")
        self._feed = Feed(len(self.signals), _SILENT_NS, lambda: silent)
        self._feed.put([values for _, values in rows])
        self.devices = [FedDevice(self._feed, index) for index in range(len(rows))]
        self._first, self._keeper = True, Keeper(self._feed, self._work, every_seconds)
        self._keeper.start()

    def adopt(self, index: int) -> FedDevice:
        """Return a device; none is ever skipped, for the tool runs on its own."""
        return self.devices[index]

    def close(self) -> None:
        """End the tool, if it runs."""
        self._keeper.stop()

    end_tools = close

    def _work(self, wanted: Callable[[], bool]) -> None:
        if self._first:  # just read
            self._first = False
            return
        found = {describe(facts)["id"]: values for facts, values in parse(self._answer())}
        gone = Unavailable(
            "failed", "hl-smi no longer names this Gaudi", "look at the kernel's log"
        )
        self._feed.put([found.get(id_, [gone] * len(self.signals)) for id_ in self._ids])

    def _answer(self) -> str:
        return run(self._argv, ANSWER_SECONDS)


def parse(text: str) -> list[tuple[dict[str, str], list[Value]]]:
    """Return (facts, one value per signal) of each device; raises Unavailable if there is none."""
    rows = []
    width = len(_FACTS) + len(_VALUES)
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != width or not cells[0].isdigit():
            continue
        facts = dict(zip(_FACTS, cells))
        rows.append((facts, [_value(*one) for one in zip(_VALUES, cells[len(_FACTS) :])]))
    if not rows:
        first = text.strip().partition("\n")[0][:100]
        raise Unavailable("failed", f"hl-smi printed no list of devices: {first!r}")
    return rows


def describe(facts: dict[str, str]) -> dict[str, Any]:
    """Return a device's entry for the header."""
    index = int(facts["index"])
    known = {key: value for key, value in facts.items() if value.lower() not in _SAY_NOTHING}
    entry: dict[str, Any] = {"id": known.get("uuid", f"gaudi-{index}"), "vendor": "intel"}
    entry |= {"index": index, "emulated": False, "tells_busy": False}
    for key, fact in (("name", "name"), ("pci_bus_id", "bus_id"), ("driver", "driver_version")):
        if fact in known:
            entry[key] = known[fact]
    if known.get("module_id", "").isdigit():
        entry["module"] = int(known["module_id"])
    return entry


def _value(meaning: Sequence[Any], cell: str) -> Value:
    column, _, convert = meaning
    if cell.lower() in _SAY_NOTHING:
        return Unavailable("absent", f"hl-smi does not say {column}")
    match = _NUMBER.fullmatch(cell)
    if match is None:
        return Unavailable("failed", f"hl-smi says {cell[:40]!r} for {column}")
    return convert(float(match[1]))  # type: ignore[no-any-return]


def _share(percent: float) -> Value:
    if percent > 100:
        return Unavailable("failed", f"hl-smi: impossible value {percent:g} %")
    return percent / 100
