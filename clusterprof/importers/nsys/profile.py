"""One profile, read and reduced; and all profiles of a job as nodes of ours."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clusterprof.importers.base import Account
from clusterprof.importers.collective_order import Side, grouped
from clusterprof.importers.device_gaps import Int, Intervals, union
from clusterprof.importers.nsys.database import DamagedError, Database
from clusterprof.importers.nsys.device import (
    Activities,
    activities_of,
    calls_of,
    with_processes,
)
from clusterprof.importers.nsys.host import loading_of, threads_of
from clusterprof.importers.nsys.metrics import add_adapters
from clusterprof.importers.nsys.names import launched_as, strings_of
from clusterprof.importers.nsys.ranks import Operations, RankPart, parts_of
from clusterprof.importers.tables import NodeTables, group_number
from clusterprof.probe import layout

_SOURCE = "nsys"
_YEAR_2001_NS = 10**18
_DEVICES_AT_MOST, _PROCESSES_AT_MOST = 1024, 4096


@dataclass(slots=True)
class Profile:
    """What one file says."""

    account: Account
    node: NodeTables
    busy: dict[int, Intervals]
    """By device."""
    parts: list[RankPart] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Matched:
    """Which operation a rank's first one on a stream is."""

    group: int
    first: int
    ranks: tuple[int, ...]


Groups = dict[int, Matched]
"""By identity of the `Operations`."""


def profile_of(db: Database, account: Account) -> Profile:
    """Read one file. Raises DamagedError when not even its strings can be read."""
    strings = strings_of(db)
    calls = calls_of(db, strings, account)
    some = with_processes(activities_of(db, strings, account), calls)
    some = _physical(db, some)
    whose = np.unique(some.device).size, np.unique(some.process).size
    if whose[0] > _DEVICES_AT_MOST or whose[1] > _PROCESSES_AT_MOST:
        raise DamagedError(
            f"{whose[0]:,} devices and {whose[1]:,} processes: no profile has so many"
        )
    busy = {}
    for device in np.unique(some.device).tolist():
        rows = some.device == device
        busy[device] = union(some.start_ns[rows], some.end_ns[rows])
    threads = threads_of(db, strings, account)
    parts = parts_of(some, calls, threads, loading_of(db, threads, account), busy)
    rank, world = launched_as(db)
    if len(parts) == 1:
        parts[0].rank, parts[0].world = rank, world
    for part in parts:
        account.notes.append(_told(part, busy[part.device]))
    return Profile(account, _node(db, busy, some, account), busy, parts)


def _told(part: RankPart, busy: Intervals) -> str:
    """What was decided about a rank, for people."""
    where = f"process {part.pid & 0xFFFFFF} on device {part.device}"
    if part.steps is not None:
        return f"{where}: {part.steps.start_ns.size} steps, told by {part.steps.how}"
    idle = 1 - float((busy[1] - busy[0]).sum()) / max(part.until_ns - part.from_ns, 1)
    return (
        f"{where}: no range says when a step was, so all of it is one, from the first to the last"
        f" activity of the device ({idle:.1%} of it idle: no kernel, copy, fill or graph)"
    )


def _physical(db: Database, some: Activities) -> Activities:
    """Replace the numbers by which each process calls its devices where the file tells better."""
    told = {}
    for rows in db.rows("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId")):
        for pid, cuda, gpu in rows:
            if type(pid) is type(cuda) is type(gpu) is int and 0 <= gpu < _DEVICES_AT_MOST:
                told[pid, cuda] = gpu
    for (pid, cuda), gpu in told.items():
        which = np.flatnonzero((some.device == cuda) & (some.process >> 24 & 0xFFFFFF == pid))
        some.kind[which] |= (gpu + 1) << 8  # aside, so that no number is replaced twice
    moved = some.kind >> 8 > 0
    some.device[moved] = (some.kind[moved] >> 8) - 1
    some.kind &= 0xFF
    return some


def _node(
    db: Database, busy: dict[int, Intervals], some: Activities, account: Account
) -> NodeTables:
    host = ""
    for rows in db.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value")):
        host = next((str(v) for n, v in rows if n == "Hostname" and v), host)
    wall = None
    for rows in db.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        wall = next((one for (one,) in rows if type(one) is int and 0 < one < 1 << 62), wall)
    if wall is not None and some.start_ns.size and int(some.start_ns[0]) > _YEAR_2001_NS:
        wall = 0  # exported with --ts-normalize
    node = NodeTables(host, _SOURCE, wall)
    for rows in db.rows("META_DATA_EXPORT", ("name", "value")):
        for name, value in rows:
            if name == "EXPORT_PRODUCT_VERSION" and isinstance(value, str):
                node.versions["nsys"] = value
    for device in busy:
        node.device(f"gpu{device}", vendor="nvidia")
    for rows in db.rows("TARGET_INFO_GPU", ("id", "name", "uuid", "totalMemory")):
        for number, name, uuid, memory in rows:
            if number in busy:
                node.device(f"gpu{number}", name=str(name or ""), uuid=str(uuid or ""))
                if type(memory) is int and memory > 0:
                    node.device(f"gpu{number}", memory_bytes=memory)
    add_adapters(node, db, account)
    return node


