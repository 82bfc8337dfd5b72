"""/sys/devices/system/node/node*/numastat: allocations that met their node or missed it.

https://docs.kernel.org/admin-guide/numastat.html

    numa_hit 1712754
    numa_miss 0
    numa_foreign 0

`numa_miss` counts on the node that had to give: a task wanted another node and got this one.
"""

from __future__ import annotations

from pathlib import Path

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
