"""Profiles of Nsight Systems, exported to SQLite.

## How to make the file

    nsys profile -t cuda,nvtx,osrt -o profile torchrun --nproc-per-node 8 train.py
    nsys export -t sqlite profile.nsys-rep

`--nic-metrics` adds the bytes of network adapters.

## How to analyze it

    clusterprof analyze profile.sqlite

## What is read

Kernels, copies, fills and graphs of all devices; CUDA runtime and driver calls; NVTX ranges of all
domains; system calls (OSRT); CPU samples of the threads that launch; bytes of network adapters;
hardware and software of the target. Every schema version since 2020 is supported. A table or column
that a file lacks is not queried. A packed file (`.gz`) is read in memory.

## How the numbers are computed

* **Busy**: a device is busy when anything runs on it: kernels, copies in any direction, fills,
  graphs.
* **Ranks**: each process with a device is a rank. A device on which a process did less than 1 % of
  its work does not count. The rank comes from the variables of the launcher (`RANK`,
  `SLURM_PROCID`, …) in the profiled command. Without them, processes are numbered in the order of
  files and devices.
* **Steps** are NVTX ranges named step or iteration, with or without a number. Without these, a step
  goes from the end of one optimizer step to the next. Without optimizer steps, it is a range that
  repeats and covers half of the time. Failing that, the whole profile is one step.
* **Data waits** are ranges named after a data loader on a thread that launches kernels.
* **Late host**: a gap of more than 1 µs is `starved` if the call that launched the next work
  returned only after the gap had begun. It is starved until the call returned, because the queue
  was empty until then. The call of a copy between host and device returns only after the copy, so
  such a copy was launched too late if its call began only after the gap.
* **CPU samples** (`-s cpu`, the default) show in which function the launching thread was in a gap:
  the operation of MPI, else the innermost function, else the library.
* **Lines of code** are the NVTX ranges around the launching thread, except those of steps and
  operators, and the Python frames of its samples (`--python-sampling=true`).
* **Collective operations** are the kernels of NCCL and RCCL. Kernels of several ranks are one
  operation if they overlap in time, in one order, in at least four of five cases.

## What it cannot see

The profile has no sizes of collective operations and no communicators: NCCL's NVTX payloads are
only in exports with `--include-blobs`, and are not read. A send and a receive in one kernel are
read as an exchange between all ranks that took part. With `--cuda-graph-trace=graph` a graph is one
activity, so operations inside it are not visible. Waits of loader processes that launch nothing are
not read. Several processes that each call their only device 0 look like one shared device if the
file has no table of CUDA devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.device_timeline import (
    Int,
    Intervals,
    OperationSequence,
    match_operations,
    merge_intervals,
)
from clusterprof.analysis.importers.core.host_activity import add_host_work
from clusterprof.analysis.importers.core.node_tables import NodeTables, compute_group_number
from clusterprof.analysis.importers.core.stacks import add_stack_samples
from clusterprof.analysis.importers.nsys.activities import (
    Activities,
    fill_processes,
    measure_loading,
    read_activities,
    read_calls,
    read_threads,
)
from clusterprof.analysis.importers.nsys.database import (
    MAGIC,
    DamagedError,
    Database,
    read_launcher_rank,
    read_strings,
)
from clusterprof.analysis.importers.nsys.ranks import RankActivity, StreamOperations, split_ranks
from clusterprof.analysis.importers.nsys.samples import read_samples
from clusterprof.errors import UsageError
from clusterprof.probe import layout

_UNIT = re.compile(r"(?:b|bytes?)\s*/\s*(s|sec|second|ms|us|ns)", re.IGNORECASE)
_UNIT_NS = {"s": 1e9, "sec": 1e9, "second": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
_SIGNAL_BY_METRIC = {
    "ib: bytes sent": "rdma.transmit_bytes_total",
    "ib: bytes received": "rdma.receive_bytes_total",
    "bytes sent": "network.transmit_bytes_total",
    "bytes received": "network.receive_bytes_total",
    "eth: bytes sent": "network.transmit_bytes_total",
    "eth: bytes received": "network.receive_bytes_total",
}
_METRIC_COLUMNS = ("start", "end", "globalId", "metricsListId", "metricsIdx", "value")


def add_adapters(node: NodeTables, db: Database, account: Account) -> None:
    """Add the bytes that network adapters sent and received.

    Only metrics whose unit is given as bytes per time are used.
    """
    try:
        units = _read_metric_units(db, account)
        adapters = _read_adapter_names(db)
        rows: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
        for rows_read in db.rows("NET_NIC_METRIC", _METRIC_COLUMNS) if units else ():
            for start, end, adapter, metric_list, number, value in rows_read:
                signal_unit = units.get((metric_list, number))
                has_times = type(start) is type(end) is int and 0 <= start < end < 1 << 62
                if signal_unit is None or not has_times or not isinstance(value, (int, float)):
                    continue
                name = adapters.get(adapter, f"nic{adapter}")
                if 0 <= value < float(1 << 50):
                    bytes_moved = value * (end - start) / signal_unit[1]
                    rows.setdefault((signal_unit[0], name), []).append((start, end, bytes_moved))
    except DamagedError as error:
        account.cut = account.cut or f"NET_NIC_METRIC: {error}"
        return
    for (signal, name), intervals in rows.items():
        intervals.sort()
        t_ns: Int = np.array([intervals[0][0], *(row[1] for row in intervals)], np.int64)
        total = np.concatenate([[0.0], np.cumsum([row[2] for row in intervals])])
        t_ns, first = np.unique(t_ns, return_index=True)
        node.add_series(signal, name, t_ns, np.rint(total[first]).astype(np.int64))
        account.read["readings of network adapters"] += len(intervals)


def _read_metric_units(db: Database, account: Account) -> dict[tuple[int, int], tuple[str, float]]:
    """Read the signal and the unit's time in ns of each metric, by its list and index."""
    units = {}
    columns = ("metricsListId", "metricsIdx", "name", "unit")
    for rows in db.rows("TARGET_INFO_NETWORK_METRICS", columns):
        for metric_list, number, name, unit in rows:
            signal = _SIGNAL_BY_METRIC.get(str(name).strip().lower())
            unit_match = _UNIT.fullmatch(str(unit).strip())
            if signal and unit_match:
                units[metric_list, number] = (signal, _UNIT_NS[unit_match[1].lower()])
            elif signal:
                account.skipped[f'network metrics in the unit "{str(unit)[:20]}"'] += 1
    return units


