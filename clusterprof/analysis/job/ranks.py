"""List every recorded training process once, on nodes with distinct names.

A machine is identified by its boot id. Several recorders may have observed one machine:
one per job, one per container, one after another, or two at once. A process that two of
them recorded counts once. Two machines with one host name get the beginning of their
boot id appended.

It also decides which recorded ranks belong to one job, and numbers jobs and incarnations.

    name of the job, size of its world, restart    by the launcher, alike on all nodes
    the same rank twice, one after the other       incarnations: first with first, …
    the same rank twice at the same time           two jobs of one name: not compared

A process that two recorders observed is counted once. Every decision is reported in a
note.

It also attributes the time lost to restarts, up to a rank's first step afterwards.

    incarnation 0   |== steps ==|x exits with 1
    incarnation 1                    gap     |-- starts up --|== steps ==|
                                |====== fail-restart ==|

A rank was restarted when its launcher counted a restart, or when an earlier incarnation
of the same job ended in failure. Two runs of one name, one after the other, are no
restart. The gap lies in no recording of a rank: it is added to the result of the later
incarnation, whose window then begins where the previous incarnation ended. The gap is
known where both ran on one machine, by one clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from clusterprof.analysis.attribution.ledger import STARTUP, RankResult
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.node.analyze import NodeResult, map_ranks
from clusterprof.analysis.timeline.load.ranks import JobPosition
from clusterprof.report.model import CoverageGap, Culprit, Evidence, Finding

START_OVERLAP_NS = 1_000_000_000
"""ns by which a process may seem to begin before its predecessor has ended."""
_UNIQUE_ID_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """One rank's process in one recording."""

    index: tuple[int, int]
    """Number of the node, and index of the rank in NodeResult."""
    node: str
    machine: str
    """Boot id; the key of the recording where no boot id is known."""
    host: str
    pid: int
    started_ticks: int
    job_position: JobPosition
    job: str
    """Name of its job, else the rendezvous address of its ranks, else ""."""
    first_ns: int
    """Time of the first record; ns by the wall clock that its node had at the start."""
    last_ns: int
    """Time of the last record; ns by the wall clock that its node had at the start."""
    in_step_ns: int
    device: str
    """Identifies the device over all machines: its UUID, else machine and device name.

    "" when no device was measured.
    """


def list_recorded_processes(nodes: Sequence[NodeResult]) -> list[RecordedProcess]:
    """List the processes of all ranks in all recordings."""
    out = []
    for number, node in enumerate(nodes):
        launcher = node.loaded.header.launcher
        shared = str(launcher.get("job") or "") if launcher.get("named") else ""
        host = node.loaded.header.node.get("hostname", "")
        ahead_ns = compute_wall_clock_offset_ns(node)
        for position, rank in enumerate(node.ranks):
            out.append(
                RecordedProcess(
                    index=(number, position),
                    node=node.facts.name,
                    machine=node.facts.boot_id or node.facts.key,
                    host=host,
                    pid=rank.ledger.pid,
                    started_ticks=rank.started_ticks,
                    job_position=rank.job_position,
                    job=rank.job_position.job or shared or rank.job_position.rendezvous,
                    first_ns=rank.first_ns + ahead_ns,
                    last_ns=rank.last_ns + ahead_ns,
                    in_step_ns=rank.ledger.in_step_ns,
                    device=_format_device_name(node, rank.ledger.device),
                )
            )
    return out


def _format_device_name(node: NodeResult, name: str) -> str:
    if not name or name.startswith(_UNIQUE_ID_PREFIXES):
        return name
    return f"{name} of {node.facts.key}"


def describe_shared_devices(processes: Iterable[RecordedProcess]) -> list[str]:
    """Write a note for each device that several processes used at the same time.

    The time of a shared device counts for each of its processes.
    """
    by_device: dict[str, list[RecordedProcess]] = {}
    for process in processes:
        if process.device:
            by_device.setdefault(process.device, []).append(process)
    notes = []
    for device, users in sorted(by_device.items()):
        users = sorted(users, key=lambda process: process.first_ns)
        if any(b.first_ns + START_OVERLAP_NS < a.last_ns for a, b in pairwise(users)):
            names = ", ".join(f"{process.node} pid {process.pid}" for process in users)
            notes.append(
                f"{device} was used by several processes at once ({names}): its time counts"
                f" for each of them"
            )
    return notes


