"""`neuron-monitor` kept running, and its reports made into samples of every core.

Its period must be written in whole seconds ("1s"; "1.0s" and "500ms" are not taken and give 5 s),
in a file: here one in memory. Shares of periods are summed to `gpu.busy_ns_total`: a period of 1 s
with 42 % adds 0.42 s. A period that was not seen adds nothing that could be told from idling, so
after one every total begins again, a little lower each time: whoever takes differences sees a
counter that went back, and knows that nothing is known of that window. Where totals begin (a
million) means nothing.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection
from typing import Any

from clusterprof.collectors.neuron import report
from clusterprof.collectors.neuron.where import INSTALL, LS, MONITOR, tool
from clusterprof.errors import Unavailable
from clusterprof.linux.feed import FedDevice, Feed, Keeper, Value
from clusterprof.linux.tool import follow, run

SIGNALS = (
    "gpu.busy_ns_total", "gpu.core_busy_ratio", "gpu.averaged_over_ns", "gpu.memory_used_bytes",
    "gpu.executions_total", "gpu.execution_errors_total", "gpu.execution_p50_ns",
    "gpu.execution_p99_ns", "gpu.processes_count", "gpu.ecc_corrected_total",
    "gpu.ecc_uncorrected_total",
)  # fmt: skip
PERIOD_SECONDS = 1
_SILENT_NS = 5_000_000_000
_FIRST_SECONDS, _LS_SECONDS = 10.0, 5.0
_HOLE_NS = 500_000_000  # by which a report may be late without a period having been missed
_START = 1_000_000
_CONFIG = {
    "period": f"{PERIOD_SECONDS}s",
    "neuron_runtimes": [
        {
            "tag_filter": ".*",
            "metrics": [
                {"type": "neuroncore_counters"},
                {"type": "memory_used"},
                {"type": "execution_stats"},
            ],
        }
    ],
    "system_metrics": [{"type": "neuron_hw_counters"}],
}


class Total:
    """A counter of what each period brought."""

    def __init__(self) -> None:
        self.value = self._start = _START
        self._hole = True  # what was before the first report is not ours

    def add(self, amount: Value, hole: bool) -> Value:
        """Add what a period brought and return the counter; `hole`: periods before it are lost."""
        if isinstance(amount, Unavailable):
            self._hole = True
            return amount
        if hole or self._hole:
            self._start -= 1
            self.value, self._hole = self._start, False
        else:
            self.value += int(amount)
        return self.value


class CoreDevice(FedDevice):
    """One core: its totals, and which process has it."""

    def __init__(self, feed: Feed, index: int) -> None:
        super().__init__(feed, index)
        self.totals = [Total() for _ in range(5)]
        self._owner = 0

    def row(self, core: report.Core, hole: bool) -> list[Value]:
        """Return a core's values after a report; `hole`: time before it was not reported."""
        ratio, period_ns = core.busy_ratio, core.period_ns
        busy_ns: Value = ratio
        if not isinstance(ratio, Unavailable):
            busy_ns = 0
            if ratio:
                busy_ns = period_ns
                if not isinstance(period_ns, Unavailable):
                    busy_ns = round(ratio * period_ns)
        busy, executions, errors, corrected, uncorrected = (
            total.add(amount, hole)
            for total, amount in zip(
                self.totals,
                (busy_ns, core.executions, core.errors, core.corrected, core.uncorrected),
            )
        )
        owner = core.pids[0] if len(core.pids) == 1 else 0
        if owner and owner != self._owner:
            self.notes.append(("device-owner", {"pid": owner}))
        self._owner = owner or self._owner
        return [
            busy, ratio, period_ns, core.memory_bytes, executions, errors,
            core.p50_ns, core.p99_ns, core.processes, corrected, uncorrected,
        ]  # fmt: skip


