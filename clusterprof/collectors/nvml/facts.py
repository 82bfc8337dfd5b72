"""What a GPU is, for the header: facts that do not change while a recording lasts.

A fact that NVML does not tell is left out. `numa_node` and `cpus` are what NVML calls the ideal
memory and processors of a GPU: those its PCIe slot belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from clusterprof.collectors.nvml import health
from clusterprof.collectors.nvml.errors import FATAL, explain
from clusterprof.errors import Unavailable

_CPU_WORDS = 128  # 8,192 processors
_NODE_WORDS = 16
_WORD_BITS = 64
_MEMORY_SCOPE = 0  # NVML_AFFINITY_SCOPE_NODE
_NVLINK_SPEED = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: of a link, one way
_LANE_BYTES = {
    1: 250_000_000, 2: 500_000_000, 3: 984_615_385, 4: 1_969_230_769, 5: 3_938_461_538,
    6: 7_563_025_210, 7: 15_126_050_420,
}  # fmt: skip
"""Bytes per second that a PCIe lane can carry one way, by generation, after its line code."""
_MORE_RATIO = 1.05


class Asking:
    """Calls about one device that may fail one by one; after a fatal error none is made."""

    def __init__(self, nvml: Any, mark: Callable[[str], None]) -> None:
        """`mark` is told the name of every call, and "" when it is back."""
        self.nvml, self._mark = nvml, mark
        self.fatal: Unavailable | None = None
        """Why the device must not be asked again."""
        self.why: Unavailable | None = None
        """Why the last call returned nothing."""

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what `nvmlDevice<name>` returns, None when it cannot be had."""

        def call() -> Any:
            return getattr(self.nvml, f"nvmlDevice{name}")(*arguments)

        return self.call(name, call)

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Return what a function returns, None when it raises."""
        if self.fatal is not None:
            return None
        self.why = None
        self._mark(name)
        try:
            value = function()
        except Exception as error:
            self.why = explain(self.nvml, error)
            if getattr(error, "value", 0) in FATAL:
                self.fatal = self.why
            return None
        finally:
            self._mark("")
        return text(value) if isinstance(value, str | bytes) else value


def describe(asking: Asking, handle: Any) -> dict[str, Any]:
    """Return what is known of a GPU."""
    ask, nvml = asking.ask, asking.nvml
    pci, memory = ask("GetPciInfo", handle), ask("GetMemoryInfo", handle)
    mig, ecc = ask("GetMigMode", handle), ask("GetEccMode", handle)
    persistence = ask("GetPersistenceMode", handle)
    limits = ask("GetPowerManagementLimitConstraints", handle)
    usual = ask("GetPowerManagementDefaultLimit", handle)
    links = asking.call("GetNvLinkState", lambda: health.nvlinks(nvml, handle))
    if asking.why == health.NO_LINKS:
        links = []
    speed = asking.call("GetFieldValues", lambda: _link_speed(nvml, handle)) if links else None
    capability = ask("GetCudaComputeCapability", handle)
    nodes = _bits(ask("GetMemoryAffinity", handle, _NODE_WORDS, _MEMORY_SCOPE))
    known = {
        "name": ask("GetName", handle),
        "pci_bus_id": None if pci is None else text(pci.busId),
        "memory_bytes": None if memory is None else memory.total,
        "compute_capability": None if capability is None else ".".join(map(str, capability)),
        "pcie_generation_max": ask("GetMaxPcieLinkGeneration", handle),
        "pcie_width_max": ask("GetMaxPcieLinkWidth", handle),
        "numa_node": nodes[0] if len(nodes) == 1 else None,
        "cpus": cpu_list(_bits(ask("GetCpuAffinity", handle, _CPU_WORDS))) or None,
        "power_limit_default_watts": None if usual is None else usual / 1000,
        "power_limit_max_watts": None if limits is None else limits[1] / 1000,
        "persistence": None if persistence is None else bool(persistence),
        "ecc": None if ecc is None else bool(ecc[0]),
        "mig": None if mig is None else bool(mig[0]),
        "nvlink_count": None if links is None else len(links),
        "nvlink_bytes_per_second": None if speed is None else speed * len(links),
    }
    return {key: value for key, value in known.items() if value is not None}


def most_bytes(entry: dict[str, Any]) -> tuple[float, float]:
    """Return bytes per second, one way, that no reading of PCIe and of NVLink can exceed."""
    lane = _LANE_BYTES.get(entry.get("pcie_generation_max", 0), math.inf)
    pcie = lane * entry.get("pcie_width_max", math.inf)
    return _MORE_RATIO * pcie, _MORE_RATIO * entry.get("nvlink_bytes_per_second", math.inf)


def _link_speed(nvml: Any, handle: Any) -> int | None:
    """Bytes per second of an NVLink, one way."""
    (speed,) = health.fields(nvml, handle, ((_NVLINK_SPEED, 0),))
    return None if isinstance(speed, Unavailable) or not speed else int(speed) * 1_000_000


def cpu_list(numbers: Iterable[int]) -> str:
    """Return ascending numbers as the kernel lists processors: 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def text(value: str | bytes) -> str:
    """Return what the binding gave as bytes or text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _bits(words: Any) -> list[int]:
    """The numbers of the bits that are set in a set of 64-bit words."""
    if words is None:
        return []
    return [
        at * _WORD_BITS + bit
        for at, word in enumerate(words)
        for bit in range(_WORD_BITS)
        if word >> bit & 1
    ]
