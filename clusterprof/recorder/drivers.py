"""What stands behind each isolated collector: its library, and whether a node has it at all.

The helper imports `library()`'s package, the recorder only asks `why_absent()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from clusterprof.errors import Unavailable

WORDS = {
    "gpu_nvidia": "NVML",
    "gpu_gaudi": "the Gaudi library",
    "gpu_neuron": "neuron-monitor",
    "gpu_tpu": "libtpu",
}
"""The library in messages, by collector."""
ELSEWHERE = frozenset({"gpu_gaudi", "gpu_neuron", "gpu_tpu"})
"""Collectors that a node without their device does without a word, but for doctor."""


def why_absent(name: str, environ: Mapping[str, str]) -> Unavailable | None:
    """Say why a collector's library need not even be tried on this node; None = it may be there.

    Saves the helper process. Asks no driver and starts nothing.
    """
    if name == "gpu_gaudi":
        from clusterprof.collectors.hlml import where as gaudi

        return gaudi.why_absent(environ)
    if name == "gpu_neuron":
        from clusterprof.collectors.neuron import where as neuron

        return neuron.why_absent(environ)
    if name == "gpu_tpu":
        from clusterprof.collectors.tpu import where as tpu

        return tpu.why_absent(environ)
    from clusterprof.collectors import nvml

    return nvml.why_absent(environ)


def library(
    name: str, options: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[[int, str], None], Collection[int]], Any]:
    """Return what opens a collector's library: `(mark, indices to skip) -> library`.

    `options`: `--gpm off` keeps NVML from reading performance counters.
    Raises ValueError for a name that no isolated collector has.
    """
    if name == "gpu_nvidia":
        # pynvml imports `find_library` and never calls it; the real module brings subprocess,
        # tempfile and lzma along, 2 of the 15 MB a helper may have.
        light = ModuleType("ctypes.util")
        light.find_library = lambda name: None  # type: ignore[attr-defined]
        sys.modules.setdefault("ctypes.util", light)
        from clusterprof.collectors.nvml import Library

        use_gpm = options.get("--gpm") != "off"
        return lambda mark, skip: Library(mark, skip, use_gpm=use_gpm)
    if name == "gpu_gaudi":
        from clusterprof.collectors.hlml import library as gaudi

        return gaudi
    if name == "gpu_neuron":
        from clusterprof.collectors.neuron import library as neuron

        return neuron
    if name == "gpu_tpu":
        from clusterprof.collectors.tpu import library as tpu

        return tpu
    raise ValueError(f"no such isolated collector: {name}")
