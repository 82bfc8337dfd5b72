"""Analyze the last minute of a growing recording, again whenever it has grown.

    job = LiveJob([Path("clusterprof-out/job-42")], build_limits({}))
    live = job.update(time.time_ns())

Attribution and comparison of ranks are those of a whole recording, applied to a window.
Only the window is read and kept, so an update costs the same after a minute and after a
day.

Measure each rank's device activity and steps in a window, chunk by chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof import signals
from clusterprof.analysis.attribution.rank.device_activity import build_device_windows, trim_windows
from clusterprof.analysis.cross_rank.pipeline import analyze_across_ranks
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.findings.report import build_report
from clusterprof.analysis.node.analyze import NodeResult, analyze_load
from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks
from clusterprof.analysis.timeline.model import Chunk, Rank
from clusterprof.errors import NoRecording
from clusterprof.probe import layout
from clusterprof.report.live import LiveView, NodeStatus, RankStatus, State
from clusterprof.report.model import Report
from clusterprof.trace.decoder import PackedSpans
from clusterprof.trace.live_tail import NodeTail
from clusterprof.trace.reader import Damage, list_node_folders
from clusterprof.trace.schema import Record
from clusterprof.util.statistics import find_quantile


class ObservedLoad:
    """A node load that observes its chunks as they pass through."""

    def __init__(self, load: NodeLoader, since_ns: int) -> None:
        """Wrap a load; what lies before `since_ns` is ignored."""
        self._load, self._since_ns = load, since_ns
        self._seen: dict[int, _RankActivity] = {}
        self.facts = load.facts

    def chunks(self) -> Iterator[Chunk]:
        """Pass the chunks through."""
        for chunk in self._load.chunks():
            for rank in find_ranks(chunk):
                self._seen.setdefault(rank.pid, _RankActivity()).add(rank, self._since_ns)
            yield chunk

    def ranks(self) -> dict[int, RankStatus]:
        """Return the activity of the ranks by process id."""
        return {pid: seen.result() for pid, seen in self._seen.items()}


class _RankActivity:
    """Activity of one rank so far."""

    def __init__(self) -> None:
        self._node_key = ""
        self._idle_ns = self._looked_ns = 0
        self._active = self._held_ns = 0.0
        self._steps: Counter[int] = Counter()
        self._step_ended_ns: int | None = None
        self._until_ns = 0

    def add(self, rank: Rank, since_ns: int) -> None:
        chunk = rank.chunk
        self._node_key = str(chunk.header.node.get("key", ""))
        since_ns = max(since_ns, self._until_ns)  # a chunk overlaps the one before
        self._until_ns = chunk.end_ns
        steps = rank.main.spans.get(layout.STEP)
        if steps is not None and steps.end_ns.size:
            own = (steps.end_ns >= since_ns) & ((steps.end_ns < chunk.end_ns) | chunk.last)
            self._steps.update((steps.end_ns - steps.start_ns)[own].tolist())
            self._step_ended_ns = max(self._step_ended_ns or 0, int(steps.end_ns.max()))
        windows = build_device_windows(rank) if rank.device else None
        if windows is not None:
            inside = trim_windows(windows, since_ns, chunk.end_ns)
            self._looked_ns += int((inside.end_ns - inside.start_ns).sum())
            self._idle_ns += int(inside.idle_ns.sum())
        self._add_active(rank, since_ns)

    def _add_active(self, rank: Rank, since_ns: int) -> None:
        """Add SM activity; a gauge holds for the time before each reading."""
        series = rank.chunk.series.get((signals.GPU_SM_ACTIVE.name, rank.device))
        if series is None or series.t_ns.size < 2:
            return
        held = np.diff(series.t_ns).astype(np.float64)
        values = series.values[1:]
        known = ~np.isnan(values) & (series.t_ns[1:] > since_ns)
        self._held_ns += float(held[known].sum())
        self._active += float((values[known] * held[known]).sum())

    def result(self) -> RankStatus:
        middle = find_quantile(self._steps, 0.5)
        ended_ns = self._step_ended_ns
        return RankStatus(
            node_key=self._node_key,
            busy_ratio=1.0 - self._idle_ns / self._looked_ns if self._looked_ns > 0 else None,
            sm_active_ratio=self._active / self._held_ns if self._held_ns > 0 else None,
            step_ns=None if middle is None else int(middle),
            since_step_ns=None if ended_ns is None else max(self._until_ns - ended_ns, 0),
        )


WINDOW_NS = 60_000_000_000
SILENT_NS = 5_000_000_000
"""Time without data after which a recorder cannot write or has ended, ns.

A recorder writes every second.
"""
_LEAD_NS = 3_000_000_000  # intervals that end in the window may begin that much before it
_ONE_CHUNK_NS = 1 << 62  # ns: the window is one chunk …
_MAX_ROWS = 4_000_000  # … unless it is dense: a minute of 8 GPUs and their host is 0.3 million


@dataclass
class _LiveNode:
    """One node's folder, and the result of its window when it last grew."""

    tail: NodeTail
    result: NodeResult | None = None
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    """By process id."""
    since_ns: int = 0
    grew_ns: int | None = None
    """When data arrived during our observation, ns by the caller's clock; None = never."""
    error: str = ""


