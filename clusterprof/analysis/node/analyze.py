"""Analyze one node chunk by chunk, in one pass over its recording.

What cannot be settled at the end of a chunk is carried over to the next one, so memory
depends on the longest step rather than on the length of the recording.

It also keeps the state of one rank while its node is read, and builds its result at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from clusterprof.analysis.attribution.accumulator import (
    EMPTY_ACCUMULATOR,
    Accumulator,
    merge_accumulators,
    with_packed_slowest_steps,
)
from clusterprof.analysis.attribution.ledger import RankIdentity, RankResult, build_rank_result
from clusterprof.analysis.attribution.lines.lost_time_by_stack import StackTimeSums
from clusterprof.analysis.attribution.rank.chunk_boundary import (
    WHOLE_RECORDING,
    PartOfRecording,
    RankState,
    concat_chunks,
    find_overdue_end_ns,
    select_carry_over,
)
from clusterprof.analysis.attribution.rank.claims import settle_segment
from clusterprof.analysis.attribution.rank.device_activity import get_sample_times
from clusterprof.analysis.attribution.rank.history import HistoryBuilder
from clusterprof.analysis.attribution.rank.lost_time import find_lost_intervals
from clusterprof.analysis.attribution.rank.step_blocks import ImplicitSteps, StepBlocks
from clusterprof.analysis.attribution.rank.time_spent import TimeSpent
from clusterprof.analysis.attribution.taxonomy import CLAIMABLE_CAUSES
from clusterprof.analysis.node.observations import EndingTracker, FailedExit, HostNotes, RankEnding
from clusterprof.analysis.node.progress import ProcessProgress, ProgressTracker
from clusterprof.analysis.node.selection import observe_part, watch_chunks
from clusterprof.analysis.node.setup import NodeSetup, SetupCollector, find_rack
from clusterprof.analysis.node.transport import pack_fields, unpack_fields, with_group_ranges
from clusterprof.analysis.spill import IN_MEMORY, SpillLocation, SpillWriter
from clusterprof.analysis.timeline.collectives.rows import Store
from clusterprof.analysis.timeline.load.buffers import LOOKBACK_NS
from clusterprof.analysis.timeline.load.chunks import LoadedNode, NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks, parse_job_position
from clusterprof.analysis.timeline.model import Chunk, Rank
from clusterprof.analysis.timeline.network_counters import NetworkMeter, NodeNetworkTotals
from clusterprof.report.model import NodeFacts
from clusterprof.signals import SELF_CPU


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What the analysis of a node shall produce."""

    limits: Mapping[str, Any]
    store: Store
    history: bool
    part: PartOfRecording
    since_ns: int | None


@dataclass(frozen=True, slots=True)
class OpenRank:
    """State of a rank that may still continue."""

    state: RankState
    settled_sums: Accumulator
    provisional_sums: Accumulator
    """Sums of provisional segments, which count only if another step ends after them."""
    rank: Rank
    """The rank in the latest chunk."""
    time_spent: TimeSpent
    implicit_steps: ImplicitSteps
    blocks: StepBlocks
    history: HistoryBuilder | None
    """None where no history was requested."""
    code: StackTimeSums
    part: PartOfRecording


def update_rank(
    open_rank: OpenRank | None, rank: Rank, request: NodeRequest, last: bool
) -> OpenRank:
    """Return the state of a rank after one more chunk.

    open_rank: None = a new rank. last: no chunk follows.
    """
    # a device that is named but was never sampled is not measured
    if not get_sample_times(rank).size:
        rank = replace(rank, device="")
    if open_rank is None:
        state = RankState(settled_ns=request.since_ns)
        open_rank = OpenRank(
            state, EMPTY_ACCUMULATOR, EMPTY_ACCUMULATOR, rank, *_create_accumulators(rank, request)
        )
        return _settle_segments(open_rank, rank, request.limits, last)
    if rank.marked and not open_rank.rank.marked:
        # The first span: what was guessed of the time before is dropped, it was start-up.
        state = RankState(first_ns=open_rank.state.first_ns, last_ns=open_rank.state.last_ns)
        open_rank = OpenRank(
            state, EMPTY_ACCUMULATOR, EMPTY_ACCUMULATOR, rank, *_create_accumulators(rank, request)
        )
    # A chunk without records of a rank does not make it a rank without a probe or a device.
    rank = replace(
        rank,
        rank=rank.rank if rank.rank is not None else open_rank.rank.rank,
        marked=rank.marked or open_rank.rank.marked,
        device=rank.device or open_rank.rank.device,
        emulated=rank.emulated or open_rank.rank.emulated,
    )
    return _settle_segments(open_rank, rank, request.limits, last)


