"""/proc/<pid>/fdinfo/<fd> of graphics devices: a process's use of each device.

Documentation/gpu/drm-usage-stats.rst. An open device is a client; duplicated or inherited
descriptors repeat its `drm-client-id`, which is unique per device.

    drm-driver:            xe
    drm-pdev:              0000:29:00.0
    drm-client-id:         17
    drm-engine-compute:    4242 ns             engine time used by the client (i915, amdgpu)
    drm-cycles-ccs:        28257900            engine time in cycles of the device (xe), of …
    drm-total-cycles-ccs:  7655183225          … this many cycles so far
    drm-engine-capacity-ccs: 4                 engines of that kind
    drm-resident-vram0:    23992 KiB           memory it holds

Work that ROCm submits to the hardware directly (queues of /dev/kfd) is in no `drm-engine` time.

Memory held through AMD's compute part comes from /sys/class/kfd (`agent.linux.gpu.drm`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.gpu.drm import is_in_first_pid_namespace, read_process_memory_bytes
from clusterprof.agent.linux.processes import read_identity
from clusterprof.agent.linux.threads import SharedStatLines
from clusterprof.errors import Unavailable, convert_os_error

_DEVICES = "/dev/dri/"
_MAX_DESCRIPTORS = 4096
_MAX_CLIENTS = 256
_BYTES_PER_UNIT = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_DEVICE_MEMORY_KEYS = (
    "drm-resident-vram",
    "drm-total-vram",
    "drm-memory-vram",
    "drm-resident-local",
    "drm-total-local",
)
"""Keys of device memory, best first; i915 calls it local."""


class Client(NamedTuple):
    """One process's use of one device, as the device's driver counts it."""

    pid: int
    driver: str
    pci: str
    client_id: int
    engines_ns: dict[str, int]
    cycles: dict[str, tuple[int, int]]
    """engine -> (cycles used by the client, total cycles)."""
    memory_bytes: int | None
    """Device memory it holds; None = not reported."""


def parse_client(pid: int, data: str) -> Client | None:
    """Parse one file; None when it is no graphics device or required fields are missing."""
    facts: dict[str, str] = {}
    for line in data.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.startswith("drm-"):
            facts[name] = value.strip()
    driver, pci = facts.get("drm-driver", ""), facts.get("drm-pdev", "").lower()
    client_id = _parse_number(facts.get("drm-client-id", ""))
    if not driver or not pci or client_id is None:
        return None
    engines, cycles = {}, {}
    for name, value in facts.items():
        engine = name.removeprefix("drm-engine-")
        if engine != name and not engine.startswith("capacity-") and value.endswith(" ns"):
            spent = _parse_number(value[:-3])
            if spent is not None:
                engines[engine] = spent
        engine = name.removeprefix("drm-cycles-")
        if engine != name:
            cycle_pair = (
                _parse_number(value),
                _parse_number(facts.get(f"drm-total-cycles-{engine}", "")),
            )
            if cycle_pair[0] is not None and cycle_pair[1] is not None:
                cycles[engine] = (cycle_pair[0], cycle_pair[1])
    return Client(pid, driver, pci, client_id, engines, cycles, _sum_device_memory(facts))


def _sum_device_memory(facts: dict[str, str]) -> int | None:
    for kind in _DEVICE_MEMORY_KEYS:
        sizes = [_parse_bytes(value) for name, value in facts.items() if name.startswith(kind)]
        known_sizes = [size for size in sizes if size is not None]
        if known_sizes:
            return sum(known_sizes)
    return None


def _parse_bytes(value: str) -> int | None:
    word, _, unit = value.partition(" ")
    count = _parse_number(word)
    return None if count is None or unit not in _BYTES_PER_UNIT else count * _BYTES_PER_UNIT[unit]


def _parse_number(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdigit() else None


class DrmDescriptors:
    """The open graphics devices of given processes; searched for from time to time."""

    def __init__(self, roots: Roots, drivers: Collection[str]) -> None:
        self._proc = str(roots.proc)
        self._drivers = frozenset(drivers)
        self._found: dict[int, list[str]] = {}
        self._unseen: Unavailable | None = None
        self._unread: Unavailable | None = None

    @property
    def denied(self) -> Unavailable | None:
        """Why a process could not be inspected in the last search or reading; None = no problem."""
        return self._unseen or self._unread

    def search(self, pids: Iterable[int]) -> None:
        """Search the descriptors of the processes; a process that has ended has none."""
        self._unseen = None
        self._found = {pid: descriptors for pid in pids if (descriptors := self._devices(pid))}

    def clients(self) -> list[Client]:
        """Return the current state of every client once; never raises."""
        by_client: dict[tuple[str, int], Client] = {}
        self._unread = None
        for pid, descriptors in self._found.items():
            for fd in descriptors:
                try:
                    with open(f"{self._proc}/{pid}/fdinfo/{fd}", "rb") as file:
                        data = file.read().decode(errors="replace")
                except PermissionError as error:
                    self._unread = convert_os_error(error, f"{self._proc}/{pid}/fdinfo")
                    continue
                except OSError:
                    continue  # closed meanwhile, or the process has ended
                client = parse_client(pid, data)
                if client is not None and client.driver in self._drivers:
                    by_client.setdefault((client.pci, client.client_id), client)
        return list(by_client.values())

    def _devices(self, pid: int) -> list[str]:
        folder = f"{self._proc}/{pid}/fd"
        try:
            names = os.listdir(folder)[:_MAX_DESCRIPTORS]
        except PermissionError as error:
            self._unseen = convert_os_error(error, folder)
            return []
        except OSError:
            return []
        descriptors = []
        for name in sorted(names, key=lambda name: (len(name), name)):
            try:
                if os.readlink(f"{folder}/{name}").startswith(_DEVICES):
                    descriptors.append(name)
            except OSError:
                continue
        return descriptors[:_MAX_CLIENTS]


def find_main_device(held_bytes: dict[str, int]) -> str:
    """Return the device on which a process works, by the bytes it holds of each; "" = unclear.

    A context alone takes memory even on unused devices, so the largest must be twice the next.
    """
    largest = sorted(held_bytes.items(), key=lambda pair: (-pair[1], pair[0]))[:2]
    if (
        not largest
        or largest[0][1] <= 0
        or (len(largest) > 1 and largest[0][1] < 2 * largest[1][1])
    ):
        return ""
    return largest[0][0]


_SEARCH_NS = 5_000_000_000
_MAX_PIDS = 512
# Engines that compute; copies, video and display are not training work.
_COMPUTE_ENGINES = ("compute", "render", "gfx", "ccs", "rcs")
_NO_ENGINE_TIMES = Unavailable(
    "absent", "the driver does not report engine times", "update the kernel"
)


class Usage(NamedTuple):
    """Device use of the job, as of one reading."""

    t_ns: int
    memory_bytes: dict[str, int]
    """device -> memory that processes of the job hold; devices without data are missing."""
    shares: dict[str, float | Unavailable]
    """PCI address -> share (0 to 1) of the time since the last reading in which an engine computed
    for the job; the sum over engines, at most 1.
    """
    processes: dict[str, int]
    """device -> number of processes of the job that have opened it."""
    works_on: dict[int, str]
    """pid -> the device it works on, where that is clear."""
    denied: Unavailable | None
    """Why some of the job's processes could not be seen."""


