"""AMD GPUs as the kernel sees them: amdgpu's files in /sys, its compute part (amdkfd) and fdinfo.

A device is named as ROCm names it, "GPU-" and its number; by its PCI address where it has none; a
partition of one (XCP; modes DPX, QPX, CPX) by the device's name, a slash and its number. The
header says of each its name, PCI address, NUMA node, memory, partition modes, and the link's
generation and width at most; events `device-used` say which process of the job works on which.
Cards with less than 4 GiB are graphics, not accelerators, and are left out.

Busy time is exact where the firmware keeps sums (its table v1.6 and later: MI300 from Linux 6.12
on); else it is summed from the percentages of the instants at which it was read. Busy means that
any queue of the device had work: what a single queue or process did is counted nowhere (ROCm's
queues bypass the kernel), and a collective that waits on the device counts as work. There is no
counterpart of SM activity, so only power tells such waiting. PCIe traffic is not told: the table
has one sum of both directions in units that differ between versions.

Of a partitioned card power, energy, memory, links and errors are counted once, for the whole, and
stand at the first partition; clock, heat and reasons hold for all of them. A device that is
suspended is idle, and is not woken to ask for more. Vendor libraries (amdsmi, rocm-smi) are never
loaded: they read the same files.

Readings ask the firmware, which may take its time: every card has a thread of its own, all together
read at most a 50th of the time, and one that hangs holds nobody up.

## Source

`gpu_busy_percent`, `gpu_metrics`, `mem_info_*` and hwmon below `/sys/class/drm/card*/device`,
`/sys/class/kfd`, `/proc/<pid>/fdinfo` (docs.kernel.org/gpu/amdgpu, gpu/drm-usage-stats).

## Privilege

None for the device; the job's user, or root, for who uses it (fdinfo).

## Cost

A thread for each card, all together at most a 50th of the time, most of which they wait for the
firmware; the processes' files every 10 s.

## Where it is blind

What a single queue or process did, SM activity, PCIe traffic; values of a suspended card; of a
partition all that is counted for the card as a whole. Tables of the firmware in a version not known
here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.linux import kfd
from clusterprof.linux.amdgpu import AmdCard, Values
from clusterprof.linux.drm import Card, cards, inventory_entry
from clusterprof.linux.drm_usage import Announced, JobUsage, Usage, tree_of
from clusterprof.linux.together import Together
from clusterprof.linux.tree import number, text
from clusterprof.signals import Signal

SIGNALS = (
    signals.GPU_BUSY, signals.GPU_MEMORY_BUSY, signals.GPU_BUSY_TIME, signals.GPU_SM_CLOCK,
    signals.GPU_THROTTLE, signals.GPU_MEMORY_USED, signals.GPU_MEMORY_TOTAL, signals.GPU_JOB_MEMORY,
    signals.GPU_POWER, signals.GPU_POWER_LIMIT, signals.GPU_ENERGY, signals.GPU_TEMPERATURE,
    signals.GPU_MEMORY_CLOCK, signals.GPU_SM_CLOCK_MAX, signals.GPU_THERMAL_VIOLATION,
    signals.GPU_POWER_VIOLATION, signals.GPU_PCIE_GENERATION, signals.GPU_PCIE_WIDTH,
    signals.GPU_PCIE_REPLAYS, signals.GPU_ECC_CORRECTED, signals.GPU_ECC_UNCORRECTED,
    signals.GPU_XGMI_READ, signals.GPU_XGMI_WRITE, signals.GPU_PROCESSES,
)  # fmt: skip
LEAST_MEMORY_BYTES = 4 << 30
_DRIVERS = ("amdgpu",)
_RARELY_NS = 10_000_000_000
_NOT_READ = Unavailable("failed", "the device was not read")
_NOT_APART = Unavailable(
    "absent", "which partition a process uses is told outside of containers only"
)
_GRAPHICS = Unavailable("absent", "only graphics of the processor: less than 4 GiB of its own")


class GpuAmdCollector:
    """Busy time, clocks, power, throttling, memory, links, errors of AMD GPUs; who uses which."""

    name: ClassVar[str] = "gpu_amd"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(
        self, context: Context, clock: Callable[[], int] = time.monotonic_ns, **waits: Any
    ) -> None:
        self._context, self._roots, self._clock = context, context.roots, clock
        self._pids: tuple[int, ...] = ()
        self.sampled_ns = 0
        """When the newest of the values that `sample()` returned were read."""
        self._together: Together[list[Values]] = Together(clock, **waits)
        self._cards: dict[str, AmdCard] = {}
        self._found: list[Card] = []
        self._devices: dict[str, list[tuple[str, int]]] = {}
        self._entries: list[dict[str, Any]] = []
        self._usage: Together[Usage] = Together(
            clock, **{"first_wait_seconds": 0.2, **waits, "rest_ns": _RARELY_NS}
        )
        self._used: Usage | Unavailable = _NOT_READ
        self._looked_ns = 0
        self._announced = Announced(context.roots)
        self._events: list[tuple[str, dict[str, Any]]] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the cards and read them once; raises Unavailable where there is none."""
        self._found = self._accelerators()
        nodes = kfd.nodes(self._roots)
        self._entries = []
        for index, card in enumerate(self._found):
            own = [node for node in nodes if node.pci == card.pci.rpartition(".")[0]]
            self._admit(card, index, own)
        self._looked_ns = self._clock()
        self._find_processes()
        usage = JobUsage(self._roots, _DRIVERS, lambda: self._pids, self._devices, self._clock)
        self._usage.open({"usage": usage.read})
        self._together.open({pci: card.read for pci, card in self._cards.items()})
        return [(signal, str(entry["id"])) for entry in self._entries for signal in SIGNALS]

    def sample(self) -> Sequence[Value]:
        """Return what has been read since the last call; raises NothingNew when nothing has."""
        self._notice_changes()
        self._find_processes()
        self.sampled_ns, found = self._together.take()
        self._take_usage()
        values: list[Value] = []
        for pci, partitions in self._devices.items():
            read = found[pci]
            for number_, (device, _) in enumerate(partitions):
                if isinstance(read, Unavailable):
                    values += [read] * len(SIGNALS)
                else:
                    values += self._row(read[number_], device)
        return values

    def inventory(self) -> list[dict[str, Any]]:
        """Return for the header what each device is."""
        for entry in self._entries:
            entry.update(self._cards[entry["pci_bus_id"]].facts)
            if "partition_number" in entry:
                entry.pop("memory_bytes", None)  # of the whole card
        return [dict(entry) for entry in self._entries]

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return which processes of the job have come to work on which device: `device-used`."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all files, once no reading is under way."""
        self._together.close({pci: card.close for pci, card in self._cards.items()})
        self._usage.close()
        self._cards, self._devices = {}, {}

    def _accelerators(self) -> list[Card]:
        found = cards(self._roots, _DRIVERS)
        real = [
            card
            for card in found
            if (number(card.folder / "device/mem_info_vram_total") or LEAST_MEMORY_BYTES)
            >= LEAST_MEMORY_BYTES
        ]
        if not real:
            raise _GRAPHICS
        return real

    def _admit(self, card: Card, index: int, nodes: list[kfd.Node]) -> None:
        """Name the card's devices, one for each partition, and open its files."""
        entry = inventory_entry(card, index, "amd")
        unique = text(card.folder / "device/unique_id").lower()
        if nodes and "numa_node" not in entry and nodes[0].numa_node is not None:
            entry["numa_node"] = nodes[0].numa_node
        base = f"GPU-{unique}" if unique.strip("0") else card.pci
        several = len(nodes) > 1
        self._devices[card.pci] = []
        for partition in range(max(1, len(nodes))):
            own = dict(entry, id=f"{base}/{partition}" if several else base)
            node = nodes[partition] if nodes else None
            if several:
                own["partition_number"] = partition
            told = f"{node.unique_id:016x}" if node is not None and node.unique_id else unique
            if told.strip("0"):
                own["uuid"] = torch_uuid(told)
            self._entries.append(own)
            self._devices[card.pci].append((own["id"], node.gpu_id if node is not None else 0))
        self._cards[card.pci] = AmdCard(self._roots, card, nodes, self._clock)

    def _find_processes(self) -> None:
        self._pids = tree_of(self._context.job_pids(), self._context.readings)

    def _notice_changes(self) -> None:
        now_ns = self._clock()
        if now_ns - self._looked_ns < _RARELY_NS:
            return
        self._looked_ns = now_ns
        try:
            there = self._accelerators()
        except Unavailable:
            there = []
        if [card.pci for card in there] != [card.pci for card in self._found]:
            raise DevicesChanged("AMD GPUs came or went")

    def _row(self, read: Values, device: str) -> list[Value]:
        otherwise = read.get("", _NOT_READ)
        row = [read.get(signal.name, otherwise) for signal in SIGNALS]
        used = self._used
        held: Value
        if isinstance(used, Unavailable):
            held = used
        elif used.denied is not None:
            held = used.denied
        else:
            held = used.memory_bytes.get(device, _NOT_APART)
        row[SIGNALS.index(signals.GPU_JOB_MEMORY)] = held
        return row

    def _take_usage(self) -> None:
        """Take what the job uses, read every 10 s; it holds until it is read again."""
        try:
            used = self._usage.take()[1]["usage"]
        except NothingNew:
            return
        except Unavailable as reason:
            used = reason
        self._used = used
        if not isinstance(used, Unavailable):
            self._events += self._announced.news(used)


def torch_uuid(unique_id: str) -> str:
    """Return the name that PyTorch has for a device on ROCm.

    HIP fills the 16 bytes of the UUID with the digits of the number, as text, and PyTorch writes
    bytes as hexadecimal: 1f…2 becomes GPU-31663….
    """
    digits = unique_id.encode().hex().ljust(32, "0")[:32]
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