def _read_adapter_names(db: Database) -> dict[int, str]:
    """Read the names of adapters by the id used in metrics."""
    names = {
        nic: str(name)
        for rows in db.rows("TARGET_INFO_NIC_INFO", ("nicId", "name"))
        for nic, name in rows
    }
    return {
        global_id: names[nic]
        for rows in db.rows("NIC_ID_MAP", ("nicId", "globalId"))
        for nic, global_id in rows
        if nic in names
    }


_SOURCE = "nsys"
_MIN_EPOCH_NS = 10**18
_MAX_DEVICES, _MAX_PROCESSES = 1024, 4096


@dataclass(slots=True)
class Profile:
    """Content of one file."""

    account: Account
    node: NodeTables
    busy: dict[int, Intervals]
    """Busy intervals by device."""
    parts: list[RankActivity] = field(default_factory=list)
    has_framework: bool = True


@dataclass(frozen=True, slots=True)
class MatchedSequence:
    """Group and number of the first operation of a rank on a stream."""

    group: int
    first_number: int
    ranks: tuple[int, ...]


SequenceGroups = dict[int, MatchedSequence]
"""Matched sequences by identity of their `StreamOperations`."""


def read_profile(db: Database, account: Account) -> Profile:
    """Read one file.

    Raises: DamagedError when its strings cannot be read or its numbers of devices are implausible.
    """
    strings = read_strings(db)
    calls = read_calls(db, strings, account)
    activities = fill_processes(read_activities(db, strings, account), calls)
    activities = _resolve_devices(db, activities)
    counts = np.unique(activities.device).size, np.unique(activities.process).size
    if counts[0] > _MAX_DEVICES or counts[1] > _MAX_PROCESSES:
        raise DamagedError(
            f"{counts[0]:,} devices and {counts[1]:,} processes, more than any profile has"
        )
    busy = {}
    for device in np.unique(activities.device).tolist():
        rows = activities.device == device
        busy[device] = merge_intervals(activities.start_ns[rows], activities.end_ns[rows])
    threads = read_threads(db, strings, account)
    loading = measure_loading(db, threads, account)
    samples = read_samples(db, np.unique(calls.thread), strings, account)
    parts = split_ranks(activities, calls, threads, loading, busy, samples)
    rank, world = read_launcher_rank(db)
    if len(parts) == 1:
        parts[0].rank, parts[0].world = rank, world
    for part in parts:
        account.notes.append(_describe_rank(part, busy[part.device]))
    node = _create_node(db, busy, activities, account)
    has_operators = any(thread.operators.all()[0].size for thread in threads.values())
    return Profile(account, node, busy, parts, strings.has_framework or has_operators)


