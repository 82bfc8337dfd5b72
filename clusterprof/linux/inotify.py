"""inotify: the kernel says when a file has come into a folder, and nobody has to look.

https://man7.org/linux/man-pages/man7/inotify.7.html

Python has no binding, so the C library is called. Only whole files count: one that was written
under another name and renamed (IN_MOVED_TO), as everything in a run directory is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from clusterprof.errors import Unavailable

_MOVED_TO, _ONLY_FOLDERS = 0x80, 0x0100_0000
_READ_BYTES = 65536
_REMEDY = "raise fs.inotify.max_user_instances"


class News:
    """One descriptor that is readable while something has come that nobody was told of."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Watch folders; raises Unavailable when the system or its limits do not allow it."""
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self.descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            add = libc.inotify_add_watch
        except AttributeError:
            raise Unavailable("absent", "the C library has no inotify", "") from None
        if self.descriptor < 0:
            raise Unavailable("failed", f"inotify: {os.strerror(ctypes.get_errno())}", _REMEDY)
        for folder in folders:
            if add(self.descriptor, os.fsencode(folder), _MOVED_TO | _ONLY_FOLDERS) < 0:
                reason = os.strerror(ctypes.get_errno())
                self.close()
                raise Unavailable("failed", f"inotify: {folder}: {reason}", _REMEDY)

    def drain(self) -> None:
        """Take what it has to say; which file has come is seen in the folders."""
        try:
            os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
