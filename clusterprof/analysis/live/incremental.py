"""Settle a growing recording part after part: every nanosecond once, for counters.

    node 0   |---- settled ----|---- this part ----|  open step  |  newest record
    node 1   |---- settled ----|---- this part ----|   open step   |
                               since               until: no step of any node is open before it

A part ends where no later record changes what a rank did: its steps have ended, and their
measurements have arrived. So the parts of a rank add up to what `analyze` finds for the whole time,
up to the confidence in a cause, which rests on the evidence of one part. A step that is open for
longer than five minutes is cut.

Only what is not settled is kept in memory, and a few seconds before it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank.chunk_boundary import (
    PartOfRecording,
    concat_chunks,
    find_closed_end,
    find_sample_from,
)
from clusterprof.analysis.attribution.rank.claims import WITH_PEERS
from clusterprof.analysis.cross_rank.pipeline import analyze_across_ranks
from clusterprof.analysis.cross_rank.wait_totals import (
    CulpritTotals,
    compute_culprit_totals,
    sum_unblamed_waits,
)
from clusterprof.analysis.live.window import LEAD_NS, MAX_ROWS, ObservedChunkSource, WindowReader
from clusterprof.analysis.node.analyze import NodeResult, analyze_load, list_ranks
from clusterprof.analysis.timeline.load.chunks import LoadedNode, NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks
from clusterprof.analysis.timeline.model import Chunk, Rank
from clusterprof.probe import layout
from clusterprof.report.live import WAIT_FOR_RANKS, JobPart, NodePart, RankPart, RankStatus
from clusterprof.report.model import UNATTRIBUTED
from clusterprof.signals import SELF_CPU
from clusterprof.trace.live_tail import NodeTail
from clusterprof.trace.reader import find_new_node_folders

START_BACK_NS = 60_000_000_000
"""How far before its newest record the first part of a recording begins at most, ns."""
MAX_KEPT_NS = 360_000_000_000
"""Longest time that is kept unsettled, ns: longer than a step may be open. What an absence of the
settling process leaves behind is not settled any more."""
SILENT_NS = 20_000_000_000
"""Lag behind the other nodes, or time without a record, at which a node is not waited for, ns."""
ABANDONED_NS = 300_000_000_000
"""Time without a record of any node after which a job is taken to have ended, ns."""
MAX_STEP_NS = 150_000_000_000
"""Time after which a part ends in the midst of a step, ns."""
_CUT_AFTER_NS = 20_000_000
"""Parts end that much after a step, ns: clocks of nodes differ, and no rank is in an operation."""
_MAX_CUTS = 4096
"""The newest steps that are looked at."""
_END_LAG_NS = 2_000_000_000
"""Records of the newest time may still arrive: where nothing was marked, a part ends before it."""
_FOREVER_NS = 1 << 62

ProcessKey = tuple[int, int]  # pid, started_ticks


@dataclass
class Cursor:
    """Up to where a node is settled, on its clock; survives the settling process."""

    settled_ns: int | None = None
    ranks: dict[ProcessKey, int] = field(default_factory=dict)
    """The same per rank: the first sample of its device from that time on."""
    skipped_ns: int = 0
    """Time that was never settled, ns."""


class _LoadedChunk:
    """What was read of a node once, as one chunk; stands in for a NodeLoader."""

    def __init__(self, load: NodeLoader) -> None:
        loaded: Chunk | None = None
        for chunk in load.chunks():
            loaded = concat_chunks(loaded, chunk)
        self.chunk = loaded
        self._facts = load.facts()
        self.read_bytes = 0

    def chunks(self) -> Iterator[Chunk]:
        yield from [] if self.chunk is None else [self.chunk]

    def facts(self) -> LoadedNode:
        return self._facts


class NodeSettler:
    """Settles one node's recording part after part."""

    def __init__(self, folder: Path, limits: Mapping[str, Any], cursor: Cursor) -> None:
        """Take the folder of a node; limits: bound limits object per cause id."""
        self.tail = NodeTail(folder)
        self.cursor = cursor
        self.error = ""
        self.grew_at_ns = time.monotonic_ns()
        """When records arrived last, ns by the clock of this process."""
        self._limits = limits
        self._loaded: _LoadedChunk | None = None

    @property
    def name(self) -> str:
        """Display name of the node."""
        header = self.tail.header.node if self.tail.header is not None else {}
        return str(header.get("display") or header.get("hostname") or self.tail.folder.name)

    @property
    def has_ended(self) -> bool:
        """Return whether the recorder has ended or the recording is gone."""
        return self.tail.state != "recording"

    @property
    def settled_at_ns(self) -> int | None:
        """Up to where it is settled by its wall clock, ns since 1970; None when unknown."""
        tail, settled_ns, realtime_ns = self.tail, self.cursor.settled_ns, self.tail.realtime_ns()
        if realtime_ns is None or settled_ns is None or tail.latest_ns is None:
            return None
        return realtime_ns - (tail.latest_ns - settled_ns)

    def poll(self) -> bool:
        """Read what was written since the last call; return whether anything was."""
        tail, settled_ns = self.tail, self.cursor.settled_ns
        has_new = tail.poll(MAX_KEPT_NS)
        if has_new:
            self.grew_at_ns = time.monotonic_ns()
        if tail.latest_ns is None:
            return has_new
        if settled_ns is None:
            begin_ns = tail.header.started.get("monotonic_ns", 0) if tail.header else 0
            self.cursor.settled_ns = max(int(begin_ns), tail.latest_ns - START_BACK_NS)
        elif settled_ns < tail.latest_ns - MAX_KEPT_NS + LEAD_NS:
            self.skip_to(tail.latest_ns - START_BACK_NS)
        assert self.cursor.settled_ns is not None
        tail.forget(self.cursor.settled_ns - LEAD_NS)
        return has_new

    def skip_to(self, t_ns: int) -> None:
        """Leave the time up to an instant of the node's clock unsettled: it is unmeasured."""
        assert self.cursor.settled_ns is not None
        self.cursor.skipped_ns += max(t_ns - self.cursor.settled_ns, 0)
        self.cursor.settled_ns = max(t_ns, self.cursor.settled_ns)

    def load(self) -> None:
        """Read what is kept as one chunk."""
        if self.cursor.settled_ns is None:
            return
        reader = WindowReader(self.tail, self.cursor.settled_ns - LEAD_NS, None)
        load = NodeLoader(self.tail.folder, _FOREVER_NS, reader, MAX_ROWS, rejects_late_ends=True)
        self._loaded = _LoadedChunk(load)

    def release(self) -> None:
        """Free what `load` has read: not all nodes of a job fit into memory."""
        self._loaded = None

    def find_closed_end(self) -> int | None:
        """Find up to where the node can be settled, ns on its clock; None without records."""
        latest_ns = self.tail.latest_ns
        if latest_ns is None or self._loaded is None:
            return None
        if self.has_ended:
            return latest_ns + _END_LAG_NS  # steps may end after the last sample
        chunk = self._loaded.chunk
        ranks = [] if chunk is None else find_ranks(chunk)
        since_ns = latest_ns if self.cursor.settled_ns is None else self.cursor.settled_ns
        ends = [end_ns for rank in ranks if (end_ns := _find_cut(rank, since_ns)) is not None]
        return min([latest_ns - _END_LAG_NS, *ends])

    def settle(self, until_ns: int) -> tuple[NodeResult, dict[ProcessKey, _RankBounds]] | None:
        """Settle up to an instant of the node's clock; None where there is nothing before it.

        Also returns which time of each rank belongs to the part.
        """
        since_ns = self.cursor.settled_ns
        if self._loaded is None or since_ns is None or until_ns <= since_ns:
            return None
        self.cursor.settled_ns = until_ns  # also if it fails: it would fail again
        observer = ObservedChunkSource(self._loaded, since_ns)
        load_like: Any = observer  # has the methods of a NodeLoader that are called
        result = analyze_load(
            load_like,
            self.tail.folder.name,
            self._limits,
            part=PartOfRecording(since_ns, until_ns, is_adjoining=True),
            since_ns=since_ns - LEAD_NS,
        )
        bounds = self._find_rank_bounds(result, since_ns, until_ns, observer.ranks())
        self.cursor.ranks = {key: bound.end_ns for key, bound in bounds.items()}
        return result, bounds

    def _find_rank_bounds(
        self, result: NodeResult, since_ns: int, until_ns: int, statuses: Mapping[int, RankStatus]
    ) -> dict[ProcessKey, _RankBounds]:
        """Find which time of each rank belongs to this part."""
        assert self._loaded is not None and self._loaded.chunk is not None
        loaded_ranks = {
            (rank.pid, rank.main.started_ticks): rank for rank in find_ranks(self._loaded.chunk)
        }
        out = {}
        for rank_result in result.ranks:
            key = rank_result.ledger.pid, rank_result.started_ticks
            rank = loaded_ranks.get(key)
            begin_ns, end_ns = since_ns, until_ns
            if rank is not None:
                begin_ns, end_ns = (find_sample_from(rank, t) for t in (since_ns, until_ns))
            settled_ns = self.cursor.ranks.get(key)
            if settled_ns is None:  # a new rank
                begin_ns = settled_ns = max(begin_ns, rank_result.first_ns)
            if rank_result.last_ns < end_ns:  # it has ended
                end_ns = max(rank_result.last_ns, begin_ns)
            out[key] = _RankBounds(settled_ns, begin_ns, end_ns, statuses.get(key[0]))
        return out

    def observe_ranks(self) -> list[RankPart]:
        """Return the ranks with their status and no time: nothing of them can be settled yet."""
        if self._loaded is None or self._loaded.chunk is None or self.cursor.settled_ns is None:
            return []
        observer = ObservedChunkSource(self._loaded, self.cursor.settled_ns)
        (chunk,) = observer.chunks()
        statuses = observer.ranks()
        return [
            RankPart(
                node=self.name,
                rank=rank.rank,
                device=rank.device,
                source="none",
                is_emulated=rank.emulated,
                status=statuses.get(rank.pid),
            )
            for rank in find_ranks(chunk)
            if rank.rank is not None or rank.marked or rank.device
        ]

    def build_status(self, silent: bool) -> NodePart:
        """Build the state of the node and its recorder after a part."""
        chunk = None if self._loaded is None else self._loaded.chunk
        tail = self.tail
        return NodePart(
            name=self.name,
            state="silent" if silent else tail.state,
            settled_at_ns=self.settled_at_ns,
            damaged_bytes=tail.damaged_bytes,
            skipped_ns=self.cursor.skipped_ns,
            cpu_ns={} if chunk is None else _read_recorder_cpu(chunk),
            trouble=self.error or tail.trouble,
        )


