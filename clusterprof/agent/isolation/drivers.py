"""The library behind each isolated collector, and whether this node has it.

The helper process imports the package that `get_library_opener` selects; the
recorder only calls `explain_absence`.

Maps the job's processes to the devices they use, from the driver's list of all processes.

The driver lists every process with a context and the memory it holds (event
`device-processes`, which is not written). A process that appears on several devices
uses the one on which it holds at least twice as much memory as on any other. Processes
outside the job are not recorded.

NVML gives process ids of the caller's PID namespace, older drivers those of the node.
Where the recorder's namespace is not the node's, a process counts only if it has a
device file of the driver open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.gpu.drm import is_in_first_pid_namespace
from clusterprof.agent.linux.gpu.process_usage import (
    DeviceAnnouncements,
    find_main_device,
    list_job_tree,
)
from clusterprof.errors import Unavailable

LIBRARY_NAMES = {
    "gpu_nvidia": "NVML",
    "gpu_gaudi": "the Gaudi library",
    "gpu_neuron": "neuron-monitor",
    "gpu_tpu": "libtpu",
}
"""Name of the library in messages, by collector."""
OPTIONAL_COLLECTORS = frozenset({"gpu_gaudi", "gpu_neuron", "gpu_tpu"})
"""Collectors of rare devices: only `doctor` reports their absence."""


def explain_absence(name: str, environ: Mapping[str, str]) -> Unavailable | None:
    """Explain why a collector's library need not be tried on this node; None = try it.

    Saves starting the helper process. Queries no driver and starts nothing.
    """
    if name == "gpu_gaudi":
        from clusterprof.agent.collectors.gpu import gaudi_hlml

        return gaudi_hlml.explain_absence(environ)
    if name == "gpu_neuron":
        from clusterprof.agent.collectors.gpu import neuron

        return neuron.explain_absence(environ)
    if name == "gpu_tpu":
        from clusterprof.agent.collectors.gpu import tpu

        return tpu.explain_absence(environ)
    from clusterprof.agent.collectors.gpu import nvml_errors

    return nvml_errors.explain_absence(environ)


def get_library_opener(
    name: str, options: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[[int, str], None], Collection[int]], Any]:
    """Return the function that opens a collector's library.

    Its parameters: a callback that marks calls (device index, name), and the device indices
    to skip.
    options: `--gpm off` keeps NVML from reading performance counters, `--gpm on` reads them
    whatever a reading costs.
    Raises: ValueError for a name that is no isolated collector.
    """
    if name == "gpu_nvidia":
        # pynvml imports `find_library` and never calls it; the real module would load subprocess,
        # tempfile and lzma, 2 of the 15 MB a helper may use.
        light = ModuleType("ctypes.util")
        light.find_library = lambda name: None  # type: ignore[attr-defined]
        sys.modules.setdefault("ctypes.util", light)
        from clusterprof.agent.collectors.gpu.nvml_library import NvmlLibrary

        gpm = options.get("--gpm", "auto")
        return lambda mark, skip: NvmlLibrary(mark, skip, gpm=gpm)
    if name == "gpu_gaudi":
        from clusterprof.agent.collectors.gpu.gaudi import open_library as gaudi

        return gaudi
    if name == "gpu_neuron":
        from clusterprof.agent.collectors.gpu.neuron import open_library as neuron

        return neuron
    if name == "gpu_tpu":
        from clusterprof.agent.collectors.gpu.tpu import open_library as tpu

        return tpu
    raise ValueError(f"no such isolated collector: {name}")


CollectorEvent = tuple[str, dict[str, Any]]
PROCESS_LIST_EVENT = "device-processes"
_DEVICE_FILE_PREFIXES = ("/dev/nvidia",)
_MAX_DESCRIPTORS = 4096


class DeviceProcessMapper:
    """Turns the driver's process lists into events `device-used`."""

    def __init__(self, context: Context) -> None:
        self._context, self._roots = context, context.roots
        self._announced = DeviceAnnouncements(context.roots)
        self._held: dict[str, dict[int, int]] = {}
        self._known: tuple[Any, ...] = ()
        self._confirmed: set[int] = set()
        self._same_pid_namespace: bool | None = None

    def map_events(self, events: Sequence[CollectorEvent]) -> list[CollectorEvent]:
        """Return the events with process lists replaced by the `device-used` events they imply.

        New processes of the job are mapped with the lists received earlier.
        """
        mapped = []
        for kind, attributes in events:
            if kind == PROCESS_LIST_EVENT:
                self._held[str(attributes["device"])] = {
                    int(pid): int(n) for pid, n in attributes["held"]
                }
                self._known = ()
            else:
                mapped.append((kind, attributes))
        if not any(self._held.values()):
            return mapped
        job = list_job_tree(self._context.job_pids(), self._context.readings)
        if self._known != (job,):
            self._known = (job,)
            mapped += self._announced.build_change_events(self._assign_devices(job))
        return mapped

    def _assign_devices(self, job: Sequence[int]) -> dict[int, str]:
        works_on = {}
        for pid in job:
            memory_bytes = {
                device: held_by_pid[pid]
                for device, held_by_pid in self._held.items()
                if pid in held_by_pid
            }
            # The driver does not always report the memory; with a single device it is not needed.
            device = (
                next(iter(memory_bytes))
                if len(memory_bytes) == 1
                else find_main_device(memory_bytes)
            )
            if device and self._is_same_process(pid):
                works_on[pid] = device
        return works_on

    def _is_same_process(self, pid: int) -> bool:
        if self._same_pid_namespace is None:
            self._same_pid_namespace = is_in_first_pid_namespace(self._roots)
        if self._same_pid_namespace or pid in self._confirmed:
            return True
        if _has_open_driver_file(self._roots, pid):
            self._confirmed.add(pid)
            return True
        return False


def _has_open_driver_file(roots: Roots, pid: int) -> bool:
    """Return whether a process has a device file of the driver open."""
    folder = roots.proc / str(pid) / "fd"
    try:
        names = os.listdir(folder)[:_MAX_DESCRIPTORS]
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(folder / name).startswith(_DEVICE_FILE_PREFIXES):
                return True
        except OSError:
            continue
    return False