def put_in_order(profiles: list[Profile]) -> Groups:
    """Number the ranks of all profiles, and say which operations are the same."""
    parts = [part for one in profiles for part in one.parts]
    ranks = [part.rank for part in parts]
    if None in ranks or len(set(ranks)) < len(ranks):
        for rank, part in enumerate(parts if len(parts) > 1 else []):
            part.rank, part.world = rank, None
        if len(parts) > 1:
            profiles[0].account.notes.append(
                "no file says which rank is which: numbered in the order of files and devices"
            )
    sides, whose = [], []
    for profile in profiles:
        wall = profile.node.wall_minus_own_ns or 0
        for part in profile.parts:
            for one in part.operations:
                moved = one.side.start_ns + wall, one.side.end_ns + wall
                sides.append(Side(part.rank, *moved, one.side.operation))
                whose.append((profile, part, one))
    found = _matched(sides, whose)
    for profile in profiles:
        alone = sum(
            one.side.start_ns.size for part in profile.parts for one in part.operations
            if id(one) not in found
        )  # fmt: skip
        if alone:
            profile.account.notes.append(
                f"{alone:,} operations met none of another rank: whom they waited for is unknown"
            )
    return found


def _matched(sides: list[Side], whose: list[tuple[Profile, RankPart, Operations]]) -> Groups:
    found: Groups = {}
    times: dict[tuple[int, ...], int] = {}
    for group in grouped(sides):
        ranks = tuple(sorted(whose[at][1].rank or 0 for at in group.members))
        nth = times[ranks] = times.get(ranks, 0) + 1
        listed = ",".join(map(str, ranks))
        number = group_number(ranks if nth == 1 else f"{listed}#{nth}")
        for at, first in zip(group.members, group.first):
            found[id(whose[at][2])] = Matched(number, first, ranks)
    return found


def node_of(profile: Profile, groups: Groups) -> NodeTables:
    """Return a profile as records of ours."""
    node = profile.node
    bounds: dict[int, tuple[int, int]] = {}
    for part in profile.parts:
        _add_rank(node, part, groups)
        first, last = part.from_ns, part.until_ns
        if part.steps is not None:
            first = min(first, int(part.steps.start_ns[0]))
            last = max(last, int(part.steps.end_ns[-1]))
        known = bounds.get(part.device, (first, last))
        bounds[part.device] = min(first, known[0]), max(last, known[1])
    for device, (start, end) in profile.busy.items():
        first, last = bounds.get(device, (int(start[0]), int(end[-1])) if start.size else (0, 0))
        if start.size:
            first, last = min(first, int(start[0])), max(last, int(end[-1]))
            node.busy(f"gpu{device}", start, end, first, last)
    return node


def _add_rank(node: NodeTables, part: RankPart, groups: Groups) -> None:
    node.rank(part.pid, part.rank, part.world, f"gpu{part.device}")
    if part.steps is None:
        node.spans(part.pid, layout.STEP, [part.from_ns], [part.until_ns], 1, 2, -1, -1)
    else:
        steps = part.steps
        node.spans(part.pid, layout.STEP, steps.start_ns, steps.end_ns, steps.number, 2, -1, -1)
    node.spans(part.pid, layout.STARVED, *part.starved, *part.host_ns)
    node.spans(part.pid, layout.DATA_WAIT, *part.waits, -1, -1, -1, -1)
    node.spans(part.pid, layout.SYNC, *part.syncs, layout.WHOLE_NS, 1)
    start, end, size = part.copies
    node.spans(part.pid, layout.H2D, start, end, size, -1)
    for one in part.loading:
        seen = 2 * (one.reading_ns + one.outside_ns) >= one.end_ns - one.start_ns
        node.spans(
            part.pid, layout.LOADING, one.start_ns[seen], one.end_ns[seen],
            one.reading_ns[seen], one.outside_ns[seen], -1, 0,
        )  # fmt: skip
    for stream in part.operations:
        _add_operations(node, part, stream, groups.get(id(stream)))


def _add_operations(
    node: NodeTables, part: RankPart, stream: Operations, matched: Matched | None
) -> None:
    side = stream.side
    numbers: Int = np.arange(side.start_ns.size, dtype=np.int64)
    if matched is not None:
        node.group(part.pid, matched.group, matched.ranks)
        numbers += matched.first
    node.collectives(
        part.pid, side.start_ns, side.end_ns, matched.group if matched else 0,
        numbers if matched else -1, -1, side.operation, stream.exposed_ns,
    )  # fmt: skip
