"""The devices of one collector: named in the header, or by an event when they come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clusterprof.trace.schema import Event, Record

Note = Callable[[str, BaseException], None]


class Devices:
    """Which devices of a collector the recording knows already."""

    def __init__(self, collector: Any, note: Note) -> None:
        self._collector = collector
        self._describe = getattr(collector, "inventory", None)
        self._note = note
        self._known: frozenset[str] | None = None

    def known(self, opened: bool) -> list[dict[str, Any]]:
        """Return the devices there are now, for the header."""
        inventory = self._inventory() if opened else []
        self._known = _ids(inventory)
        return inventory

    def appeared(self, now_ns: int) -> list[Record]:
        """Say which devices have come since the header was written; the collector is open."""
        if self._known is None:
            return []  # the header is still to come and names them
        inventory = self._inventory()
        known, self._known = self._known, self._known | _ids(inventory)
        return [
            Event(now_ns, "device-appeared", device)
            for device in inventory
            if str(device.get("id")) not in known
        ]

    def _inventory(self) -> list[dict[str, Any]]:
        if self._describe is None:
            return []
        try:
            return [dict(device) for device in self._describe()]
        except BaseException as error:
            self._note(self._collector.name, error)
            return []


def _ids(inventory: list[dict[str, Any]]) -> frozenset[str]:
    return frozenset(str(device.get("id")) for device in inventory)
