"""Dumps of the PyTorch flight recorder: collective operations started and completed.

## How to make the file

`TORCH_NCCL_TRACE_BUFFER_SIZE=2000` turns the flight recorder on. Write the dump of each rank as
JSON:

    dump = torch._C._distributed_c10d._dump_nccl_trace_json()
    Path(f"dumps/nccl_trace_rank_{rank}.json").write_bytes(dump)

Without NCCL the function is `_dump_fr_trace_json`. `clusterprof record` collects dumps by itself
(docs/hangs.md).

## How to analyze it

    clusterprof analyze dumps/

## What is read

The JSON form of the dumps, whose file names end with the rank. A pickle is never read here, because
loading a pickle can run code. (The recorder copies dumps of a hanging job into the recording. These
are read by an unpickler that can run nothing.) The fields are those of version 2 of the format;
earlier versions lack some:

    {"version": "2.10",
     "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
     "pg_status": {"0": {"last_enqueued_collective": 7, "last_started_collective": 7,
                         "last_completed_collective": 6}},
     "entries": [{"process_group": ["0", "default_pg"], "pg_id": 0,
                  "collective_seq_id": 7, "p2p_seq_id": 0, "is_p2p": false,
                  "profiling_name": "nccl:all_reduce", "time_created_ns": …,
                  "time_discovered_started_ns": …,
                  "time_discovered_completed_ns": null,
                  "state": "started", "retired": false}]}

Times are wall-clock ns. A backend that records no times leaves them null (0 in JSON) and marks
every finished operation as `retired`, whatever its state. gloo (PyTorch 2.13) is one: it records
when an operation was issued, and neither its start nor its end.

## How the numbers are computed

A rank arrived at an operation when the recorder noticed its start, and left when the recorder
noticed its end. Operations are matched by process group and number. The covered time is one step,
from the first operation to the last. If an operation was issued and had not ended when the dump was
written, its rank was waiting in it. The ranks that had not reached that operation are listed, by
the operations and, where these are gone from the dump, by the last one issued (`pg_status`). First
come ranks that others waited for and that waited for no such rank themselves.

## What it cannot see

The recorder polls, so starts and ends are up to a second late. It does not know what else the
device did, so the time in operations is an upper bound of the time lost. Sends and receives are
left out, because the two sides number them differently.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import (
    NodeTables,
    compute_group_number,
    number_groups,
)
from clusterprof.analysis.importers.core.text import read_json_bytes
from clusterprof.errors import Unavailable
from clusterprof.probe import layout

MAX_DUMP_BYTES = 64 << 20
EXIT_PREFIX = "exit_rank_"
"""Of the names of dumps in a recording that ranks wrote when they ended."""
COMPLETED = "completed"
_PICKLE_ERRORS = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    LookupError,
    MemoryError,
    OverflowError,
    AssertionError,
)
_RANK_SUFFIX = re.compile(r"(\d+)(?:\.json)?$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation as the flight recorder saw it."""

    group: str
    """Name of the process group."""
    number: int
    """Number of a collective operation in its group, from 1; of a message 0 or undefined."""
    name: str
    """Name given by the backend, like `nccl:all_reduce`."""
    message: bool
    """True for send and receive."""
    created_ns: int | None
    """When it was issued, wall clock."""
    started_ns: int | None
    """When the recorder noticed that the device had started it, wall clock."""
    completed_ns: int | None
    done: bool
    """True if it had ended, whether or not the time was recorded."""


@dataclass(frozen=True, slots=True)
class Dump:
    """Flight recorder dump of one rank."""

    rank: int
    at_ns: int
    """When the file was written: wall clock, from the file system."""
    version: str
    members: Mapping[str, tuple[int, ...]]
    """Global ranks of each group; groups without that information are left out."""
    completed: Mapping[str, int]
    """By group id: number of the last collective that ended, -1 if none."""
    entries: tuple[Entry, ...]
    """Oldest first; the recorder keeps the last few thousand."""
    at_exit: bool = False
    """True if its rank wrote it when it ended, False if it was stopped or timed out then."""
    descriptions: Mapping[str, str] = field(default_factory=dict)
    """What each group is for, by its name: `EXPERT_MODEL_PARALLEL_GROUP`."""
    enqueued: Mapping[str, int] = field(default_factory=dict)
    """By name of the group: number of the last collective that was issued, where known."""


