"""NVML opened: its devices, and what they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from clusterprof.collectors.nvml.calls import SIGNALS
from clusterprof.collectors.nvml.device import Device, Mark
from clusterprof.collectors.nvml.errors import explain, load
from clusterprof.errors import Unavailable

LIBRARY = -1
"""Index that stands for the library itself in a `Mark`."""


class Library:
    """The devices of a node, each with what is known of it; raises Unavailable if there are none.

    A device that cannot be opened is there all the same, and every value of it says why. Devices
    in `skip` (they crashed the process before) are not touched.
    """

    signals = SIGNALS

    def __init__(
        self,
        mark: Mark,
        skip: Collection[int] = (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._nvml, self._mark, self._clock = load(), mark, clock
        self.devices: list[Device] = []
        self.inventory: list[dict[str, Any]] = []
        """id (UUID), vendor, name, index, pci_bus_id, memory_bytes, driver, nvml; what is known."""
        self._call(LIBRARY, "Init", self._nvml.nvmlInit)
        count = self._call(LIBRARY, "GetCount", self._nvml.nvmlDeviceGetCount)
        if not count:
            raise Unavailable("absent", "the driver knows no NVIDIA GPU", "")
        versions = {
            key: value
            for key, name in (
                ("driver", "nvmlSystemGetDriverVersion"),
                ("nvml", "nvmlSystemGetNVMLVersion"),
            )
            if (value := self._try(LIBRARY, name)) is not None
        }
        self._versions = versions
        for index in range(count):
            device, entry = self._open(index, index in skip)
            self.devices.append(device)
            self.inventory.append(entry)

    def adopt(self, index: int) -> Device:
        """Open a device that was skipped, or open one anew, and return it."""
        self.devices[index], self.inventory[index] = self._open(index, False)
        return self.devices[index]

    def close(self) -> None:
        """Close NVML; errors no longer matter."""
        try:
            self._call(LIBRARY, "Shutdown", self._nvml.nvmlShutdown)
        except Unavailable:
            pass

    def _open(self, index: int, skip: bool) -> tuple[Device, dict[str, Any]]:
        entry: dict[str, Any] = {"id": f"nvidia-{index}", "vendor": "nvidia", "index": index}
        entry["emulated"] = False
        handle, reason = None, None
        if skip:
            reason = Unavailable("failed", "not asked: it crashed the driver's library")
        else:
            try:
                by_index = self._nvml.nvmlDeviceGetHandleByIndex
                handle = self._call(index, "GetHandleByIndex", lambda: by_index(index))
                uuid = self._nvml.nvmlDeviceGetUUID
                entry["id"] = _text(self._call(index, "GetUUID", lambda: uuid(handle)))
            except Unavailable as error:
                reason = error
        device = Device(self._nvml, index, handle, self._mark, self._clock)
        if reason is not None:
            device.fail(reason)
        else:
            self._describe(index, handle, entry)
        return device, {**entry, **self._versions}

    def _describe(self, index: int, handle: Any, entry: dict[str, Any]) -> None:
        name = self._try(index, "nvmlDeviceGetName", handle)
        pci = self._try(index, "nvmlDeviceGetPciInfo", handle)
        memory = self._try(index, "nvmlDeviceGetMemoryInfo", handle)
        if name is not None:
            entry["name"] = name
        if pci is not None:
            entry["pci_bus_id"] = _text(pci.busId)
        if memory is not None:
            entry["memory_bytes"] = memory.total

    def _try(self, index: int, name: str, *arguments: Any) -> Any:
        """Return a fact that may be missing: None when it cannot be had."""
        try:
            function = getattr(self._nvml, name)
            value = self._call(index, name.removeprefix("nvmlDevice"), lambda: function(*arguments))
        except (Unavailable, AttributeError):
            return None
        return _text(value) if isinstance(value, str | bytes) else value

    def _call(self, index: int, name: str, function: Callable[[], Any]) -> Any:
        self._mark(index, name)
        try:
            return function()
        except Exception as error:
            raise explain(self._nvml, error) from error
        finally:
            self._mark(index, "")


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