def compute_wall_clock_offset_ns(node: NodeResult) -> int:
    """Compute how far a node's wall clock was ahead of its monotonic clock.

    In ns, at the moment when its recording began.
    """
    started = node.loaded.header.started
    return int(started.get("realtime_ns", 0)) - int(started.get("monotonic_ns", 0))


def drop_duplicate_recordings(
    processes: Iterable[RecordedProcess],
) -> tuple[list[RecordedProcess], list[str]]:
    """Drop the shorter of two recordings of one process, and write a note about each.

    A process is identified by its machine, host, pid and start time. In another process-id
    namespace it has another pid, but the same start time, job and rank.

    Returns the kept processes in the order of the nodes, and the notes.
    """
    distinct: list[RecordedProcess] = []
    notes = []
    by_key: dict[tuple[object, ...], list[RecordedProcess]] = {}
    for process in sorted(processes, key=lambda process: (-process.in_step_ns, process.index)):
        keys = _build_identity_keys(process)
        again = next(
            (
                other
                for key in keys
                for other in by_key.get(key, ())
                if other.first_ns < process.last_ns and process.first_ns < other.last_ns
            ),
            None,
        )
        if again is not None:
            rank = process.job_position.rank
            name = f"pid {process.pid}" if rank is None else f"rank {rank}"
            notes.append(f"{name} on {process.node} was recorded twice; it counts once")
            continue
        distinct.append(process)
        for key in keys:
            by_key.setdefault(key, []).append(process)
    return sorted(distinct, key=lambda process: process.index), sorted(set(notes))


def _build_identity_keys(process: RecordedProcess) -> list[tuple[object, ...]]:
    if process.started_ticks < 0:
        return []
    keys: list[tuple[object, ...]] = [
        (
            "pid",
            process.machine,
            process.host,
            process.pid,
            process.started_ticks,
            process.job_position.rank,
        )
    ]
    if process.job_position.rank is not None and process.job:
        keys.append(
            ("rank", process.machine, process.started_ticks, process.job, process.job_position.rank)
        )
    return keys


def with_unique_node_names(nodes: Sequence[NodeResult]) -> tuple[NodeResult, ...]:
    """Return the nodes with part of the boot id added to names that machines share."""
    machines: dict[str, set[str]] = {}
    for node in nodes:
        if node.facts.boot_id:
            machines.setdefault(node.facts.name, set()).add(node.facts.boot_id)
    return tuple(
        _with_node_name(node, f"{node.facts.name}-{node.facts.boot_id[:8]}")
        if node.facts.boot_id and len(machines[node.facts.name]) > 1
        else node
        for node in nodes
    )


def _with_node_name(node: NodeResult, name: str) -> NodeResult:
    def rename_rank(rank: RankResult) -> RankResult:
        return replace(rank, ledger=replace(rank.ledger, node=name))

    return replace(
        node, facts=replace(node.facts, name=name), ranks=tuple(map(rename_rank, node.ranks))
    )


AMBIGUOUS_JOB = -1
"""Job number of ranks that could not be assigned to one job."""
_MISSING_RANKS_REMEDY = (
    "record on every node of the job, and give the folders of all: analyze host1/ host2/"
)


@dataclass(frozen=True, slots=True)
class Job:
    """One job, or one incarnation of it."""

    number: int
    name: str
    """Name that the launcher gave; "" without one."""
    world_size: int | None
    restart: int
    """How often the launcher had restarted its ranks."""
    incarnation: int
    """Number, from 0, among jobs with the same name and restart count."""
    ranks: tuple[int, ...]
    """Global ranks that were recorded, ascending."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the ranks of its world that were not recorded."""
        return tuple(sorted(set(range(self.world_size or 0)) - set(self.ranks)))


@dataclass(frozen=True, slots=True)
class JobAssignment:
    """All nodes, with every process once and the number of its job set."""

    nodes: tuple[NodeResult, ...]
    jobs: tuple[Job, ...] = ()
    notes: tuple[str, ...] = ()
    coverage_gaps: tuple[CoverageGap, ...] = field(default=())


