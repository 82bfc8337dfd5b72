"""nvidia-smi and `dcgmi dmon`: what they print about the GPUs of one host.

## What is read

`nvidia-smi --query-gpu=… --format=csv` with its first line (with or without units), `nvidia-smi
dmon` and `pmon`, `nvidia-smi -q -x` (one document, or a log of many), `dcgmi dmon`. Best:

    nvidia-smi --query-gpu=timestamp,uuid,utilization.gpu,memory.used,power.draw,clocks.sm,\\
    clocks_event_reasons.active --format=csv -l 1 > gpus.csv
    nvidia-smi dmon -o DT > dmon.txt

## How it is understood

Each file is one host, whose name it does not say. Times are those of that host's clock, in a zone
that it does not say. Where there are no times, sweeps are taken to be a second apart, as the tools
do them unless told otherwise, and a note says so. `N/A` is unknown, not zero.

## Where it is blind

Utilisation is the driver's: a kernel was resident in its last window of 1/6 s to 1 s; what happened
between sweeps is not seen. `pmon` tells how many processes a device has, and no more is taken from
it. Instances of a GPU (MIG) are left out. Nothing tells of ranks or steps: no loss is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.nvidia_smi.monitor import is_monitor, read_monitor
from clusterprof.importers.nvidia_smi.query import heads_of, read_query
from clusterprof.importers.nvidia_smi.readings import Devices
from clusterprof.importers.nvidia_smi.xml import is_xml, read_xml
from clusterprof.importers.tables import NodeTables


class NvidiaSmi:
    """Output of NVIDIA's command line tools."""

    name: ClassVar[str] = "nvidia_smi"
    title: ClassVar[str] = "output of nvidia-smi or dcgmi"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the root of the document, or by the heads of the table."""
        return is_xml(head) or is_monitor(head) or _is_query(head)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the host."""
        source, account = sources[0], accounts[0]
        devices = Devices(account)
        if is_xml(source.head):
            read_xml(source, devices)
        elif is_monitor(source.head):
            read_monitor(source, devices)
        else:
            read_query(source, devices)
        found = False
        for node in devices.nodes(self.name, source.path.name.split(".")[0]):
            found = True
            yield node
        if not found:
            raise CannotImportError("no reading of a GPU was found", "")


def _is_query(head: bytes) -> bool:
    return heads_of(head.lstrip().split(b"\n", 1)[0]) is not None