class Library:
    """The cores of a node; raises Unavailable when there are none or the tool does not say."""

    signals = SIGNALS

    def __init__(self, mark: Callable[[int, str], None], skip: Collection[int] = ()) -> None:
        path = tool(MONITOR, os.environ)
        if path is None:
            raise Unavailable("absent", "neuron-monitor was not found", INSTALL)
        seconds = _SILENT_NS // 10**9
        silent = Unavailable("failed", f"neuron-monitor has said nothing for {seconds} s")
        self._path = path
        self._feed = Feed(len(SIGNALS), _SILENT_NS, lambda: silent)
        self._known: report.Hardware | None = None
        self._before_ns: int | None = None
        self._period_ns = PERIOD_SECONDS * 10**9
        self._opened = threading.Event()
        self.devices: list[CoreDevice] = []
        self._keeper = Keeper(self._feed, self._work, 0.0)
        self._keeper.start()
        if not self._opened.wait(_FIRST_SECONDS) or self._known is None:
            newest = self._feed.newest
            self._keeper.stop()
            why = newest[1] if newest is not None else None
            raise why if isinstance(why, Unavailable) else silent
        self.inventory = _inventory(self._known)

    def adopt(self, index: int) -> CoreDevice:
        """Return a core; none is ever skipped, for the tool runs on its own."""
        return self.devices[index]

    def close(self) -> None:
        """End the tool."""
        self._keeper.stop()

    end_tools = close

    def _work(self, wanted: Callable[[], bool]) -> None:
        self._before_ns = None
        config = os.memfd_create("neuron-monitor.json", 0)
        try:
            os.write(config, json.dumps(_CONFIG).encode())
            argv = [self._path, "-c", f"/proc/self/fd/{config}"]
            follow(argv, self._line, wanted, keep_fds=[config])
        except Unavailable as reason:
            if self._known is None:
                self._feed.put(reason)
                self._opened.set()
            raise
        finally:
            os.close(config)

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            found = report.decode(line)
            if self._known is None:
                self._know(report.hardware(found))
        except Unavailable as reason:
            self._before_ns = None
            self._feed.put(reason)
            if self._known is None and reason.kind == "absent":
                self._opened.set()
            return
        assert self._known is not None
        now_ns = self._feed.clock()
        cores = report.cores(found, self._known)
        periods = [one.period_ns for one in cores if isinstance(one.period_ns, int)]
        self._period_ns = max(periods, default=self._period_ns)  # an idle node does not say it
        before_ns, self._before_ns = self._before_ns, now_ns
        hole = before_ns is None or now_ns - before_ns > self._period_ns + _HOLE_NS
        self._feed.put([device.row(core, hole) for device, core in zip(self.devices, cores)])
        self._opened.set()

    def _know(self, known: report.Hardware) -> None:
        count = known.devices * known.cores_per_device
        self.devices = [CoreDevice(self._feed, index) for index in range(count)]
        self._known = known


def _inventory(known: report.Hardware) -> list[dict[str, Any]]:
    """id, vendor, name, index, chip and its memory, PCI and NUMA place; what is known."""
    places = _listed()
    out = []
    for index in range(known.devices * known.cores_per_device):
        device = index // known.cores_per_device
        entry: dict[str, Any] = {"id": f"neuron-{device}-core-{index}", "vendor": "aws"}
        entry |= {"index": index, "emulated": False, "name": known.kind, "chip": device}
        if known.memory_bytes is not None:
            entry["chip_memory_bytes"] = known.memory_bytes
        out.append(entry | places.get(device, {}))
    return out


def _listed() -> dict[int, dict[str, Any]]:
    """What `neuron-ls` says of each device's place; {} when it says nothing of use."""
    path = tool(LS, os.environ)
    try:
        found = json.loads(run([path, "--json-output"], _LS_SECONDS)) if path else []
    except (Unavailable, ValueError, RecursionError):
        return {}
    places = {}
    for entry in found if isinstance(found, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("neuron_device"), int):
            continue
        place: dict[str, Any] = {}
        if isinstance(entry.get("bdf"), str):
            place["pci_bus_id"] = entry["bdf"][:32]
        try:
            numa = int(entry.get("numa_node", -1))  # a string in JSON
        except (TypeError, ValueError):
            numa = -1
        if numa >= 0:  # -1: the machine does not say
            place["numa_node"] = numa
        places[entry["neuron_device"]] = place
    return places
