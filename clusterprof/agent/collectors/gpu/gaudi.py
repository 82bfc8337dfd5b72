"""Intel Gaudi through its management library (`pyhlml`), else through `hl-smi`.

A device is identified by its UUID. Gaudi derives its "utilization" from power, so
nothing shows how long a Gaudi was busy: the lost time of its ranks is bounded from
above by the host's waits (docs/design/devices-and-isolation.md). With `hl-smi` alone there is a
reading every 5 s.

Library and tool run in the helper process, which they may hang or crash; the tool ends
with it. Neither reports which process uses which device: ranks are assumed to use
devices in the order of local ranks.

## Source

`pyhlml`, Intel's binding of HLML, else `hl-smi -Q` (Intel Gaudi documentation, "System
Management Interface Tool").

## Privilege

None with the driver's device nodes; a container needs them and the library or tool.

## Cost

A helper process; with `hl-smi` alone one run of it every 5 s.

## Where it is blind

How long a device was busy: its utilization is derived from power. Which process uses
it. Intervals below a second, with `hl-smi` below 5 s.

Gaudi through HLML, Intel's management library (binding `pyhlml`), else `hl-smi`.

https://docs.habana.ai: API reference guides, PYHLML APIs; embedded system tools guide, hl-smi. It
runs in the helper process: no signals, no heavy imports.

**Utilization is power.** The driver computes it as (power - power at rest) / (limit -
power at rest): `hl_device_utilization()` in Linux,
drivers/accel/habanalabs/common/device.c. Here it is `gpu.power_utilisation_ratio`,
never `gpu.busy_ratio`: a device with light work is not idle.

**Old bindings.** Old versions of `pyhlml` did not raise the library's errors, so that
every unreadable value was zero, and returned one shared handle for all devices. A
binding that does not raise is not used; a handle is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

from clusterprof.agent.collectors.base import InProcessLibraryCollector
from clusterprof.errors import Unavailable


def open_library(mark: Callable[[int, str], None], skip: Collection[int] = ()) -> Any:
    """Open the binding, or else the tool.

    Raises: Unavailable with the reasons of both when neither can be opened.
    """
    from clusterprof.agent.collectors.gpu import gaudi_hlml  # the recorder needs neither

    try:
        return gaudi_hlml.HlmlLibrary(mark, skip)
    except Unavailable as of_binding:
        try:
            return gaudi_hlml.HlSmiLibrary()
        except Unavailable as of_tool:
            kind = "failed" if "failed" in (of_binding.kind, of_tool.kind) else "absent"
            message = f"{of_binding.message}; {of_tool.message}"
            advised = of_binding if of_binding.remedy else of_tool
            remedy = advised.remedy, advised.by_user
            raise Unavailable(kind, message, *remedy) from None  # type: ignore[arg-type]


class GpuGaudiCollector(InProcessLibraryCollector):
    """Power, memory, clocks, throttling, temperature, errors of Gaudi accelerators."""

    name: ClassVar[str] = "gpu_gaudi"
    interval_ns: ClassVar[int] = 1_000_000_000

    def open_library(self, mark: Callable[[int, str], None]) -> Any:
        """Open HLML or hl-smi in this process."""
        return open_library(mark)
