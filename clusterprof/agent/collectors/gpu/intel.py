"""Intel GPUs as the kernel sees them: i915 or xe in /sys, and fdinfo of the job's processes.

A device is named by its PCI address; the header says of each its driver, PCI identity and NUMA
node, and events `device-used` say which process of the job works on which. Graphics of the
processor are left out.

Busy time is that of the job's own processes: their drivers count the time (i915) or the cycles
(xe) that an engine computed for each of them, without a sampling error. Engines that computed at
the same time add up, to the whole time at most, so a device that works in parallel queues may look
busier than it was; what others do on it is not seen. A collective that waits on the device counts
as work, and there is no counterpart of SM activity, so only power tells such waiting. Power is the
mean since the reading before, out of the card's energy. Memory is what the job's processes hold.
The PCIe link is left out: a card shows that to its own bridge, which is not the slot's.

Reading may have to wait for the driver: every card has a thread of its own, as have the files of
the processes, and all together read at most a 50th of the time.

## Source

`/sys/class/drm/card*` of i915 and xe with hwmon, and `/proc/<pid>/fdinfo`
(docs.kernel.org/gpu/drm-usage-stats, Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon).

## Privilege

The job's user, or root: busy time is read from fdinfo of its processes.

## Cost

A thread for each card and one for the files of the processes, together at most a 50th of the time.

## Where it is blind

What others do on the device; parallel engines, which add up; SM activity and PCIe traffic, which
have no counterpart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.linux.drm import Card, cards, inventory_entry
from clusterprof.linux.drm_usage import Announced, JobUsage, Usage, tree_of
from clusterprof.linux.integral import EXACT_HOLD_NS, ShareIntegral
from clusterprof.linux.intel_gpu import IntelCard, Values, is_integrated
from clusterprof.linux.together import Together
from clusterprof.signals import Signal

SIGNALS = (
    signals.GPU_BUSY_TIME, signals.GPU_SM_CLOCK, signals.GPU_THROTTLE, signals.GPU_JOB_MEMORY,
    signals.GPU_POWER, signals.GPU_POWER_LIMIT, signals.GPU_ENERGY, signals.GPU_TEMPERATURE,
    signals.GPU_SM_CLOCK_MAX,
)  # fmt: skip
_DRIVERS = ("i915", "xe")
_RARELY_NS = 10_000_000_000
_USAGE = "processes"
_NAMES = {  # as in pci.ids, for the kernel does not tell
    "8086:0bd5": "Intel Data Center GPU Max 1550",
    "8086:0bda": "Intel Data Center GPU Max 1100",
    "8086:56c0": "Intel Data Center GPU Flex 170",
    "8086:56c1": "Intel Data Center GPU Flex 140",
}
_NOT_READ = Unavailable("failed", "the device was not read")


class GpuIntelCollector:
    """Busy time by the job, clocks, power, throttling, memory of Intel GPUs; who uses which."""

    name: ClassVar[str] = "gpu_intel"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(
        self, context: Context, clock: Callable[[], int] = time.monotonic_ns, **waits: Any
    ) -> None:
        self._context, self._roots, self._clock = context, context.roots, clock
        self._pids: tuple[int, ...] = ()
        self.sampled_ns = 0
        """When the newest of the values that `sample()` returned were read."""
        self._together: Together[Any] = Together(clock, **waits)
        self._found: list[Card] = []
        self._cards: dict[str, IntelCard] = {}
        self._busy: dict[str, ShareIntegral] = {}
        self._looked_ns = 0
        self._announced = Announced(context.roots)
        self._events: list[tuple[str, dict[str, Any]]] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the cards and read them once; raises Unavailable where there is none."""
        self._found = self._accelerators()
        self._looked_ns = self._clock()
        self._cards = {card.pci: IntelCard(card, self._clock) for card in self._found}
        reads: dict[str, Callable[[], Any]] = {pci: card.read for pci, card in self._cards.items()}
        devices = {card.pci: [(card.pci, 0)] for card in self._found}
        self._find_processes()
        usage = JobUsage(self._roots, _DRIVERS, lambda: self._pids, devices, self._clock)
        reads[_USAGE] = usage.read
        self._busy = {card.pci: self._busy.get(card.pci, ShareIntegral()) for card in self._found}
        self._together.open(reads)
        return [(signal, card.pci) for card in self._found for signal in SIGNALS]

    def sample(self) -> Sequence[Value]:
        """Return what has been read since the last call; raises NothingNew when nothing has."""
        now_ns = self._clock()
        if now_ns - self._looked_ns >= _RARELY_NS:
            self._looked_ns = now_ns
            self._notice_changes()
        self._find_processes()
        self.sampled_ns, found = self._together.take()
        used = found[_USAGE]
        if not isinstance(used, Unavailable):
            self._events += self._announced.news(used)
        return [
            value for card in self._found for value in self._row(card.pci, found[card.pci], used)
        ]

    def inventory(self) -> list[dict[str, Any]]:
        """Return for the header what each device is."""
        entries = []
        for index, card in enumerate(self._found):
            entry = inventory_entry(card, index, "intel", link=False)
            if card.pci_id in _NAMES:
                entry["name"] = _NAMES[card.pci_id]
            entries.append(entry)
        return entries

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return which processes of the job have come to work on which device: `device-used`."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all files, once no reading is under way."""
        self._together.close({pci: card.close for pci, card in self._cards.items()})
        self._cards = {}

    def _accelerators(self) -> list[Card]:
        found = [card for card in cards(self._roots, _DRIVERS) if not is_integrated(card)]
        if not found:
            raise Unavailable("absent", "only graphics of the processor")
        return found

    def _find_processes(self) -> None:
        self._pids = tree_of(self._context.job_pids(), self._context.readings)

    def _notice_changes(self) -> None:
        try:
            there = self._accelerators()
        except Unavailable:
            there = []
        if [card.pci for card in there] != [card.pci for card in self._found]:
            raise DevicesChanged("Intel GPUs came or went")

    def _row(self, pci: str, read: Values | Unavailable, used: Usage | Unavailable) -> list[Value]:
        values: dict[str, Value] = {"": read} if isinstance(read, Unavailable) else dict(read)
        busy, memory = signals.GPU_BUSY_TIME.name, signals.GPU_JOB_MEMORY.name
        if isinstance(used, Unavailable):
            values[busy] = values[memory] = used
        else:
            share: float | Unavailable = used.denied or used.shares[pci]
            if isinstance(share, Unavailable):
                self._busy[pci].lose()
                values[busy] = share
            else:
                values[busy] = self._busy[pci].add(share, used.t_ns, EXACT_HOLD_NS)
            values[memory] = used.denied or used.memory_bytes.get(pci, 0)
        otherwise = values.get("", _NOT_READ)
        return [values.get(signal.name, otherwise) for signal in SIGNALS]