def _create_accumulators(
    rank: Rank, request: NodeRequest
) -> tuple[
    TimeSpent, ImplicitSteps, StepBlocks, HistoryBuilder | None, StackTimeSums, PartOfRecording
]:
    ranks = parse_job_position(rank.main.registration).world_size or 1
    spending = TimeSpent(CLAIMABLE_CAUSES, request.store, ranks)
    times = HistoryBuilder(request.store) if request.history else None
    barrier = ImplicitSteps(spending.categories, request.store)
    return spending, barrier, StepBlocks(), times, StackTimeSums(), request.part


def _settle_segments(
    open_rank: OpenRank, rank: Rank, limits: Mapping[str, Any], last: bool
) -> OpenRank:
    lost_segments, state = find_lost_intervals(rank, open_rank.state, last, open_rank.part)
    partial, pending = open_rank.settled_sums, open_rank.provisional_sums
    accumulators = (
        open_rank.time_spent,
        open_rank.implicit_steps,
        open_rank.blocks,
        open_rank.history,
        open_rank.code,
    )
    for segment, lost, account in lost_segments:
        if segment.end_ns == segment.start_ns:
            settled = Accumulator(totals={"not_asked": account.outside_selection_ns})
            for accumulator in () if segment.provisional else accumulators:
                if accumulator is not None:
                    accumulator.confirm()
        else:
            settled = settle_segment(rank, segment, lost, account, limits, *accumulators)
        if segment.provisional:
            pending = merge_accumulators(pending, settled)
        else:
            partial, pending = merge_accumulators(partial, pending, settled), EMPTY_ACCUMULATOR
    return OpenRank(state, partial, pending, rank, *accumulators, open_rank.part)


def finish_rank(open_rank: OpenRank, limits: Mapping[str, Any]) -> RankResult:
    """Settle a rank to the end of the recording and build its result.

    The time after its last step counts as outside the steps.
    """
    open_rank = _settle_segments(open_rank, open_rank.rank, limits, last=True)
    rank = open_rank.rank
    node = rank.chunk.header.node
    job_position = parse_job_position(rank.main.registration)
    name = RankIdentity(
        node=node.get("display") or node.get("hostname", ""),
        rank=rank.rank,
        pid=rank.pid,
        device=rank.device,
        marked=rank.marked,
        emulated=rank.emulated,
        has_peers=(job_position.world_size or 1) > 1,
        launcher_variables=dict(rank.main.registration.get("variables", {})),
        job_position=job_position,
        started_ticks=rank.main.started_ticks,
    )
    operations = open_rank.time_spent.operations()
    if operations is not None:
        operations = operations.select_clock_samples(not rank.device or rank.emulated)
    accumulator = with_packed_slowest_steps(open_rank.settled_sums)
    result = build_rank_result(name, open_rank.state, accumulator, operations)
    steps, suspected = open_rank.implicit_steps.operations()
    times = None if open_rank.history is None else open_rank.history.finish()
    period, blocks = open_rank.implicit_steps.period(), open_rank.blocks.finish()
    return replace(
        result,
        implicit_steps=steps and steps.select_clock_samples(None),
        suspected_steps=suspected and suspected.select_clock_samples(None),
        period=period,
        history=times,
        blocks=blocks,
        losses_by_time_bin=open_rank.time_spent.losses_by_time_bin(),
        code=open_rank.code.finish(),
    )


ProcessKey = tuple[int, int]  # pid, started_ticks
# Chunks overlap by LOOKBACK_NS. Two samples are left out of it: they may lie across the edge.
_CHUNK_OVERLAP_NS = LOOKBACK_NS - 200_000_000
_FIRST_SPAN_NS = 60_000_000_000
"""How long the first span of a rank may have lasted when it arrives, ns."""


@dataclass(frozen=True, slots=True)
class NodeResult:
    """Result of analyzing one node; small, so that worker processes can return it."""

    facts: NodeFacts
    ranks: tuple[RankResult, ...]
    loaded: LoadedNode
    endings: tuple[RankEnding, ...] = ()
    network: NodeNetworkTotals = field(default_factory=NodeNetworkTotals)
    """Its network counters during operations between ranks."""
    network_throughout: NodeNetworkTotals = field(default_factory=NodeNetworkTotals)
    """Its network counters over the whole time, where no operation was marked."""
    notes: tuple[str, ...] = ()
    """Notes on its host."""
    setup: NodeSetup = field(default_factory=NodeSetup)
    """How the node and its ranks were set up."""
    failed_exits: tuple[FailedExit, ...] = ()
    """Processes that ended with an exit status or by a signal, in order of time."""
    progress: tuple[ProcessProgress, ...] = ()
    """How far each process that ended steps came in its job."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to pickle it: packed (analysis.node.transport)."""
        values = [getattr(self, part.name) for part in fields(self)]
        return _unpack_result, (pack_fields(values),)


