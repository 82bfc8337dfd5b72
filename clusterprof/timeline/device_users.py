"""Which process uses which accelerator, as collectors saw it while they recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clusterprof.trace.schema import Event


class DeviceUsers:
    """What the events of a node say of it: the last word of each kind counts.

    `device-owner` (device, pid): a tool names the process that has a device; a process may have
    several. `device-used` (pid, device): the one device that a process was seen to work on.
    """

    def __init__(self) -> None:
        self._owners: dict[object, object] = {}
        self._works_on: dict[int, str] = {}

    def saw(self, event: Event) -> bool:
        """Take in an event; return whether it said anything of who uses a device."""
        pid, device = event.attributes.get("pid"), event.attributes.get("device")
        if event.kind == "device-owner":
            self._owners[device] = pid
        elif event.kind == "device-used" and isinstance(pid, int):
            self._works_on[pid] = str(device)
        else:
            return False
        return True

    def named(self, devices: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return devices with their owner as `pid`, and who was seen to work on them as `users`."""
        found = [
            {**one, "pid": self._owners[one["id"]]} if one.get("id") in self._owners else one
            for one in devices
        ]
        if not self._works_on:
            return found
        users: dict[str, list[int]] = {}
        for pid, device in self._works_on.items():
            users.setdefault(device, []).append(pid)
        return [{**one, "users": users.get(str(one.get("id")), [])} for one in found]
