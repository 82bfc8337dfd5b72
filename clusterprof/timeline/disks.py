"""Which block devices stand on which, so that no byte is counted twice.

A read from a volume (device-mapper, md) is counted by the volume and again by each disk it went to;
with NVMe multipath by the namespace's head and by the path. Sums are over what lies undermost:

    dm-0 ── md0 ── nvme0n1p3 (of nvme0n1)        nvme2n1 ── nvme2c0n1
                └─ nvme1n1                               └─ nvme2c1n1
    undermost: nvme0n1, nvme1n1, nvme2c0n1, nvme2c1n1

What stands on what is in the header (`host.disks`, "on" and "partition_of"); paths are told by
their names. A volume nothing is known to lie under counts itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterprof import signals
from clusterprof.timeline.model import Chunk

_PATH = re.compile(r"(nvme\d+)c\d+(n\d+)")
_UNDERMOST, _UNDER = "undermost disks", "disks under"


def undermost(chunk: Chunk) -> frozenset[str]:
    """Return the recorded disks that stand on no other recorded disk."""
    known: frozenset[str] | None = chunk.shared.get(_UNDERMOST)
    if known is None:
        names = [device for name, device in chunk.series if name == signals.DISK_READ_BYTES.name]
        found = frozenset(name for name in names if not under(chunk, name))
        known = chunk.shared[_UNDERMOST] = found
    return known


def under(chunk: Chunk, disk: str) -> tuple[str, ...]:
    """Return the recorded disks that are undermost below one, by name; () when it is itself."""
    known: dict[str, tuple[str, ...]] | None = chunk.shared.get(_UNDER)
    if known is None:
        recorded = {d for name, d in chunk.series if name == signals.DISK_READ_BYTES.name}
        stands_on = _stands_on(chunk, recorded)
        known = chunk.shared[_UNDER] = {
            name: tuple(sorted(_bottom(name, stands_on, recorded, frozenset()) - {name}))
            for name in recorded
        }
    return known.get(disk, ())


def _stands_on(chunk: Chunk, recorded: set[str]) -> Mapping[str, list[str]]:
    out: dict[str, list[str]] = {}
    for entry in chunk.header.host.get("disks") or ():
        if not isinstance(entry, dict):
            continue
        below = entry.get("on") or ([entry["partition_of"]] if "partition_of" in entry else [])
        if isinstance(below, list) and below:
            out[str(entry.get("name"))] = [str(one) for one in below]
    for name in sorted(recorded):
        if match := _PATH.fullmatch(name):
            out.setdefault(match[1] + match[2], []).append(name)
    return out


def _bottom(
    name: str, stands_on: Mapping[str, list[str]], recorded: set[str], above: frozenset[str]
) -> set[str]:
    """The recorded disks at the bottom; itself when nothing recorded lies below."""
    found: set[str] = set()
    for below in stands_on.get(name, ()):
        if below not in above:  # a table that goes in circles is not ours to mend
            found |= _bottom(below, stands_on, recorded, above | {name})
    return found or ({name} & recorded)
