"""Dumps of PyTorch's flight recorder: which collective operations a rank had begun and finished.

A rank writes one file when an operation times out or when it is asked to: a pickle, or JSON
(`TORCH_FR_DUMP_TEMP_FILE`, formerly `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`, followed by the rank). The
fields are those of version 2 of the format, of which versions before lack some:

    {"version": "2.10",
     "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
     "pg_status": {"0": {"last_enqueued_collective": 7, "last_started_collective": 7,
                         "last_completed_collective": 6}},
     "entries": [{"process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": 7,
                  "p2p_seq_id": 0, "is_p2p": false, "profiling_name": "nccl:all_reduce",
                  "time_created_ns": …, "time_discovered_started_ns": …,
                  "time_discovered_completed_ns": null, "state": "started", "retired": false}]}

Times are wall-clock ns; a backend that keeps no time leaves them null (0 in JSON), and calls all it
has finished `retired`, whatever their state.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.errors import Unavailable

BYTES_AT_MOST = 64 << 20
COMPLETED = "completed"
_BROKEN = (
    pickle.UnpicklingError, struct.error, EOFError, LookupError, MemoryError, OverflowError,
    AssertionError,
)  # fmt: skip
_RANK = re.compile(r"(\d+)(?:\.json)?$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation as the recorder saw it."""

    group: str
    """Name of the process group."""
    number: int
    """Of the collective operation in its group, from 1; of a message 0 or unclear."""
    name: str
    """`nccl:all_reduce`, as the backend calls it."""
    message: bool
    """True for send and receive."""
    created_ns: int | None
    """When it was issued, wall clock."""
    started_ns: int | None
    """When the recorder noticed that the device had begun it."""
    completed_ns: int | None
    done: bool
    """True when it had ended, whether or not anybody noted when."""


@dataclass(frozen=True, slots=True)
class Dump:
    """The file of one rank."""

    rank: int
    at_ns: int
    """When it was written: wall clock, from the file system."""
    version: str
    members: Mapping[str, tuple[int, ...]]
    """Global ranks of each group; groups of which the dump does not say so are left out."""
    completed: Mapping[str, int]
    """By id of the group: number of the last collective that ended, -1 for none."""
    entries: tuple[Entry, ...]
    """Oldest first; the recorder keeps the last few thousand."""


def read_dump(path: Path) -> Dump:
    """Read one dump.

    Raises Unavailable("failed") for what is no dump, is too large, or wants to be more than plain
    values: a pickle can name any function, and this reader calls none.
    """
    match = _RANK.search(path.name)
    if match is None:
        raise _unreadable(path, "its name does not end with a rank")
    try:
        status = path.stat()
        if status.st_size > BYTES_AT_MOST:
            raise _unreadable(path, f"{status.st_size} bytes are more than {BYTES_AT_MOST}")
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    try:
        return parse_dump(data, int(match[1]), status.st_mtime_ns)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def parse_dump(data: bytes | bytearray, rank: int, at_ns: int) -> Dump:
    """Return the dump in these bytes. Raises ValueError, TypeError, KeyError or AttributeError."""
    content = json.loads(data) if data[:1] in b"{" else _plain(data)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), (list, tuple)):
        raise ValueError("no flight recorder dump")
    members = {}
    for name, group in (content.get("pg_config") or {}).items():
        ranks = group.get("ranks")
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        if ranks:
            members[str(group.get("name", name))] = tuple(sorted(int(one) for one in ranks))
    status = content.get("pg_status") or {}
    return Dump(
        rank,
        at_ns,
        str(content.get("version", "")),
        members,
        {str(k): int(one.get("last_completed_collective", -1)) for k, one in status.items()},
        tuple(_entry(one) for one in content["entries"]),
    )


def _entry(one: Mapping[str, Any]) -> Entry:
    group = one.get("process_group", ("", ""))
    name = str(one.get("profiling_name", ""))
    words = name.rpartition(":")[2].split()
    message = bool(one.get("is_p2p", words[:1] in (["send"], ["recv"])))
    return Entry(
        str((*group, "")[0] if isinstance(group, (list, tuple)) else group),
        int(one.get("collective_seq_id", one.get("seq_id", 0))),
        name,
        message,
        _time(one.get("time_created_ns")),
        _time(one.get("time_discovered_started_ns")),
        _time(one.get("time_discovered_completed_ns")),
        one.get("state") == COMPLETED or bool(one.get("retired", False)),
    )


def _time(value: Any) -> int | None:
    """Null, or 0 in JSON, is a time that nobody took."""
    return int(value) or None if value is not None else None


class _OnlyPlain(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Reads containers, text and numbers; whatever names a class or a function is refused.

    The one written in Python: the one in C can be told by five bytes to take all memory.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it names something outside itself")


def _plain(data: bytes | bytearray) -> Any:
    try:
        return _OnlyPlain(io.BytesIO(data)).load()
    except _BROKEN as error:
        raise ValueError(f"{type(error).__name__} {error}") from error


def _unreadable(path: Path, why: str) -> Unavailable:
    return Unavailable("failed", f"{path.name}: {why}", "leave it out, or dump again")