def assign_jobs(nodes: Sequence[NodeResult]) -> JobAssignment:
    """Assign each rank the number of its job, and leave out duplicate recordings.

    The number is set in RankResult`.job`; AMBIGUOUS_JOB
    where one rank of a job was several processes at the same time.
    """
    nodes = with_unique_node_names(nodes)
    processes, notes = drop_duplicate_recordings(list_recorded_processes(nodes))
    notes += describe_shared_devices(processes)
    by_name: dict[tuple[str, int | None, int], list[RecordedProcess]] = {}
    for process in processes:
        by_name.setdefault(
            (process.job, process.job_position.world_size, process.job_position.restart), []
        ).append(process)
    jobs: list[Job] = []
    number: dict[tuple[int, int], int] = {}
    for (name, world_size, restart), members in sorted(by_name.items(), key=_get_job_sort_key):
        incarnations, unclear = _split_incarnations(members)
        for incarnation, ranks in enumerate(incarnations):
            job = Job(len(jobs), name, world_size, restart, incarnation, _list_global_ranks(ranks))
            jobs.append(job)
            number.update({process.index: job.number for process in ranks})
        for rank, duplicates in unclear:
            notes.append(_describe_clash(name, rank, duplicates))
        if unclear:
            number.update({process.index: AMBIGUOUS_JOB for process in members})
    numbered = tuple(
        replace(node, ranks=tuple(_assign_job_numbers(node.ranks, node_number, number)))
        for node_number, node in enumerate(nodes)
    )
    return JobAssignment(
        numbered, tuple(jobs), (*notes, *_describe_jobs(jobs)), tuple(_report_missing_ranks(jobs))
    )


def _assign_job_numbers(
    ranks: Iterable[RankResult], node: int, number: Mapping[tuple[int, int], int]
) -> Iterable[RankResult]:
    for position, rank in enumerate(ranks):
        if (node, position) in number:
            yield replace(rank, job=number[node, position])


def _get_job_sort_key(item: tuple[tuple[str, int | None, int], object]) -> tuple[str, int, int]:
    name, world_size, restart = item[0]
    return name, world_size or 0, restart


def _list_global_ranks(processes: Iterable[RecordedProcess]) -> tuple[int, ...]:
    ranks = {process.job_position.rank for process in processes}
    return tuple(sorted(rank for rank in ranks if rank is not None))


def _split_incarnations(
    processes: list[RecordedProcess],
) -> tuple[list[list[RecordedProcess]], list[tuple[int, list[RecordedProcess]]]]:
    """Split the processes of one job name into incarnations.

    Returns the incarnations, and by rank the processes that could not be separated.
    """
    by_rank: dict[int | None, list[RecordedProcess]] = {}
    for process in sorted(processes, key=lambda process: process.first_ns):
        by_rank.setdefault(process.job_position.rank, []).append(process)
    unnumbered = by_rank.pop(None, [])  # processes that no launcher numbered clash with no other
    max_processes = max((len(same_rank) for same_rank in by_rank.values()), default=1)
    if max_processes < 2:
        return [processes], []
    parts = _group_processes(processes, lambda process: process.job_position.rendezvous)
    if len(parts) > 1 and not any(_find_concurrent_duplicates(part) for part in parts):
        return parts, []
    clashes = _find_concurrent_duplicates(processes)
    if clashes:
        return [], clashes
    if all(len(same_rank) == max_processes for same_rank in by_rank.values()):
        incarnations = [
            [same_rank[number] for same_rank in by_rank.values()] for number in range(max_processes)
        ]
    else:
        incarnations = _group_by_time(
            [process for process in processes if process.job_position.rank is not None]
        )
        unclear = [
            pair for incarnation in incarnations for pair in _find_repeated_ranks(incarnation)
        ]
        if unclear:
            return [], unclear
    incarnations[-1] += unnumbered
    return incarnations, []


def _group_processes(
    processes: Iterable[RecordedProcess], get_key: Callable[[RecordedProcess], str]
) -> list[list[RecordedProcess]]:
    parts: dict[str, list[RecordedProcess]] = {}
    for process in processes:
        parts.setdefault(get_key(process), []).append(process)
    return list(parts.values())


def _find_repeated_ranks(
    processes: Iterable[RecordedProcess],
) -> list[tuple[int, list[RecordedProcess]]]:
    by_rank: dict[int, list[RecordedProcess]] = {}
    for process in processes:
        if process.job_position.rank is not None:
            by_rank.setdefault(process.job_position.rank, []).append(process)
    return [(rank, same_rank) for rank, same_rank in sorted(by_rank.items()) if len(same_rank) > 1]


