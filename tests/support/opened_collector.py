"""One collector on one fixture machine, and the value of each of its columns."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.files import Roots
from clusterprof.signals import Signal

_PREAD = os.pread
Reading = tuple[str, str, Value]


class OpenedCollector:
    """A collector that was opened, and its columns."""

    def __init__(self, kind: Any, roots: Roots, pids: Sequence[int] = ()) -> None:
        self.collector = kind(Context(roots, None, lambda: pids))
        self.columns: Sequence[tuple[Signal, str]] = self.collector.open()

    def read_all(self) -> list[Reading]:
        """Return signal, device and value of every column, from one sample."""
        values = self.collector.sample()
        assert len(values) == len(self.columns)
        return [(signal.name, device, v) for (signal, device), v in zip(self.columns, values)]

    def read_value(self, signal: str, device: str = "") -> Value:
        """Return the value of one column, from one sample."""
        return {(name, where): value for name, where, value in self.read_all()}[signal, device]

    def close(self) -> None:
        """Close the collector."""
        self.collector.close()


def pread_as_cgroupfs_does(fd: int, size: int, offset: int) -> bytes:
    """Read, but answer ENODEV for a deleted file, as the files of a removed cgroup do."""
    if os.fstat(fd).st_nlink == 0:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    return _PREAD(fd, size, offset)
