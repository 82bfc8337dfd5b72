"""A memory limit that follows the least memory a group needs: tight, but it never kills the group.

A limit reclaims file pages first. The rest (`needed`) may not be known before the job runs; while
it still grows, the limit stays above it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from clusterprof_lab.real.faults.cgroups import Group

_TICK_S = 0.25
_CALM_BYTES = 2 << 20
_ROOM_BYTES = 256 << 20
_NO_LIMIT = -1
CALM_TICKS = 6
"""Ticks without growth before a group counts as settled."""


def set_limit(group: Group, limit_bytes: int) -> None:
    """Limit a group's memory; what cannot be taken away at once is left for the next time.

    Version 2 gets `memory.high`, which slows its processes down but ends none.
    """
    with suppress(OSError):
        if group.controller.version == 1:
            group.write(limit_bytes, "memory.limit_in_bytes")
        else:
            group.write("max" if limit_bytes == _NO_LIMIT else limit_bytes, "", "memory.high")


def read_needed_bytes(group: Group) -> int:
    """Return what the group uses beside pages of files."""
    stat = group.read_counts("memory.stat")
    if group.controller.version == 1:
        used = int((group.folder / "memory.usage_in_bytes").read_text())
        return used - stat.get("cache", 0) + stat.get("shmem", 0)
    used = int((group.folder / "memory.current").read_text())
    return used - stat.get("file", 0) + stat.get("shmem", 0)


@contextmanager
def limit_memory_to_need(group: Group, cache_bytes: int) -> Iterator[None]:
    """Limit a group's memory to what it needs plus this much page cache."""
    over = threading.Event()

    def follow() -> None:
        before = calm = 0
        while not over.wait(_TICK_S):
            needed = read_needed_bytes(group)
            calm = calm + 1 if needed - before < _CALM_BYTES else 0
            before = needed
            room = cache_bytes if calm >= CALM_TICKS else _ROOM_BYTES
            set_limit(group, needed + room)

    if group.controller.version == 1:  # wait for memory rather than end a rank
        with suppress(OSError):
            group.write(1, "memory.oom_control")
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        set_limit(group, _NO_LIMIT)