def _find_concurrent_duplicates(
    processes: Iterable[RecordedProcess],
) -> list[tuple[int, list[RecordedProcess]]]:
    """Find the rank numbers that two processes held at the same time."""
    out = []
    for rank, same_rank in _find_repeated_ranks(processes):
        same_rank = sorted(same_rank, key=lambda process: process.first_ns)
        if any(b.first_ns + START_OVERLAP_NS < a.last_ns for a, b in itertools.pairwise(same_rank)):
            out.append((rank, same_rank))
    return out


def _group_by_time(processes: Iterable[RecordedProcess]) -> list[list[RecordedProcess]]:
    """Group processes whose times overlap or touch, by the wall clocks of their nodes."""
    incarnations: list[list[RecordedProcess]] = []
    until_ns = 0
    for process in sorted(processes, key=lambda process: process.first_ns):
        if not incarnations or process.first_ns + START_OVERLAP_NS >= until_ns:
            incarnations.append([])
        incarnations[-1].append(process)
        until_ns = max(until_ns, process.last_ns)
    return incarnations


def _describe_clash(name: str, rank: int, duplicates: Sequence[RecordedProcess]) -> str:
    where = ", ".join(f"{process.node} pid {process.pid}" for process in duplicates)
    return (
        f"rank {rank}{format_job_suffix(name)} was held by several processes at once"
        f" ({where}): recordings of more than one job? Its ranks were not compared with each other"
    )


def format_job_suffix(name: str) -> str:
    """Format " of job NAME"; "" for a job without a name."""
    return f" of job {name}" if name else ""


_MAX_RANGES = 8


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as "0-3, 7"; after 8 ranges only how many more numbers there are."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_MAX_RANGES]]
    hidden_count = sum(b - a + 1 for a, b in runs[_MAX_RANGES:])
    return ", ".join(shown) + (f" and {hidden_count} more" if hidden_count else "")


def _describe_jobs(jobs: Sequence[Job]) -> list[str]:
    names = list(dict.fromkeys(job.name for job in jobs))
    notes = []
    if len(names) > 1:
        described = "; ".join(
            (name or "one without a name")
            + f" (ranks {format_ranges(r for job in jobs if job.name == name for r in job.ranks)})"
            for name in names[:4]
        )
        unnamed = f" and {len(names) - 4} more" if len(names) > 4 else ""
        notes.append(
            f"recordings of {len(names)} jobs were given: {described}{unnamed}; ranks of different"
            " jobs are never compared"
        )
    for name in names:
        incarnations = [job for job in jobs if job.name == name]
        if len(incarnations) > 1:
            times = f"{len(incarnations) - 1} times" if len(incarnations) > 2 else "once"
            notes.append(
                f"the ranks{format_job_suffix(name)} were restarted {times}; each incarnation has"
                " lines of its own"
            )
    return notes


def _report_missing_ranks(jobs: Sequence[Job]) -> list[CoverageGap]:
    out = []
    for job in jobs:
        if job.missing and job.ranks:
            message = (
                f"{len(job.missing)} of {job.world_size} ranks{format_job_suffix(job.name)}"
                f" have no recording:"
                f" {format_ranges(job.missing)}; the cause of waits for them is not known"
                f" (sync-unknown-peer)"
            )
            out.append(CoverageGap("ranks", "absent", message, _MISSING_RANKS_REMEDY))
    return out


FAIL_RESTART = "fail-restart"
_RESTART_CONFIDENCE, _UNCOUNTED_RESTART_CONFIDENCE = 0.95, 0.8
_SIGTERM = 15  # how a launcher ends the ranks that did not fail


@dataclass(frozen=True, slots=True)
class RestartResult:
    """All nodes, with the time of restarts in the results of their ranks."""

    nodes: tuple[NodeResult, ...]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Incarnation:
    """One rank in one incarnation of its job."""

    job: Job
    machine: str
    result: RankResult
    failed_ns: int | None
    """When it failed, ns on its machine's clock; None = no failure was recorded."""


