"""What `doctor` says of a node's fabric as a whole: rails, ports near GPUs, bonds, GPUDirect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clusterprof.linux.roots import Roots
from clusterprof.recorder import fabric, links
from clusterprof.recorder.inspect import OWNER_ADMIN, OWNER_NOBODY, Hole, Look

NAME = "fabric"
_SHOWN_AT_MOST = 4
_BEHIND = {
    "switch": "behind the same PCIe switch",
    "root": "below the same PCIe root",
    "numa": "of the same NUMA node",
    "system": "of another NUMA node",
}
_REMEDY = "load nvidia-peermem (modprobe nvidia-peermem)"


def look_at_fabric(roots: Roots | None = None) -> Look:
    """Say how network cards and GPUs lie to each other."""
    roots = roots or Roots()
    nics, hcas = links.nics(roots.sys, roots.proc), links.hcas(roots.sys)
    told = fabric.told(roots, nics, hcas)
    bonds = [nic for nic in nics if "mode" in nic]
    found = [*_rails(told), *_near(told), *_direct(told)]
    found += [f"{nic['name']} is a bond of {', '.join(nic.get('lower', ()))}" for nic in bonds]
    if not found:
        message = "no cards that are alike, no bond, and none whose way to a GPU is known"
        return Look(NAME, "absent", "", message, "", OWNER_NOBODY, elsewhere="rails and bonds")
    missing = [*_far(told), *_unknown(told)]
    missing += [f"{nic['name']}'s member {m}: it is down" for nic in bonds for m in _down(nic)]
    holes = tuple(_hole(text) for text in missing)
    return Look(NAME, "available", "; ".join(found), "", "", "", tuple(missing), holes)


def _hole(text: str) -> Hole:
    """What is amiss, as `doctor` lays reasons together."""
    subject, _, reason = text.partition(": ")
    remedy = _REMEDY if reason.endswith(_REMEDY) else ""
    reason = reason.removesuffix(f"; {_REMEDY}")
    return Hole((subject,), (), "absent", reason, remedy, OWNER_ADMIN if remedy else OWNER_NOBODY)


def _down(nic: Mapping[str, Any]) -> Sequence[str]:
    found: Sequence[str] = nic.get("down", ())
    return found


def _shown(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _SHOWN_AT_MOST else ""
    return ", ".join(names[:_SHOWN_AT_MOST]) + more


def _rails(told: Mapping[str, Any]) -> Iterator[str]:
    for rail in told.get("rails", ()):
        kind = f" of {rail['link_layer']}" if "link_layer" in rail else ""
        yield f"{len(rail['ports'])} rails{kind}: {_shown(rail['ports'])}"


def _near(told: Mapping[str, Any]) -> Iterator[str]:
    near = told.get("gpu_nics", ())
    for path in fabric.PATHS[:-1]:
        count = sum(entry["path"] == path for entry in near)
        if count:
            yield f"{count} GPU{'s' if count > 1 else ''} with a card {_BEHIND[path]}"


def _direct(told: Mapping[str, Any]) -> Iterator[str]:
    direct = told.get("gpudirect", {})
    if direct.get("module"):
        yield f"GPUDirect by {direct['module']}"
    if direct.get("dma_buf"):
        yield "GPUDirect by dma-buf where the library asks for it"


def _far(told: Mapping[str, Any]) -> Iterator[str]:
    for entry in told.get("gpu_nics", ()):
        if entry["path"] == fabric.PATHS[-1]:
            nics = _shown(entry["nics"])
            yield f"a card near GPU {entry['gpu']}: the nearest, {nics}, is {_BEHIND['system']}"


def _unknown(told: Mapping[str, Any]) -> Iterator[str]:
    direct = told.get("gpudirect")
    if direct is None:
        return
    if "module" not in direct:
        yield "GPUDirect: /proc/modules cannot be read, so whether it is there is not known"
    elif not direct["module"] and not direct.get("dma_buf", True):
        yield f"GPUDirect: neither by a module nor by dma-buf, data go by the host; {_REMEDY}"
    elif not direct["module"] and "dma_buf" not in direct:
        yield "nvidia-peermem: whether the driver offers dma-buf instead is not known"