def _unpack_result(data: bytes) -> NodeResult:
    return NodeResult(*unpack_fields(data))


def list_ranks(nodes: Iterable[NodeResult]) -> list[RankResult]:
    """List the ranks of all nodes in order."""
    return [rank for node in nodes for rank in node.ranks]


def map_ranks(
    nodes: Iterable[NodeResult], function: Callable[[RankResult], RankResult]
) -> tuple[NodeResult, ...]:
    """Return the nodes with a function applied to the result of each rank, in order."""
    return tuple(replace(node, ranks=tuple(map(function, node.ranks))) for node in nodes)


def with_ranks(nodes: Iterable[NodeResult], ranks: Sequence[RankResult]) -> tuple[NodeResult, ...]:
    """Return the nodes with other results of their ranks, one for each, in order."""
    remaining = iter(ranks)
    return map_ranks(nodes, lambda _: next(remaining))


def analyze_node(
    folder: Path,
    limits: Mapping[str, Any],
    chunk_ns: int | None = None,
    spill: SpillLocation = IN_MEMORY,
    history: bool = False,
    within: Callable[[int], None] | None = None,
    part: PartOfRecording = WHOLE_RECORDING,
) -> NodeResult:
    """Analyze one node's folder and return the results of its ranks.

    limits: bound limits object per cause id. spill: where the operations of its ranks are
    stored until those of all nodes are there. history: record also when time was lost.
    within: called with the number of bytes read so far. part: time outside it counts as
    outside the steps.
    """
    load = NodeLoader(folder) if chunk_ns is None else NodeLoader(folder, chunk_ns)
    return analyze_load(load, folder.name, limits, spill, history, within, part)


def analyze_load(
    load: NodeLoader,
    key: str,
    limits: Mapping[str, Any],
    spill: SpillLocation = IN_MEMORY,
    history: bool = False,
    within: Callable[[int], None] | None = None,
    part: PartOfRecording = WHOLE_RECORDING,
    since_ns: int | None = None,
) -> NodeResult:
    """Analyze the chunks of one opened node; records before `since_ns` are ignored.

    key: the node's key when the header has none. limits: bound limits object per cause id.
    spill: where the operations of its ranks are stored. history: record also when time was
    lost. within: called with the number of bytes read so far. part: time outside it
    counts as outside the steps.
    """
    meter, endings, network = _Meter(), EndingTracker(), NetworkMeter()
    throughout, host, setups = NetworkMeter(throughout=True), HostNotes(), SetupCollector()
    progress = ProgressTracker()
    chunks = observe_part(network, watch_chunks(load, within), part)
    chunks = setups.watch(host.watch(observe_part(throughout, chunks, part)))
    chunks = endings.watch(progress.watch(meter.watch(chunks)))
    with SpillWriter(spill) as shelf:
        ranks = analyze_ranks(chunks, limits, shelf, history, part, since_ns)
    loaded = load.facts()
    loaded = replace(loaded, events=with_group_ranges(loaded.events))
    duration_ns = loaded.last_ns - loaded.first_ns
    facts = NodeFacts(
        name=loaded.header.node.get("display") or loaded.header.node.get("hostname", ""),
        key=loaded.header.node.get("key", key),
        boot_id=loaded.header.node.get("boot_id", ""),
        duration_ns=duration_ns,
        damaged_bytes=loaded.damage.damaged_bytes + loaded.damage.torn_tail_bytes,
        dropped_spans=loaded.dropped_spans,
        recorder_cpu_ratio=meter.cpu_ratio(duration_ns),
        has_host_name=loaded.header.node.get("hostname") != "",
        is_window=loaded.header.node.get("covers") == "window",
        has_time_unit=loaded.header.node.get("time_unit") != "unknown",
        rack=find_rack(loaded.header.launcher.get("variables")),
        altered_segments=loaded.damage.altered_segments,
    )
    return NodeResult(
        facts,
        ranks,
        loaded,
        endings.endings(),
        network.finish(),
        throughout.finish(),
        host.notes(),
        setups.result(facts.name),
        endings.failed_exits(),
        progress.finish(),
    )


