"""Build the life of a job from the results of its ranks, over all attempts and recordings.

Every rank has a slot, and a slot holds one device from the beginning of the life to its end:

    slot 0   |-- gap --|== attempt 0 ==|-- gap --|== attempt 1 ==|
    slot 1   |--- gap --|== attempt 0 ==|- gap -|=== attempt 1 ==|

Attempts are placed by the wall clocks of their nodes, and the ledger of the rank divides each. The
gap before an attempt is divided where the job was submitted and where it was started:

    |-- down --|-- queued --|-- starting up --|== attempt ==|
    last record     submitted    started           first record

Steps that a later attempt does again are the last steps of the earlier one. Of these, the time that
was productive counts as done again: the rest is lost already, by its causes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from clusterprof.analysis.attribution.ledger import LONG_FIRST_STEP, NO_STEPS, RankResult
from clusterprof.analysis.attribution.ledger import STARTUP as STARTUP_LINE
from clusterprof.analysis.attribution.rank.step_blocks import LOST as LOST_ROW
from clusterprof.analysis.attribution.rank.step_blocks import STEPS, TIME
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.cross_rank.hang_findings import FAIL_HANG
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.job.ranks import (
    AMBIGUOUS_JOB,
    FAIL_RESTART,
    START_OVERLAP_NS,
    compute_wall_clock_offset_ns,
)
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.node.progress import ProcessProgress
from clusterprof.errors import UsageError
from clusterprof.report.life import (
    AFTER,
    CHECKPOINT,
    DOWN,
    EVALUATION,
    HANG,
    LIFE_PARTS,
    LOST,
    QUEUED,
    REPEATED,
    RESTART,
    STARTUP,
    TRAINING,
    UNMEASURED,
    Attempt,
    Life,
    LifePart,
)

QUEUED_AT, STARTED_AT = "CLUSTERPROF_QUEUED_AT", "SLURM_JOB_START_TIME"
"""Variables of the job with the time of its submission and of its start."""
EVALUATION_CAUSE = "eval-host"
"""Cause of the time lost to evaluation, metrics and logging; others of its family are no such work.
"""
NO_QUEUE_TIME = "the time of submission is not known: give --queued-at TIME"
LATE_QUEUE_TIME = "the stated time of submission is after the start of the job"
OTHER_JOBS = "recordings of different jobs were given"
AT_ONCE = "two processes of one rank ran at the same time"
_RESTART_SUFFIX = re.compile(r"-restart\d+$")
_SLURM_STEP = re.compile(r"(\d+)\.\w+")
_MIN_UNIX_S, _MAX_UNIX_S = 1e9, 1e11
"""Plausible times of a start, seconds since 1970: the years 2001 to 5138."""
_NEVER = 1 << 62
"""A number of a step that no job reaches."""


@dataclass(slots=True)
class _Process:
    """One rank in one attempt; times are ns since 1970."""

    node: NodeResult
    result: RankResult
    start_ns: int
    end_ns: int
    progress: ProcessProgress
    attempt: tuple[int, int] = (0, 0)
    """Number of its job, and for ranks without a number that of its place in the slot."""
    repeated: int | None = 0
    """Its steps that were done again; None = not known."""


@dataclass(slots=True)
class _Sums:
    """Device time by part, ns; what is known adds up to the slots' time."""

    ns: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, ns: int) -> None:
        """Add time to a part."""
        self.ns[part] = self.ns.get(part, 0) + ns


def build_life(across: JobState, queued_at_ns: int | None = None) -> Life | None:
    """Build the life of a job; None without steps, and for imported traces.

    queued_at_ns: when the job was submitted, ns since 1970; None = as its recordings state.
    Raises: UsageError if `queued_at_ns` is after the first record.
    """
    nodes = [node for node in across.nodes if node.ranks]
    processes = [process for node in nodes for process in _list_processes(node)]
    is_imported = any("importer" in node.loaded.header.versions for node in nodes)
    if is_imported or not any(process.result.ledger.in_step_ns for process in processes):
        return None
    if any(process.result.job == AMBIGUOUS_JOB for process in processes):
        return _build_missing(AT_ONCE)
    if not is_one_job(nodes):
        return _build_missing(OTHER_JOBS)
    slots = _assign_slots(processes)
    if slots is None:
        return _build_missing(AT_ONCE)
    first_ns = min(process.start_ns for process in processes)
    if queued_at_ns is not None and queued_at_ns > first_ns:
        raise UsageError(
            "--queued-at is after the first record of the job",
            "give the time at which the job was submitted",
        )
    why_repeated = _count_repeated_steps(slots)
    return _sum_slots(slots, queued_at_ns, why_repeated)


