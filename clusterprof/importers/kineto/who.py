"""Whose trace it is: the rank, the host, the devices, and what the wall clock showed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterprof.importers.base import Source
from clusterprof.importers.kineto.decode import Document

_RANK = re.compile(r"rank[-_]?(\d{1,7})(?!\d)", re.IGNORECASE)
_WORKER = re.compile(r"([A-Za-z][\w.-]*?)_(\d{1,10})\.\d{8,20}\.pt\.trace\.json")
_WALL_US = 1e15
"""Larger times are microseconds since 1970, smaller ones since the machine or the program began."""
_AMD = re.compile(r"amd|radeon|instinct|\bmi\d{2,3}", re.IGNORECASE)
_NVIDIA = re.compile(r"nvidia|tesla|geforce|quadro|rtx|[ahbvlt]\d{1,3}\b|grace", re.IGNORECASE)
_INTEL = re.compile(r"intel|gaudi|\bmax \d", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Who:
    """What one file says of the process it is of."""

    rank: int | None
    world_size: int | None
    host: str
    """Told by the name of the file; "" when it does not."""
    host_pid: int | None
    """Of the file's name: the host counts when this is the trace's process."""
    distributed: Mapping[str, Any]
    devices: Mapping[int | str, Mapping[str, Any]]
    """Number of a device -> facts for `NodeTables.device`."""
    rank_from_name: bool


def who(source: Source, document: Document) -> Who:
    """Put together what a trace and its name say."""
    said = document.distributed if isinstance(document.distributed, dict) else {}
    rank, world = (_count(said.get(key)) for key in ("rank", "world_size"))
    by_name = _RANK.search(source.path.name)
    worker = _WORKER.search(source.path.name)
    from_name = rank is None and by_name is not None
    if from_name and by_name is not None:
        rank = int(by_name[1])
    if world is not None and (world < 1 or (rank is not None and rank >= world)):
        world = None
    return Who(
        rank, world, worker[1] if worker else "", int(worker[2]) if worker else None, said,
        _devices(document), from_name,
    )  # fmt: skip


def wall_minus_origin_ns(document: Document, origin_us: float) -> int | None:
    """Return what the wall clock showed at the origin of the tables; None when nobody knows."""
    base_ns = document.base_ns
    if isinstance(base_ns, int) and not isinstance(base_ns, bool) and 0 < base_ns < 1 << 62:
        return base_ns + int(origin_us) * 1000
    if math.isfinite(origin_us) and _WALL_US < origin_us < 9e15:
        return int(origin_us) * 1000
    return None


def _devices(document: Document) -> dict[int | str, dict[str, Any]]:
    listed = document.device_properties
    found: dict[int | str, dict[str, Any]] = {}
    for one in listed if isinstance(listed, list) else ():
        if not isinstance(one, dict) or (number := _count(one.get("id"))) is None:
            continue
        name = one.get("name") if isinstance(one.get("name"), str) else ""
        facts: dict[str, Any] = {"name": name[:100]} if name else {}
        memory = _count(one.get("totalGlobalMem"))
        if memory:
            facts["memory_bytes"] = memory
        vendor = _vendor(name or "", document.runtime is not None)
        if vendor:
            facts["vendor"] = vendor
        found[number] = facts
    return found


def _vendor(name: str, hip: bool) -> str:
    if hip or _AMD.search(name):
        return "amd"
    if _NVIDIA.search(name):
        return "nvidia"
    return "intel" if _INTEL.search(name) else ""


def _count(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdigit() and len(value) < 18:
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return value if fits else None
