"""Report ranks that hung when their recordings ended, and book their time.

It also finds jobs that stopped making progress though their operations were not marked.

    device of every rank      idle for at least 10 s, to the end of its recording
    main thread of each       asleep, and not on a CPU in the last ten seconds
    how it ended              recorded to the end, or ended by a signal: not by itself

A job that is finished ends; a job that saves or evaluates uses its CPUs. Which rank the
others wait for is not known, except for a few ranks that sleep in another kernel
function than most.

It also attributes pauses of all ranks on their CPUs to an unmarked evaluation.

Garbage collection, or a compiler, stops one rank, and the others wait for it. When the
devices of all ranks of a job are idle for some windows while their main threads run on
a CPU, and no rank waits for another, the program itself pauses: metrics of a
validation, a log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.ledger import (
    AFTER_STEPS,
    NO_STEPS,
    RankResult,
    with_attributed_waits,
)
from clusterprof.analysis.attribution.rank.claims import PEERS_UNKNOWN
from clusterprof.analysis.attribution.rank.host_activity import PAUSED
from clusterprof.analysis.attribution.rank.unprobed_rank import ON_CPU
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.attribution.wait_for.hangs import Hang
from clusterprof.analysis.cross_rank.hang_evidence import (
    build_hang_line,
    describe_last_line,
    describe_ras,
    format_operation,
)
from clusterprof.analysis.cross_rank.hangs import (
    HANG_NS,
    HangAnalysis,
    JobRank,
    RecordedRank,
    analyze_hangs,
)
from clusterprof.analysis.cross_rank.state import JobState, group_ranks_by_job
from clusterprof.analysis.job.ranks import AMBIGUOUS_JOB, format_ranges
from clusterprof.analysis.node.analyze import NodeResult, map_ranks
from clusterprof.analysis.node.observations import RankEnding
from clusterprof.analysis.timeline.model import SOURCE_DEVICE_SAMPLES
from clusterprof.probe import layout
from clusterprof.report.model import Culprit, Evidence, Finding

FAIL_HANG = "fail-hang"
_MAX_NOTES = 8
_HANG_CONFIDENCE, _UNRECORDED_ROOT_CONFIDENCE = 0.95, 0.7
_THREAD_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "blocked in the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended and not waited for",
}


def attribute_hangs(state: JobState) -> JobState:
    """Find ranks that hung in the end, move their time to `fail-hang` and describe it."""
    analysis = analyze_hangs(state.nodes)
    # Work that is waited for and a look into NCCL explain; they are no failures.
    explained = [
        _describe_working_root(hang, analysis) for hang in analysis.waits_for_working[:_MAX_NOTES]
    ]
    if not analysis.hangs:
        return replace(state, notes=(*explained, *state.notes))
    lost = _measure_hang_times(analysis)
    nodes = tuple(_with_hang_time(node, lost) for node in state.nodes)
    notes = [_describe_hang(hang, analysis) for hang in analysis.hangs[:_MAX_NOTES]]
    finding = _build_hang_finding(nodes, analysis)
    state = replace(
        state, nodes=nodes, notes=(*explained, *describe_ras(state.nodes), *state.notes)
    )
    return _with_hang_reports(state, (finding,), notes)


def _with_hang_reports(
    state: JobState, findings: Sequence[Finding], notes: Sequence[str]
) -> JobState:
    return replace(
        state,
        hang_findings=(*state.hang_findings, *findings),
        hang_notes=(*state.hang_notes, *notes),
    )


def _measure_hang_times(analysis: HangAnalysis) -> dict[tuple[str, int, int], int]:
    """Measure how long each waiting or awaited rank hung, ns by node and process."""
    out: dict[tuple[str, int, int], int] = {}
    for hang in analysis.hangs:
        for number in {*hang.waiting, *hang.roots}:
            recorded = analysis.recorded.get(analysis.ranks[number])
            if recorded is None:
                continue
            under_way = analysis.under_way.get(number)
            ns = recorded.silent_ns if under_way is None else recorded.waited_ns(under_way)
            out[recorded.node.facts.key, recorded.ending.pid, recorded.ending.started_ticks] = ns
    return out


def _with_hang_time(node: NodeResult, lost: dict[tuple[str, int, int], int]) -> NodeResult:
    def with_hang_time(rank: RankResult) -> RankResult:
        ns = lost.get((node.facts.key, rank.ledger.pid, rank.started_ticks), 0)
        lines = dict(rank.ledger.outside_buckets)
        for name in (AFTER_STEPS, NO_STEPS):
            part = min(ns, lines.get(name, 0))
            if part > 0:
                lines[name] -= part
                lines[FAIL_HANG] = lines.get(FAIL_HANG, 0) + part
                ns -= part
        remaining = tuple((name, amount) for name, amount in lines.items() if amount)
        return replace(rank, ledger=replace(rank.ledger, outside_buckets=remaining))

    return replace(node, ranks=tuple(map(with_hang_time, node.ranks)))


def _build_hang_finding(nodes: Sequence[NodeResult], analysis: HangAnalysis) -> Finding:
    ledgers = [rank.ledger for node in nodes for rank in node.ranks]
    lost_ns = sum(dict(ledger.outside_buckets).get(FAIL_HANG, 0) for ledger in ledgers)
    window_ns = sum(ledger.window_ns for ledger in ledgers)
    all_recorded = all(hang.recorded for hang in analysis.hangs)
    waiting = {number for hang in analysis.hangs for number in hang.waiting}
    longest_ns = max(
        analysis.recorded[analysis.ranks[number]].waited_ns(analysis.under_way[number])
        for number in waiting
    )
    culprits, lines = [], []
    for hang in analysis.hangs:
        for number in _select_culprits(hang, analysis):
            recorded = analysis.recorded.get(analysis.ranks[number])
            if recorded is not None:
                culprits.append(_build_hang_culprit(recorded))
                lines.append(build_hang_line(recorded.node, recorded.ending, lost_ns))
    named = [line for line in lines if line is not None]
    return Finding(
        cause=CAUSES[FAIL_HANG],
        lost_ns=lost_ns,
        share_ratio=lost_ns / window_ns if window_ns else 0.0,
        recoverable_ns=None,
        confidence_ratio=_HANG_CONFIDENCE if all_recorded else _UNRECORDED_ROOT_CONFIDENCE,
        grade="A" if all_recorded else "B",
        upper_bound=False,
        outside_steps=True,
        culprits=tuple(dict.fromkeys(culprits)),
        lines=tuple(named[:1]),  # of the most awaited rank
        evidence=(
            Evidence(
                "hang.longest_ns",
                float(longest_ns),
                "ns",
                "longest time a rank had been in one operation at its last record",
            ),
            Evidence(
                "hang.waiting_count",
                float(len(waiting)),
                "count",
                "ranks that waited in an operation that did not end",
            ),
        ),
    )


def _select_culprits(hang: Hang, analysis: HangAnalysis) -> tuple[int, ...]:
    """Select the roots to name: of a circle those that most ranks are not with, else all."""
    if hang.is_complete:
        return ()
    if not hang.is_cycle:
        return hang.roots
    operations = {number: _get_operation(number, analysis) for number in hang.roots}
    usual, count = Counter(operations.values()).most_common(1)[0]
    if 2 * count <= len(hang.roots):
        return hang.roots
    return tuple(number for number in hang.roots if operations[number] != usual)


def _get_operation(number: int, analysis: HangAnalysis) -> tuple[int, int, int]:
    """Return group, number and kind of the operation that a rank waits in."""
    began = analysis.under_way[number]
    return began.group, began.number, began.operation & layout.OPERATION_MASK


def _build_hang_culprit(recorded: RecordedRank) -> Culprit:
    process_key = recorded.ending.pid, recorded.ending.started_ticks  # a pid may be used again
    ranks = recorded.node.ranks
    rank = next((r for r in ranks if (r.ledger.pid, r.started_ticks) == process_key), None)
    device = rank.ledger.device if rank is not None else ""
    return Culprit(recorded.node.facts.name, recorded.ending.job_position.rank, device)


def _describe_hang(hang: Hang, analysis: HangAnalysis) -> str:
    first = hang.waiting[0]
    recorded = analysis.recorded[analysis.ranks[first]]
    seconds = recorded.waited_ns(analysis.under_way[first]) / 1e9
    waiting = _format_global_ranks(hang.waiting, analysis)
    where = _format_operation(first, analysis)
    if hang.is_complete:
        return (
            f"progress stopped: {waiting}, the whole group, arrived at {where} and none completed"
            f" it for {seconds:.0f} s. Suspect the network or a device"
        )
    if hang.is_cycle:
        return _describe_cycle(hang, analysis, seconds)
    sentence = f"progress stopped: {waiting} waited for {seconds:.0f} s in {where}"
    return f"{sentence} for {_describe_root(analysis.ranks[hang.roots[0]], recorded, analysis)}"


def _describe_cycle(hang: Hang, analysis: HangAnalysis, seconds: float) -> str:
    """Describe ranks that wait for each other, each operation once, the fewest ranks first."""
    members: dict[tuple[int, int, int], list[int]] = {}
    for number in hang.roots:
        members.setdefault(_get_operation(number, analysis), []).append(number)
    parts = []
    for numbers in sorted(members.values(), key=lambda numbers: (len(numbers), numbers)):
        recorded = analysis.recorded[analysis.ranks[numbers[0]]]
        line = describe_last_line(recorded.node, recorded.ending)
        parts.append(
            f"{_format_global_ranks(numbers, analysis)} in"
            f" {_format_operation(numbers[0], analysis)}{f' {line}' if line else ''}"
        )
    return (
        f"progress stopped for {seconds:.0f} s: {_format_global_ranks(hang.roots, analysis)} wait"
        f" for each other in a circle ({'; '.join(parts)})"
    )


def _describe_working_root(hang: Hang, analysis: HangAnalysis) -> str:
    recorded = analysis.recorded[analysis.ranks[hang.waiting[0]]]
    seconds = recorded.waited_ns(analysis.under_way[hang.waiting[0]]) / 1e9
    roots = _format_global_ranks(hang.roots, analysis)
    return (
        f"{_format_global_ranks(hang.waiting, analysis)} had waited {seconds:.0f} s for {roots}"
        f" when the recording ended; {roots} {'was' if len(hang.roots) == 1 else 'were'} still"
        f" working"
    )


def _describe_root(job_rank: JobRank, waiting: RecordedRank, analysis: HangAnalysis) -> str:
    recorded = analysis.recorded.get(job_rank)
    name = f"rank {job_rank[1]}"
    if recorded is None:
        return f"{name}, which has no recording: its state is not known"
    name = f"{name} on {recorded.node.facts.name}"
    end = recorded.ending
    if end.exited is not None and recorded.ended_before(waiting):
        signal, code = end.exited.get("signal"), end.exited.get("exit_code")
        line = describe_last_line(recorded.node, end)
        line = f", {line}" if line else ""
        if signal:
            return f"{name}, which had been killed by signal {signal}{line}"
        how = "" if code is None else f" with exit code {code}"
        return f"{name}, which had ended{how}{line}"
    state = _THREAD_STATES.get(end.state, "in an unknown state")
    if end.state == "R" and end.on_cpu_ratio is not None:
        state += f", on the CPU for {100 * end.on_cpu_ratio:.0f} % of the time"
    elif end.wchan and end.state in ("S", "D"):
        state += f" in {end.wchan}"
    line = describe_last_line(recorded.node, end)
    state += f", {line}" if line else ""
    if recorded.has_diverged and recorded.silent_ns < HANG_NS:
        steps = end.steps.after_last
        return f"{name}, which went on without it for {steps:,} steps: {state}"
    silent = f"for {recorded.silent_ns / 1e9:.0f} s" if end.last_span_ns else "since its start"
    return f"{name}, which had not arrived and had marked no span {silent}: {state}"


def _format_operation(number: int, analysis: HangAnalysis) -> str:
    under_way = analysis.under_way[number]
    return format_operation(under_way.operation, under_way.number)


def _get_global_rank(number: int, analysis: HangAnalysis) -> int:
    return analysis.ranks[number][1]


def _format_global_ranks(numbers: Sequence[int], analysis: HangAnalysis) -> str:
    text = format_ranges(_get_global_rank(number, analysis) for number in numbers)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


MAX_ASLEEP_CPU_RATIO = 0.01
"""CPU share of the last seconds below which a thread sleeps; it may poll a clock."""
_UNMARKED_HANG_CONFIDENCE = 0.7


_Member = tuple[NodeResult, RankResult, RankEnding]


def attribute_unmarked_hangs(state: JobState) -> JobState:
    """Move the time after the last progress of hung jobs without marks to `fail-hang`."""
    hung = [members for members in _group_by_job(state.nodes).values() if _is_hung(members)]
    if not hung:
        return state
    jobs = {members[0][1].job for members in hung}
    nodes = map_ranks(
        state.nodes, lambda rank: _with_unmarked_hang_time(rank) if rank.job in jobs else rank
    )
    notes = [_describe_unmarked_hang(members) for members in hung]
    finding = _build_unmarked_hang_finding(nodes, hung)
    return _with_hang_reports(replace(state, nodes=nodes), (finding,), notes)


def _group_by_job(nodes: Sequence[NodeResult]) -> dict[int, list[_Member]]:
    out: dict[int, list[_Member]] = {}
    for node in nodes:
        ends = {(ending.pid, ending.started_ticks): ending for ending in node.endings}
        for rank in node.ranks:
            ending = ends.get((rank.ledger.pid, rank.started_ticks))
            if rank.job != AMBIGUOUS_JOB and ending is not None:
                out.setdefault(rank.job, []).append((node, rank, ending))
    return out


def _is_hung(members: Sequence[_Member]) -> bool:
    if len(members) < max(2, max(rank.job_position.world_size or 0 for _, rank, _ in members)):
        return False
    return all(_is_rank_hung(rank, end) for _, rank, end in members)


def _is_rank_hung(rank: RankResult, ending: RankEnding) -> bool:
    if rank.marked or dict(rank.ledger.outside_buckets).get(AFTER_STEPS, 0) < HANG_NS:
        return False
    if ending.exited is not None and not ending.exited.get("signal"):
        return False
    asleep = ending.on_cpu_ratio is not None and ending.on_cpu_ratio < MAX_ASLEEP_CPU_RATIO
    return asleep and ending.state in ("S", "D")


def _find_diverging_ranks(members: Sequence[_Member]) -> list[_Member]:
    """Find the ranks that sleep in another kernel function than more than half of all."""
    functions = Counter(end.wchan for _, _, end in members)
    usual, count = functions.most_common(1)[0]
    if 2 * count <= len(members):
        return []
    return [member for member in members if member[2].wchan != usual]


def _with_unmarked_hang_time(rank: RankResult) -> RankResult:
    lines = dict(rank.ledger.outside_buckets)
    lines[FAIL_HANG] = lines.get(FAIL_HANG, 0) + lines.pop(AFTER_STEPS)
    return replace(rank, ledger=replace(rank.ledger, outside_buckets=tuple(lines.items())))


def _build_unmarked_hang_finding(
    nodes: Sequence[NodeResult], halted: Sequence[Sequence[_Member]]
) -> Finding:
    ledgers = [rank.ledger for node in nodes for rank in node.ranks]
    hang_ns = [dict(ledger.outside_buckets).get(FAIL_HANG, 0) for ledger in ledgers]
    window_ns = sum(ledger.window_ns for ledger in ledgers)
    culprits = [
        Culprit(node.facts.name, rank.ledger.rank, rank.ledger.device)
        for members in halted
        for node, rank, _ in _find_diverging_ranks(members)
    ]
    return Finding(
        cause=CAUSES[FAIL_HANG],
        lost_ns=sum(hang_ns),
        share_ratio=sum(hang_ns) / window_ns if window_ns else 0.0,
        recoverable_ns=None,
        confidence_ratio=_UNMARKED_HANG_CONFIDENCE,
        grade="C",
        upper_bound=False,
        outside_steps=True,
        culprits=tuple(culprits),
        evidence=(
            Evidence(
                "hang.longest_ns",
                float(max(hang_ns)),
                "ns",
                "longest time from the last work of a device to the end of its recording",
            ),
        ),
    )


def _describe_unmarked_hang(members: Sequence[_Member]) -> str:
    seconds = min(dict(rank.ledger.outside_buckets)[AFTER_STEPS] for _, rank, _ in members) / 1e9
    ranks = format_ranges(rank.ledger.rank or 0 for _, rank, _ in members)
    sentence = (
        f"progress stopped: no device of ranks {ranks} was active in the last {seconds:.0f} s,"
    )
    return f"{sentence} and their main threads were asleep"


MIN_PAUSE_RATIO = 0.5
"""Least pause time of a rank relative to the rank that paused longest."""
MAX_WAIT_RATIO = 0.5
"""Largest wait of ranks for others that were on a CPU or late without a known reason, relative to
their pauses.
"""
MIN_PAUSED_CPU_RATIO = 0.5
"""Least part of a rank's own loss to its CPU that fell into pauses."""
_CPU, _EVAL = "cpu", "eval"


