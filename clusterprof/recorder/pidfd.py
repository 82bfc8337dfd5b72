"""Processes by descriptor: a pidfd never means another process, and says when its own is gone.

The wait status comes from PIDFD_GET_INFO (Linux 6.15 and later, also when the recorder is not
the parent), from /proc/<pid>/stat while the process is still a zombie, or not at all.
https://man7.org/linux/man-pages/man2/pidfd_open.2.html, include/uapi/linux/pidfd.h
"""

from __future__ import annotations

import fcntl
import os
import select
import struct

from clusterprof.recorder.identity import started_ticks, stat_fields

_INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT
_INFO = struct.Struct("=QQ11Ii")  # struct pidfd_info, first version: 64 bytes
# _IOWR(0xFF, 11, 64): direction, size, type, number
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_STAT_EXIT_CODE = 49  # field 52, counted from the third


def open_process(proc: str, pid: int, ticks: int) -> int | None:
    """Return a pidfd of the process with this pid and start time, None when it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    # Checked after opening: if the pid had been reused before, the start time differs now.
    if started_ticks(proc, pid) != ticks:
        os.close(descriptor)
        return None
    return descriptor


def wait_status(proc: str, descriptor: int, pid: int, ticks: int) -> int | None:
    """Return the wait status of an exited process as waitpid() would, None while unknown."""
    buffer = bytearray(_INFO.size)
    _INFO.pack_into(buffer, 0, _INFO_EXIT, *(0,) * 13)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, buffer)
    except OSError:
        pass  # an older kernel
    else:
        values = _INFO.unpack(buffer)
        if values[0] & _INFO_EXIT:
            return int(values[-1])
    fields = stat_fields(proc, pid)
    zombie = fields is not None and fields[0] == b"Z" and int(fields[19]) == ticks
    if fields is not None and zombie and len(fields) > _STAT_EXIT_CODE:
        return int(fields[_STAT_EXIT_CODE])
    return None


class Exits:
    """Tells when watched processes have ended; `descriptor` is readable while one is untold."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, started ticks)

    @property
    def descriptor(self) -> int:
        """A descriptor to wait on."""
        return self._epoll.fileno()

    def watch(self, pid: int, ticks: int) -> bool:
        """Watch a process; return False when it is already gone."""
        pidfd = open_process(self._proc, pid, ticks)
        if pidfd is None:
            return False
        self._epoll.register(pidfd, select.EPOLLIN)
        self._watched[pidfd] = (pid, ticks)
        return True

    def ended(self) -> list[tuple[int, int, int]]:
        """Return (pidfd, pid, started ticks) of processes that ended; the caller closes each."""
        found = []
        for pidfd, _ in self._epoll.poll(0):
            self._epoll.unregister(pidfd)
            found.append((pidfd, *self._watched.pop(pidfd)))
        return found

    def close(self) -> None:
        """Give up all descriptors."""
        for pidfd in self._watched:
            os.close(pidfd)
        self._watched.clear()
        self._epoll.close()
