"""What an export is: a run in, bytes out. Options of an exporter go to its constructor.

Exporters read the recording itself, one frame at a time, so that memory does not grow with its
length; who is who and what was lost they take from the analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from clusterprof.engine.local import Analysed
from clusterprof.exporters.output import Output
from clusterprof.findings import Report
from clusterprof.timeline.model import Int
from clusterprof.trace.schema import Header


@dataclass(frozen=True, slots=True)
class RunRank:
    """One training process of a node."""

    place: int
    """In `Report.ranks`."""
    rank: int | None
    """Global rank, None if unknown."""
    pid: int
    started_ticks: int
    """With the pid the identity of the process on its node."""
    device: str
    """Accelerator id, "" when none was measured."""
    emulated: bool


@dataclass(frozen=True, slots=True)
class RunNode:
    """One recorded node."""

    folder: Path
    key: str
    """Name of its folder in the recording: alike wherever the recording is copied."""
    name: str
    """Display name."""
    header: Header
    first_ns: int
    """First record, on the node's own clock."""
    ranks: tuple[RunRank, ...]
    common_ns: Callable[[Int], Int]
    """Takes times of the node's clock to the one of all nodes: ns since 1970, where the wall
    clocks were right."""

    def instant_ns(self, t_ns: int) -> int:
        """Return one time of the node's clock on the one of all nodes."""
        return int(self.common_ns(np.array([t_ns], np.int64))[0])


@dataclass(frozen=True, slots=True)
class Run:
    """A recording and what its analysis found."""

    report: Report
    nodes: tuple[RunNode, ...]

    def start_ns(self) -> int:
        """Return when run time 0 was, on the clock of all nodes; 0 without nodes."""
        history = self.report.history
        if history is not None and history.started_at_ns is not None:
            return history.started_at_ns
        return min((node.instant_ns(node.first_ns) for node in self.nodes), default=0)

    def at(self, place: int) -> tuple[RunNode, RunRank] | None:
        """Return the node and rank at a place in `Report.ranks`; None when there is none."""
        for node in self.nodes:
            for rank in node.ranks:
                if rank.place == place:
                    return node, rank
        return None


class Exporter(Protocol):
    """One format."""

    name: ClassVar[str]
    """The word after `--to`."""
    suffix: ClassVar[str]
    """File suffix, with the dot; "" when nothing is written to a file."""

    def check(self, output: Output) -> None:
        """Raise UsageError, before anything is read, for what cannot be written there."""
        ...

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write everything; return sentences about what a reader must know."""
        ...


def run_of(found: Analysed) -> Run:
    """Return what exporters read of an analysed recording."""
    clock = found.across.clock
    nodes, place = [], 0
    for number, (folder, node) in enumerate(zip(found.folders, found.across.nodes)):
        ranks = []
        for one in node.books:
            ledger = one.ledger
            ranks.append(
                RunRank(
                    place, ledger.rank, ledger.pid, one.started_ticks, ledger.device, one.emulated
                )
            )
            place += 1

        def common_ns(t_ns: Int, number: int = number) -> Int:
            t_ns = np.asarray(t_ns, np.int64)
            return t_ns if clock is None else clock.when_ns(number, t_ns)

        nodes.append(
            RunNode(
                folder, node.facts.key, node.facts.name, node.loaded.header,
                node.loaded.first_ns, tuple(ranks), common_ns,
            )
        )  # fmt: skip
    return Run(found.report, tuple(nodes))
