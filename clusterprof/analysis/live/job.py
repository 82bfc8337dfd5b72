"""Merge the last minute of all nodes of a growing recording, again whenever it has grown.

    job = LiveJob([Path("clusterprof-out/job-42")], build_limits({}))
    live = job.update(time.time_ns())

Attribution and comparison of ranks are those of a whole recording, applied to a window.
A node's part of the window comes from the node itself, where its helper has settled it
(settler), or from its recording. Only the window is read and kept, so an update costs
the same after a minute and after a day.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.analysis.cross_rank.pipeline import analyze_across_ranks
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.findings.report import build_report
from clusterprof.analysis.live.selection import MIN_NODES, SettledSelection
from clusterprof.analysis.live.settled_file import SettledNode, make_settings_key
from clusterprof.analysis.live.window import KEEP_MORE_NS, WINDOW_NS, NodeWindow, settle_window
from clusterprof.report.live import LiveView, NodeStatus, State
from clusterprof.report.model import Report
from clusterprof.trace.live_tail import NodeTail
from clusterprof.trace.reader import find_new_node_folders
from clusterprof.util.gc_control import reduce_gc_frequency

PATIENCE_S = 10.0
"""Time to wait for the nodes of a large job, seconds: a recorder looks for marks every 5 s."""
SILENT_NS = 5_000_000_000
"""Time without data after which a recorder cannot write or has ended, ns.

A recorder writes every second.
"""


@dataclass
class _LiveNode:
    """One node's folder, and the result of its window when it last grew."""

    tail: NodeTail
    settled: SettledNode | None = None
    """What the node has settled itself; None where its recording is read."""
    window: NodeWindow | None = None
    grew_ns: int | None = None
    """When data arrived during our observation, ns by the caller's clock; None = never."""
    error: str = ""


