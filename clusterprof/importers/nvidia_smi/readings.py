"""Readings of the devices of one host, with times or in sweeps that have none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from clusterprof.importers.base import Account
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.telemetry.gathered import READINGS_AT_MOST, Gathered, Meaning

SWEEP_NS = 1_000_000_000
"""Between two sweeps of a tool that prints no times: what it waits for unless told otherwise."""
SEEN_AT_MOST = 1 << 16
"""Devices of one sweep, or processes."""
_ABSENT = ("", "-", "n/a", "[n/a]", "[not supported]", "not supported", "[unknown error]")


def quantity(text: str) -> float:
    """Return the number in `97 %`, `16x`, `0x0000000000000040`; NaN where there is none."""
    word = text.strip()
    if word.lower() in _ABSENT:
        return math.nan
    word = word.split()[0]
    try:
        return float(int(word, 16)) if word[:2] == "0x" else float(word.rstrip("x%"))
    except (ValueError, OverflowError):
        return math.nan


class Devices:
    """Gathers readings by device; sweeps without times are a second apart."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._gathered = Gathered()
        self._left = READINGS_AT_MOST
        self._sweep = 0
        self._seen: set[object] = set()
        self.timeless = False

    @property
    def sweep(self) -> int:
        """Number of the sweep under way, from 0."""
        return self._sweep

    def next_in_sweep(self, who: object) -> None:
        """Say of whom the next row is; one who was there already begins the next sweep."""
        if who in self._seen or len(self._seen) >= SEEN_AT_MOST:
            self.new_sweep()
        self._seen.add(who)

    def new_sweep(self) -> None:
        """Begin the next sweep."""
        self._sweep += 1
        self._seen.clear()

    def sweep_ns(self) -> int:
        """Return when a sweep without a time is taken to be."""
        self.timeless = True
        return self._sweep * SWEEP_NS

    def row(
        self, device: str, t_ns: int, values: Mapping[Meaning, float], zoned: bool, **facts: str
    ) -> None:
        """Add the readings of one device at one instant."""
        self._gathered.wall &= zoned
        self._gathered.device("", device, **{"vendor": "nvidia", **facts})
        self.account.read["rows"] += 1
        for meaning, value in values.items():
            column = self._gathered.column("", meaning, device)
            if column is None or self._left <= 0:
                self.account.skipped["readings beyond the most that are read"] += 1
                continue
            self._left -= 1
            column.add(t_ns, value)

    def nodes(self, source: str, key: str) -> Iterator[NodeTables]:
        """Yield the node."""
        if self.timeless and self._sweep:
            self.account.notes.append(
                f"the file shows no times: its {self._sweep + 1:,} sweeps are taken to be a second"
                " apart, as the tool does them unless told otherwise"
            )
        for node in self._gathered.nodes(source, self.account, key):
            node.shown = key
            yield node
