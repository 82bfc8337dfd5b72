"""The last minute of a recording that grows: its end is analysed again whenever it has grown.

    job = LiveJob([Path("clusterprof-out/job-42")], bound({}))
    live = job.look(time.time_ns())

The same local attribution as for a whole recording, over a window, and the same comparison of
ranks. What is read and kept is the window's, so a look costs the same after a minute and a day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterprof.engine.live_ranks import Watched
from clusterprof.engine.node import NodeResult, analyse_load
from clusterprof.engine.peers import Across, across_ranks
from clusterprof.engine.report import build_report
from clusterprof.errors import NoRecording
from clusterprof.findings import Report
from clusterprof.live import Live, NodeLive, RankLive, State
from clusterprof.timeline.load import NodeLoad
from clusterprof.trace.reader import node_folders
from clusterprof.trace.scan import Damage
from clusterprof.trace.schema import Record
from clusterprof.trace.spanframes import PackedSpans
from clusterprof.trace.tail import NodeTail

WINDOW_NS = 60_000_000_000
SILENT_NS = 5_000_000_000
"""A recorder writes every second; so long it says nothing only when it cannot, or is no more."""
_LEAD_NS = 3_000_000_000  # what intervals that end in the window need of before it
_WHOLE = 1 << 62  # ns: the window is one chunk …
_ROWS_AT_MOST = 4_000_000  # … unless it is dense: a minute of 8 GPUs and their host is 0.3 million


@dataclass
class _Node:
    """One node's folder, and what its window gave the last time it had grown."""

    tail: NodeTail
    result: NodeResult | None = None
    ranks: dict[int, RankLive] = field(default_factory=dict)
    """By process id."""
    since_ns: int = 0
    grew_ns: int | None = None
    """When something came while we looked, by the clock of the one who looks."""
    trouble: str = ""


class LiveJob:
    """Looks at all nodes of a recording, again and again."""

    def __init__(
        self, paths: Sequence[Path], limits: Mapping[str, Any], window_ns: int = WINDOW_NS
    ) -> None:
        """`limits`: bound, by cause id."""
        self._paths = tuple(paths)
        self._limits = limits
        self._window_ns = window_ns
        self._nodes: dict[Path, _Node] = {}
        self._told: tuple[Report, str] | None = None

    def look(self, now_ns: int) -> Live:
        """Read what has come and analyse the window; `now_ns` is the time of people's clocks.

        Raises NoRecording when there has never been anything to read.
        """
        came = self._find()
        for node in self._nodes.values():
            known = node.tail.latest_ns is not None
            if node.tail.look(self._window_ns + _LEAD_NS):
                came = True
                node.grew_ns = now_ns if known else None
        newest_ns = max(
            (t for node in self._nodes.values() if (t := node.tail.realtime_ns()) is not None),
            default=None,
        )
        if came or self._told is None:
            for node in self._nodes.values():
                self._analyse(node, newest_ns)
            self._told = self._report()
        report, trouble = self._told
        states = tuple(_state(node, now_ns) for node in self._nodes.values())
        troubles = [node.trouble for node in self._nodes.values() if node.trouble]
        return Live(
            title=" ".join(map(str, self._paths)),
            window_ns=self._window_ns,
            age_ns=min((one.age_ns for one in states if one.age_ns is not None), default=None),
            nodes=states,
            report=report,
            ranks={
                (node.result.facts.name, pid): one
                for node in self._nodes.values()
                if node.result is not None
                for pid, one in node.ranks.items()
            },
            trouble=next((why for why in [trouble, *troubles] if why), ""),
        )

    def _find(self) -> bool:
        """Take up nodes that have come, and say whether some have; those that have gone stay."""
        known = len(self._nodes)
        for path in self._paths:
            try:
                folders = node_folders(path)
            except NoRecording:
                if not self._nodes and len(self._paths) == 1:
                    raise
                continue
            for folder in folders:
                if folder not in self._nodes:
                    self._nodes[folder] = _Node(NodeTail(folder))
        if not self._nodes:
            node_folders(self._paths[0])  # says what is wrong with it
        return len(self._nodes) > known

    def _analyse(self, node: _Node, newest_ns: int | None) -> None:
        """Analyse a node's part of the window, which ends with the newest record of all nodes."""
        tail, told_ns = node.tail, node.tail.realtime_ns()
        node.result, node.ranks, node.trouble = None, {}, ""
        if tail.latest_ns is None or told_ns is None or newest_ns is None:
            return
        since_ns = tail.latest_ns - self._window_ns + max(newest_ns - told_ns, 0)
        if since_ns >= tail.latest_ns:
            return  # it has been silent for longer than that
        window = _Window(tail, since_ns - _LEAD_NS)
        load = NodeLoad(tail.folder, _WHOLE, window, _ROWS_AT_MOST)
        watched = Watched(load, since_ns)
        try:
            node.result = analyse_load(watched, tail.folder.name, self._limits, since_ns=since_ns)  # type: ignore[arg-type]
            node.ranks = watched.ranks()
        except Exception as error:
            node.trouble = f"{tail.folder.name}: {type(error).__name__}: {error}"

    def _report(self) -> tuple[Report, str]:
        nodes = [node.result for node in self._nodes.values() if node.result is not None]
        title = str(self._paths[0])
        try:
            return build_report(title, across_ranks(nodes, limits=self._limits)), ""
        except Exception as error:
            why = f"ranks could not be compared: {type(error).__name__}: {error}"
            return build_report(title, Across(tuple(nodes))), why


class _Window:
    """A node's last minute as a reader of records."""

    def __init__(self, tail: NodeTail, since_ns: int) -> None:
        self._tail, self._since_ns = tail, since_ns

    @property
    def damage(self) -> Damage:
        return Damage(damaged_bytes=self._tail.damaged_bytes)

    def packed(self) -> Iterator[list[Record | PackedSpans]]:
        return self._tail.records(self._since_ns)


def _state(node: _Node, now_ns: int) -> NodeLive:
    tail = node.tail
    header = tail.header.node if tail.header is not None else {}
    told_ns = tail.realtime_ns()
    age_ns = None if told_ns is None else max(now_ns - told_ns, 0)
    if age_ns is not None and node.grew_ns is not None and tail.state == "recording":
        age_ns = min(age_ns, max(now_ns - node.grew_ns, 0) + SILENT_NS // 5)
    state: State = tail.state
    why = tail.why_ended if state == "ended" else tail.trouble
    if state == "gone":
        why = "its files are gone"
    elif state == "recording" and age_ns is not None and age_ns > SILENT_NS:
        state = "silent"
    return NodeLive(
        name=header.get("display") or header.get("hostname") or tail.folder.name,
        key=tail.folder.name,
        state=state,
        age_ns=age_ns,
        why=why,
        damaged_bytes=tail.damaged_bytes,
    )