class LiveJob:
    """Analyzes the latest window of all nodes of a recording, again and again."""

    def __init__(
        self, paths: Sequence[Path], limits: Mapping[str, Any], window_ns: int = WINDOW_NS
    ) -> None:
        """Start without data; `limits`: bound limits object per cause id."""
        self._paths = tuple(paths)
        self._limits = limits
        self._window_ns = window_ns
        self._nodes: dict[Path, _LiveNode] = {}
        self._report_and_error: tuple[Report, str] | None = None

    def update(self, now_ns: int) -> LiveView:
        """Read new data and analyze the window; `now_ns`: wall-clock time, ns.

        Raises: NoRecording when there has never been anything to read.
        """
        changed = self._find_nodes()
        for node in self._nodes.values():
            known = node.tail.latest_ns is not None
            if node.tail.poll(self._window_ns + _LEAD_NS):
                changed = True
                node.grew_ns = now_ns if known else None
        newest_ns = max(
            (t for node in self._nodes.values() if (t := node.tail.realtime_ns()) is not None),
            default=None,
        )
        if changed or self._report_and_error is None:
            for node in self._nodes.values():
                self._analyze(node, newest_ns)
            self._report_and_error = self._build_report()
        report, trouble = self._report_and_error
        states = tuple(_build_node_state(node, now_ns) for node in self._nodes.values())
        troubles = [node.error for node in self._nodes.values() if node.error]
        return LiveView(
            title=" ".join(map(str, self._paths)),
            window_ns=self._window_ns,
            age_ns=min(
                (state.age_ns for state in states if state.age_ns is not None), default=None
            ),
            nodes=states,
            report=report,
            ranks={
                (node.result.facts.name, pid): rank
                for node in self._nodes.values()
                if node.result is not None
                for pid, rank in node.ranks.items()
            },
            trouble=next((why for why in [trouble, *troubles] if why), ""),
        )

    def _find_nodes(self) -> bool:
        """Add nodes that have appeared, and return whether there are any; vanished nodes stay."""
        known = len(self._nodes)
        for path in self._paths:
            try:
                folders = list_node_folders(path)
            except NoRecording:
                if not self._nodes and len(self._paths) == 1:
                    raise
                continue
            for folder in folders:
                if folder not in self._nodes:
                    self._nodes[folder] = _LiveNode(NodeTail(folder))
        if not self._nodes:
            list_node_folders(self._paths[0])  # raises the error that describes the path
        return len(self._nodes) > known

    def _analyze(self, node: _LiveNode, newest_ns: int | None) -> None:
        """Analyze a node's part of the window, which ends with the latest record of all nodes."""
        tail, realtime_ns = node.tail, node.tail.realtime_ns()
        node.result, node.ranks, node.error = None, {}, ""
        if tail.latest_ns is None or realtime_ns is None or newest_ns is None:
            return
        since_ns = tail.latest_ns - self._window_ns + max(newest_ns - realtime_ns, 0)
        if since_ns >= tail.latest_ns:
            return  # without data for longer than the window
        window = _WindowReader(tail, since_ns - _LEAD_NS)
        load = NodeLoader(tail.folder, _ONE_CHUNK_NS, window, _MAX_ROWS)
        load_observer = ObservedLoad(load, since_ns)
        try:
            load_like: Any = load_observer  # has the methods of a NodeLoader that are called
            node.result = analyze_load(load_like, tail.folder.name, self._limits, since_ns=since_ns)
            node.ranks = load_observer.ranks()
        except Exception as error:
            node.error = f"{tail.folder.name}: {type(error).__name__}: {error}"

    def _build_report(self) -> tuple[Report, str]:
        nodes = [node.result for node in self._nodes.values() if node.result is not None]
        title = str(self._paths[0])
        try:
            return build_report(title, analyze_across_ranks(nodes, limits=self._limits)), ""
        except Exception as error:
            why = f"ranks could not be compared: {type(error).__name__}: {error}"
            return build_report(title, JobState(tuple(nodes))), why


class _WindowReader:
    """Reads the records of a node's window."""

    def __init__(self, tail: NodeTail, since_ns: int) -> None:
        self._tail, self._since_ns = tail, since_ns

    @property
    def damage(self) -> Damage:
        return Damage(damaged_bytes=self._tail.damaged_bytes)

    def packed(self) -> Iterator[list[Record | PackedSpans]]:
        return self._tail.records(self._since_ns)


def _build_node_state(node: _LiveNode, now_ns: int) -> NodeStatus:
    tail = node.tail
    header = tail.header.node if tail.header is not None else {}
    realtime_ns = tail.realtime_ns()
    age_ns = None if realtime_ns is None else max(now_ns - realtime_ns, 0)
    if age_ns is not None and node.grew_ns is not None and tail.state == "recording":
        age_ns = min(age_ns, max(now_ns - node.grew_ns, 0) + SILENT_NS // 5)
    state: State = tail.state
    why = tail.why_ended if state == "ended" else tail.trouble
    if state == "gone":
        why = "its files are gone"
    elif state == "recording" and age_ns is not None and age_ns > SILENT_NS:
        state = "silent"
    return NodeStatus(
        name=header.get("display") or header.get("hostname") or tail.folder.name,
        key=tail.folder.name,
        state=state,
        age_ns=age_ns,
        why=why,
        damaged_bytes=tail.damaged_bytes,
    )
