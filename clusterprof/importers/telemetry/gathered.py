"""Readings by host, signal and device, held as packed columns until a file has ended.

    gathered = Gathered()
    column = gathered.column("gpu-node-1", Meaning("gpu.power_watts"), "GPU-c4529c8d")
    column.add(t_ns, 113.6)
    for node in gathered.nodes("prometheus", account): ...

A signal may be the sum of several foreign values (user and nice make `cpu.user_ns_total`), and may
be there in two forms, of which the better is taken.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.base import Account, CannotImportError
from clusterprof.importers.tables import Float, Int, NodeTables

_Settled = tuple[str, str, Int, Float]
COLUMNS_AT_MOST = 1 << 17
OF_A_HOST_AT_MOST = 1 << 13
"""A thousand CPUs in six states, and all of their devices."""
HOSTS_AT_MOST = 1 << 14
REFUSED_AT_MOST = 1 << 16
"""So often there may be no room; then the rest is not read."""
READINGS_AT_MOST = 1 << 26
"""16 bytes each: 1 GiB."""
# What DCGM writes for "not there", in 32 and 64 bits, and as floating point (dcgm_structs.h).
_BLANK_32, _BLANK_64, _BLANK_FLOAT = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 140737488355328.0
_BLANKS = (
    (_BLANK_32, _BLANK_32 + 15), (_BLANK_64, float(1 << 63)), (_BLANK_FLOAT, _BLANK_FLOAT + 15),
)  # fmt: skip
ALL = "all"
"""The device of CPU times of a whole node."""
_OF_CORES = frozenset(f"cpu.{w}_ns_total" for w in ("user", "system", "idle", "iowait", "steal"))
_ROUNDED_UP = 1.001  # a share that its source rounded up


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a foreign name says in ours."""

    signal: str
    scale: float = 1.0
    """Our unit = foreign value × scale."""
    part: str = ""
    """Values of several parts at one time are added."""
    choice: int = 0
    """Of several forms of one signal the lowest one that has readings is taken."""
    parts: tuple[str, ...] = ()
    """All parts that make the signal; where one is missing nothing is said."""


class Column:
    """Readings of one foreign value."""

    __slots__ = ("meaning", "t_ns", "values")

    def __init__(self, meaning: Meaning) -> None:
        self.meaning = meaning
        self.t_ns = array("q")
        self.values = array("d")

    def add(self, t_ns: int, value: float) -> None:
        """Add a reading in foreign units."""
        self.t_ns.append(t_ns)
        self.values.append(value)


@dataclass(slots=True)
class Host:
    """What is known of one node besides its readings."""

    devices: dict[str, dict[str, str]] = field(default_factory=dict)
    columns: dict[tuple[str, str, int, str], Column] = field(default_factory=dict)
    """By signal, device, choice and part."""