def attribute_restarts(nodes: Sequence[NodeResult], jobs: Sequence[Job]) -> RestartResult:
    """Move start-up time of restarted ranks, and the gap before it, to `fail-restart`."""
    incarnations = _list_incarnations(nodes, jobs)
    gaps: dict[tuple[str, int, int], int] = {}
    failed: list[_Incarnation] = []
    counted = True
    for same_rank in incarnations.values():
        before: _Incarnation | None = None
        for incarnation in same_rank:
            has_failed = before is not None and before.failed_ns is not None
            if incarnation.job.restart or has_failed:
                gaps[_get_process_key(incarnation.result)] = _compute_gap_ns(before, incarnation)
                counted &= bool(incarnation.job.restart)
                if before is not None and has_failed:
                    failed.append(before)
            before = incarnation
    if not gaps:
        return RestartResult(tuple(nodes))
    new_nodes = map_ranks(
        nodes, lambda rank: _with_restart_time(rank, gaps.get(_get_process_key(rank)))
    )
    return RestartResult(new_nodes, _build_restart_finding(new_nodes, failed, counted))


def _get_process_key(result: RankResult) -> tuple[str, int, int]:
    return result.ledger.node, result.ledger.pid, result.started_ticks


def _list_incarnations(
    nodes: Sequence[NodeResult], jobs: Sequence[Job]
) -> dict[tuple, list[_Incarnation]]:
    """List the incarnations of each rank by job name and rank, in the order in which they ran."""
    numbered = {job.number: job for job in jobs}
    out: dict[tuple, list[_Incarnation]] = {}
    for node in nodes:
        ends = {(ending.pid, ending.started_ticks): ending for ending in node.endings}
        for rank in node.ranks:
            job = numbered.get(rank.job)
            if job is None or not job.name or rank.job_position.rank is None:
                continue
            end = ends.get((rank.ledger.pid, rank.started_ticks))
            exited = {} if end is None or end.exited is None else end.exited
            signal, code = exited.get("signal"), exited.get("exit_code")
            failed = bool(code) or bool(signal and signal != _SIGTERM)
            failed_ns = end.exited_ns if failed and end is not None else None
            incarnation = _Incarnation(job, node.facts.boot_id or node.facts.key, rank, failed_ns)
            key = job.name, job.world_size, rank.job_position.rank
            out.setdefault(key, []).append(incarnation)
    for same_rank in out.values():
        same_rank.sort(
            key=lambda incarnation: (incarnation.job.restart, incarnation.job.incarnation)
        )
    return out


def _compute_gap_ns(before: _Incarnation | None, incarnation: _Incarnation) -> int:
    if before is None or before.machine != incarnation.machine:
        return 0
    return max(0, incarnation.result.first_ns - before.result.last_ns)


def _with_restart_time(result: RankResult, gap_ns: int | None) -> RankResult:
    if gap_ns is None:
        return result
    ledger = result.ledger
    lines = dict(ledger.outside_buckets)
    ns = lines.pop(STARTUP, 0) + gap_ns
    if not ns:
        return result
    lines = {FAIL_RESTART: ns, **lines}
    moved = replace(
        ledger,
        window_ns=ledger.window_ns + gap_ns,
        outside_ns=ledger.outside_ns + gap_ns,
        outside_buckets=tuple(lines.items()),
    )
    return replace(result, ledger=moved)


def _build_restart_finding(
    nodes: Sequence[NodeResult], failed: Sequence[_Incarnation], counted: bool
) -> tuple[Finding, ...]:
    ledgers = [rank.ledger for node in nodes for rank in node.ranks]
    spent = [dict(ledger.outside_buckets).get(FAIL_RESTART, 0) for ledger in ledgers]
    if not any(spent):
        return ()
    window_ns = sum(ledger.window_ns for ledger in ledgers)
    first = sorted(failed, key=lambda incarnation: incarnation.failed_ns or 0)
    culprits = [
        Culprit(
            incarnation.result.ledger.node,
            incarnation.result.ledger.rank,
            incarnation.result.ledger.device,
        )
        for incarnation in first
    ]
    return (
        Finding(
            cause=CAUSES[FAIL_RESTART],
            lost_ns=sum(spent),
            share_ratio=sum(spent) / window_ns if window_ns else 0.0,
            recoverable_ns=None,
            confidence_ratio=_RESTART_CONFIDENCE if counted else _UNCOUNTED_RESTART_CONFIDENCE,
            grade="A" if counted else "B",
            upper_bound=False,
            outside_steps=True,
            culprits=tuple(dict.fromkeys(culprits)),
            evidence=(
                Evidence(
                    "restart.longest_ns",
                    float(max(spent)),
                    "ns",
                    "from the end of a rank to its first step after the restart, at the longest",
                ),
            ),
        ),
    )
