"""NVML opened: its devices, and what they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from clusterprof.collectors.nvml import facts, gpm, mig, plans
from clusterprof.collectors.nvml.calls import SIGNALS
from clusterprof.collectors.nvml.device import Device, Mark
from clusterprof.collectors.nvml.errors import explain, load
from clusterprof.collectors.nvml.facts import Asking, text
from clusterprof.collectors.nvml.gpm import Gpm
from clusterprof.collectors.nvml.mig import Instance
from clusterprof.errors import Unavailable

LIBRARY = -1
"""Index that stands for the library itself in a `Mark`."""
_CRASHED = Unavailable("failed", "not asked: it crashed the driver's library")


class Library:
    """The devices of a node, each with what is known of it; raises Unavailable if there are none.

    GPUs come first, in NVML's order, then the instances of those in MIG mode. A device that cannot
    be opened is there all the same, and every value of it says why. Devices in `skip` (they crashed
    the process before) are not touched; instances of a GPU that is skipped are not there.
    """

    signals = SIGNALS

    def __init__(
        self,
        mark: Mark,
        skip: Collection[int] = (),
        clock: Callable[[], int] = time.monotonic_ns,
        pause: Callable[[float], None] = time.sleep,
        use_gpm: bool = True,
    ) -> None:
        self._nvml, self._mark, self._clock, self._pause = load(), mark, clock, pause
        self._use_gpm = use_gpm
        self.devices: list[Device] = []
        self.inventory: list[dict[str, Any]] = []
        """id (UUID), vendor, index, versions, and what `facts` and `mig` tell, where known."""
        self._handles: list[Any] = []
        self._instances: dict[int, Instance] = {}
        self._call("Init", self._nvml.nvmlInit)
        count = self._call("GetCount", self._nvml.nvmlDeviceGetCount)
        if not count:
            raise Unavailable("absent", "the driver knows no NVIDIA GPU", "")
        self._versions = self._find_versions()
        for index in range(count):
            self._add(*self._open_gpu(index, index in skip))
        split = [at for at in range(count) if self.inventory[at].get("mig") and at not in skip]
        found = [
            (at, *pair) for at in split for pair in mig.handles(self._asking(at), self._handles[at])
        ]
        for index, (at, position, handle) in enumerate(found, count):
            self._instances[index] = (
                Instance(at, position, None, None)
                if index in skip
                else mig.identify(self._asking(index), handle, at, position)
            )
        for index, (_, _, handle) in enumerate(found, count):
            self._add(*self._open_instance(index, handle, skip))

    def adopt(self, index: int) -> Device:
        """Open a device that was skipped, or open one anew, and return it."""
        if index in self._instances:
            one = self._instances[index]
            asking = self._asking(index)
            gpu = self._handles[one.parent]
            handle = asking.ask("GetMigDeviceHandleByIndex", gpu, one.position)
            self._instances[index] = mig.identify(asking, handle, one.parent, one.position)
            opened = self._open_instance(index, handle, ())
        else:
            opened = self._open_gpu(index, False)
        self.devices[index], self.inventory[index], self._handles[index] = opened
        return self.devices[index]

    def close(self) -> None:
        """Close NVML; errors no longer matter."""
        try:
            self._call("Shutdown", self._nvml.nvmlShutdown)
        except Unavailable:
            pass

    def _add(self, device: Device, entry: dict[str, Any], handle: Any) -> None:
        self.devices.append(device)
        self.inventory.append(entry)
        self._handles.append(handle)

    def _open_gpu(self, index: int, skip: bool) -> tuple[Device, dict[str, Any], Any]:
        entry = self._entry(index)
        handle, asking = None, self._asking(index)
        reason: Unavailable | None = _CRASHED
        if not skip:
            try:
                by_index = self._nvml.nvmlDeviceGetHandleByIndex
                handle = self._call("GetHandleByIndex", lambda: by_index(index), index)
                uuid = self._nvml.nvmlDeviceGetUUID
                entry["id"] = text(self._call("GetUUID", lambda: uuid(handle), index))
                entry.update(facts.describe(asking, handle))
                reason = asking.fatal
            except Unavailable as error:
                reason = error
        device = Device(self._nvml, index, handle, self._mark, self._clock)
        if reason is not None:
            device.fail(reason)
        elif entry.get("mig"):
            entry["tells_busy"] = False  # nobody runs on all of it
            device.follow(plans.plan_of_split(entry), gpm.UNSUPPORTED, facts.most_bytes(entry))
        else:
            counters = self._gpm(asking, handle, plans.metrics(entry))
            device.follow(plans.plan(entry, counters), counters, facts.most_bytes(entry))
            if asking.fatal is not None:
                device.fail(asking.fatal)
        return device, entry, handle

    def _open_instance(
        self, index: int, handle: Any, skip: Collection[int]
    ) -> tuple[Device, dict[str, Any], Any]:
        one, entry, asking = self._instances[index], self._entry(index), self._asking(index)
        parent = self.inventory[one.parent]
        entry["id"] = f"{parent['id']}/{one.position}"
        device = Device(self._nvml, index, handle, self._mark, self._clock)
        device.follow(plans.plan_of_instance(False), gpm.UNSUPPORTED)
        if index in skip or handle is None:
            device.fail(_CRASHED if index in skip else plans.GONE)
            return device, entry, handle
        uuid = asking.ask("GetUUID", handle)
        if uuid is not None:
            entry["id"], entry["uuid"] = uuid, mig.torch_name(uuid)
        entry.update(mig.describe(asking, handle, one, parent))
        counters = self._gpm_of_instance(asking, one)
        has_gpm = isinstance(counters, Gpm)
        if not has_gpm:
            entry["tells_busy"] = False
        device.follow(plans.plan_of_instance(has_gpm), counters)
        if asking.fatal is not None:
            device.fail(asking.fatal)
        return device, entry, handle

    def _gpm(self, asking: Asking, handle: Any, metrics: tuple[int, ...]) -> Gpm | Unavailable:
        """The counters of a GPU, or why there are none."""
        nvml = self._nvml

        def take(sample: Any) -> Any:
            return nvml.nvmlGpmSampleGet(handle, sample)

        return self._counters(asking, handle, take, metrics)

    def _gpm_of_instance(self, asking: Asking, one: Instance) -> Gpm | Unavailable:
        """The counters of the GPU instance, if it is one compute instance's alone."""
        nvml, handle = self._nvml, self._handles[one.parent]
        if not mig.gpm_allowed(str(self._versions.get("driver", ""))):
            return plans.OLD_DRIVER
        where = (one.parent, one.gpu_instance)
        beside = sum((a.parent, a.gpu_instance) == where for a in self._instances.values())
        if one.gpu_instance is None or beside > 1:
            return plans.SHARED

        def take(sample: Any) -> Any:
            return nvml.nvmlGpmMigSampleGet(handle, one.gpu_instance, sample)

        return self._counters(asking, handle, take, plans.OF_INSTANCE)

    def _counters(
        self, asking: Asking, gpu: Any, take: Callable[[Any], Any], metrics: tuple[int, ...]
    ) -> Gpm | Unavailable:
        if not self._use_gpm:
            return gpm.OFF
        nvml = self._nvml
        support = asking.call("GpmQueryDeviceSupport", lambda: nvml.nvmlGpmQueryDeviceSupport(gpu))
        if support is None or not support.isSupportedDevice:
            return gpm.UNSUPPORTED
        counters = Gpm(nvml, take, metrics, self._clock, self._pause)
        asking.call("GpmSampleGet", counters.begin)
        return asking.why or counters

    def _entry(self, index: int) -> dict[str, Any]:
        """What is said of any device."""
        entry: dict[str, Any] = {"id": f"nvidia-{index}", "vendor": "nvidia", "index": index}
        return {**entry, "emulated": False, **self._versions}

    def _find_versions(self) -> dict[str, str]:
        asking = self._asking(LIBRARY)
        nvml = self._nvml
        cuda = asking.call("CudaVersion", lambda: nvml.nvmlSystemGetCudaDriverVersion())
        known = {
            "driver": asking.call("DriverVersion", lambda: nvml.nvmlSystemGetDriverVersion()),
            "nvml": asking.call("NVMLVersion", lambda: nvml.nvmlSystemGetNVMLVersion()),
            "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
        return {key: value for key, value in known.items() if value is not None}

    def _asking(self, index: int) -> Asking:
        return Asking(self._nvml, lambda name: self._mark(index, name))

    def _call(self, name: str, function: Callable[[], Any], index: int = LIBRARY) -> Any:
        self._mark(index, name)
        try:
            return function()
        except Exception as error:
            raise explain(self._nvml, error) from error
        finally:
            self._mark(index, "")