def analyze_ranks(
    chunks: Iterable[Chunk],
    limits: Mapping[str, Any],
    store: Store,
    history: bool = False,
    part: PartOfRecording = WHOLE_RECORDING,
    since_ns: int | None = None,
) -> tuple[RankResult, ...]:
    """Analyze every rank in a stream of chunks of one node, from `since_ns` on."""
    request = NodeRequest(limits, store, history, part, since_ns)
    ranks: dict[ProcessKey, OpenRank] = {}
    done: dict[ProcessKey, RankResult] = {}
    parents: dict[int, int] = {}
    carry_over: Chunk | None = None
    for chunk in chunks:
        for key in [key for key in ranks if _has_ended(key, chunk)]:
            done[key] = finish_rank(ranks.pop(key), limits)
        joined, end_ns, is_last = concat_chunks(carry_over, chunk), chunk.end_ns, chunk.last
        del chunk
        at_once = is_last and since_ns is not None  # a window is one chunk, settled in one go
        ranks = {key: _move_to_chunk(open_rank, joined) for key, open_rank in ranks.items()}
        # Those that are alive without a record in this chunk are among them.
        seen_ranks = {key: open_rank.rank for key, open_rank in ranks.items()}
        seen_ranks |= {(rank.pid, rank.main.started_ticks): rank for rank in find_ranks(joined)}
        for key, rank in seen_ranks.items():
            if key not in done:
                ranks[key] = update_rank(ranks.get(key), rank, request, at_once)
        needed_ns = _find_needed_start_ns(ranks, joined)
        # What the next chunk overlaps by itself need not be carried over.
        needed = needed_ns < end_ns - _CHUNK_OVERLAP_NS and not is_last
        carry_over = select_carry_over(joined, needed_ns) if needed else None
        parents.update({rank.pid: rank.main.parent_pid for rank in seen_ranks.values()})
    for key, open_rank in ranks.items():
        done[key] = finish_rank(open_rank, limits)
    return tuple(sorted(_drop_false_ranks(list(done.values()), parents), key=_get_rank_sort_key))


def _move_to_chunk(open_rank: OpenRank, chunk: Chunk) -> OpenRank:
    """Move a rank to a chunk in which it has no record."""
    main = chunk.processes[open_rank.rank.pid]
    return replace(open_rank, rank=replace(open_rank.rank, chunk=chunk, main=main, workers=()))


def _drop_false_ranks(ranks: list[RankResult], parents: Mapping[int, int]) -> list[RankResult]:
    """Drop processes that were taken for ranks.

    Before the first span of a job its ranks are guessed. A child of a rank that marks spans
    of its own but never waits or steps is a worker.
    """
    if any(rank.marked for rank in ranks):
        ranks = [rank for rank in ranks if rank.marked]
    pids = {rank.ledger.pid for rank in ranks}
    return [
        rank for rank in ranks if rank.ledger.in_step_ns or parents[rank.ledger.pid] not in pids
    ]


def _get_rank_sort_key(result: RankResult) -> tuple[bool, int, int]:
    number = result.ledger.rank
    return number is None, number or 0, result.ledger.pid


def _has_ended(key: ProcessKey, chunk: Chunk) -> bool:
    process = chunk.processes.get(key[0])
    return process is None or process.started_ticks != key[1]


def _find_needed_start_ns(ranks: Mapping[ProcessKey, OpenRank], chunk: Chunk) -> int:
    """Find the time from which on some rank still needs recorded data, ns."""
    oldest = find_overdue_end_ns(chunk)
    times = [chunk.end_ns]
    for open_rank in ranks.values():
        times.append(oldest if open_rank.state.settled_ns is None else open_rank.state.settled_ns)
        if not open_rank.rank.marked:  # its first span may still arrive, with a begin some time ago
            times.append(chunk.end_ns - _FIRST_SPAN_NS)
    return max(min(times), oldest)


class _Meter:
    """Measures the CPU time of the recorder itself while chunks pass through."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[float, float]] = {}

    def watch(self, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Pass chunks through, and record the CPU time of the recorder and its helpers."""
        for chunk in chunks:
            self._observe(chunk)
            yield chunk
            del chunk  # else it stays while the next one is read

    def _observe(self, chunk: Chunk) -> None:
        for (name, device), series in chunk.series.items():
            if name != SELF_CPU.name:
                continue
            measured = series.values[series.values == series.values]
            if measured.size:
                first = self._latest.get(device, (float(measured[0]), 0.0))[0]
                self._latest[device] = (first, float(measured[-1]))

    def cpu_ratio(self, duration_ns: int) -> float | None:
        """Return the CPU time of the recorder's processes over recorded time; None = not
        recorded."""
        if not self._latest or duration_ns <= 0:
            return None
        return max(0.0, sum(last - first for first, last in self._latest.values())) / duration_ns