def attribute_common_pauses(state: JobState) -> JobState:
    """Move the CPU time of pauses common to all ranks of a job to `eval`."""
    by_job = group_ranks_by_job(state.nodes)
    jobs = {job for job, ranks in by_job.items() if _has_common_pauses(ranks)}
    nodes = map_ranks(
        state.nodes, lambda rank: _with_pauses_as_eval(rank) if rank.job in jobs else rank
    )
    return replace(state, nodes=nodes)


def _has_common_pauses(ranks: Sequence[RankResult]) -> bool:
    paused = [rank.accumulator.totals.get(PAUSED, 0) for rank in ranks]
    if len(ranks) < 2 or min(paused) <= 0 or min(paused) < MIN_PAUSE_RATIO * max(paused):
        return False
    if any(
        units < MIN_PAUSED_CPU_RATIO * _compute_own_cpu_units(rank)
        for rank, units in zip(ranks, paused)
    ):
        return False
    waited = sum(rank.victim_ns.get(_CPU, 0) for rank in ranks) * SHARE_SCALE
    waited += sum(rank.accumulator.unexplained.get(PEERS_UNKNOWN, 0) for rank in ranks)
    return waited < MAX_WAIT_RATIO * sum(paused)


def _compute_own_cpu_units(rank: RankResult) -> int:
    claimed = sum(
        units for (cause, _, _), units in rank.accumulator.claimed.items() if cause == _CPU
    )
    on_cpu = rank.accumulator.unexplained.get(ON_CPU, 0)
    return claimed + on_cpu - rank.victim_ns.get(_CPU, 0) * SHARE_SCALE


def _with_pauses_as_eval(rank: RankResult) -> RankResult:
    remaining_units = _compute_own_cpu_units(
        rank
    )  # includes CPU time in the windows at the edges of pauses
    claimed, unexplained = dict(rank.accumulator.claimed), dict(rank.accumulator.unexplained)
    on_cpu = unexplained.pop(ON_CPU, 0)
    remaining_units -= on_cpu
    source = SOURCE_DEVICE_SAMPLES  # without a device, nothing is attributed by families
    claimed[_EVAL, "C", source] = claimed.get((_EVAL, "C", source), 0) + on_cpu
    for key in sorted(claimed):
        cause, grade, source = key
        if cause == _CPU and grade == "C":
            moved_units = min(remaining_units, claimed[key])
            remaining_units -= moved_units
            claimed[key] -= moved_units
            claimed[_EVAL, grade, source] = claimed.get((_EVAL, grade, source), 0) + moved_units
    claimed = {key: units for key, units in claimed.items() if units}
    accumulator = replace(rank.accumulator, claimed=claimed, unexplained=unexplained)
    return with_attributed_waits(rank, accumulator, rank.victim_ns, rank.culprit_ns)
