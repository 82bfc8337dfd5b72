"""AMD GPUs through the kernel: amdgpu's files in /sys, amdkfd and fdinfo.

A device has ROCm's name, "GPU-" and its number, or its PCI address if it has none; a
partition (XCP; modes DPX, QPX, CPX) has the device's name, a slash and its number. The
header lists for each device its name, PCI address, NUMA node, memory, partition modes,
and the link's maximum generation and width; events `device-used` report which process
of the job works on which device. Cards with less than 4 GiB are considered graphics,
not accelerators, and are left out.

Busy time is exact where the firmware accumulates it (its table v1.6 and later: MI300
since Linux 6.12); otherwise it is integrated from instantaneous percentages. Busy means
that any queue of the device had work. The activity of a single queue or process is not
counted (ROCm's queues bypass the kernel), and a collective that waits on the device
counts as work. There is no counterpart of SM activity, so only power reveals such
waiting. PCIe traffic is not available: the table has one sum of both directions in
units that differ between versions.

For a partitioned card power, energy, memory, links and errors are counted once for the
whole card and appear at the first partition; clock, temperature and throttle reasons
apply to all partitions. A suspended device is idle, and is not woken to read more.
Vendor libraries (amdsmi, rocm-smi) are never loaded: they read these files too.

Readings query the firmware, which may be slow: every card has its own thread, all
together read at most a 50th of the time, and a thread that hangs delays no other.

## Source

`gpu_busy_percent`, `gpu_metrics`, `mem_info_*` and hwmon below
`/sys/class/drm/card*/device`, `/sys/class/kfd`, `/proc/<pid>/fdinfo`
(docs.kernel.org/gpu/amdgpu, gpu/drm-usage-stats).

## Privilege

None for the device; the job's user, or root, for the processes that use it (fdinfo).

## Cost

A thread for each card, all together at most a 50th of the time, most of which they wait
for the firmware; the processes' files every 10 s.

## Where it is blind

Activity of a single queue or process, SM activity, PCIe traffic; values of a suspended
card; for a partition all values that are counted for the card as a whole. Firmware
tables in an unsupported version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.files import read_int, read_text
from clusterprof.agent.linux.gpu.amdgpu import AmdCard, Values
from clusterprof.agent.linux.gpu.drm import (
    Card,
    KfdNode,
    build_inventory_entry,
    list_cards,
    list_gpu_nodes,
)
from clusterprof.agent.linux.gpu.process_usage import (
    DeviceAnnouncements,
    JobUsage,
    Usage,
    list_job_tree,
)
from clusterprof.agent.linux.reader_threads import ParallelReaders
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import Signal

SIGNALS = (
    signals.GPU_BUSY,
    signals.GPU_MEMORY_BUSY,
    signals.GPU_BUSY_TIME,
    signals.GPU_SM_CLOCK,
    signals.GPU_THROTTLE,
    signals.GPU_MEMORY_USED,
    signals.GPU_MEMORY_TOTAL,
    signals.GPU_JOB_MEMORY,
    signals.GPU_POWER,
    signals.GPU_POWER_LIMIT,
    signals.GPU_ENERGY,
    signals.GPU_TEMPERATURE,
    signals.GPU_MEMORY_CLOCK,
    signals.GPU_SM_CLOCK_MAX,
    signals.GPU_THERMAL_VIOLATION,
    signals.GPU_POWER_VIOLATION,
    signals.GPU_PCIE_GENERATION,
    signals.GPU_PCIE_WIDTH,
    signals.GPU_PCIE_REPLAYS,
    signals.GPU_ECC_CORRECTED,
    signals.GPU_ECC_UNCORRECTED,
    signals.GPU_XGMI_READ,
    signals.GPU_XGMI_WRITE,
    signals.GPU_PROCESSES,
)
MIN_ACCELERATOR_MEMORY_BYTES = 4 << 30
_DRIVERS = ("amdgpu",)
_SLOW_INTERVAL_NS = 10_000_000_000
_NOT_READ = Unavailable("failed", "the device was not read")
_PARTITION_UNKNOWN = Unavailable(
    "absent", "which partition a process uses is known outside of containers only"
)
_ONLY_GRAPHICS = Unavailable("absent", "only integrated graphics with less than 4 GiB of memory")


class GpuAmdCollector:
    """Busy time, clocks, power, throttling, memory, links, errors and users of AMD GPUs."""

    name: ClassVar[str] = "gpu_amd"
    isolated: ClassVar[bool] = False
    holds_device: ClassVar[bool] = True
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(
        self, context: Context, clock: Callable[[], int] = time.monotonic_ns, **waits: Any
    ) -> None:
        self._context, self._roots, self._clock = context, context.roots, clock
        self._pids: tuple[int, ...] = ()
        self.sampled_ns = 0
        """When the newest of the values that `sample()` returned were read."""
        self._readers: ParallelReaders[list[Values]] = ParallelReaders(clock, **waits)
        self._cards: dict[str, AmdCard] = {}
        self._found: list[Card] = []
        self._devices: dict[str, list[tuple[str, int]]] = {}
        self._entries: list[dict[str, Any]] = []
        self._usage: ParallelReaders[Usage] = ParallelReaders(
            clock, **{"first_wait_seconds": 0.2, **waits, "rest_ns": _SLOW_INTERVAL_NS}
        )
        self._used: Usage | Unavailable = _NOT_READ
        self._looked_ns = 0
        self._announced = DeviceAnnouncements(context.roots)
        self._events: list[tuple[str, dict[str, Any]]] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the cards and read them once.

        Raises: Unavailable where there are none.
        """
        self._found = self._list_accelerators()
        nodes = list_gpu_nodes(self._roots)
        self._entries = []
        for index, card in enumerate(self._found):
            nodes_of_card = [node for node in nodes if node.pci == card.pci.rpartition(".")[0]]
            self._add_card(card, index, nodes_of_card)
        self._looked_ns = self._clock()
        self._find_processes()
        usage = JobUsage(self._roots, _DRIVERS, lambda: self._pids, self._devices, self._clock)
        self._usage.open({"usage": usage.read})
        self._readers.open({pci: card.read for pci, card in self._cards.items()})
        return [(signal, str(entry["id"])) for entry in self._entries for signal in SIGNALS]

    def sample(self) -> Sequence[Value]:
        """Return the values read since the last call.

        Raises: NothingNew when there are none, DevicesChanged when GPUs were added or removed.
        """
        self._check_devices()
        self._find_processes()
        self.sampled_ns, readings = self._readers.take()
        self._update_usage()
        values: list[Value] = []
        for pci, partitions in self._devices.items():
            read = readings[pci]
            for number_, (device, _) in enumerate(partitions):
                if isinstance(read, Unavailable):
                    values += [read] * len(SIGNALS)
                else:
                    values += self._build_row(read[number_], device)
        return values

    def inventory(self) -> list[dict[str, Any]]:
        """Return the header entries of the devices."""
        for entry in self._entries:
            entry.update(self._cards[entry["pci_bus_id"]].facts)
            if "partition_number" in entry:
                entry.pop("memory_bytes", None)  # of the whole card
        return [dict(entry) for entry in self._entries]

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return new events `device-used`: which process of the job works on which device."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all files once no reading is in progress."""
        self._readers.close({pci: card.close for pci, card in self._cards.items()})
        self._usage.close()
        self._cards, self._devices = {}, {}

    def _list_accelerators(self) -> list[Card]:
        all_cards = list_cards(self._roots, _DRIVERS)
        accelerators = [
            card
            for card in all_cards
            if (
                read_int(card.folder / "device/mem_info_vram_total") or MIN_ACCELERATOR_MEMORY_BYTES
            )
            >= MIN_ACCELERATOR_MEMORY_BYTES
        ]
        if not accelerators:
            raise _ONLY_GRAPHICS
        return accelerators

    def _add_card(self, card: Card, index: int, nodes: list[KfdNode]) -> None:
        """Name the card's devices, one per partition, and open its files."""
        entry = build_inventory_entry(card, index, "amd")
        unique = read_text(card.folder / "device/unique_id").lower()
        if nodes and "numa_node" not in entry and nodes[0].numa_node is not None:
            entry["numa_node"] = nodes[0].numa_node
        base = f"GPU-{unique}" if unique.strip("0") else card.pci
        several = len(nodes) > 1
        self._devices[card.pci] = []
        for partition in range(max(1, len(nodes))):
            partition_entry = dict(entry, id=f"{base}/{partition}" if several else base)
            node = nodes[partition] if nodes else None
            if several:
                partition_entry["partition_number"] = partition
            unique_id = f"{node.unique_id:016x}" if node is not None and node.unique_id else unique
            if unique_id.strip("0"):
                partition_entry["uuid"] = build_torch_uuid(unique_id)
            self._entries.append(partition_entry)
            self._devices[card.pci].append(
                (partition_entry["id"], node.gpu_id if node is not None else 0)
            )
        self._cards[card.pci] = AmdCard(self._roots, card, nodes, self._clock)

    def _find_processes(self) -> None:
        self._pids = list_job_tree(self._context.job_pids(), self._context.readings)

    def _check_devices(self) -> None:
        now_ns = self._clock()
        if now_ns - self._looked_ns < _SLOW_INTERVAL_NS:
            return
        self._looked_ns = now_ns
        try:
            current = self._list_accelerators()
        except Unavailable:
            current = []
        if [card.pci for card in current] != [card.pci for card in self._found]:
            raise DevicesChanged("AMD GPUs were added or removed")

    def _build_row(self, read: Values, device: str) -> list[Value]:
        otherwise = read.get("", _NOT_READ)
        row = [read.get(signal.name, otherwise) for signal in SIGNALS]
        used = self._used
        job_memory: Value
        if isinstance(used, Unavailable):
            job_memory = used
        elif used.denied is not None:
            job_memory = used.denied
        else:
            job_memory = used.memory_bytes.get(device, _PARTITION_UNKNOWN)
        row[SIGNALS.index(signals.GPU_JOB_MEMORY)] = job_memory
        return row

    def _update_usage(self) -> None:
        """Update the job's device use, which is read every 10 s and valid until the next
        reading."""
        try:
            used = self._usage.take()[1]["usage"]
        except NothingNew:
            return
        except Unavailable as reason:
            used = reason
        self._used = used
        if not isinstance(used, Unavailable):
            self._events += self._announced.build_events(used)


def build_torch_uuid(unique_id: str) -> str:
    """Return PyTorch's name of a device on ROCm.

    HIP fills the 16 bytes of the UUID with the digits of the number as text, and PyTorch
    writes bytes as hexadecimal: 1f…2 becomes GPU-31663….
    """
    digits = unique_id.encode().hex().ljust(32, "0")[:32]
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