class JobUsage:
    """Reads the device use of the registered processes; used by one thread only."""

    def __init__(
        self,
        roots: Roots,
        drivers: Collection[str],
        job_pids: Callable[[], Sequence[int]],
        devices: Mapping[str, Sequence[tuple[str, int]]],
        clock: Callable[[], int],
    ) -> None:
        """Set up the reader.

        devices: PCI address -> (device, its number in KFD; 0 = not in KFD), per partition.
        """
        self._roots, self._job_pids, self._clock = roots, job_pids, clock
        self._devices = devices
        self._descriptors = DrmDescriptors(roots, drivers)
        self._use_kfd = is_in_first_pid_namespace(roots)
        self._searched_ns: int | None = None
        self._pids: tuple[int, ...] = ()
        self._before: dict[tuple[str, int], Client] = {}
        self._before_ns: int | None = None

    def read(self) -> Usage:
        """Return the current use of all devices."""
        now_ns = self._clock()
        pids = tuple(self._job_pids())
        due = self._searched_ns is None or now_ns - self._searched_ns >= _SEARCH_NS
        if due or pids != self._pids:
            self._descriptors.search(pids)
            self._searched_ns, self._pids = now_ns, pids
        clients = [client for client in self._descriptors.clients() if client.pci in self._devices]
        memory_of_process = {pid: self._sum_process_memory(pid, clients) for pid in pids}
        memory = {
            device: 0
            for pairs in self._devices.values()
            for device, gpu_id in pairs
            if len(pairs) == 1 or (self._use_kfd and gpu_id)
        }
        for of_process in memory_of_process.values():
            for device, size in of_process.items():
                memory[device] = memory.get(device, 0) + size
        works_on = {
            pid: device
            for pid, held_bytes_by_device in memory_of_process.items()
            if (device := find_main_device(held_bytes_by_device))
        }
        return Usage(
            now_ns,
            memory,
            self._compute_shares(clients, now_ns),
            self._count_processes(clients),
            works_on,
            self._descriptors.denied,
        )

    def _sum_process_memory(self, pid: int, clients: Sequence[Client]) -> dict[str, int]:
        """Return the memory a process holds of each device, from the source that reports more."""
        memory_bytes: dict[str, int] = {}
        for client in clients:
            devices = self._devices[client.pci]
            # The file does not show which partition of a partitioned card a client uses.
            if client.pid == pid and len(devices) == 1 and client.memory_bytes:
                device = devices[0][0]
                memory_bytes[device] = memory_bytes.get(device, 0) + client.memory_bytes
        if self._use_kfd:
            for device, gpu_id in [pair for pairs in self._devices.values() for pair in pairs]:
                size = read_process_memory_bytes(self._roots, pid, gpu_id) if gpu_id else None
                if size:
                    memory_bytes[device] = max(size, memory_bytes.get(device, 0))
        return memory_bytes

    def _count_processes(self, clients: Sequence[Client]) -> dict[str, int]:
        pids = {pci: {c.pid for c in clients if c.pci == pci} for pci in self._devices}
        return {pairs[0][0]: len(pids[pci]) for pci, pairs in self._devices.items()}

    def _compute_shares(
        self, clients: Sequence[Client], now_ns: int
    ) -> dict[str, float | Unavailable]:
        """Return for each card the share of time in which an engine computed for the job."""
        before, self._before = self._before, {}
        before_ns, self._before_ns = self._before_ns, now_ns
        elapsed_ns = 0 if before_ns is None else now_ns - before_ns
        shares: dict[str, float | Unavailable] = dict.fromkeys(self._devices, 0.0)
        for client in clients:
            key = (client.pci, client.client_id)
            previous = before.get(key)
            self._before[key] = client if previous is None else _merge_maxima(client, previous)
            share = (
                _NO_ENGINE_TIMES
                if not _has_compute_times(client)
                else _compute_share(client, previous, elapsed_ns)
            )
            share_sum = shares[client.pci]
            if isinstance(share, Unavailable):
                shares[client.pci] = share
            elif not isinstance(share_sum, Unavailable):
                shares[client.pci] = min(share_sum + share, 1.0)
        return shares