@dataclass(frozen=True, slots=True)
class _RankBounds:
    """Which time of a rank belongs to a part, on its node's clock, ns."""

    settled_ns: int
    """Up to where the rank was settled before."""
    begin_ns: int
    """First instant that the ledger covers; later than `settled_ns` after an absence."""
    end_ns: int
    status: RankStatus | None


def _find_cut(rank: Rank, since_ns: int) -> int | None:
    """Find where a part may end for a rank: just after a step, ns; None: anywhere.

    In the midst of a step an operation would be cut, and the wait in it could not be blamed.
    """
    closed_ns = find_closed_end(rank)
    steps = rank.main.spans.get(layout.STEP)
    if closed_ns is None or steps is None or not steps.end_ns.size:
        return closed_ns
    cuts = [
        int(end_ns) + _CUT_AFTER_NS
        for end_ns in np.sort(steps.end_ns)[-_MAX_CUTS:]
        if end_ns > since_ns - _CUT_AFTER_NS
    ]
    cuts = [cut_ns for cut_ns in cuts if find_sample_from(rank, cut_ns) <= closed_ns]
    if cuts:
        return cuts[-1]
    return closed_ns if closed_ns > since_ns + MAX_STEP_NS else since_ns


def _read_recorder_cpu(chunk: Chunk) -> dict[str, int]:
    """Read the CPU time of the recorder and its helpers so far, ns by process."""
    out = {}
    for (name, process), series in chunk.series.items():
        if name != SELF_CPU.name:
            continue
        measured = series.values[series.values == series.values]
        if measured.size:
            out[process] = int(measured[-1])
    return out


