"""TPU by `tpu-info`, run anew every few seconds; its tables are for people, and taken as such.

TPU Runtime Utilization
│ Chip │ HBM Usage (GiB)       │ Duty cycle │
│ 0    │ 18.45 GiB / 31.25 GiB │    100.00% │
TensorCore Utilization
│ Core ID │ TensorCore Utilization │
│ 0       │ 13.60%                 │
"""

from __future__ import annotations

import os
import re

from clusterprof.collectors.tpu.where import TOOL, chips, inventory
from clusterprof.errors import Unavailable
from clusterprof.linux.feed import FedDevice, Feed, Keeper, Value
from clusterprof.linux.programs import find
from clusterprof.linux.tool import run

EVERY_SECONDS, ANSWER_SECONDS = 5.0, 10.0
_SILENT_NS = 20_000_000_000
_GIB = 1 << 30
_USE = re.compile(r"(\d+)\D+?(\d+(?:\.\d+)?) ?GiB / (\d+(?:\.\d+)?) ?GiB\W+(\S+?)%?\W*", re.ASCII)
_TENSORCORE = re.compile(r"\W*(\d+)\W+(\d+(?:\.\d+)?)%\W*", re.ASCII)


class Library:
    """The chips that `tpu-info` knows; raises Unavailable when it knows none."""

    signals = (
        "gpu.duty_cycle_ratio", "gpu.tensorcore_ratio", "gpu.memory_used_bytes",
        "gpu.memory_total_bytes",
    )  # fmt: skip

    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        path = find(TOOL, os.environ)
        if path is None:
            raise Unavailable("absent", "tpu-info was not found", "pip install tpu-info")
        self._argv = [path]
        first = parse(run(self._argv, ANSWER_SECONDS))
        self._chips = sorted(first)
        silent = Unavailable("failed", f"tpu-info has said nothing for {_SILENT_NS // 10**9} s")
        self._feed = Feed(len(self.signals), _SILENT_NS, lambda: silent)
        self._feed.put([first[chip] for chip in self._chips])
        self.devices = [FedDevice(self._feed, index) for index in range(len(self._chips))]
        self.inventory = inventory(len(self._chips), chips())
        self._first, self._keeper = True, Keeper(self._feed, self._work, every_seconds)
        self._keeper.start()

    def adopt(self, index: int) -> FedDevice:
        """Return a chip; none is ever skipped, for the tool runs on its own."""
        return self.devices[index]

    def close(self) -> None:
        """End the tool, if it runs."""
        self._keeper.stop()

    end_tools = close

    def _work(self, wanted: object) -> None:
        if self._first:  # just read
            self._first = False
            return
        found = parse(run(self._argv, ANSWER_SECONDS))
        gone = Unavailable("failed", "tpu-info no longer names this chip")
        self._feed.put([found.get(chip, [gone] * len(self.signals)) for chip in self._chips])


def parse(text: str) -> dict[int, list[Value]]:
    """Return a row per chip; raises Unavailable when the table of their use has none."""
    found: dict[int, list[Value]] = {}
    matrix: list[float] = []
    section = ""
    for line in text.splitlines():
        for title in ("TPU Runtime Utilization", "TensorCore Utilization", "TPU "):
            if title in line and "Core ID" not in line:
                section = title
                break
        cells = line.strip(" |│┃")
        if section == "TPU Runtime Utilization" and (use := _USE.fullmatch(cells)):
            duty = _percent(use[4])
            memory = (int(float(use[2]) * _GIB), int(float(use[3]) * _GIB))
            missing = Unavailable("absent", "tpu-info does not say it")
            found[int(use[1])] = [duty, missing, *memory]
        elif section == "TensorCore Utilization" and (core := _TENSORCORE.fullmatch(cells)):
            matrix.append(float(core[2]))
    if not found:
        raise Unavailable("absent", "tpu-info shows no TPU in use; a process must hold it")
    each, rest = divmod(len(matrix), len(found))
    if each and not rest:
        for number, chip in enumerate(sorted(found)):
            part = matrix[number * each : (number + 1) * each]
            found[chip][1] = _percent(str(sum(part) / each))
    return found


def _percent(word: str) -> Value:
    try:
        percent = float(word)
    except ValueError:
        return Unavailable("absent", f"tpu-info says {word[:20]!r} for the duty cycle")
    if not 0 <= percent <= 100:
        return Unavailable("failed", f"tpu-info: impossible value {percent:g} %")
    return percent / 100