class LiveJob:
    """Analyzes the latest window of all nodes of a recording, again and again."""

    def __init__(
        self,
        paths: Sequence[Path],
        limits: Mapping[str, Any],
        window_ns: int = WINDOW_NS,
        min_settled_nodes: int | None = None,
    ) -> None:
        """Start without data; `limits`: bound limits object per cause id.

        min_settled_nodes: jobs with fewer nodes are read directly, which is fresher. None: a fixed
        number where nodes settle with the same limits and window, else no job is large enough.
        """
        if min_settled_nodes is None:
            defaults = make_settings_key(build_limits({}))
            is_settled = window_ns == WINDOW_NS and make_settings_key(limits) == defaults
            min_settled_nodes = MIN_NODES if is_settled else sys.maxsize
        self._paths = tuple(paths)
        self._limits = limits
        self._window_ns = window_ns
        self._nodes: dict[Path, _LiveNode] = {}
        self._report_and_error: tuple[Report, str] | None = None
        self._selection = SettledSelection(limits, window_ns, min_settled_nodes)

    def wait_for_settled(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until the nodes of a large job have settled their last minute.

        They begin when they see the mark of this viewer. It costs no CPU, and no more time than
        reading all recordings takes. Where nodes cannot be expected to settle, it does not wait.

        Raises: NoRecording when there has never been anything to read.
        """
        self._find_nodes()
        deadline = time.monotonic() + patience_s
        while self._selection.is_expected(list(self._nodes)) and time.monotonic() < deadline:
            time.sleep(1.0)

    @reduce_gc_frequency()
    def update(self, now_ns: int) -> LiveView:
        """Read new data and analyze the window; `now_ns`: wall-clock time, ns.

        Raises: NoRecording when there has never been anything to read.
        """
        changed = self._find_nodes()
        changed |= self._take_settled(now_ns)
        read_nodes = [node for node in self._nodes.values() if node.settled is None]
        for node in read_nodes:
            has_records = node.tail.latest_ns is not None
            if node.tail.poll(self._window_ns + KEEP_MORE_NS):
                changed = True
                node.grew_ns = now_ns if has_records else None
        if changed or self._report_and_error is None:
            newest_ns = self._selection.end_ns or max(
                (t for node in read_nodes if (t := node.tail.realtime_ns()) is not None),
                default=None,
            )
            for node in read_nodes:
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
                (node.window.result.facts.name, pid): rank
                for node in self._nodes.values()
                if node.window is not None
                for pid, rank in node.window.ranks.items()
            },
            trouble=next((why for why in [trouble, *troubles] if why), ""),
            reading=self._selection.reading,
        )

    def _find_nodes(self) -> bool:
        """Add nodes that have appeared, and return whether there are any; vanished nodes stay."""
        folders = find_new_node_folders(self._paths, self._nodes)
        for folder in folders:
            self._nodes[folder] = _LiveNode(NodeTail(folder))
        return bool(folders)

    def _take_settled(self, now_ns: int) -> bool:
        """Take the windows that nodes have settled themselves; return whether any has changed."""
        changed = False
        for folder, settled in self._selection.update(list(self._nodes)).items():
            node = self._nodes[folder]
            if settled is node.settled:
                continue
            changed = True
            if settled is not None:
                node.grew_ns = now_ns if node.settled is not None else None
                node.window = NodeWindow(settled.result, settled.ranks)
                node.error = ""
                node.tail = NodeTail(folder)  # what it keeps of the window is no longer needed
            node.settled = settled
        return changed

    def _analyze(self, node: _LiveNode, newest_ns: int | None) -> None:
        """Analyze a node's part of the window, which ends with the latest record of all nodes.

        newest_ns: the time of that record, or the common end of the windows that other nodes have
        settled, by wall clocks.
        """
        tail, realtime_ns = node.tail, node.tail.realtime_ns()
        node.window, node.error = None, ""
        if tail.latest_ns is None or realtime_ns is None or newest_ns is None:
            return
        until_ns = tail.latest_ns + newest_ns - realtime_ns
        is_cut = self._selection.end_ns is not None
        since_ns = (until_ns if is_cut else max(until_ns, tail.latest_ns)) - self._window_ns
        if since_ns >= tail.latest_ns:
            return  # without data for longer than the window
        try:
            node.window = settle_window(tail, self._limits, since_ns, until_ns if is_cut else None)
        except Exception as error:
            node.error = f"{tail.folder.name}: {type(error).__name__}: {error}"

    def _build_report(self) -> tuple[Report, str]:
        nodes = [node.window.result for node in self._nodes.values() if node.window is not None]
        title = str(self._paths[0])
        try:
            return build_report(title, analyze_across_ranks(nodes, limits=self._limits)), ""
        except Exception as error:
            why = f"ranks could not be compared: {type(error).__name__}: {error}"
            return build_report(title, JobState(tuple(nodes))), why


def _build_node_state(node: _LiveNode, now_ns: int) -> NodeStatus:
    if node.settled is not None:
        return _build_settled_state(node, node.settled, now_ns)
    tail = node.tail
    header = tail.header.node if tail.header is not None else {}
    realtime_ns = tail.realtime_ns()
    grew_ns = node.grew_ns if tail.state == "recording" else None
    age_ns = _measure_age(realtime_ns, grew_ns, now_ns)
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


def _build_settled_state(node: _LiveNode, settled: SettledNode, now_ns: int) -> NodeStatus:
    """Build the state of a recorder whose node settles its window every `period_ns`."""
    age_ns = _measure_age(settled.latest_ns, node.grew_ns, now_ns)
    is_silent = age_ns is not None and age_ns > SILENT_NS + 2 * settled.period_ns
    return NodeStatus(
        name=settled.name,
        key=node.tail.folder.name,
        state="silent" if is_silent else "recording",
        age_ns=age_ns,
        damaged_bytes=settled.damaged_bytes,
    )


def _measure_age(latest_ns: int | None, grew_ns: int | None, now_ns: int) -> int | None:
    """Measure the age of a node's newest record, ns.

    latest_ns: its time by the node's clock. grew_ns: when it was seen to arrive; clocks may
    differ, and what arrived while we looked is at most that old.
    """
    if latest_ns is None:
        return None
    age_ns = max(now_ns - latest_ns, 0)
    if grew_ns is not None:
        age_ns = min(age_ns, max(now_ns - grew_ns, 0) + SILENT_NS // 5)
    return age_ns