class JobSettler:
    """Settles all nodes of a job up to common instants."""

    def __init__(
        self,
        paths: Sequence[Path],
        limits: Mapping[str, Any],
        is_blaming: bool,
        cursors: Mapping[str, Cursor] | None = None,
        job: str = "",
    ) -> None:
        """Start without data; limits: bound limits object per cause id.

        is_blaming: compare the ranks of all nodes and blame their waits; else they stay waits.
        cursors: by name of a node's folder. job: name of the job; "" = that in the recording.
        """
        self._paths = tuple(paths)
        self._limits = limits
        self._is_blaming = is_blaming
        self._cursors = cursors or {}
        self._job = job
        self._nodes: dict[Path, NodeSettler] = {}

    @property
    def nodes(self) -> Sequence[NodeSettler]:
        """All nodes seen so far."""
        return tuple(self._nodes.values())

    @property
    def job(self) -> str:
        """Name of the job; "" before the first record."""
        headers = (node.tail.header for node in self.nodes)
        names = (str(header.launcher.get("job") or "") for header in headers if header is not None)
        return self._job or next((name for name in names if name), "")

    @property
    def settled_at_ns(self) -> int | None:
        """Up to where the job is settled by wall clocks, ns since 1970; None before any record."""
        times = (node.settled_at_ns for node in self.nodes)
        return min((t_ns for t_ns in times if t_ns is not None), default=None)

    @property
    def has_ended(self) -> bool:
        """Return whether no recorder is left that could write."""
        return bool(self._nodes) and all(node.has_ended for node in self.nodes)

    @property
    def is_abandoned(self) -> bool:
        """Return whether nothing has been written for so long that all recorders were killed."""
        now_ns = time.monotonic_ns()
        return all(node.has_ended or now_ns - node.grew_at_ns > ABANDONED_NS for node in self.nodes)

    def poll(self) -> None:
        """Find new nodes, and read what was written since the last call.

        Raises: NoRecording when there has never been anything to read.
        """
        self._find_nodes()
        for node in self.nodes:
            node.poll()

    def settle(self) -> JobPart:
        """Settle every node up to the instant up to which all of them can be settled."""
        is_one_node = len(self._nodes) == 1
        silent = self._find_silent_nodes()
        closed: dict[NodeSettler, int] = {}
        for node in self.nodes:
            with self._keep_error(node):
                node.load()
                end_ns = node.find_closed_end()
                if end_ns is not None:
                    closed[node] = end_ns
                if not is_one_node:
                    node.release()
        common_ns = self._find_common_end(closed, silent)
        results, statuses, waiting = [], [], []
        bounds: dict[tuple[str, int, int], _RankBounds] = {}
        for node, own_end_ns in closed.items():
            until_ns = min(own_end_ns, _to_node_ns(node.tail, common_ns))
            with self._keep_error(node):
                if not is_one_node:
                    node.load()
                settled = node.settle(until_ns)
                if settled is None:
                    waiting += node.observe_ranks()
                else:
                    results.append(settled[0])
                    for (pid, ticks), bound in settled[1].items():
                        bounds[node.name, pid, ticks] = bound
            statuses.append(node.build_status(node in silent))
            node.release()
        ranks, unblamed, trouble = self._build_ranks(results, bounds)
        return JobPart(self.job, tuple(statuses), (*ranks, *waiting), unblamed, trouble)

    def _find_nodes(self) -> None:
        for folder in find_new_node_folders(self._paths, self._nodes):
            cursor = self._cursors.get(folder.name) or Cursor()
            self._nodes[folder] = NodeSettler(folder, self._limits, cursor)

    def _find_silent_nodes(self) -> set[NodeSettler]:
        """Find the nodes that do not write, or whose records end long before those of others."""
        times = {node: t_ns for node in self.nodes if (t_ns := node.tail.realtime_ns()) is not None}
        newest_ns, now_ns = max(times.values(), default=0), time.monotonic_ns()
        return {
            node
            for node in self.nodes
            if not node.has_ended
            and (
                times.get(node, newest_ns) < newest_ns - SILENT_NS
                or now_ns - node.grew_at_ns > SILENT_NS
            )
        }

    def _find_common_end(self, closed: Mapping[NodeSettler, int], silent: set[NodeSettler]) -> int:
        """Find the instant up to which all nodes can be settled, by wall clocks, ns since 1970."""
        ends = []
        for node, end_ns in closed.items():
            realtime_ns, latest_ns = node.tail.realtime_ns(), node.tail.latest_ns
            if node.has_ended or node in silent or realtime_ns is None or latest_ns is None:
                continue
            ends.append(realtime_ns - (latest_ns - end_ns))
        return min(ends, default=_FOREVER_NS)

    @contextlib.contextmanager
    def _keep_error(self, node: NodeSettler) -> Iterator[None]:
        """Keep the error of one node, whose time stays unmeasured: the others go on."""
        try:
            yield
            node.error = ""
        except Exception as error:
            node.error = f"{type(error).__name__}: {error}"

    def _build_ranks(
        self, results: Sequence[NodeResult], bounds: Mapping[tuple[str, int, int], _RankBounds]
    ) -> tuple[tuple[RankPart, ...], Mapping[str, int], str]:
        """Build what each rank did, the waits without a culprit, and why none could be blamed."""
        ranks = list_ranks(results)
        totals: Sequence[CulpritTotals | None] = [None] * len(ranks)
        unblamed: Mapping[str, int] = {}
        is_blamed, trouble = False, ""
        if self._is_blaming and ranks:
            try:
                state = analyze_across_ranks(results, limits=self._limits)
                ranks = list_ranks(state.nodes)
                totals = [None] * len(ranks)
                if state.observer is not None:
                    totals, unblamed = compute_culprit_totals(ranks), sum_unblamed_waits(ranks)
                is_blamed = True
            except Exception as error:  # damage of any kind: the waits of this part stay waits
                trouble = f"ranks could not be compared: {type(error).__name__}: {error}"
        parts = []
        for rank, total in zip(ranks, totals):
            bound = bounds.get((rank.ledger.node, rank.ledger.pid, rank.started_ticks))
            is_known = rank.ledger.rank is not None or rank.marked or bool(rank.ledger.device)
            if (
                bound is not None and is_known
            ):  # before the first span, a launcher may look like one
                parts.append(_build_rank_part(rank, total, bound, is_blamed))
        return tuple(parts), unblamed, trouble


