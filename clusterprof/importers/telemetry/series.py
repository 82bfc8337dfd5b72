"""Series with labels, from whatever form they come in, into columns by host and device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from clusterprof.importers.base import Account
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.telemetry.dcgm_names import XID
from clusterprof.importers.telemetry.gathered import (
    READINGS_AT_MOST,
    Column,
    Gathered,
    Host,
)
from clusterprof.importers.telemetry.labelled import gpu_of, host_of, is_known, meaning_of

_XIDS_AT_MOST = 4096
_MAKERS = (("DCGM_", "nvidia"), ("rocm_", "amd"), ("gpu_", "amd"))


class Labelled:
    """Takes series with labels; gives out a node for each host."""

    def __init__(self) -> None:
        self._gathered = Gathered()
        self._timeless = Gathered()
        self._addresses: dict[str, set[str]] = {}
        self._at: dict[str, str] = {}
        self._left = READINGS_AT_MOST
        self._xids: Counter[tuple[str, str, int]] = Counter()

    def column(
        self, name: str, labels: Mapping[str, str], timed: bool, account: Account
    ) -> Column | None:
        """Return where the readings of a series go; None when they mean nothing to us."""
        found = meaning_of(name, labels)
        if found is None:
            if name != XID:
                why = "of a device or kind left out" if is_known(name) else "of unknown names"
                account.skipped[f"series {why}"] += 1
            return None
        meaning, device = found
        host, address = host_of(labels)
        gathered = self._gathered if timed else self._timeless
        column = gathered.column(host, meaning, device)
        if column is None:
            account.skipped["series beyond the most that are read"] += 1
            return None
        if address and address != host:
            self._addresses.setdefault(address, set()).add(host)
        account.read["series"] += 1
        if meaning.signal.startswith("gpu."):
            maker = next((maker for start, maker in _MAKERS if name.startswith(start)), "")
            gathered.device(
                host, device, vendor=maker, name=labels.get("modelName", ""),
                uuid=labels.get("UUID", ""), pci_address=labels.get("pci_bus_id", ""),
            )  # fmt: skip
        return column

    def add(self, column: Column, t_ns: int, value: float, account: Account) -> bool:
        """Add a reading; False when there is room for no more."""
        if self._left <= 0:
            account.skipped["readings beyond the most that are read"] += 1
            return False
        self._left -= 1
        column.add(t_ns, value)
        return True

    def error(self, labels: Mapping[str, str], value: float) -> None:
        """Note the last error (Xid) that a device's driver reported; 0 = none."""
        if 0 < value < 1 << 16 and len(self._xids) < _XIDS_AT_MOST:
            host, _ = host_of(labels)
            self._xids[host, labels.get("gpu", "") or gpu_of(labels), int(value)] += 1

    def nodes(self, source: str, account: Account) -> Iterator[NodeTables]:
        """Yield a node for each host; hosts known by address alone get the name others give it."""
        self._name_addresses()
        timed = {name for name, host in self._gathered.hosts.items() if host.columns}
        for name in timed & set(self._timeless.hosts):
            left = self._timeless.hosts.pop(name)
            count = sum(len(column.t_ns) for column in left.columns.values())
            account.skipped["readings without a time, beside others with one"] += count
        self._timeless.wall = False
        if self._timeless.hosts:
            account.notes.append("readings without a time are shown as those of one instant")
        for (host, gpu, number), _ in sorted(self._xids.items()):
            account.notes.append(
                f"{host or 'a node'}: GPU {gpu}: the driver's last error is Xid {number}"
            )
        yield from self._gathered.nodes(source, account)
        yield from self._timeless.nodes(source, account)

    def _name_addresses(self) -> None:
        """Merge what was read at an address into the one host whose name stood beside it."""
        for gathered in (self._gathered, self._timeless):
            for address, names in self._addresses.items():
                if len(names) != 1 or address not in gathered.hosts:
                    continue
                nameless = gathered.hosts.pop(address)
                named = gathered.hosts.setdefault(next(iter(names)), Host())
                named.columns = {**nameless.columns, **named.columns}
                named.devices = {**nameless.devices, **named.devices}
