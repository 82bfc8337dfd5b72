"""/sys/devices/system/node/node*/numastat: allocations that met their node or missed it.

https://docs.kernel.org/admin-guide/numastat.html

    numa_hit 1712754
    numa_miss 0
    numa_foreign 0
    interleave_hit 17
    local_node 1708311
    other_node 4443

`numa_miss` counts on the node that had to give: a task wanted another node and got this one.
`other_node` counts pages of this node that went to a task which ran on another one, wanted or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from clusterprof.linux.fields import Numbers
from clusterprof.linux.roots import Roots


def numa_nodes(roots: Roots) -> list[Path]:
    """Return the folders of the NUMA nodes by number; empty where the kernel shows none."""
    folder = roots.sys / "devices/system/node"
    nodes = [path for path in folder.glob("node*") if path.name[4:].isdecimal()]
    return sorted(nodes, key=lambda path: int(path.name[4:]))


class NumastatParser:
    """Finds the misses in successive readings of one node's file."""

    def __init__(self) -> None:
        self._find = Numbers(b"numa_miss ")

    def __call__(self, data: bytes) -> int | None:
        """Return the pages this node gave to tasks that wanted another one."""
        return self._find(data)[0]


class NumaPlaces(NamedTuple):
    """Pages that one node gave since boot; None where the kernel does not count them."""

    wanted: int | None
    """To tasks that wanted this node."""
    local: int | None
    """To tasks that ran on this node."""
    remote: int | None
    """To tasks that ran on another one."""


class NumaPlacesParser:
    """Finds in successive readings of one node's file who was given its pages."""

    def __init__(self) -> None:
        self._find = Numbers(b"numa_hit ", b"local_node ", b"other_node ")

    def __call__(self, data: bytes) -> NumaPlaces:
        """Return the pages since boot."""
        return NumaPlaces._make(self._find(data))
