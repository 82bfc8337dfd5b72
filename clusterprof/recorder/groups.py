"""The process groups that ranks announced: `groups/<pid>.<group>.json` becomes an event.

docs/design.md, section 12, says what a group's number means.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterprof.recorder.announcements import Announcements
from clusterprof.recorder.rundir import read_small_json
from clusterprof.trace.schema import Event, Record

ANNOUNCEMENTS_AT_MOST = 8192  # 32 ranks of a node with 256 groups each
FILE_BYTES_AT_MOST = 128 << 10  # a group of 16,384 ranks


class Groups:
    """Announced groups, from a folder of small files to `group-announced` events."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = str(run_dir / "groups")
        self._announcements = Announcements(self._folder, ANNOUNCEMENTS_AT_MOST)

    def take(self, now_ns: int) -> list[Record]:
        """Return the events of the announcements that came since the last call."""
        found: list[Record] = []
        for name in self._announcements.fresh() or ():
            announced = read_small_json(f"{self._folder}/{name}", FILE_BYTES_AT_MOST) or {}
            attributes = checked(announced)
            if attributes and name == f"{attributes['pid']}.{attributes['group']}.json":
                found.append(Event(now_ns, "group-announced", attributes))
        return found

    def finish(self, now_ns: int) -> list[Record]:
        """Return the last events."""
        self._announcements.look_again()
        return self.take(now_ns)


def checked(announced: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes that may enter a recording, None if this announces no group."""
    pid, group, ranks = (announced.get(name) for name in ("pid", "group", "ranks"))
    if not _is_number(pid) or not _is_number(group) or not isinstance(ranks, list) or not ranks:
        return None
    if not all(map(_is_number, ranks)):
        return None
    return {"pid": pid, "group": group, "ranks": ranks}


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
