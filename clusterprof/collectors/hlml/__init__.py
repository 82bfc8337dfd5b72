"""Gaudi by HLML, Intel's management library, through its binding `pyhlml`; else by `hl-smi`.

https://docs.habana.ai: API reference guides, PYHLML APIs; embedded system tools guide, hl-smi. It
runs in the helper process: no signals, nothing heavy.

**Utilisation is power.** The driver computes it as (power - power at rest) / (limit - power at
rest): `hl_device_utilization()` in Linux, drivers/accel/habanalabs/common/device.c.
It is `gpu.power_utilisation_ratio` here, never `gpu.busy_ratio`: a device at work on little is not
an idle one.

**Old bindings.** Old versions of `pyhlml` did not raise the errors of the library, so that every
value that could not be read was a zero, and gave one and the same handle to all devices. One that
does not raise is not used; a handle is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from clusterprof.collectors.hlml.where import why_absent
from clusterprof.errors import Unavailable

__all__ = ["library", "why_absent"]


def library(mark: Callable[[int, str], None], skip: Collection[int] = ()) -> Any:
    """Open the binding, else the tool; raises Unavailable with the reasons of both."""
    from clusterprof.collectors.hlml import binding, smi  # the recorder needs neither

    try:
        return binding.Library(mark, skip)
    except Unavailable as of_binding:
        try:
            return smi.Library()
        except Unavailable as of_tool:
            kind = "failed" if "failed" in (of_binding.kind, of_tool.kind) else "absent"
            message = f"{of_binding.message}; {of_tool.message}"
            remedy = of_binding.remedy or of_tool.remedy
            raise Unavailable(kind, message, remedy) from None  # type: ignore[arg-type]
