"""/proc/<pid>/fdinfo/<fd> of graphics devices: what a process uses of which device.

Documentation/gpu/drm-usage-stats.rst. An open device is a client; descriptors that were duplicated
or inherited repeat its `drm-client-id`, which is unique for one device.

    drm-driver:            xe
    drm-pdev:              0000:29:00.0
    drm-client-id:         17
    drm-engine-compute:    4242 ns             time an engine worked for the client (i915, amdgpu)
    drm-cycles-ccs:        28257900            the same in cycles of the device (xe), of which it
    drm-total-cycles-ccs:  7655183225          has had so many until now
    drm-engine-capacity-ccs: 4                 engines of that kind
    drm-resident-vram0:    23992 KiB           memory it holds

Work that ROCm gives the hardware by itself (queues of /dev/kfd) is in no `drm-engine` time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import NamedTuple

from clusterprof.errors import Unavailable, unavailable_from_os_error
from clusterprof.linux.roots import Roots

_DEVICES = "/dev/dri/"
_MOST_DESCRIPTORS = 4096
_MOST_CLIENTS = 256
_FACTORS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MEMORY = ("drm-resident-vram", "drm-total-vram", "drm-memory-vram", "drm-resident-local",
           "drm-total-local")  # fmt: skip
"""Kinds of device memory, best first; i915 calls it local."""


class Client(NamedTuple):
    """One process's use of one device, as its driver counts it."""

    pid: int
    driver: str
    pci: str
    client_id: int
    engines_ns: dict[str, int]
    cycles: dict[str, tuple[int, int]]
    """engine -> (cycles it worked for the client, cycles there have been)."""
    memory_bytes: int | None
    """Device memory it holds; None = not told."""


def parse_client(pid: int, data: str) -> Client | None:
    """Parse one file; None when the descriptor is no graphics device, or says too little."""
    facts: dict[str, str] = {}
    for line in data.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.startswith("drm-"):
            facts[name] = value.strip()
    driver, pci = facts.get("drm-driver", ""), facts.get("drm-pdev", "").lower()
    client_id = _number(facts.get("drm-client-id", ""))
    if not driver or not pci or client_id is None:
        return None
    engines, cycles = {}, {}
    for name, value in facts.items():
        engine = name.removeprefix("drm-engine-")
        if engine != name and not engine.startswith("capacity-") and value.endswith(" ns"):
            spent = _number(value[:-3])
            if spent is not None:
                engines[engine] = spent
        engine = name.removeprefix("drm-cycles-")
        if engine != name:
            both = _number(value), _number(facts.get(f"drm-total-cycles-{engine}", ""))
            if both[0] is not None and both[1] is not None:
                cycles[engine] = (both[0], both[1])
    return Client(pid, driver, pci, client_id, engines, cycles, _memory(facts))


def _memory(facts: dict[str, str]) -> int | None:
    for kind in _MEMORY:
        sizes = [_bytes(value) for name, value in facts.items() if name.startswith(kind)]
        told = [size for size in sizes if size is not None]
        if told:
            return sum(told)
    return None


def _bytes(value: str) -> int | None:
    word, _, unit = value.partition(" ")
    count = _number(word)
    return None if count is None or unit not in _FACTORS else count * _FACTORS[unit]


def _number(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdigit() else None


class Descriptors:
    """The descriptors of some processes that are graphics devices; looked for now and then."""

    def __init__(self, roots: Roots, drivers: Collection[str]) -> None:
        self._proc = str(roots.proc)
        self._drivers = frozenset(drivers)
        self._found: dict[int, list[str]] = {}
        self._unseen: Unavailable | None = None
        self._unread: Unavailable | None = None

    @property
    def denied(self) -> Unavailable | None:
        """Why something of a process could not be seen, as of the last look and reading."""
        return self._unseen or self._unread

    def look(self, pids: Iterable[int]) -> None:
        """Search the processes' descriptors; one that has ended has none."""
        self._unseen = None
        self._found = {pid: found for pid in pids if (found := self._devices(pid))}

    def clients(self) -> list[Client]:
        """Return every client once, as it is now; raises nothing."""
        seen: dict[tuple[str, int], Client] = {}
        self._unread = None
        for pid, found in self._found.items():
            for fd in found:
                try:
                    with open(f"{self._proc}/{pid}/fdinfo/{fd}", "rb") as file:
                        data = file.read().decode(errors="replace")
                except PermissionError as error:
                    self._unread = unavailable_from_os_error(error, f"{self._proc}/{pid}/fdinfo")
                    continue
                except OSError:
                    continue  # closed meanwhile, or the process has ended
                client = parse_client(pid, data)
                if client is not None and client.driver in self._drivers:
                    seen.setdefault((client.pci, client.client_id), client)
        return list(seen.values())

    def _devices(self, pid: int) -> list[str]:
        folder = f"{self._proc}/{pid}/fd"
        try:
            names = os.listdir(folder)[:_MOST_DESCRIPTORS]
        except PermissionError as error:
            self._unseen = unavailable_from_os_error(error, folder)
            return []
        except OSError:
            return []
        found = []
        for name in sorted(names, key=lambda name: (len(name), name)):
            try:
                if os.readlink(f"{folder}/{name}").startswith(_DEVICES):
                    found.append(name)
            except OSError:
                continue
        return found[:_MOST_CLIENTS]


def main_device(held_bytes: dict[str, int]) -> str:
    """Return the device a process works on by the memory it holds of each; "" = not clear.

    A context alone takes memory of devices that are not used, so the most must be twice the next.
    """
    most = sorted(held_bytes.items(), key=lambda pair: (-pair[1], pair[0]))[:2]
    if not most or most[0][1] <= 0 or (len(most) > 1 and most[0][1] < 2 * most[1][1]):
        return ""
    return most[0][0]
