"""Emulated accelerators: pages of shared memory in the run directory (docs/design.md, section 6).

Everything they say is exact, because the emulator is the truth; everything made of it is labelled
"emulated". Devices may come into being while the job runs: a look at the modification time of the
folder (one `fstat`) tells, and `DevicesChanged` asks to be opened again. No device yet is no
column, not an error; where none has come for 5 s, one that comes is seen five ticks later at most.

## Source

Pages of shared memory that the jobs of `clusterprof demo` and of the lab write.

## Privilege

None.

## Cost

One read of a mapped page for each device, no system call.

## Where it is blind

A model of a device: no kernel runs, and power is made up from busy time and clock.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.linux.held import HeldFolder
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
    GPU_BUSY_TIME, GPU_SM_CLOCK, GPU_THROTTLE, GPU_MEMORY_USED,
    GPU_SM_CLOCK_MAX, GPU_SM_ACTIVE, GPU_POWER, GPU_PCIE_RECEIVE,
)  # fmt: skip
COMPUTES_ON_RATIO, WAITS_ON_RATIO = 0.9, 0.05
"""Of the multiprocessors: of a kernel that computes, and of a collective that is resident."""
IDLE_WATTS, RESIDENT_WATTS, ACTIVE_WATTS = 90.0, 110.0, 500.0

_MAGIC = b"CPEMU02\n"
_PAGE_BYTES = 4096
_VERSION = struct.Struct("<Q")
_PAGE = struct.Struct("<8sQQQ11q")  # the whole of section 6, from offset 0
_TRIES = 100
# The kernel's file times advance with its tick (1 to 10 ms): a file born just after a look can
# leave the folder's time as it was, so a folder is looked at again until its time is this old.
_SETTLED_NS = 50_000_000
_ALONE_NS = 5_000_000_000  # without any device for so long: the recorder need not ask so often


class GpuEmulatedCollector:
    """Busy time, activity, clock, throttle reasons, power, copies of emulated accelerators."""

    name: ClassVar[str] = "gpu_emulated"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        run_dir = context.run_dir
        self._folder = None if run_dir is None else HeldFolder(run_dir / "devices")
        self._clock = clock
        self._pages: dict[str, mmap.mmap] = {}
        self._before: dict[str, _Page] = {}

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Map every device; raises Unavailable (absent) where there is no run directory."""
        if self._folder is None:
            raise Unavailable("absent", "no job with emulated accelerators runs here", "")
        self._opened_ns = self._clock()
        self._modified_ns, self._names = self._look()
        for name in self._names:
            page = _map(Path(self._folder.path) / f"{name[0]}.emulated")
            if page is not None:
                self._pages[f"emulated-{name[0]}"] = page
        return [(signal, device) for device in self._pages for signal in SIGNALS]

    def sample(self) -> Sequence[Value]:
        """Return the values of all devices; raises DevicesChanged when there are others now."""
        if self._has_changed():
            raise DevicesChanged("emulated accelerators came or went")
        if not self._pages and self._clock() - self._opened_ns >= _ALONE_NS:
            raise NothingNew
        values: list[Value] = []
        for device, page in self._pages.items():
            now = _read(page, self._clock)
            if now is None:
                values += [_TORN] * len(SIGNALS)
                continue
            values += _values(now, self._before.get(device))
            self._before[device] = now
        return values

    def inventory(self) -> list[dict[str, Any]]:
        """Return for the header what each open device is and which process it belongs to."""
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
        modified_ns = self._folder.changed_ns() or 0
        if modified_ns == self._modified_ns:
            return False
        settled = time.time_ns() - modified_ns > _SETTLED_NS
        names = self._look()[1]
        self._modified_ns = modified_ns if settled else -1
        return names != self._names

    def _look(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the folder's time, -1 = look again soon, and (number, inode) of each device."""
        assert self._folder is not None
        modified_ns = self._folder.changed_ns()
        if modified_ns is None:
            return 0, []
        try:
            found = [
                (int(entry.name.partition(".")[0]), entry.inode())
                for entry in os.scandir(self._folder.path)
                if entry.name.endswith(".emulated") and entry.name.partition(".")[0].isdigit()
            ]
        except OSError:
            return 0, []
        settled = time.time_ns() - modified_ns > _SETTLED_NS
        return modified_ns if settled else -1, sorted(found)


def _map(path: Path) -> mmap.mmap | None:
    """Map a device's page read-only; None when it is not one (or gone again)."""
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
    """What a device's page said at an instant."""

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


def _read(page: mmap.mmap, clock: Callable[[], int]) -> _Page | None:
    """Read one device: a version that is odd, or changes meanwhile, means to read again."""
    for _ in range(_TRIES):
        fields = _PAGE.unpack_from(page)
        now_ns = clock()  # before the check, so that nothing was submitted between page and clock
        if fields[1] % 2 == 0 and _VERSION.unpack_from(page, 8)[0] == fields[1]:
            scheduled_ns, end_ns, clock_hertz, throttle_bits, memory_bytes = fields[4:9]
            resident_ns, since_ns, clock_max_hertz, copied_bytes = fields[11:15]
            waiting_ns = max(0, now_ns - since_ns) if since_ns else 0
            busy_ns = scheduled_ns - max(0, end_ns - now_ns) + waiting_ns
            return _Page(
                now_ns, busy_ns, resident_ns + waiting_ns, clock_hertz, throttle_bits, memory_bytes,
                clock_max_hertz, copied_bytes,
            )  # fmt: skip
    return None


def _values(now: _Page, before: _Page | None) -> list[Value]:
    """Return the values in the order of `SIGNALS`; rates are of the time since the sample before.

    Power is a model: what a device takes at rest, more for any resident kernel, most for one that
    computes.
    """
    exact: list[Value] = [now.busy_ns, now.clock_hertz, now.throttle_bits, now.memory_bytes]
    exact.append(now.clock_max_hertz)
    if before is None or now.t_ns <= before.t_ns:
        first = Unavailable("absent", "known from the second sample on", "")
        return [*exact, first, first, first]
    length_ns = now.t_ns - before.t_ns
    resident = (now.resident_ns - before.resident_ns) / length_ns
    computing = max(0.0, (now.busy_ns - before.busy_ns) / length_ns - resident)
    active = COMPUTES_ON_RATIO * computing + WAITS_ON_RATIO * resident
    watts = IDLE_WATTS + RESIDENT_WATTS * (computing + resident)
    watts += ACTIVE_WATTS * active * now.clock_hertz / now.clock_max_hertz
    return [*exact, active, watts, (now.copied_bytes - before.copied_bytes) * 1e9 / length_ns]