def read_dump(path: Path) -> Dump:
    """Read one dump from a file; a pickle is read without calling anything that it names.

    Raises: Unavailable("failed") when the file is not a dump, is too large, or holds more than
    plain values.
    """
    match = _RANK_SUFFIX.search(path.name)
    if match is None:
        raise _build_error(path, "its name does not end with a rank")
    try:
        status = path.stat()
        if status.st_size > MAX_DUMP_BYTES:
            raise _build_error(path, f"{status.st_size} bytes exceed {MAX_DUMP_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise _build_error(path, str(error)) from error
    try:
        dump = parse_dump(data, int(match[1]), status.st_mtime_ns)
        return replace(dump, at_exit=path.name.startswith(EXIT_PREFIX))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _build_error(path, f"{type(error).__name__}: {error}") from error


def parse_dump(data: bytes | bytearray, rank: int, at_ns: int) -> Dump:
    """Parse a dump.

    Raises: ValueError, TypeError, KeyError or AttributeError when the bytes are not a dump.
    """
    content = json.loads(data) if data[:1] in b"{" else _load_plain_pickle(data)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), (list, tuple)):
        raise ValueError("not a flight recorder dump")
    members, descriptions = {}, {}
    for name, group in (content.get("pg_config") or {}).items():
        descriptions[str(group.get("name", name))] = str(group.get("desc") or "")
        ranks = group.get("ranks")
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        if ranks:
            members[str(group.get("name", name))] = tuple(sorted(int(rank_) for rank_ in ranks))
    status = content.get("pg_status") or {}
    entries = tuple(_parse_entry(entry) for entry in content["entries"])
    groups = {entry.group for entry in entries}
    if len(groups) == 1 and members.keys() == {""}:  # gloo names its only group in operations alone
        members = {groups.pop(): members[""]}
    return Dump(
        rank,
        at_ns,
        str(content.get("version", "")),
        members,
        {
            str(k): int(group_status.get("last_completed_collective", -1))
            for k, group_status in status.items()
        },
        entries,
        descriptions=descriptions,
        enqueued=_match_status(content, descriptions, "last_enqueued_collective"),
    )


def _match_status(
    content: Mapping[str, Any], names: Mapping[str, str], field_name: str
) -> dict[str, int]:
    """Match a field of `pg_status` to the names of groups: status has ids local to the rank.

    Both count up in the order in which groups were made, so they pair off if there are as many of
    both and the operations confirm it; otherwise only the groups of operations are known.
    """
    status = {int(id_): group for id_, group in (content.get("pg_status") or {}).items()}
    ids = {
        str(entry["process_group"][0]): int(entry["pg_id"])
        for entry in content["entries"]
        if "pg_id" in entry and entry.get("process_group")
    }
    if len(names) == len(status) and all(name.isdecimal() for name in names):
        pairs = dict(zip(sorted(names, key=int), sorted(status)))
        if all(pairs.get(name, id_) == id_ for name, id_ in ids.items()):
            ids = pairs
    numbers = {name: int(status.get(id_, {}).get(field_name, -1)) for name, id_ in ids.items()}
    return {name: number for name, number in numbers.items() if number > 0}


def _parse_entry(entry: Mapping[str, Any]) -> Entry:
    group = entry.get("process_group", ("", ""))
    name = str(entry.get("profiling_name", ""))
    words = name.rpartition(":")[2].split()
    message = bool(entry.get("is_p2p", words[:1] in (["send"], ["recv"])))
    return Entry(
        str((*group, "")[0] if isinstance(group, (list, tuple)) else group),
        int(entry.get("collective_seq_id", entry.get("seq_id", 0))),
        name,
        message,
        _convert_time(entry.get("time_created_ns")),
        _convert_time(entry.get("time_discovered_started_ns")),
        _convert_time(entry.get("time_discovered_completed_ns")),
        entry.get("state") == COMPLETED or bool(entry.get("retired", False)),
    )


def _convert_time(value: Any) -> int | None:
    """Convert a time; null, or 0 in JSON, means that it was not recorded."""
    return int(value) or None if value is not None else None