def list_job_tree(job_pids: Sequence[int], readings: SharedStatLines) -> tuple[int, ...]:
    """Return the registered processes and those of their process trees that are being read.

    The lowest pids come first, because a client that a child has inherited belongs to its parent.
    Only the recorder's loop, which owns these lists, may call it, not a thread.
    """
    return tuple(sorted({*job_pids, *readings.pids()})[:_MAX_PIDS])


class DeviceAnnouncements:
    """The device that each process was last reported to work on."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._announced: dict[int, str] = {}

    def build_events(self, used: Usage) -> list[tuple[str, dict[str, Any]]]:
        """Return the new events `device-used` (pid, started_ticks, device) for a reading."""
        return self.build_change_events(used.works_on)

    def build_change_events(self, works_on: Mapping[int, str]) -> list[tuple[str, dict[str, Any]]]:
        """Return the new events `device-used` for a mapping of pid to device."""
        events = []
        for pid, device in works_on.items():
            identity = read_identity(self._roots, pid)
            if identity is None or self._announced.get(pid) == device:
                continue
            self._announced[pid] = device
            about = {"pid": pid, "started_ticks": identity.started_ticks, "device": device}
            events.append(("device-used", about))
        return events


def _has_compute_times(client: Client) -> bool:
    return any(name in client.engines_ns or name in client.cycles for name in _COMPUTE_ENGINES)


def _merge_maxima(client: Client, previous: Client) -> Client:
    """Return the larger times of both readings: times may decrease briefly and catch up."""
    engines = {
        name: max(ns, previous.engines_ns.get(name, 0)) for name, ns in client.engines_ns.items()
    }
    cycles = {
        name: pair if pair[0] >= previous.cycles.get(name, (0, 0))[0] else previous.cycles[name]
        for name, pair in client.cycles.items()
    }
    return client._replace(engines_ns=engines, cycles=cycles)


def _compute_share(client: Client, previous: Client | None, elapsed_ns: int) -> float:
    if previous is None:
        return 0.0  # work before the first reading is not part of this interval
    share = 0.0
    for name in _COMPUTE_ENGINES:
        if name in client.engines_ns and name in previous.engines_ns and elapsed_ns > 0:
            share += max(0, client.engines_ns[name] - previous.engines_ns[name]) / elapsed_ns
        if name in client.cycles and name in previous.cycles:
            worked = client.cycles[name][0] - previous.cycles[name][0]
            passed = client.cycles[name][1] - previous.cycles[name][1]
            if worked > 0 and passed > 0:
                share += worked / passed
    return min(share, 1.0)
