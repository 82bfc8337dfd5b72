"""Tables that go on: `nvidia-smi dmon` and `pmon`, `dcgmi dmon`.

#Date       Time        gpu   pwr gtemp mtemp    sm   mem
#YYYYMMDD   HH:MM:SS    Idx     W     C     C     %     %
 20260321   15:22:47      0   612    61    88    97    41

#Entity   GPUTL   POWER
ID                    W
GPU 0        97   612.4
"""

from __future__ import annotations

import re
from collections import Counter

from clusterprof.importers.base import Source
from clusterprof.importers.nvidia_smi.names import DCGMI, MONITOR, PROCESSES
from clusterprof.importers.nvidia_smi.readings import SEEN_AT_MOST, Devices, quantity
from clusterprof.importers.telemetry.gathered import Meaning
from clusterprof.importers.telemetry.lines import lines_of
from clusterprof.importers.telemetry.times import time_ns

_DEVICE = re.compile(r"[0-9]{1,6}")
_DAY_NS = 86_400_000_000_000
_LINES_LOOKED_AT = 20


def heads_of(line: bytes) -> list[str] | None:
    """Return the names of the columns of a table's head; None for anything else."""
    text = line.decode("latin-1").strip()
    if not text.startswith("#") or len(text) > 4096:
        return None
    heads = text.lstrip("# ").split()
    if heads[:1] == ["Entity"] and any(head in DCGMI for head in heads):
        return heads
    plain = [head.lower() for head in heads]
    known = any(head in MONITOR for head in plain) or "pid" in plain
    return plain if "gpu" in plain and known else None


def is_monitor(head: bytes) -> bool:
    """Say whether a file begins like such a table."""
    lines = head.split(b"\n")[:_LINES_LOOKED_AT]
    return any(heads_of(line) is not None for line in lines)


def read_monitor(source: Source, devices: Devices) -> None:
    """Read all rows."""
    reader = _Rows(devices)
    for line in lines_of(source, devices.account):
        text = line.decode("latin-1").strip()
        if text.startswith("#"):
            reader.heads = heads_of(line) or reader.heads
        elif text and not text.startswith(("ID", "Id")):
            reader.row(text.split())
    reader.end_of_sweep()


class _Rows:
    """One row after the other."""

    def __init__(self, devices: Devices) -> None:
        self.heads: list[str] = []
        self._devices = devices
        self._processes: Counter[str] = Counter()
        self._seen: set[tuple[str, str]] = set()
        self._last: tuple[str, str] | None = None
        self._at: tuple[int, bool] = (0, False)
        self._clock: list[int] = [0, 0]
        """ns into the day that a row last showed; ns of the days before."""

    def row(self, cells: list[str]) -> None:
        account = self._devices.account
        if self.heads[:1] == ["Entity"]:
            if len(cells) > 1 and cells[0].startswith("GPU"):  # "GPU 0" is one cell
                cells = [f"gpu{cells[1]}" if cells[0] == "GPU" else " ".join(cells[:2]), *cells[2:]]
            if len(cells) == len(self.heads) and cells[0].lower().startswith("gpu"):
                self._add(cells[0], dict(zip(self.heads[1:], cells[1:])), DCGMI)
                return
        elif self.heads:
            row = dict(zip(self.heads, cells))
            if len(cells) >= len(self.heads) and _DEVICE.fullmatch(row.get("gpu", "")):
                if "pid" in row:
                    self._process(row)
                else:
                    self._add(f"gpu{row['gpu']}", row, MONITOR)
                return
        account.skipped["lines that are no rows of a table"] += 1

    def _add(self, device: str, row: dict[str, str], names: dict[str, Meaning]) -> None:
        self._devices.next_in_sweep(device)
        t_ns, zoned = self._when(row)
        values = {names[head]: quantity(cell) for head, cell in row.items() if head in names}
        self._devices.row(device, t_ns, values, zoned)

    def _process(self, row: dict[str, str]) -> None:
        """Rows of `pmon`: how many processes each device has."""
        who = (row["gpu"], row["pid"])
        again = who in self._seen or len(self._seen) >= SEEN_AT_MOST
        if again or (self._last and int(row["gpu"]) < int(self._last[0])):
            self.end_of_sweep()
            self._devices.new_sweep()
        self._at = self._when(row)
        self._seen.add(who)
        self._last = who
        self._processes[f"gpu{row['gpu']}"] += row["pid"].isdecimal()

    def end_of_sweep(self) -> None:
        """Give out how many processes there were."""
        for device, count in self._processes.items():
            self._devices.row(device, self._at[0], {PROCESSES: float(count)}, self._at[1])
        self._processes = Counter()
        self._seen = set()
        self._last = None

    def _when(self, row: dict[str, str]) -> tuple[int, bool]:
        """When a row was printed; by the clock alone the days are counted from 0."""
        date, time = row.get("date", ""), row.get("time", "")
        if len(date) == 8 and date.isdecimal():
            said = time_ns(f"{date[:4]}-{date[4:6]}-{date[6:]}T{time}")
            if said is not None:
                return said
        parts = time.split(":")
        if len(parts) == 3 and all(part.isdecimal() and len(part) <= 2 for part in parts):
            hours, minutes, seconds = map(int, parts)
            now = (hours * 3600 + minutes * 60 + seconds) * 1_000_000_000
            if now < self._clock[0] - _DAY_NS // 2:
                self._clock[1] += _DAY_NS
            self._clock[0] = now
            return now + self._clock[1], False
        return self._devices.sweep_ns(), False
