"""GPUs of makers of which a node has none are not missed; a GPU that cannot be read is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from builders import header

from clusterprof.engine.blinds import blinds_of
from clusterprof.trace.schema import Gap

AMD = {"id": "GPU-1f", "vendor": "amd", "emulated": False}
EMULATED = {"id": "emulated-0", "emulated": True}


def unseen(devices: list[dict[str, Any]], *gaps: Gap) -> list[tuple[str, str]]:
    loaded = SimpleNamespace(
        header=replace(header(), devices=devices),
        gaps=gaps,
        damage=SimpleNamespace(damaged_places=0, torn_tail_bytes=0, unknown_frames=0),
        dropped_spans=0,
    )
    node: Any = SimpleNamespace(loaded=loaded, facts=SimpleNamespace(name="node-1"))
    found = blinds_of([node], [], {}, [])
    return [(one.what, one.message) for one in found if one.what.startswith("gpu")]


def gap(collector: str, kind: Any, message: str, signal: str = "", device: str = "") -> Gap:
    return Gap(5, collector, signal, device, kind, message, "")


NO_NVIDIA = gap("gpu_nvidia", "absent", "no library")
NO_INTEL = gap("gpu_intel", "absent", "no device of the driver i915 or xe")
NO_AMD = gap("gpu_amd", "absent", "no device of the driver amdgpu")


def test_a_node_with_gpus_of_one_maker_misses_no_other() -> None:
    assert unseen([AMD], NO_NVIDIA, NO_INTEL) == []


def test_a_node_without_any_says_so_once() -> None:
    for devices in ([], [EMULATED]):
        assert unseen(devices, NO_NVIDIA, NO_INTEL, NO_AMD) == [("gpu_nvidia", "no library")]


def test_what_is_missing_of_a_gpu_that_is_there_is_said() -> None:
    silent = gap("gpu_amd", "failed", "the driver does not answer")
    table = gap("gpu_amd", "absent", "v1.3 does not tell it", "gpu.energy_joules_total", "GPU-1f")
    assert unseen([AMD], silent, table) == [
        ("gpu.energy_joules_total", "v1.3 does not tell it"),
        ("gpu_amd", "the driver does not answer"),
    ]
