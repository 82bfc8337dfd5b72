"""A disk with slow writes: data that is written and synced inside a step delays the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clusterprof_lab.real.faults import disks
from clusterprof_lab.real.faults.base import Log, Options, Place, now_ns

_DISK_BYTES = 256 << 20
_LATE_S = 0.075
"""How much later than its rate says the throttle lets a synced write end (measured)."""


class SlowFsync:
    """A checkpoint every `every` steps (10) stalls its step by the stalls of all of them.

    `checkpoint_mb` (16) are written by `writers` (1) ranks of the node. For what is written in
    every step the throttle is too coarse: that is `fuse-fsync`.
    """

    name = "slow-fsync"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        return disks.why_not_here()

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Mount a disk whose writes, and write-back, are limited."""
        interval_steps = int(place.options.get("every", 10))
        megabytes = int(place.options.get("checkpoint_mb", 16))
        writers = int(place.options.get("writers", 1))
        with disks.mount_disk(place, self.name, _DISK_BYTES) as disk:
            log = Log(place.make_path("slow-fsync.jsonl"))
            stall_s = place.stall_ns * interval_steps / 1e9
            rate = round((writers * megabytes << 20) / max(stall_s - _LATE_S, stall_s / 2))
            start_ns = now_ns()
            if not place.clean:
                disk.limit("write", rate)
            words = [
                f"--checkpoint={disk.mounted}/checkpoint",
                f"--checkpoint-mb={megabytes}",
                f"--checkpoint-every={interval_steps}",
            ]
            try:
                yield Options(words, log=log.path)
            finally:
                disk.limit("write", 0)  # unmounting writes
            if not place.clean:
                log.write(start_ns, now_ns(), "checkpoint", bytes_per_second=rate)


FAULT = SlowFsync()