def _describe_rank(part: RankActivity, busy: Intervals) -> str:
    """Describe for the report how the steps of a rank were found."""
    location = f"process {part.pid & 0xFFFFFF} on device {part.device}"
    if part.steps is not None:
        return f"{location}: {part.steps.start_ns.size} steps, from {part.steps.source}"
    # other processes may use the device before and after this one
    start, end = (np.clip(side, part.from_ns, part.until_ns) for side in busy)
    idle = 1 - float((end - start).sum()) / max(part.until_ns - part.from_ns, 1)
    return (
        f"{location}: no range marks a step, so everything is one step, from the first to the last"
        f" activity of the device ({idle:.1%} of it idle: no kernel, copy, fill or graph)"
    )


def _resolve_devices(db: Database, activities: Activities) -> Activities:
    """Replace process-local device numbers by global ones where the file has the mapping."""
    gpu_by_cuda_device = {}
    for rows in db.rows("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId")):
        for pid, cuda, gpu in rows:
            if type(pid) is type(cuda) is type(gpu) is int and 0 <= gpu < _MAX_DEVICES:
                gpu_by_cuda_device[pid, cuda] = gpu
    for (pid, cuda), gpu in gpu_by_cuda_device.items():
        rows_of_device = np.flatnonzero(
            (activities.device == cuda) & (activities.process >> 24 & 0xFFFFFF == pid)
        )
        activities.kind[rows_of_device] |= (
            gpu + 1
        ) << 8  # in the high bits: no number changes twice
    is_resolved = activities.kind >> 8 > 0
    activities.device[is_resolved] = (activities.kind[is_resolved] >> 8) - 1
    activities.kind &= 0xFF
    return activities


def _create_node(
    db: Database, busy: dict[int, Intervals], activities: Activities, account: Account
) -> NodeTables:
    host = ""
    for rows in db.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value")):
        host = next((str(v) for n, v in rows if n == "Hostname" and v), host)
    wall = None
    for rows in db.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        wall = next(
            (epoch_ns for (epoch_ns,) in rows if type(epoch_ns) is int and 0 < epoch_ns < 1 << 62),
            wall,
        )
    if (
        wall is not None
        and activities.start_ns.size
        and int(activities.start_ns[0]) > _MIN_EPOCH_NS
    ):
        wall = 0  # exported with --ts-normalize
    node = NodeTables(host, _SOURCE, wall)
    for rows in db.rows("META_DATA_EXPORT", ("name", "value")):
        for name, value in rows:
            if name == "EXPORT_PRODUCT_VERSION" and isinstance(value, str):
                node.versions["nsys"] = value
    for device in busy:
        node.add_device(f"gpu{device}", vendor="nvidia")
    for rows in db.rows("TARGET_INFO_GPU", ("id", "name", "uuid", "totalMemory")):
        for number, name, uuid, memory in rows:
            if number in busy:
                node.add_device(f"gpu{number}", name=str(name or ""), uuid=str(uuid or ""))
                if type(memory) is int and memory > 0:
                    node.add_device(f"gpu{number}", memory_bytes=memory)
    add_adapters(node, db, account)
    return node


def match_profiles(profiles: list[Profile]) -> SequenceGroups:
    """Number the ranks of all profiles and match their collective operations."""
    parts = [part for profile in profiles for part in profile.parts]
    ranks = [part.rank for part in parts]
    if None in ranks or len(set(ranks)) < len(ranks):
        for rank, part in enumerate(parts if len(parts) > 1 else []):
            part.rank, part.world = rank, None
        if len(parts) > 1:
            profiles[0].account.notes.append(
                "no file contains the rank: ranks are numbered in the order of files and devices"
            )
    sequences, owners = [], []
    for profile in profiles:
        wall = profile.node.wall_minus_own_ns or 0
        for part in profile.parts:
            for stream in part.operations:
                shifted = stream.sequence.start_ns + wall, stream.sequence.end_ns + wall
                sequences.append(OperationSequence(part.rank, *shifted, stream.sequence.operation))
                owners.append((profile, part, stream))
    groups = _match_groups(sequences, owners)
    for profile in profiles:
        unmatched = sum(
            stream.sequence.start_ns.size
            for part in profile.parts
            for stream in part.operations
            if id(stream) not in groups
        )
        if unmatched:
            profile.account.notes.append(
                f"{unmatched:,} operations match none of another rank: what they waited for is"
                f" unknown"
            )
    return groups


def _match_groups(
    sequences: list[OperationSequence], owners: list[tuple[Profile, RankActivity, StreamOperations]]
) -> SequenceGroups:
    groups: SequenceGroups = {}
    times: dict[tuple[int, ...], int] = {}
    for group in match_operations(sequences):
        ranks = tuple(sorted(owners[member][1].rank or 0 for member in group.members))
        nth = times[ranks] = times.get(ranks, 0) + 1
        listed = ",".join(map(str, ranks))
        number = compute_group_number(ranks if nth == 1 else f"{listed}#{nth}")
        for member, first in zip(group.members, group.first_numbers):
            groups[id(owners[member][2])] = MatchedSequence(number, first, ranks)
    return groups


