"""What drivers said went wrong with devices while they were recorded, as notes of the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.engine.node import NodeResult
from clusterprof.trace.schema import Event

_KINDS = {"gpu-xid": "Xid", "nvswitch-sxid": "SXid"}
_NOTES_AT_MOST = 8
_HEX = re.compile(r"^(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-9a-f]+)?$")


def notes_of(nodes: Sequence[NodeResult]) -> tuple[str, ...]:
    """Return a note for every kind of error of every device, in order of their first time."""
    notes = []
    for node in nodes:
        start_ns = int(node.loaded.header.started.get("monotonic_ns", 0))
        notes += _of_node(node.facts.name, node.loaded.events, node.loaded.header.devices, start_ns)
    more = len(notes) - _NOTES_AT_MOST
    if more > 0:
        notes[_NOTES_AT_MOST:] = [f"{more} more kinds of errors of drivers are in the recording"]
    return tuple(notes)


def _of_node(
    name: str, events: Sequence[Event], devices: Sequence[Mapping[str, Any]], start_ns: int
) -> list[str]:
    first: dict[tuple[Any, ...], Event] = {}
    times: dict[tuple[Any, ...], int] = {}
    for event in events:
        said = event.attributes
        key: tuple[Any, ...]
        if event.kind in _KINDS:
            key = (event.kind, said.get("pci"), said.get("code"), said.get("gpu_instance"))
        elif event.kind == "device-lost":
            key = (event.kind, said.get("device"), said.get("message"))
        else:
            continue
        first.setdefault(key, event)
        count = said.get("count", 1)
        times[key] = times.get(key, 0) + (count if isinstance(count, int) else 1)
    return [
        _note(name, event, times[key], devices, (event.t_ns - start_ns) / 1e9)
        for key, event in first.items()
    ]


def _note(
    name: str, event: Event, times: int, devices: Sequence[Mapping[str, Any]], seconds: float
) -> str:
    said = event.attributes
    when = f"after {max(0.0, seconds):.0f} s" + (f", {times} times" if times > 1 else "")
    if event.kind == "device-lost":
        return f"{said.get('device')} on {name} was lost {when}: {said.get('message')}"
    where = f"NVSwitch {said.get('pci')}"
    if event.kind == "gpu-xid":
        where = _gpu_at(str(said.get("pci")), devices)
        if "gpu_instance" in said:
            where += f", GPU instance {said['gpu_instance']}"
    text = str(said.get("text") or "").strip()
    told = f"{_KINDS[event.kind]} {said.get('code')} of {where} on {name} {when}"
    return f"the NVIDIA driver reported {told}" + (f": {text}" if text else "")


def _gpu_at(pci: str, devices: Sequence[Mapping[str, Any]]) -> str:
    """The GPU at a PCI address, by its number and identity where the header has it."""
    place = _place(pci)
    for device in devices:
        if "parent" not in device and place and _place(str(device.get("pci_bus_id"))) == place:
            return f"GPU {device.get('index')} ({device.get('id')}, {pci})"
    return f"the GPU at {pci}"


def _place(pci: str) -> tuple[int, int, int] | None:
    """Domain, bus and device of an address, however many digits it has."""
    found = _HEX.match(pci.lower())
    if found is None:
        return None
    return (int(found[1] or "0", 16), int(found[2], 16), int(found[3], 16))