class Gathered:
    """All readings of some files."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.wall = True
        """False when the zone of the times is not known."""
        self._columns = self._devices = self._refused = 0

    def column(self, host: str, meaning: Meaning, device: str) -> Column | None:
        """Return where readings of a value go; None when there are too many values or hosts.

        Raises CannotImportError when that was said too often.
        """
        known = self.hosts.get(host)
        key = (meaning.signal, device, meaning.choice, meaning.part)
        column = known.columns.get(key) if known is not None else None
        if column is None:
            if self._columns >= COLUMNS_AT_MOST or (
                len(self.hosts) >= HOSTS_AT_MOST
                if known is None
                else len(known.columns) >= OF_A_HOST_AT_MOST
            ):
                self._refused += 1
                if self._refused > REFUSED_AT_MOST:
                    raise CannotImportError(
                        f"more than {COLUMNS_AT_MOST:,} series, {OF_A_HOST_AT_MOST:,} of one host"
                        f" or {HOSTS_AT_MOST:,} hosts", "give fewer hosts, devices or metrics",
                    )  # fmt: skip
                return None
            known = known or self.hosts.setdefault(host, Host())
            self._columns += 1
            column = known.columns[key] = Column(meaning)
        return column

    def device(self, host: str, id_: str, **facts: str) -> None:
        """Add what is known of an accelerator; empty facts are left out."""
        if self._devices >= COLUMNS_AT_MOST or (
            host not in self.hosts and len(self.hosts) >= HOSTS_AT_MOST
        ):
            return
        devices = self.hosts.setdefault(host, Host()).devices
        self._devices += id_ not in devices
        devices.setdefault(id_, {}).update({k: v for k, v in facts.items() if v})

    @property
    def readings(self) -> int:
        """How many there are."""
        return sum(len(c.t_ns) for host in self.hosts.values() for c in host.columns.values())

    def nodes(self, source: str, account: Account, key: str = "") -> Iterator[NodeTables]:
        """Yield a node for every host that has readings; says in the account what was left out."""
        seen: list[float] = []
        for name, host in sorted(self.hosts.items()):
            node = NodeTables(name, source, 0 if self.wall else None, name or key)
            used = False
            settled = list(_settled(host, account))
            for signal, device, t_ns, values in (*settled, *_all_cores(settled)):
                if np.isnan(values).all():  # parts that were never read at the same time
                    continue
                node.series(signal, device, t_ns, values)
                used = True
                if signal == "gpu.busy_ratio":
                    seen.append(float(np.nanmean(values)))
            for id_, facts in sorted(host.devices.items()):
                node.device(id_, **facts)
            if used:
                yield node
        if seen:
            account.notes.append(_worked(seen, len(self.hosts)))


def _all_cores(settled: list[_Settled]) -> Iterator[_Settled]:
    """CPU times of a node, as the sum of its cores, where they are not there as such."""
    for signal in sorted({one[0] for one in settled if one[0] in _OF_CORES}):
        cores = [(t_ns, values) for name, _, t_ns, values in settled if name == signal]
        if all(device != ALL for name, device, *_ in settled if name == signal):
            yield (signal, ALL, *_added(cores))


def _worked(seen: list[float], hosts: int) -> str:
    mean = sum(seen) / len(seen)
    spread = f" (from {min(seen):.0%} to {max(seen):.0%})" if max(seen) - min(seen) > 0.01 else ""
    devices = f"{len(seen)} device" + "s" * (len(seen) > 1)
    nodes = f" of {hosts} nodes" if hosts > 1 else ""
    return f"{devices}{nodes} had work for {mean:.0%} of the time by their readings{spread}"


def _settled(host: Host, account: Account) -> Iterator[_Settled]:
    """Signals of a host: the best form of each, parts added up."""
    forms: dict[tuple[str, str], dict[int, list[Column]]] = defaultdict(dict)
    for (signal, device, choice, _), column in host.columns.items():
        forms[signal, device].setdefault(choice, []).append(column)
    for (signal, device), choices in sorted(forms.items()):
        for _, columns in sorted(choices.items()):
            tables = [_cleaned(column, account) for column in columns]
            tables = [(t, v) for t, v in tables if t.size and not np.isnan(v).all()]
            if len(tables) < len(columns[0].meaning.parts or (1,)):
                if tables:
                    account.skipped[f"values without the others that make {signal}"] += len(tables)
                continue
            yield (signal, device, *_added(tables))
            break


def _cleaned(column: Column, account: Account) -> tuple[Int, Float]:
    """Readings in our unit, in order of time, one at a time; NaN where nothing can be meant."""
    t_ns = np.frombuffer(column.t_ns, np.int64) if column.t_ns else np.empty(0, np.int64)
    raw = np.frombuffer(column.values, np.float64) if column.values else np.empty(0)
    signal = column.meaning.signal
    with np.errstate(over="ignore", invalid="ignore"):
        scale = column.meaning.scale
        values = raw / round(1 / scale) if scale < 1 else raw * scale  # 41 % is 0.41 to the bit
    bad = ~np.isfinite(values)
    for low, high in _BLANKS:
        bad |= (raw >= low) & (raw <= high)
    if not signal.endswith("_celsius"):
        bad |= values < 0
    if signal.startswith("gpu.") and signal.endswith("_ratio"):
        bad |= values > _ROUNDED_UP
        values = np.minimum(values, 1.0)
    _left_out(account, "values out of range or not available", bad)
    values = np.where(bad, np.nan, values)
    order = np.argsort(t_ns, kind="stable")
    t_ns, values = t_ns[order], values[order]
    last = np.append(t_ns[1:] != t_ns[:-1], True) if t_ns.size else np.empty(0, np.bool_)
    _left_out(account, "readings at the same time as a later one", ~last)
    return t_ns[last], values[last]


def _left_out(account: Account, why: str, which: NDArray[np.bool_]) -> None:
    if which.any():
        account.skipped[why] += int(which.sum())


def _added(tables: list[tuple[Int, Float]]) -> tuple[Int, Float]:
    """Sums at the times that all have."""
    t_ns, total = tables[0]
    for other_t, other in tables[1:]:
        t_ns, mine, theirs = np.intersect1d(t_ns, other_t, True, return_indices=True)
        total = total[mine] + other[theirs]
    return t_ns, total
