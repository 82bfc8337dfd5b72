"""What the job's processes use of each graphics device: memory, time of engines, and whose it is.

Memory and clients come from `drm_fdinfo`; of AMD's compute part also from `kfd`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from clusterprof.errors import Unavailable
from clusterprof.linux import kfd
from clusterprof.linux.drm_fdinfo import Client, Descriptors, main_device
from clusterprof.linux.processes import read_identity
from clusterprof.linux.roots import Roots
from clusterprof.linux.task import Readings

_LOOK_NS = 5_000_000_000
_PIDS_AT_MOST = 512
# What computes; copies, video and display are not the work that a GPU is trained with.
_COMPUTING = ("compute", "render", "gfx", "ccs", "rcs")
_NO_TIMES = Unavailable(
    "absent", "the driver does not tell the time of its engines", "update the kernel"
)


class Usage(NamedTuple):
    """What the job uses, as of one reading."""

    t_ns: int
    memory_bytes: dict[str, int]
    """device -> memory that processes of the job hold; one that nobody tells of is not in it."""
    shares: dict[str, float | Unavailable]
    """PCI address -> share of the time since the last reading in which an engine computed for the
    job; of several at once the sum, at most 1."""
    processes: dict[str, int]
    """device -> processes of the job that have opened it."""
    works_on: dict[int, str]
    """pid -> the device it works on, where that is clear."""
    denied: Unavailable | None
    """Why some of the job's processes could not be seen."""


class JobUsage:
    """Reads what the registered processes use; by one thread."""

    def __init__(
        self,
        roots: Roots,
        drivers: Collection[str],
        job_pids: Callable[[], Sequence[int]],
        devices: Mapping[str, Sequence[tuple[str, int]]],
        clock: Callable[[], int],
    ) -> None:
        """`devices`: PCI address -> (device, its number in KFD; 0 = not there), per partition."""
        self._roots, self._job_pids, self._clock = roots, job_pids, clock
        self._devices = devices
        self._descriptors = Descriptors(roots, drivers)
        self._kfd = kfd.pids_mean_the_same(roots)
        self._looked_ns: int | None = None
        self._pids: tuple[int, ...] = ()
        self._before: dict[tuple[str, int], Client] = {}
        self._before_ns: int | None = None

    def read(self) -> Usage:
        """Return what is used now."""
        now_ns = self._clock()
        pids = tuple(self._job_pids())
        due = self._looked_ns is None or now_ns - self._looked_ns >= _LOOK_NS
        if due or pids != self._pids:
            self._descriptors.look(pids)
            self._looked_ns, self._pids = now_ns, pids
        clients = [one for one in self._descriptors.clients() if one.pci in self._devices]
        held = {pid: self._held(pid, clients) for pid in pids}
        memory = {
            device: 0
            for pairs in self._devices.values()
            for device, gpu_id in pairs
            if len(pairs) == 1 or (self._kfd and gpu_id)
        }
        for of_process in held.values():
            for device, size in of_process.items():
                memory[device] = memory.get(device, 0) + size
        works_on = {pid: device for pid, of in held.items() if (device := main_device(of))}
        return Usage(
            now_ns,
            memory,
            self._shares(clients, now_ns),
            self._processes(clients),
            works_on,
            self._descriptors.denied,
        )

    def _held(self, pid: int, clients: Sequence[Client]) -> dict[str, int]:
        """Return the memory a process holds of each device, by whoever tells more."""
        held: dict[str, int] = {}
        for client in clients:
            devices = self._devices[client.pci]
            # Which partition a client of a partitioned card is of, its file does not tell.
            if client.pid == pid and len(devices) == 1 and client.memory_bytes:
                device = devices[0][0]
                held[device] = held.get(device, 0) + client.memory_bytes
        if self._kfd:
            for device, gpu_id in [pair for pairs in self._devices.values() for pair in pairs]:
                size = kfd.held_bytes(self._roots, pid, gpu_id) if gpu_id else None
                if size:
                    held[device] = max(size, held.get(device, 0))
        return held

    def _processes(self, clients: Sequence[Client]) -> dict[str, int]:
        pids = {pci: {c.pid for c in clients if c.pci == pci} for pci in self._devices}
        return {pairs[0][0]: len(pids[pci]) for pci, pairs in self._devices.items()}

    def _shares(self, clients: Sequence[Client], now_ns: int) -> dict[str, float | Unavailable]:
        """Return for each card for which share of the time an engine computed for the job."""
        before, self._before = self._before, {}
        before_ns, self._before_ns = self._before_ns, now_ns
        elapsed_ns = 0 if before_ns is None else now_ns - before_ns
        shares: dict[str, float | Unavailable] = dict.fromkeys(self._devices, 0.0)
        for client in clients:
            key = (client.pci, client.client_id)
            old = before.get(key)
            self._before[key] = client if old is None else _larger(client, old)
            share = _NO_TIMES if not _tells(client) else _share(client, old, elapsed_ns)
            so_far = shares[client.pci]
            if isinstance(share, Unavailable):
                shares[client.pci] = share
            elif not isinstance(so_far, Unavailable):
                shares[client.pci] = min(so_far + share, 1.0)
        return shares


def tree_of(job_pids: Sequence[int], readings: Readings) -> tuple[int, ...]:
    """Return the registered processes and those of their tree that somebody reads.

    The oldest numbers come first, for a client that a child has inherited is its parent's. Called
    by the recorder's loop, whose own lists these are: a thread must not ask for them.
    """
    return tuple(sorted({*job_pids, *readings.pids()})[:_PIDS_AT_MOST])


class Announced:
    """Which process was last said to work on which device."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._said: dict[int, str] = {}

    def news(self, used: Usage) -> list[tuple[str, dict[str, Any]]]:
        """Return the events `device-used` (pid, started_ticks, device) that are to be written."""
        return self.changes(used.works_on)

    def changes(self, works_on: Mapping[int, str]) -> list[tuple[str, dict[str, Any]]]:
        """Return the same of pid -> the device it works on."""
        events = []
        for pid, device in works_on.items():
            identity = read_identity(self._roots, pid)
            if identity is None or self._said.get(pid) == device:
                continue
            self._said[pid] = device
            about = {"pid": pid, "started_ticks": identity.started_ticks, "device": device}
            events.append(("device-used", about))
        return events


def _tells(client: Client) -> bool:
    return any(name in client.engines_ns or name in client.cycles for name in _COMPUTING)


def _larger(new: Client, old: Client) -> Client:
    """Times may fall for a moment and catch up: until then the larger one holds."""
    engines = {name: max(ns, old.engines_ns.get(name, 0)) for name, ns in new.engines_ns.items()}
    cycles = {
        name: pair if pair[0] >= old.cycles.get(name, (0, 0))[0] else old.cycles[name]
        for name, pair in new.cycles.items()
    }
    return new._replace(engines_ns=engines, cycles=cycles)


def _share(new: Client, old: Client | None, elapsed_ns: int) -> float:
    if old is None:
        return 0.0  # what it did before it was seen is not of this time
    share = 0.0
    for name in _COMPUTING:
        if name in new.engines_ns and name in old.engines_ns and elapsed_ns > 0:
            share += max(0, new.engines_ns[name] - old.engines_ns[name]) / elapsed_ns
        if name in new.cycles and name in old.cycles:
            worked = new.cycles[name][0] - old.cycles[name][0]
            passed = new.cycles[name][1] - old.cycles[name][1]
            if worked > 0 and passed > 0:
                share += worked / passed
    return min(share, 1.0)
