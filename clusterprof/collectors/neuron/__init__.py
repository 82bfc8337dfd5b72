"""Trainium and Inferentia by the Neuron tools: `neuron-monitor` and `neuron-ls`.

https://awsdocs-neuron.readthedocs-hosted.com/en/latest/tools/neuron-sys-tools/. It runs in
the helper process: no signals, nothing heavy. Not by the driver's sysfs: its nodes move from
version to version. What identifies the instance (`instance_info`), command lines, tags and names
of models are never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from clusterprof.collectors.neuron.where import why_absent

__all__ = ["library", "why_absent"]


def library(mark: Callable[[int, str], None], skip: Collection[int] = ()) -> Any:
    """Start neuron-monitor; raises Unavailable when it is not there or knows no device."""
    from clusterprof.collectors.neuron.monitor import Library  # the recorder does without

    return Library(mark, skip)