def _build_missing(why: str) -> Life:
    return Life(0, 0, 0, 0, (), (), why)


def _list_processes(node: NodeResult) -> Iterable[_Process]:
    offset_ns = compute_wall_clock_offset_ns(node)
    progress = {(item.pid, item.started_ticks): item for item in node.progress}
    for rank in node.ranks:
        key = rank.ledger.pid, rank.started_ticks
        own_progress = progress.get(key) or ProcessProgress(*key)
        yield _Process(
            node, rank, rank.first_ns + offset_ns, rank.last_ns + offset_ns, own_progress
        )


def is_one_job(nodes: Sequence[NodeResult]) -> bool:
    """Return whether recordings are of one job.

    They are if their ids are equal without the number of the restart, or the names that Slurm knows
    them by, or the scripts after which unnamed jobs are called.
    """
    ids, names = set(), set()
    for node in nodes:
        launcher = node.loaded.header.launcher
        job, _, suffix = str(launcher.get("job") or "").partition("@")
        ids.add((_strip_restart(job), bool(launcher.get("named")), bool(suffix)))
        names.add(_find_variable(node, "SLURM_JOB_NAME"))
    return len(ids) == 1 or (len(names) == 1 and "" not in names)


def _strip_restart(job: str) -> str:
    """Return the id that restarts and Slurm steps of a job share; "" for a generated one."""
    job = _RESTART_SUFFIX.sub("", job)
    step = _SLURM_STEP.fullmatch(job)
    return "" if re.fullmatch(r"launch-\d+|\d+-\d{6,}", job) else step[1] if step else job


def _find_variable(node: NodeResult, name: str) -> str:
    """Return a variable of the recorder or of its ranks; "" if none has it."""
    recorder_variables = node.loaded.header.launcher.get("variables")
    sources = [
        recorder_variables if isinstance(recorder_variables, Mapping) else {},
        *(rank.launcher_variables for rank in node.ranks),
    ]
    return next((str(source[name]) for source in sources if source.get(name)), "")


def parse_wall_time(text: str) -> int | None:
    """Parse seconds since 1970, or an ISO time, to ns since 1970; None for anything else.

    A time without a zone is local.
    """
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    return round(seconds * 1e9) if _MIN_UNIX_S <= seconds <= _MAX_UNIX_S else None


def _assign_slots(processes: Sequence[_Process]) -> list[list[_Process]] | None:
    """Assign the processes to slots, each in the order of time.

    A rank has its own slot; ranks without a number follow each other in the first free one. None if
    two processes of a rank ran at the same time.
    """
    numbered: dict[int, list[_Process]] = {}
    unnumbered: list[list[_Process]] = []
    for process in sorted(processes, key=lambda process: process.start_ns):
        rank = process.result.job_position.rank
        if rank is not None:
            process.attempt = process.result.job, -1
            numbered.setdefault(rank, []).append(process)
            continue
        is_free = (slot for slot in unnumbered if not _overlap(slot[-1], process))
        slot = next(is_free, None)
        if slot is None:
            unnumbered.append(slot := [])
        slot.append(process)
        process.attempt = process.result.job, len(slot) - 1
    slots = [*(numbered[rank] for rank in sorted(numbered)), *unnumbered]
    is_clear = not any(_overlap(*pair) for slot in slots for pair in pairwise(slot))
    return slots if is_clear else None


def _overlap(first: _Process, second: _Process) -> bool:
    return second.start_ns + START_OVERLAP_NS < first.end_ns


def _count_repeated_steps(slots: Sequence[Sequence[_Process]]) -> str:
    """Set how many steps of each process were done again; return why some are not known.

    Numbers below are the job's own: 1 to 20 done, then begun with 11, so 10 are repeated.
    """
    why = ""
    for slot in slots:
        resumed = _NEVER  # the lowest number that a later attempt began with
        why_later, has_later = "", False
        for process in reversed(slot):
            progress = process.progress
            if not progress.steps:
                continue
            first = progress.first_job_step
            why_unknown = why_later or ("" if first is not None else progress.why_missing)
            if has_later and (first is None or why_unknown):
                process.repeated = None
                why = why or why_unknown
            elif has_later and first is not None:
                repeated = first + progress.steps - max(resumed, first)
                process.repeated = min(max(repeated, 0), progress.steps)
            why_later, has_later = why_unknown, True
            resumed = resumed if first is None else min(resumed, first)
    return why


