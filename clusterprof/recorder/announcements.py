"""The files by which processes of the job announce themselves and their rings."""

from __future__ import annotations

import os
import time

from clusterprof.linux.held import HeldFolder

# A file may come within the same timer tick (1 to 10 ms) as the one before and leave the folder's
# time as it was: a folder is read again until its time is this old.
_SETTLED_NS = 50_000_000


class Announcements:
    """A folder of small JSON files that come and are replaced; says which are new.

    Looking costs one fstat() while nothing changes.
    """

    def __init__(self, folder: str, at_most: int) -> None:
        self._folder = HeldFolder(folder)
        self._at_most = at_most  # a flood of files is not read beyond this
        self._seen: dict[str, int] = {}  # file name -> inode
        self._changed_ns = -1
        self._look_again = True

    def look_again(self) -> None:
        """Read the folder at the next look even if it seems unchanged."""
        self._look_again = True

    def fresh(self) -> list[str] | None:
        """Return the names that came or were replaced since the last look; None = no change."""
        changed_ns = self._folder.changed_ns()
        if changed_ns is None or (changed_ns == self._changed_ns and not self._look_again):
            return None
        age_ns = time.time_ns() - changed_ns
        self._look_again = changed_ns != self._changed_ns or 0 <= age_ns < _SETTLED_NS
        self._changed_ns = changed_ns
        names: dict[str, int] = {}
        with os.scandir(self._folder.path) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and not entry.name.startswith("."):
                    names[entry.name] = entry.inode()
                if len(names) >= self._at_most:
                    break
        fresh = [name for name, inode in names.items() if self._seen.get(name) != inode]
        self._seen = names
        return fresh
