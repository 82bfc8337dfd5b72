"""Emulated accelerators: shared memory in the run directory (docs/design/recording-format.md).

All their values are exact, because the emulator is the ground truth; everything derived
from them is labeled "emulated". Devices may appear while the job runs: the modification
time of the folder (one `fstat`) shows it, and `DevicesChanged` reopens the collector.
Without any device there are no columns, which is not an error; after 5 s without a
device, a new one is seen at most five ticks later.

## Source

Pages of shared memory that the jobs of `clusterprof demo` and of the lab write.

## Privilege

None.

## Cost

One read of a mapped page for each device, no system call.

## Where it is blind

It is a model of a device: no kernel runs, and power is derived from busy time and
clock.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.files import OpenFolder
from clusterprof.errors import NEEDS_SECOND_SAMPLE, DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import (
    GPU_BUSY_TIME,
    GPU_MEMORY_USED,
    GPU_PCIE_RECEIVE,
    GPU_POWER,
    GPU_SM_ACTIVE,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_THROTTLE,
    Signal,
)

SIGNALS = (
    GPU_BUSY_TIME,
    GPU_SM_CLOCK,
    GPU_THROTTLE,
    GPU_MEMORY_USED,
    GPU_SM_CLOCK_MAX,
    GPU_SM_ACTIVE,
    GPU_POWER,
    GPU_PCIE_RECEIVE,
)
COMPUTE_SM_RATIO, COLLECTIVE_SM_RATIO = 0.9, 0.05
"""Share of active multiprocessors: of a computing kernel, and of a resident collective."""
IDLE_WATTS, RESIDENT_WATTS, ACTIVE_WATTS = 90.0, 110.0, 500.0

_MAGIC = b"CPEMU02\n"
_PAGE_BYTES = 4096
_VERSION = struct.Struct("<Q")
_PAGE = struct.Struct("<8sQQQ11q")  # the whole page of section 6, from offset 0
_MAX_READ_ATTEMPTS = 100
# File times advance with the kernel's tick (1 to 10 ms): a file created just after a check can
# leave the folder's time unchanged, so the folder is checked again until its time is this old.
_SETTLED_NS = 50_000_000
_NO_DEVICE_NS = 5_000_000_000  # without any device for this long: the recorder samples less often


class GpuEmulatedCollector:
    """Busy time, activity, clock, throttle reasons, power, copies of emulated accelerators."""

    name: ClassVar[str] = "gpu_emulated"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        run_dir = context.run_dir
        self._folder = None if run_dir is None else OpenFolder(run_dir / "devices")
        self._clock = clock
        self._pages: dict[str, mmap.mmap] = {}
        self._before: dict[str, _Page] = {}

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Map every device.

        Raises: Unavailable ("absent") where there is no run directory.
        """
        if self._folder is None:
            raise Unavailable("absent", "no job with emulated accelerators runs here", "")
        self._opened_ns = self._clock()
        self._modified_ns, self._names = self._list_devices()
        for name in self._names:
            page = _map_page(Path(self._folder.path) / f"{name[0]}.emulated")
            if page is not None:
                self._pages[f"emulated-{name[0]}"] = page
        return [(signal, device) for device in self._pages for signal in SIGNALS]

    def sample(self) -> Sequence[Value]:
        """Return the values of all devices.

        Raises: DevicesChanged when the set of devices changed, NothingNew when there are none.
        """
        if self._has_changed():
            raise DevicesChanged("emulated accelerators were added or removed")
        if not self._pages and self._clock() - self._opened_ns >= _NO_DEVICE_NS:
            raise NothingNew
        values: list[Value] = []
        for device, page in self._pages.items():
            counters = _read_page(page, self._clock)
            if counters is None:
                values += [_TORN] * len(SIGNALS)
                continue
            values += _compute_values(counters, self._before.get(device))
            self._before[device] = counters
        return values

    def inventory(self) -> list[dict[str, Any]]:
        """Return the header entry of each open device, with the process that it belongs to."""
        devices = []
        for device, page in self._pages.items():
            fields = _PAGE.unpack_from(page)
            devices.append(
                {
                    "id": device,
                    "vendor": "clusterprof",
                    "name": "emulated accelerator",
                    "emulated": True,
                    "pid": fields[2],
                    "started_ticks": fields[3],
                }
            )
        return devices

    def close(self) -> None:
        """Unmap the devices."""
        for page in self._pages.values():
            page.close()
        self._pages, self._before = {}, {}
        if self._folder is not None:
            self._folder.close()

    def _has_changed(self) -> bool:
        assert self._folder is not None
        modified_ns = self._folder.read_mtime_ns() or 0
        if modified_ns == self._modified_ns:
            return False
        settled = time.time_ns() - modified_ns > _SETTLED_NS
        names = self._list_devices()[1]
        self._modified_ns = modified_ns if settled else -1
        return names != self._names

    def _list_devices(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the folder's time (-1 = check again soon) and (number, inode) of each device."""
        assert self._folder is not None
        modified_ns = self._folder.read_mtime_ns()
        if modified_ns is None:
            return 0, []
        try:
            devices = [
                (int(entry.name.partition(".")[0]), entry.inode())
                for entry in os.scandir(self._folder.path)
                if entry.name.endswith(".emulated") and entry.name.partition(".")[0].isdigit()
            ]
        except OSError:
            return 0, []
        settled = time.time_ns() - modified_ns > _SETTLED_NS
        return modified_ns if settled else -1, sorted(devices)


def _map_page(path: Path) -> mmap.mmap | None:
    """Map a device's page read-only; None when it is no device page or already gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size < _PAGE_BYTES:
            return None
        page = mmap.mmap(fd, _PAGE_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if page[:8] != _MAGIC:
        page.close()
        return None
    return page


class _Page(NamedTuple):
    """Content of a device's page at one instant."""

    t_ns: int
    busy_ns: int
    resident_ns: int
    """Part of the busy time in which collectives were resident."""
    clock_hertz: int
    throttle_bits: int
    memory_bytes: int
    clock_max_hertz: int
    copied_bytes: int


_TORN = Unavailable("failed", "its process stopped while it wrote the device's page", "")


def _read_page(page: mmap.mmap, clock: Callable[[], int]) -> _Page | None:
    """Read one device; an odd or changing version means that the page must be read again."""
    for _ in range(_MAX_READ_ATTEMPTS):
        fields = _PAGE.unpack_from(page)
        now_ns = clock()  # before the check, so that nothing was submitted between page and clock
        if fields[1] % 2 == 0 and _VERSION.unpack_from(page, 8)[0] == fields[1]:
            scheduled_ns, end_ns, clock_hertz, throttle_bits, memory_bytes = fields[4:9]
            resident_ns, since_ns, clock_max_hertz, copied_bytes = fields[11:15]
            waiting_ns = max(0, now_ns - since_ns) if since_ns else 0
            busy_ns = scheduled_ns - max(0, end_ns - now_ns) + waiting_ns
            return _Page(
                now_ns,
                busy_ns,
                resident_ns + waiting_ns,
                clock_hertz,
                throttle_bits,
                memory_bytes,
                clock_max_hertz,
                copied_bytes,
            )
    return None


def _compute_values(counters: _Page, before: _Page | None) -> list[Value]:
    """Compute the values of all signals, in order; rates since the last sample.

    Power is a model: a base value at rest, more for any resident kernel, most for one that
    computes.
    """
    exact: list[Value] = [
        counters.busy_ns,
        counters.clock_hertz,
        counters.throttle_bits,
        counters.memory_bytes,
    ]
    exact.append(counters.clock_max_hertz)
    if before is None or counters.t_ns <= before.t_ns:
        return [*exact, *[NEEDS_SECOND_SAMPLE] * 3]
    length_ns = counters.t_ns - before.t_ns
    resident = (counters.resident_ns - before.resident_ns) / length_ns
    computing = max(0.0, (counters.busy_ns - before.busy_ns) / length_ns - resident)
    active = COMPUTE_SM_RATIO * computing + COLLECTIVE_SM_RATIO * resident
    watts = IDLE_WATTS + RESIDENT_WATTS * (computing + resident)
    watts += ACTIVE_WATTS * active * counters.clock_hertz / counters.clock_max_hertz
    return [*exact, active, watts, (counters.copied_bytes - before.copied_bytes) * 1e9 / length_ns]