class _PlainUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Unpickler of containers, text and numbers; refuses pickles that name any code.

    This is the unpickler written in Python: five bytes can make the C version allocate all memory.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it refers to {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to an external object")


def _load_plain_pickle(data: bytes | bytearray) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _PICKLE_ERRORS as error:
        raise ValueError(f"{type(error).__name__} {error}") from error


def _build_error(path: Path, why: str) -> Unavailable:
    return Unavailable("failed", f"{path.name}: {why}", "leave it out, or dump again")


_FILE_RANK = re.compile(r"(\d{1,9})(?:\.json)?(?:\.gz|\.zst)?$")
_PICKLE = b"\x80"
_PICKLE_REFUSAL = (
    "a pickle: loading one may run arbitrary code, so it is not read; dump as JSON"
    " (torch._C._distributed_c10d._dump_nccl_trace_json())"
)
_OPERATIONS = {
    "all_reduce": layout.ALL_REDUCE,
    "_all_gather_base": layout.ALL_GATHER,
    "all_gather": layout.ALL_GATHER,
    "reduce_scatter": layout.REDUCE_SCATTER,
    "_reduce_scatter_base": layout.REDUCE_SCATTER,
    "broadcast": layout.BROADCAST,
    "reduce": layout.REDUCE,
    "gather": layout.GATHER,
    "scatter": layout.SCATTER,
    "all_to_all": layout.ALL_TO_ALL,
    "barrier": layout.BARRIER,
}
_MAX_VALUE = 1 << 62
_MAX_SHOWN = 8
_MAX_RANKS = 1 << 24


class FlightRecorder:
    """Importer of the dumps of all ranks of one job."""

    name: ClassVar[str] = "flight-recorder"
    title: ClassVar[str] = "PyTorch flight recorder dump"
    reads_windows: ClassVar[bool] = True
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file is a dump: JSON, or a pickle (to refuse it by name)."""
        first_byte = head.lstrip()[:1]
        if first_byte == b"{":
            return b'"entries"' in head and (b'"pg_config"' in head or b"profiling_name" in head)
        return first_byte == _PICKLE and (b"pg_config" in head or b"profiling_name" in head)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per rank.

        Raises: CannotImportError when no dump could be read.
        """
        dumps: dict[int, tuple[Dump, Account]] = {}
        for source, account in zip(sources, accounts):
            dump = _read_source(source, account)
            if dump is None:
                continue
            if dump.rank in dumps:
                account.refuse(f"rank {dump.rank} is in another file as well")
            else:
                dumps[dump.rank] = dump, account
        if not dumps:
            raise CannotImportError(
                "; ".join(dict.fromkeys(account.cut for account in accounts)),
                "give dumps as JSON, each file named after its rank",
            )
        ordered = [dumps[rank] for rank in sorted(dumps)]
        stuck = describe_stuck_ranks([dump for dump, _ in ordered])
        ordered[0][1].notes += stuck
        ordered[0][1].answers += stuck
        world = 1 + max(max((*dump.members.get("0", ()), dump.rank)) for dump, _ in ordered)
        for dump, account in ordered:
            node = _build_node(dump, account, world)
            if node is not None:
                yield node


def _read_source(source: Source, account: Account) -> Dump | None:
    if source.head.lstrip()[:1] == _PICKLE:
        account.refuse(_PICKLE_REFUSAL)
        return None
    rank = _FILE_RANK.search(source.path.name)
    if rank is None:
        account.refuse("its name does not end with a rank")
        return None
    try:
        data = read_json_bytes(source, MAX_DUMP_BYTES)
    except CannotImportError as error:
        account.refuse(error.message)
        return None
    try:
        dump = parse_dump(data.lstrip(), int(rank[1]), 0)
        if not all(
            0 <= rank_ < _MAX_RANKS for members in dump.members.values() for rank_ in members
        ):
            raise ValueError("impossible ranks")
        return dump
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        account.refuse(f"not a readable dump ({type(error).__name__}: {str(error)[:120]})")
        return None


def _build_node(dump: Dump, account: Account, world: int) -> NodeTables | None:
    """Build the node of a rank: its clock is the wall clock of its host."""
    entries: list[Entry] = []
    for entry in dump.entries:
        if entry.message:
            account.skipped["sends and receives"] += 1
        elif entry.started_ns is None or entry.completed_ns is None:
            account.skipped["operations without start and end times"] += 1
        elif not 0 < entry.started_ns <= entry.completed_ns < _MAX_VALUE:
            account.skipped["operations that end before they start"] += 1
        elif not 0 < entry.number < _MAX_VALUE:
            account.skipped["operations with impossible numbers"] += 1
        else:
            entries.append(entry)
    account.read["operations"] += len(entries)
    if not entries:
        account.notes.append(f"rank {dump.rank}: no operation has start and end times")
        return None
    node = NodeTables(f"rank {dump.rank}", FlightRecorder.name, wall_minus_own_ns=0)
    node.versions["flight-recorder"] = dump.version
    pid = dump.rank + 1
    node.add_rank(pid, dump.rank, world)
    groups = number_groups(dump.members)
    for name, ranks in dump.members.items():
        node.add_group(pid, groups[name], ranks)
    start, end, number = (
        np.array([value for value in column], np.int64)
        for column in zip(*((e.started_ns, e.completed_ns, e.number - 1) for e in entries))
    )
    node.add_collectives(
        pid,
        start,
        end,
        [groups.get(e.group) or compute_group_number(e.group) for e in entries],
        number,
        operation=[find_operation(e.name) for e in entries],
    )
    node.add_spans(pid, layout.STEP, [int(start.min())], [int(end.max())], 1, 2, -1, -1)
    return node


def find_operation(name: str) -> int:
    """Find the operation in a backend's name: `nccl:all_reduce`, `nccl:_all_gather_base`."""
    operation = name.rpartition(":")[2].split(" ")[0].lower().removesuffix("_coalesced")
    code = _OPERATIONS.get(
        operation.removeprefix("_") if operation not in _OPERATIONS else operation
    )
    return layout.ALL_TO_ALL if operation.startswith(("all_to_all", "alltoall")) else code or 15


@dataclass(frozen=True, slots=True)
class _Standstill:
    """One operation in which ranks waited."""

    group: str
    number: int
    name: str
    waiting: tuple[int, ...]
    """Ranks that had issued it and for which it had not ended."""
    late: tuple[int, ...]
    """Ranks of the group with a dump that had not reached it."""
    missing: tuple[int, ...]
    """Ranks of the group without a dump."""


def describe_stuck_ranks(dumps: Sequence[Dump]) -> list[str]:
    """Describe in which operations ranks waited, and which ranks had not reached them.

    Ranks that others waited for, and that did not wait for another such rank, come first.
    """
    reached = _find_last_operations(dumps)
    standstills = _find_standstills(dumps, reached)
    names = {name: text for dump in dumps for name, text in dump.descriptions.items()}
    late = {rank for standstill in standstills for rank in standstill.late}
    victims = {rank for standstill in standstills if standstill.late for rank in standstill.waiting}
    culprits = (late - victims) or late
    blaming = [standstill for standstill in standstills if culprits & set(standstill.late)]
    notes = []
    names_culprits = len(standstills) > 1 and bool(culprits)
    if names_culprits:
        groups = {standstill.group: None for standstill in blaming}
        first = ", ".join(_name_group(group, names) for group in list(groups)[:3])
        suffix = f" and {len(groups) - 3} more groups" if len(groups) > 3 else ""
        notes.append(
            f"missing: {_format_ranks(sorted(culprits))}; others waited for operations that they"
            f" had not reached in {first}{suffix}: look there first"
        )
    for standstill in sorted(
        standstills, key=lambda item: (item not in blaming, not item.late, -len(item.waiting))
    ):
        line = (
            f"{_format_ranks(standstill.waiting)} waited in {standstill.name}"
            f" {standstill.number} of {_name_group(standstill.group, names)}"
        )
        if standstill.late:
            last = "; ".join(
                _describe_last(rank, reached.get((rank, standstill.group)))
                for rank in standstill.late[:4]
            )
            line += f"; {_format_ranks(standstill.late)} had not reached it ({last})"
            line += "" if names_culprits else ": look there first"
        if standstill.missing:
            line += f"; no dump of {_format_ranks(standstill.missing)}"
        notes.append(line)
    return notes[:_MAX_SHOWN] or ["no rank waited in an operation at that time"]


def _find_last_operations(dumps: Sequence[Dump]) -> dict[tuple[int, str], int]:
    """Find the last operation that each rank issued in each group; unknown ones are left out."""
    reached: dict[tuple[int, str], int] = {}
    for dump in dumps:
        for group, number in dump.enqueued.items():
            reached[dump.rank, group] = number
        for entry in dump.entries:
            if not entry.message:
                key = (dump.rank, entry.group)
                reached[key] = max(reached.get(key, 0), entry.number)
    return reached


def find_waiting_ranks(dumps: Sequence[Dump]) -> tuple[int, ...]:
    """Find the ranks with a collective that they had issued and that had not ended."""
    standstills = _find_standstills(dumps, {})
    return tuple(sorted({rank for standstill in standstills for rank in standstill.waiting}))


def _find_standstills(
    dumps: Sequence[Dump], reached: Mapping[tuple[int, str], int]
) -> list[_Standstill]:
    """Find the oldest operation of each group that had not ended on each rank."""
    waiting: dict[tuple[str, int, str], list[int]] = {}
    for dump in dumps:
        oldest: dict[str, Entry] = {}
        for entry in dump.entries:
            if entry.message or entry.done:
                continue
            if entry.group not in oldest or entry.number < oldest[entry.group].number:
                oldest[entry.group] = entry
        for group, entry in oldest.items():
            waiting.setdefault((group, entry.number, entry.name), []).append(dump.rank)
    dumped_ranks = {dump.rank for dump in dumps}
    standstills = []
    for (group, number, name), ranks in sorted(waiting.items()):
        members = next((d.members[group] for d in dumps if group in d.members), ())
        late = [r for r in members if r in dumped_ranks and reached.get((r, group), 0) < number]
        missing = [r for r in members if r not in dumped_ranks]
        standstills.append(
            _Standstill(group, number, name, tuple(sorted(ranks)), tuple(late), tuple(missing))
        )
    return standstills


def _name_group(group: str, names: Mapping[str, str]) -> str:
    name = names.get(group, "")
    return f"{name[:80]} (group {group})" if name not in ("", "default_pg") else f"group {group}"


def _describe_last(rank: int, number: int | None) -> str:
    return f"rank {rank} had reached {number}" if number else f"rank {rank} shows none"


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    suffix = f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{suffix}"
