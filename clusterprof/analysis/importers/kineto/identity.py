"""Which process and which devices a trace is of: its metadata and its file name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterprof.analysis.importers.core.base import Source
from clusterprof.analysis.importers.kineto.event_stream import Document

_RANK = re.compile(r"rank[-_]?(\d{1,7})(?!\d)", re.IGNORECASE)
_WORKER = re.compile(r"([A-Za-z][\w.-]*?)_(\d{1,10})\.\d{8,20}\.pt\.trace\.json")
_MIN_WALL_US = 1e15
"""Larger times are microseconds since 1970; smaller ones count from the start of the machine or
program.
"""
_AMD = re.compile(r"amd|radeon|instinct|\bmi\d{2,3}", re.IGNORECASE)
_NVIDIA = re.compile(r"nvidia|tesla|geforce|quadro|rtx|[ahbvlt]\d{1,3}\b|grace", re.IGNORECASE)
_INTEL = re.compile(r"intel|gaudi|\bmax \d", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TraceIdentity:
    """What one file records about its process."""

    rank: int | None
    world_size: int | None
    host: str
    """Hostname in the file name; empty if there is none."""
    host_pid: int | None
    """Pid in the file name: the hostname is used only if the trace has this process."""
    distributed: Mapping[str, Any]
    devices: Mapping[int | str, Mapping[str, Any]]
    """Device number -> facts for `NodeTables.device`."""
    rank_from_name: bool


def read_identity(source: Source, document: Document) -> TraceIdentity:
    """Read the identity of a trace from its metadata and file name."""
    distributed = document.distributed if isinstance(document.distributed, dict) else {}
    rank, world = (_parse_count(distributed.get(key)) for key in ("rank", "world_size"))
    by_name = _RANK.search(source.path.name)
    worker = _WORKER.search(source.path.name)
    from_name = rank is None and by_name is not None
    if from_name and by_name is not None:
        rank = int(by_name[1])
    if world is not None and (world < 1 or (rank is not None and rank >= world)):
        world = None
    return TraceIdentity(
        rank,
        world,
        worker[1] if worker else "",
        int(worker[2]) if worker else None,
        distributed,
        _read_device_facts(document),
        from_name,
    )


def compute_wall_offset(document: Document, origin_us: float) -> int | None:
    """Compute the wall clock at the origin of the tables in ns; None if unknown."""
    base_ns = document.base_ns
    if isinstance(base_ns, int) and not isinstance(base_ns, bool) and 0 < base_ns < 1 << 62:
        return base_ns + int(origin_us) * 1000
    if math.isfinite(origin_us) and _MIN_WALL_US < origin_us < 9e15:
        return int(origin_us) * 1000
    return None


def _read_device_facts(document: Document) -> dict[int | str, dict[str, Any]]:
    listed = document.device_properties
    facts_by_device: dict[int | str, dict[str, Any]] = {}
    for properties in listed if isinstance(listed, list) else ():
        if (
            not isinstance(properties, dict)
            or (number := _parse_count(properties.get("id"))) is None
        ):
            continue
        name = properties.get("name") if isinstance(properties.get("name"), str) else ""
        facts: dict[str, Any] = {"name": name[:100]} if name else {}
        memory = _parse_count(properties.get("totalGlobalMem"))
        if memory:
            facts["memory_bytes"] = memory
        vendor = _guess_vendor(name or "", document.runtime is not None)
        if vendor:
            facts["vendor"] = vendor
        facts_by_device[number] = facts
    return facts_by_device


def _guess_vendor(name: str, has_hip: bool) -> str:
    if has_hip or _AMD.search(name):
        return "amd"
    if _NVIDIA.search(name):
        return "nvidia"
    return "intel" if _INTEL.search(name) else ""


def _parse_count(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdigit() and len(value) < 18:
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return value if fits else None
