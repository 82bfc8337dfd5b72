"""Which process of the job works on which device, out of what a driver says of all processes.

The driver lists every process with a context and the memory it holds (event `device-processes`,
which is not written). Of several devices that of which a process holds at least twice as much
memory as of any other is the one it works on. Processes of others are not recorded.

NVML gives numbers of the caller's PID namespace, older drivers those of the node. Where the
recorder's are not the node's, a process counts only if it has a device file of the driver open.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from clusterprof.collectors.base import Context
from clusterprof.linux.drm_fdinfo import main_device
from clusterprof.linux.drm_usage import Announced, tree_of
from clusterprof.linux.kfd import pids_mean_the_same
from clusterprof.linux.roots import Roots

Event = tuple[str, dict[str, Any]]
LISTED = "device-processes"
_FILES = ("/dev/nvidia",)
_DESCRIPTORS_AT_MOST = 4096


class DevicePids:
    """Turns lists of processes into events `device-used`."""

    def __init__(self, context: Context) -> None:
        self._context, self._roots = context, context.roots
        self._announced = Announced(context.roots)
        self._held: dict[str, dict[int, int]] = {}
        self._known: tuple[Any, ...] = ()
        self._theirs: set[int] = set()
        self._same: bool | None = None

    def told(self, events: Sequence[Event]) -> list[Event]:
        """Return events without the driver's lists, with what these, or new processes, mean."""
        rest = []
        for kind, about in events:
            if kind == LISTED:
                self._held[str(about["device"])] = {int(pid): int(n) for pid, n in about["held"]}
                self._known = ()
            else:
                rest.append((kind, about))
        if not any(self._held.values()):
            return rest
        job = tree_of(self._context.job_pids(), self._context.readings)
        if self._known != (job,):
            self._known = (job,)
            rest += self._announced.changes(self._works_on(job))
        return rest

    def _works_on(self, job: Sequence[int]) -> dict[int, str]:
        works_on = {}
        for pid in job:
            held = {device: of[pid] for device, of in self._held.items() if pid in of}
            # How much it holds is not always told; of one device it need not be.
            device = next(iter(held)) if len(held) == 1 else main_device(held)
            if device and self._is_meant(pid):
                works_on[pid] = device
        return works_on

    def _is_meant(self, pid: int) -> bool:
        if self._same is None:
            self._same = pids_mean_the_same(self._roots)
        if self._same or pid in self._theirs:
            return True
        if _has_open(self._roots, pid):
            self._theirs.add(pid)
            return True
        return False


def _has_open(roots: Roots, pid: int) -> bool:
    """True when a process has a file of the driver open."""
    folder = roots.proc / str(pid) / "fd"
    try:
        names = os.listdir(folder)[:_DESCRIPTORS_AT_MOST]
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(folder / name).startswith(_FILES):
                return True
        except OSError:
            continue
    return False