def _sum_slots(
    slots: Sequence[Sequence[_Process]], queued_at_ns: int | None, why_repeated: str
) -> Life:
    """Sum the time of all slots by part."""
    begin_ns, why_queued = _find_begin(slots, queued_at_ns)
    sums = _Sums()
    ends = []
    for slot in slots:
        at_ns = begin_ns
        for number, process in enumerate(slot):
            gap_ns = max(process.start_ns - at_ns, 0)
            _add_gap(sums, slot, number, at_ns, gap_ns, queued_at_ns)
            _add_process(sums, process, number > 0)
            # by wall clocks an attempt may seem to begin before the end of the one before
            at_ns += gap_ns + process.end_ns - process.start_ns
        ends.append(at_ns)
    end_ns = max(ends)
    sums.add(AFTER, sum(end_ns - own_ns for own_ns in ends))
    missing = {QUEUED: why_queued, REPEATED: why_repeated}
    parts = []
    for name in LIFE_PARTS:
        ns, why = sums.ns.get(name, 0), missing.get(name, "")
        parts.append(LifePart(name, ns if ns or not why else None, why))
    attempts = _list_attempts(slots, begin_ns)
    wall_ns = end_ns - begin_ns
    return Life(begin_ns, wall_ns, len(slots), wall_ns * len(slots), tuple(parts), attempts)


def _find_begin(slots: Sequence[Sequence[_Process]], queued_at_ns: int | None) -> tuple[int, str]:
    """Find when the life begins, ns since 1970, and why its time in the queue is not known."""
    firsts = [slot[0] for slot in slots]
    first_ns = min(process.start_ns for process in firsts)
    if queued_at_ns is not None:
        return queued_at_ns, ""
    queued = [ns for process in firsts if (ns := _find_time(process, QUEUED_AT)) is not None]
    if queued and min(queued) <= first_ns:
        return min(queued), ""
    started = [ns for process in firsts if (ns := _find_time(process, STARTED_AT)) is not None]
    begin_ns = min([first_ns, *started])
    return begin_ns, LATE_QUEUE_TIME if queued else NO_QUEUE_TIME


def _find_time(process: _Process, name: str) -> int | None:
    return parse_wall_time(_find_variable(process.node, name))


def _add_gap(
    sums: _Sums,
    slot: Sequence[_Process],
    number: int,
    from_ns: int,
    gap_ns: int,
    queued_at_ns: int | None,
) -> None:
    """Add the gap before an attempt, divided where the job was submitted and started."""
    process, until_ns = slot[number], from_ns + gap_ns
    starting = RESTART if number else STARTUP
    if number and slot[number - 1].node is process.node:
        sums.add(DOWN, gap_ns)  # its launcher started it again
        return
    queued_ns = _find_time(process, QUEUED_AT)
    if not number and queued_at_ns is not None:
        queued_ns = queued_at_ns
    started_ns = _find_time(process, STARTED_AT)
    if started_ns is None:
        started_ns = int(process.node.loaded.header.started.get("realtime_ns", 0)) or until_ns
    started_ns = min(max(started_ns, from_ns), until_ns)
    before_ns = started_ns if queued_ns is None else min(max(queued_ns, from_ns), started_ns)
    sums.add(DOWN if number else STARTUP, before_ns - from_ns)
    sums.add(QUEUED, started_ns - before_ns)
    sums.add(starting, until_ns - started_ns)


