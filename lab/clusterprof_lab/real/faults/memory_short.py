"""The ranks hold more memory than they may: what they touch has been swapped out, and is read back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from clusterprof_lab.real.faults import cgroups, disks, processes
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns
from clusterprof_lab.real.faults.squeeze import CALM_TICKS, needed_bytes, set_limit

HOLD_MB = 256
TOUCH_MB = 16
_KEPT = 0.25
_SWAP_BYTES = 1 << 30
_MOSTLY_HELD = 0.9
_TICK_S = 0.25
_CALM_BYTES = 4 << 20


class MemoryShort:
    """A limit leaves a quarter of what is held; the swap device reads at the speed that stalls as aimed.

    The script keeps `--hold-mb` in memory and goes through it in turn, `--touch-mb` per batch, so
    that what it comes to was swapped out longest ago. The limit is set once the group no longer
    grows. No other process of the machine is pushed to the swap device, as memory abounds there.
    """

    name = "memory-short"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        reason = disks.why_not_here() or cgroups.why_not("memory")
        reason = reason or processes.missing("mkswap", "swapon", "swapoff")
        if reason or Path("/proc/swaps").exists():
            return reason
        return "the kernel has no swap"

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Make a swap device of the fault's own, and a group with a limit."""
        with ExitStack() as stack:
            group = stack.enter_context(cgroups.group("memory", place.path("short").name))
            log = Log(place.path("memory-short.jsonl"))
            if not place.clean:
                device = stack.enter_context(_swap(place))
                touched = TOUCH_MB * place.ranks << 20
                device.limit("read", touched * 1_000_000_000 // place.slowed_ns)
                held = HOLD_MB * place.ranks << 20
                stack.enter_context(_limited_when_settled(group, held, log))
            script = [f"--hold-mb={HOLD_MB}", f"--touch-mb={TOUCH_MB}"]
            yield Options(script, group.folder, log=log.path)


@contextmanager
def _swap(place: Place) -> Iterator[disks.Disk]:
    with disks.device(place, "memory-short", _SWAP_BYTES) as name:
        processes.run("mkswap", name)
        with processes.undoing('swapoff "$0"', name):
            processes.run("swapon", "--priority", "32767", name)
            made = disks.Disk(name, Path(), Path())
            with disks.unlimited_again(made):
                yield made


@contextmanager
def _limited_when_settled(group: cgroups.Group, held_bytes: int, log: Log) -> Iterator[None]:
    over = threading.Event()

    def wait_and_limit() -> None:
        before = calm = 0
        while calm < CALM_TICKS:
            if over.wait(_TICK_S):
                return
            needed = needed_bytes(group)
            grown = abs(needed - before) >= _CALM_BYTES or needed < _MOSTLY_HELD * held_bytes
            calm, before = 0 if grown else calm + 1, needed
        start_ns = now_ns()
        limit = before - round((1 - _KEPT) * held_bytes)
        set_limit(group, limit)
        over.wait()
        set_limit(group, -1)
        log.write(start_ns, now_ns(), "cpu-memory", limit_bytes=limit, needed_bytes=before)

    thread = threading.Thread(target=wait_and_limit)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


FAULT = MemoryShort()
