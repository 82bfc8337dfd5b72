"""Intel Gaudi through its management library (`pyhlml`), else through `hl-smi`.

Identity of a device is its UUID. What Gaudi calls utilisation is drawn from its power, so nothing
says how long a Gaudi was busy: lost time of its ranks is what the host's waits bound from above
(docs/design.md, section 15). With `hl-smi` alone there is a reading every 5 s.

Library and tool run in the helper process, which they may hang or crash; the tool is ended with it.
Which process uses which device is told by neither: ranks take devices in the order of local ranks.

## Source

`pyhlml`, Intel's binding of HLML, else `hl-smi -Q` (Intel Gaudi documentation, "System Management
Interface Tool").

## Privilege

None with the driver's device nodes; a container needs them and the library or tool.

## Cost

A helper process; with `hl-smi` alone a run of it every 5 s.

## Where it is blind

How long a device was busy: utilisation is drawn from power. Who uses it. Steps below the second,
with `hl-smi` below 5 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from clusterprof.collectors.base import OpenedHere
from clusterprof.collectors.hlml import library


class GpuGaudiCollector(OpenedHere):
    """Power, memory, clocks, throttling, temperature, errors of Gaudi accelerators."""

    name: ClassVar[str] = "gpu_gaudi"
    interval_ns: ClassVar[int] = 1_000_000_000

    def library(self, mark: Callable[[int, str], None]) -> Any:
        """Open HLML or hl-smi in this process."""
        return library(mark)