def _add_process(sums: _Sums, process: _Process, is_later: bool) -> None:
    """Add the time of one rank in one attempt, as its ledger divides it."""
    result, ledger = process.result, process.result.ledger
    outside = dict(ledger.outside_buckets)
    # the ledger of a restarted rank begins where the attempt before ended
    gap_ns = ledger.window_ns - (result.last_ns - result.first_ns)
    starting = RESTART if is_later or FAIL_RESTART in outside else STARTUP
    sums.add(starting, outside.pop(FAIL_RESTART, 0) - gap_ns)
    for line in (STARTUP_LINE, NO_STEPS, LONG_FIRST_STEP):
        sums.add(starting, outside.pop(line, 0))
    sums.add(HANG, outside.pop(FAIL_HANG, 0))
    after_ns = sum(outside.values())
    save_ns = min(process.progress.save_ns, after_ns)
    evaluation_ns = min(process.progress.evaluation_ns, after_ns - save_ns)
    sums.add(AFTER, after_ns - save_ns - evaluation_ns)
    sums.add(UNMEASURED, ledger.unmeasured_ns)
    sums.add(CHECKPOINT, save_ns)
    for id_, ns in ledger.buckets:
        sums.add(_find_part(id_, starting), ns)
    in_evaluation_ns = min(result.accumulator.totals.get("evaluation", 0), ledger.productive_ns)
    sums.add(EVALUATION, evaluation_ns + in_evaluation_ns)
    training_ns = ledger.productive_ns - in_evaluation_ns
    repeated_ns = _estimate_repeated_time(process, training_ns)
    sums.add(REPEATED, repeated_ns)
    sums.add(TRAINING, training_ns - repeated_ns)


def _find_part(bucket: str, starting: str) -> str:
    """Find the part that lost time inside steps belongs to."""
    if bucket in (FAIL_HANG, EVALUATION_CAUSE):
        return HANG if bucket == FAIL_HANG else EVALUATION
    family = CAUSES[bucket].family if bucket in CAUSES else bucket
    return {"checkpoint": CHECKPOINT, "startup": starting}.get(family, LOST)


def _estimate_repeated_time(process: _Process, training_ns: int) -> int:
    """Estimate how much of a process's training its last steps took that were done again, ns.

    Exact to the step in runs of up to 128 steps. In longer runs a block of steps may lie on both
    sides: its time is divided by the number of steps.
    """
    blocks, remaining_steps = process.result.blocks, process.repeated
    if blocks is None or not remaining_steps:
        return 0
    sums = blocks.sums
    work = [max(int(ns), 0) for ns in sums[TIME] - sums[LOST_ROW]]
    repeated_ns = 0
    for steps, ns in zip(reversed(sums[STEPS].tolist()), reversed(work)):
        counted_steps = min(steps, remaining_steps)
        repeated_ns += ns * counted_steps // steps if steps else ns
        remaining_steps -= counted_steps
        if not remaining_steps:
            break
    return training_ns * repeated_ns // max(sum(work), 1)


def _list_attempts(slots: Sequence[Sequence[_Process]], begin_ns: int) -> tuple[Attempt, ...]:
    """List the attempts in the order in which they began."""
    groups: dict[tuple[int, int], list[_Process]] = {}
    for slot in slots:
        for process in slot:
            groups.setdefault(process.attempt, []).append(process)
    attempts = sorted(groups.values(), key=lambda group: min(item.start_ns for item in group))
    return tuple(_summarize_attempt(group, begin_ns) for group in attempts)


def _summarize_attempt(processes: Sequence[_Process], begin_ns: int) -> Attempt:
    repeated = [process.repeated for process in processes]
    known_counts = [count for count in repeated if count is not None]
    firsts = [process.progress.first_job_step for process in processes]
    numbers = [first for first in firsts if first is not None]
    return Attempt(
        start_ns=min(process.start_ns for process in processes) - begin_ns,
        end_ns=max(process.end_ns for process in processes) - begin_ns,
        ranks=len(processes),
        steps=max(process.progress.steps for process in processes),
        first_job_step=min(numbers, default=None),
        repeated_steps=max(known_counts) if len(known_counts) == len(repeated) else None,
        ended=_describe_end(processes),
    )


def _describe_end(processes: Sequence[_Process]) -> str:
    """Describe how the first rank that failed ended; "" if none is known to have failed."""
    ends = []
    for process in processes:
        key = process.result.ledger.pid, process.result.started_ticks
        ends += [
            (failed.t_ns + compute_wall_clock_offset_ns(process.node), failed)
            for failed in process.node.failed_exits
            if (failed.pid, failed.started_ticks) == key
        ]
    if not ends:
        return ""
    failed = min(ends, key=lambda end: end[0])[1]
    return f"signal {failed.signal}" if failed.signal else f"exit status {failed.status}"
