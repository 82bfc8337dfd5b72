"""Memory of the loaders is swapped out before they use it, and is read back.

The kernel is asked to take the pages away (`process_madvise` with MADV_PAGEOUT). A memory limit
would let the kernel choose: it takes from any rank, and cold pages of libraries first.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from clusterprof_lab.real.faults import cgroups, disks, processes
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns

HOLD_MB = 64
TOUCH_MB = 8
_SWAP_BYTES = 1 << 30
_EVERY_S = 0.4
_PROCESS_MADVISE = 440  # the same numbers on every architecture
_MADV_WILLNEED, _MADV_PAGEOUT = 3, 21
_BACK_S = 1.0  # within which what was swapped out is there again
_PRIVATE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0\s*$", re.MULTILINE)


class _Region(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


class MemoryShort:
    """Loaders go through the memory that they hold (`--hold-mb`), `--touch-mb` per batch of a rank.

    It is swapped out again long before its next turn, so every batch reads so many bytes from a
    swap device, which is as slow as it takes for a slowed step. No other process is pushed there.
    """

    name = "memory-short"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        reason = disks.why_not_here() or cgroups.check_controller("memory")
        reason = reason or processes.list_missing_commands("mkswap", "swapon", "swapoff")
        if reason or Path("/proc/swaps").exists():
            return reason
        return "the kernel has no swap"

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Make a swap device of the fault's own, and a group by which the ranks are found."""
        script = [f"--hold-mb={HOLD_MB}", f"--touch-mb={TOUCH_MB}"]
        with ExitStack() as stack:
            group = stack.enter_context(cgroups.make_group("memory", place.make_path("short").name))
            log = Log(place.make_path("memory-short.jsonl"))
            start_ns = now_ns()
            if place.clean:
                yield Options(script, group.folder, log=log.path)
                return
            device = stack.enter_context(_make_swap(place))
            touched = TOUCH_MB * place.ranks << 20
            rate = touched * 1_000_000_000 // place.slowed_ns
            device.limit("read", rate)
            paging = stack.enter_context(_page_out_repeatedly(group))

            def switch(on: bool) -> None:
                device.limit("read", rate if on else 0)
                if on:
                    paging.set()
                    _advise_all(group, _MADV_PAGEOUT)
                else:
                    paging.clear()
                    _advise_all(group, _MADV_WILLNEED)
                    time.sleep(_BACK_S)

            yield Options(script, group.folder, log=log.path, switch=switch)
            log.write(start_ns, now_ns(), "cpu-memory", touched_bytes=touched)


@contextmanager
def _make_swap(place: Place) -> Iterator[disks.Disk]:
    with disks.attach_loop_device(place, "memory-short", _SWAP_BYTES) as name:
        processes.run_command("mkswap", name)
        with processes.run_at_end('swapoff "$0"', name):
            processes.run_command("swapon", "--priority", "32767", name)
            made = disks.Disk(name, Path(), Path())
            with disks.remove_limits_at_end(made):
                yield made


@contextmanager
def _page_out_repeatedly(group: cgroups.Group) -> Iterator[threading.Event]:
    """Page the group out again and again, as long as the event is set."""
    over, paging = threading.Event(), threading.Event()
    paging.set()

    def again_and_again() -> None:
        while not over.wait(_EVERY_S):
            if paging.is_set():
                _advise_all(group, _MADV_PAGEOUT)

    thread = threading.Thread(target=again_and_again)
    thread.start()
    try:
        yield paging
    finally:
        over.set()
        thread.join()


def _advise_all(group: cgroups.Group, advice: int) -> None:
    for pid in (group.folder / "cgroup.procs").read_text().split():
        with suppress(OSError):  # it has just ended
            _advise(int(pid), advice)


def _advise(pid: int, advice: int) -> None:
    matches = _PRIVATE.findall(Path(f"/proc/{pid}/maps").read_text())
    held = [(int(first, 16), int(last, 16)) for first, last in matches]
    held = [(first, last) for first, last in held if last - first >= HOLD_MB << 20]
    if not held:
        return
    handle = os.pidfd_open(pid)
    try:
        regions = (_Region * len(held))(*(_Region(first, last - first) for first, last in held))
        ctypes.CDLL(None).syscall(_PROCESS_MADVISE, handle, regions, len(held), advice, 0)
    finally:
        os.close(handle)


FAULT = MemoryShort()
