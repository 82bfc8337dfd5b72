"""Define the exporter interface: a run in, bytes out. Options go to an exporter's
constructor.

Exporters read the recording itself, one frame at a time, so that memory does not grow
with its length; process identities and lost time come from the analysis.

Open the destination of an export: stdout, one file, or a folder of files, written
atomically.

A file is written under a temporary name and renamed when it is complete, so that its
readers (the textfile collector of node_exporter) never see half of it.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol, cast

import numpy as np

from clusterprof.analysis.pipeline import Analysis
from clusterprof.analysis.timeline.model import Int
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.model import Report
from clusterprof.trace.schema import Header
from clusterprof.util.atomic_file import convert_write_error, open_replacement


class Output:
    """The destination of an export; parts that can be concatenated may share one file."""

    def __init__(self, path: Path | None, stdout: BinaryIO, folder: bool = False) -> None:
        """Write to `path` (None = `stdout`); `folder`: `path` is a folder, or will be created as
        one.
        """
        self.path = path
        self._stdout = stdout
        self.is_folder = path is not None and (folder or path.is_dir())

    @property
    def is_terminal(self) -> bool:
        """True when the output would appear on a terminal."""
        return self.path is None and self._stdout.isatty()

    @contextmanager
    def open_whole(self) -> Iterator[BinaryIO]:
        """Open the one file that all parts share.

        Raises: UsageError when it cannot be written.
        """
        if self.path is None:
            try:
                yield self._stdout
                self._stdout.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise convert_write_error("to stdout", error) from None
            return
        with open_export_file(self.path) as file:
            yield file

    @contextmanager
    def open_part(self, name: str, suffix: str) -> Iterator[BinaryIO]:
        """Open a file in the folder, named after a part."""
        assert self.path is not None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise convert_write_error(str(self.path), error) from None
        with open_export_file(self.path / (escape_file_name(name) + suffix)) as file:
            yield file


def escape_file_name(name: str) -> str:
    """Convert a name to one part of a path: no separators, not hidden, no control characters."""
    safe = escape_text(name, 150).replace("/", "_").replace("\\", "_").strip()
    return "_" + safe if safe.startswith(".") or not safe else safe


@contextmanager
def open_export_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name when it is complete (see open_replacement).

    `*.gz` is compressed.
    """
    with open_replacement(path) as file, _open_compressed(file, path) as target_file:
        yield target_file


@contextmanager
def _open_compressed(file: BinaryIO, target: Path) -> Iterator[BinaryIO]:
    if target.suffix != ".gz":
        yield file
        return
    with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        yield cast(BinaryIO, packed)


@dataclass(frozen=True, slots=True)
class RunRank:
    """One training process of a node."""

    index: int
    """Index into `Report.ranks`."""
    rank: int | None
    """Global rank, None if unknown."""
    pid: int
    started_ticks: int
    """With the pid, the identity of the process on its node."""
    device: str
    """Accelerator id, "" when none was measured."""
    emulated: bool


@dataclass(frozen=True, slots=True)
class RunNode:
    """One recorded node."""

    folder: Path
    key: str
    """Name of its folder in the recording, equal in every copy of the recording."""
    name: str
    """Display name."""
    header: Header
    first_ns: int
    """Time of the first record, on the node's own clock."""
    ranks: tuple[RunRank, ...]
    common_ns: Callable[[Int], Int]
    """Converts times of the node's clock to the common clock, int64[n]: ns since 1970, as far
    as the wall clocks were right.
    """

    def instant_ns(self, t_ns: int) -> int:
        """Convert one time of the node's clock to the common clock."""
        return int(self.common_ns(np.array([t_ns], np.int64))[0])


@dataclass(frozen=True, slots=True)
class Run:
    """A recording and the result of its analysis."""

    report: Report
    nodes: tuple[RunNode, ...]

    def start_ns(self) -> int:
        """Return run time 0 on the common clock; 0 without nodes."""
        history = self.report.history
        if history is not None and history.started_at_ns is not None:
            return history.started_at_ns
        return min((node.instant_ns(node.first_ns) for node in self.nodes), default=0)

    def find_rank(self, index: int) -> tuple[RunNode, RunRank] | None:
        """Return the node and rank at an index of `Report.ranks`; None when there is none."""
        for node in self.nodes:
            for rank in node.ranks:
                if rank.index == index:
                    return node, rank
        return None


class Exporter(Protocol):
    """One export format."""

    name: ClassVar[str]
    """The word after `--to` that selects it."""
    suffix: ClassVar[str]
    """File suffix, with the dot; "" when nothing is written to a file."""

    def check(self, output: Output) -> None:
        """Reject an invalid output before anything is read.

        Raises: UsageError when the format cannot be written there.
        """
        ...

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write everything, and return remarks for the user."""
        ...


def build_run(analyzed: Analysis) -> Run:
    """Build the exporters' view of an analyzed recording."""
    clock = analyzed.across.clock
    nodes, index = [], 0
    for number, (folder, node) in enumerate(zip(analyzed.folders, analyzed.across.nodes)):
        ranks = []
        for result in node.ranks:
            ledger = result.ledger
            ranks.append(
                RunRank(
                    index,
                    ledger.rank,
                    ledger.pid,
                    result.started_ticks,
                    ledger.device,
                    result.emulated,
                )
            )
            index += 1

        def common_ns(t_ns: Int, number: int = number) -> Int:
            t_ns = np.asarray(t_ns, np.int64)
            return t_ns if clock is None else clock.to_common_ns(number, t_ns)

        nodes.append(
            RunNode(
                folder,
                node.facts.key,
                node.facts.name,
                node.loaded.header,
                node.loaded.first_ns,
                tuple(ranks),
                common_ns,
            )
        )
    return Run(analyzed.report, tuple(nodes))