def build_node(profile: Profile, groups: SequenceGroups) -> NodeTables:
    """Build the node of a profile."""
    node = profile.node
    bounds: dict[int, tuple[int, int]] = {}
    for part in profile.parts:
        _add_rank(node, part, groups)
        table, samples = part.stacks
        read = add_stack_samples(node, part.pid, table, [samples])
        if read:
            profile.account.read["samples of stacks"] += read
        if not profile.has_framework:
            node.mark_without_framework(part.pid)
        first, last = part.from_ns, part.until_ns
        if part.steps is not None:
            first = min(first, int(part.steps.start_ns[0]))
            last = max(last, int(part.steps.end_ns[-1]))
        known_bounds = bounds.get(part.device, (first, last))
        bounds[part.device] = min(first, known_bounds[0]), max(last, known_bounds[1])
    for device, (start, end) in profile.busy.items():
        first, last = bounds.get(device, (int(start[0]), int(end[-1])) if start.size else (0, 0))
        if start.size:
            first, last = min(first, int(start[0])), max(last, int(end[-1]))
            node.add_busy_time(f"gpu{device}", start, end, first, last)
    return node


def _add_rank(node: NodeTables, part: RankActivity, groups: SequenceGroups) -> None:
    node.add_rank(part.pid, part.rank, part.world, f"gpu{part.device}")
    if part.steps is None:
        node.add_spans(part.pid, layout.STEP, [part.from_ns], [part.until_ns], 1, 2, -1, -1)
    else:
        steps = part.steps
        node.add_spans(part.pid, layout.STEP, steps.start_ns, steps.end_ns, steps.number, 2, -1, -1)
    node.add_spans(part.pid, layout.STARVED, *part.starved, *part.host_ns)
    add_host_work(node, part.pid, [part.host_work], part.function_names)
    node.add_spans(part.pid, layout.EXPOSED_COPY, *part.exposed_copies)
    node.add_spans(part.pid, layout.DATA_WAIT, *part.waits, -1, -1, -1, -1)
    node.add_spans(part.pid, layout.SYNC, *part.syncs, layout.WHOLE_NS, 1)
    start, end, size = part.copies
    node.add_spans(part.pid, layout.H2D, start, end, size, -1)
    for loading in part.loading:
        is_covered = (
            2 * (loading.reading_ns + loading.outside_ns) >= loading.end_ns - loading.start_ns
        )
        node.add_spans(
            part.pid,
            layout.LOADING,
            loading.start_ns[is_covered],
            loading.end_ns[is_covered],
            loading.reading_ns[is_covered],
            loading.outside_ns[is_covered],
            -1,
            0,
        )
    for stream in part.operations:
        _add_operations(node, part, stream, groups.get(id(stream)))


def _add_operations(
    node: NodeTables, part: RankActivity, stream: StreamOperations, matched: MatchedSequence | None
) -> None:
    sequence = stream.sequence
    numbers: Int = np.arange(sequence.start_ns.size, dtype=np.int64)
    if matched is not None:
        node.add_group(part.pid, matched.group, matched.ranks)
        numbers += matched.first_number
    node.add_collectives(
        part.pid,
        sequence.start_ns,
        sequence.end_ns,
        matched.group if matched else 0,
        numbers if matched else -1,
        -1,
        sequence.operation,
        stream.exposed_ns,
    )


_TABLE_MARKERS = (b"CUPTI_ACTIVITY_KIND_", b"StringIds", b"NVTX_EVENTS", b"TARGET_INFO_")


class Nsys:
    """Importer of Nsight Systems profiles of one job, one file per node or process."""

    name: ClassVar[str] = "nsys"
    title: ClassVar[str] = "Nsight Systems profile (SQLite)"
    reads_windows: ClassVar[bool] = True
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether this is a SQLite file with a table that Nsight Systems writes."""
        return head.startswith(MAGIC) and any(sign in head for sign in _TABLE_MARKERS)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per profile.

        Raises: CannotImportError when no profile holds anything usable.
        """
        profiles: list[Profile] = []
        for source, account in zip(sources, accounts):
            try:
                with Database(source) as db:
                    profiles.append(read_profile(db, account))
            except (UsageError, DamagedError) as error:
                account.refuse(getattr(error, "message", str(error)))
            if profiles and profiles[-1].account is account and not profiles[-1].parts:
                account.refuse("the profile has no device activity")
                profiles.pop()
        if not profiles:
            raise CannotImportError(
                "; ".join(account.cut for account in accounts),
                "profile with nsys profile -t cuda,nvtx and export with nsys export -t sqlite",
            )
        groups = match_profiles(profiles)
        for profile in profiles:
            yield build_node(profile, groups)