def _to_node_ns(tail: NodeTail, wall_ns: int) -> int:
    """Convert a wall-clock time to the clock of a node, ns."""
    realtime_ns = tail.realtime_ns()
    if realtime_ns is None or tail.latest_ns is None or wall_ns >= _FOREVER_NS:
        return _FOREVER_NS
    return tail.latest_ns + wall_ns - realtime_ns


def _build_rank_part(
    rank: RankResult, total: CulpritTotals | None, bound: _RankBounds, is_blamed: bool
) -> RankPart:
    """Build what a rank did in a part; the states add up to its time exactly."""
    ledger = rank.ledger
    away_ns = max(bound.begin_ns - bound.settled_ns, 0)
    window_ns = bound.end_ns - bound.begin_ns
    is_observable = rank.marked or bool(ledger.device)
    unmeasured_ns = ledger.unmeasured_ns if is_observable else window_ns - ledger.in_step_ns
    outside_ns = max(window_ns - ledger.in_step_ns - unmeasured_ns, 0)
    lost = {cause: ns for cause, ns in ledger.buckets if ns}
    if not is_blamed:
        waits_ns = sum(ns for reason, ns in rank.reasons if reason == WITH_PEERS)
        if waits_ns:
            lost[UNATTRIBUTED] = lost.get(UNATTRIBUTED, 0) - waits_ns
            lost[WAIT_FOR_RANKS] = waits_ns
    return RankPart(
        node=ledger.node,
        rank=ledger.rank,
        device=ledger.device,
        source=ledger.source,
        is_emulated=rank.emulated,
        productive_ns=ledger.productive_ns,
        lost_ns=ledger.lost_ns,
        outside_ns=outside_ns,
        unmeasured_ns=unmeasured_ns + away_ns,
        lost={cause: ns for cause, ns in lost.items() if ns},
        caused=dict(lost) if total is None else total.total,
        steps=ledger.steps,
        status=bound.status,
    )
