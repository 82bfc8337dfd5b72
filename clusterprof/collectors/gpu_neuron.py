"""AWS Trainium and Inferentia through `neuron-monitor`; a device is one NeuronCore.

    neuron-monitor -c <1 s; cores, memory, executions, ECC>      kept running, one report a second
    neuron-ls --json-output                                      once: PCI and NUMA place

`gpu.busy_ns_total` is the sum over reports of utilisation × period, so the device's windows are one
second long: what was lost is measured, and its cause told at that grain (docs/design.md, section
14). Executions, their errors and times are those of the processes that use a core; ECC events those
of the chip it is part of. Which process has a core is told (event `device-owner`).

The tools run below the helper process, which they may not outlive. A report that is missing, late
or garbled is a reason, and makes the totals begin anew: never an idle second nobody saw.

## Source

`neuron-monitor` and `neuron-ls` of aws-neuronx-tools (AWS Neuron documentation, "Neuron Monitor
User Guide").

## Privilege

None with the driver's device nodes and the tools.

## Cost

A helper process and below it `neuron-monitor`, which reports once a second.

## Where it is blind

What happened within a second, and within an execution; engines of a core apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from clusterprof.collectors.base import OpenedHere
from clusterprof.collectors.neuron import library


class GpuNeuronCollector(OpenedHere):
    """Utilisation, memory, executions, errors of the cores of Trainium and Inferentia."""

    name: ClassVar[str] = "gpu_neuron"
    interval_ns: ClassVar[int] = 1_000_000_000

    def library(self, mark: Callable[[int, str], None]) -> Any:
        """Start neuron-monitor below this process."""
        return library(mark)
