"""Intel GPUs through the kernel: i915 or xe in /sys, and fdinfo of the job's processes.

A device is named by its PCI address; the header lists for each its driver, PCI identity
and NUMA node, and events `device-used` report which process of the job works on which
device. Integrated graphics are left out.

Busy time covers the job's own processes: their drivers count the time (i915) or the
cycles (xe) that an engine computed for each of them, without sampling error. Engines
that computed in parallel are summed, up to the whole time, so a device with parallel
queues may look busier than it was; the work of other processes is invisible. A
collective that waits on the device counts as work, and there is no counterpart of SM
activity, so only power reveals such waiting. Power is the mean since the previous
reading, from the card's energy. Memory is the memory held by the job's processes. The
PCIe link is left out: a card reports the link to its own bridge, which is not the
slot's link.

A reading may have to wait for the driver: every card and the files of the processes
have their own thread, and all together read at most a 50th of the time.

## Source

`/sys/class/drm/card*` of i915 and xe with hwmon, and `/proc/<pid>/fdinfo`
(docs.kernel.org/gpu/drm-usage-stats,
Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon).

## Privilege

The job's user, or root: busy time is read from fdinfo of its processes.

## Cost

A thread for each card and one for the files of the processes, together at most a 50th
of the time.

## Where it is blind

Work of other processes on the device; parallel engines, which are summed; SM activity
and PCIe traffic, which have no counterpart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.counters import EXACT_HOLD_NS, ShareIntegral
from clusterprof.agent.linux.gpu.drm import Card, build_inventory_entry, list_cards
from clusterprof.agent.linux.gpu.intel import IntelCard, Values, is_integrated
from clusterprof.agent.linux.gpu.process_usage import (
    DeviceAnnouncements,
    JobUsage,
    Usage,
    list_job_tree,
)
from clusterprof.agent.linux.reader_threads import ParallelReaders
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.signals import Signal

SIGNALS = (
    signals.GPU_BUSY_TIME,
    signals.GPU_SM_CLOCK,
    signals.GPU_THROTTLE,
    signals.GPU_JOB_MEMORY,
    signals.GPU_POWER,
    signals.GPU_POWER_LIMIT,
    signals.GPU_ENERGY,
    signals.GPU_TEMPERATURE,
    signals.GPU_SM_CLOCK_MAX,
)
_DRIVERS = ("i915", "xe")
_SLOW_INTERVAL_NS = 10_000_000_000
_USAGE = "processes"
_DEVICE_NAMES = {  # as in pci.ids, because the kernel does not report names
    "8086:0bd5": "Intel Data Center GPU Max 1550",
    "8086:0bda": "Intel Data Center GPU Max 1100",
    "8086:56c0": "Intel Data Center GPU Flex 170",
    "8086:56c1": "Intel Data Center GPU Flex 140",
}
_NOT_READ = Unavailable("failed", "the device was not read")


class GpuIntelCollector:
    """Busy time by the job, clocks, power, throttling, memory and users of Intel GPUs."""

    name: ClassVar[str] = "gpu_intel"
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
        self._readers: ParallelReaders[Any] = ParallelReaders(clock, **waits)
        self._found: list[Card] = []
        self._cards: dict[str, IntelCard] = {}
        self._busy: dict[str, ShareIntegral] = {}
        self._looked_ns = 0
        self._announced = DeviceAnnouncements(context.roots)
        self._events: list[tuple[str, dict[str, Any]]] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the cards and read them once.

        Raises: Unavailable where there are none.
        """
        self._found = self._list_accelerators()
        self._looked_ns = self._clock()
        self._cards = {card.pci: IntelCard(card, self._clock) for card in self._found}
        reads: dict[str, Callable[[], Any]] = {pci: card.read for pci, card in self._cards.items()}
        devices = {card.pci: [(card.pci, 0)] for card in self._found}
        self._find_processes()
        usage = JobUsage(self._roots, _DRIVERS, lambda: self._pids, devices, self._clock)
        reads[_USAGE] = usage.read
        self._busy = {card.pci: self._busy.get(card.pci, ShareIntegral()) for card in self._found}
        self._readers.open(reads)
        return [(signal, card.pci) for card in self._found for signal in SIGNALS]

    def sample(self) -> Sequence[Value]:
        """Return the values read since the last call.

        Raises: NothingNew when there are none, DevicesChanged when GPUs were added or removed.
        """
        now_ns = self._clock()
        if now_ns - self._looked_ns >= _SLOW_INTERVAL_NS:
            self._looked_ns = now_ns
            self._check_devices()
        self._find_processes()
        self.sampled_ns, readings = self._readers.take()
        used = readings[_USAGE]
        if not isinstance(used, Unavailable):
            self._events += self._announced.build_events(used)
        return [
            value
            for card in self._found
            for value in self._build_row(card.pci, readings[card.pci], used)
        ]

    def inventory(self) -> list[dict[str, Any]]:
        """Return the header entries of the devices."""
        entries = []
        for index, card in enumerate(self._found):
            entry = build_inventory_entry(card, index, "intel", link=False)
            if card.pci_id in _DEVICE_NAMES:
                entry["name"] = _DEVICE_NAMES[card.pci_id]
            entries.append(entry)
        return entries

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return new events `device-used`: which process of the job works on which device."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all files once no reading is in progress."""
        self._readers.close({pci: card.close for pci, card in self._cards.items()})
        self._cards = {}

    def _list_accelerators(self) -> list[Card]:
        accelerators = [
            card for card in list_cards(self._roots, _DRIVERS) if not is_integrated(card)
        ]
        if not accelerators:
            raise Unavailable("absent", "only integrated graphics")
        return accelerators

    def _find_processes(self) -> None:
        self._pids = list_job_tree(self._context.job_pids(), self._context.readings)

    def _check_devices(self) -> None:
        try:
            current = self._list_accelerators()
        except Unavailable:
            current = []
        if [card.pci for card in current] != [card.pci for card in self._found]:
            raise DevicesChanged("Intel GPUs were added or removed")

    def _build_row(
        self, pci: str, read: Values | Unavailable, used: Usage | Unavailable
    ) -> list[Value]:
        values: dict[str, Value] = {"": read} if isinstance(read, Unavailable) else dict(read)
        busy, memory = signals.GPU_BUSY_TIME.name, signals.GPU_JOB_MEMORY.name
        if isinstance(used, Unavailable):
            values[busy] = values[memory] = used
        else:
            share: float | Unavailable = used.denied or used.shares[pci]
            if isinstance(share, Unavailable):
                self._busy[pci].invalidate()
                values[busy] = share
            else:
                values[busy] = self._busy[pci].add(share, used.t_ns, EXACT_HOLD_NS)
            values[memory] = used.denied or used.memory_bytes.get(pci, 0)
        otherwise = values.get("", _NOT_READ)
        return [values.get(signal.name, otherwise) for signal in SIGNALS]
