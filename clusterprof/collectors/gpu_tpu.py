"""Google TPU through the monitoring part of `libtpu`, else through `tpu-info`; a device is a chip.

The duty cycle is a mean over a window of seconds that slides, and says nothing of single steps:
time lost on TPU hosts is what the host's waits bound from above (docs/design.md, section 15).
Duty cycle, matrix units and memory stand beside it. Without a process that holds the TPU there are
no values.

`libtpu` is asked in the helper process, by a thread that may hang; `tpu-info` runs below it every
5 s and is ended with it. The service on port 8431 is not asked directly: it speaks gRPC.

## Source

`libtpu.sdk.tpumonitoring`, else the tool `tpu-info` (Google Cloud TPU documentation, "TPU
monitoring library").

## Privilege

None; the library's process has to run on the TPU host, and one process has to hold the TPU.

## Cost

A helper process; with `tpu-info` alone a run of it every 5 s.

## Where it is blind

Single steps: the duty cycle is a sliding mean of seconds. Who uses a chip. Everything while no
process holds the TPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from clusterprof.collectors.base import OpenedHere
from clusterprof.collectors.tpu import library


class GpuTpuCollector(OpenedHere):
    """Duty cycle, use of the matrix units and memory of TPU chips."""

    name: ClassVar[str] = "gpu_tpu"
    interval_ns: ClassVar[int] = 1_000_000_000

    def library(self, mark: Callable[[int, str], None]) -> Any:
        """Open libtpu or tpu-info in this process."""
        return library(mark)
