"""Select a part of a run by time or by steps, on the clocks of the nodes.

Report the progress of an analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from clusterprof.analysis.attribution.rank.chunk_boundary import WHOLE_RECORDING, PartOfRecording
from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.analysis.timeline.model import Chunk, Process, Series
from clusterprof.analysis.timeline.network_counters import NetworkMeter
from clusterprof.errors import UsageError
from clusterprof.report.model import Report
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Header
from clusterprof.units import format_quantity

_FIRST_FRAMES = 64  # in which the header must stand


@dataclass(frozen=True, slots=True)
class Instant:
    """An instant of the run: a time after its start, or a wall-clock time."""

    ns: int
    is_wall: bool = False
    """True: `ns` counts from 1970."""


@dataclass(frozen=True, slots=True)
class PartOfRun:
    """Bounds of the analyzed part of a run; None = no bound."""

    since: Instant | None = None
    until: Instant | None = None
    first_step: int | None = None
    end_step: int | None = None
    """The first step that is left out."""
    description: str = ""
    """The part in the user's own words, for messages."""

    @property
    def whole(self) -> bool:
        """Return whether nothing is left out."""
        bounds = self.since, self.until, self.first_step, self.end_step
        return all(bound is None for bound in bounds)


WHOLE_RUN = PartOfRun()


StartTimes = tuple[int, int]
"""When a node's recording began: ns on its own clock, ns by the wall clock."""


def build_parts(
    folders: Sequence[Path],
    part: PartOfRun,
    read_starts: Callable[[Sequence[Path]], Iterable[StartTimes]] | None = None,
) -> list[PartOfRecording]:
    """Build the analyzed part of each node's recording, with bounds on its own clock.

    Times of the run count from the first start of a recording, by the nodes' wall clocks.
    read_starts: reads the start times of the folders in order; None = read_start_times.
    """
    if part.since is None and part.until is None:
        return [PartOfRecording(None, None, part.first_step, part.end_step)] * len(folders)
    starts = list(map(read_start_times, folders) if read_starts is None else read_starts(folders))
    first_ns = min((wall for _, wall in starts), default=0)
    out = []
    for own_ns, wall_ns in starts:

        def to_node_ns(
            instant: Instant | None, own_ns: int = own_ns, wall_ns: int = wall_ns
        ) -> int | None:
            if instant is None:
                return None
            return own_ns + (instant.ns if instant.is_wall else first_ns + instant.ns) - wall_ns

        out.append(
            PartOfRecording(
                to_node_ns(part.since), to_node_ns(part.until), part.first_step, part.end_step
            )
        )
    return out


def read_start_times(folder: Path) -> StartTimes:
    """Read when a node's recording began: ns on its own clock, ns by the wall clock."""
    for number, records in enumerate(NodeReader(folder).frames()):
        for record in records:
            if isinstance(record, Header):
                monotonic_ns = record.started.get("monotonic_ns", 0)
                return int(monotonic_ns), int(record.started.get("realtime_ns", monotonic_ns))
        if number >= _FIRST_FRAMES:
            break
    return 0, 0


def with_part_note(report: Report, part: PartOfRun) -> Report:
    """Return the report with a note of the analyzed part.

    Raises: UsageError when the part contains no time inside steps.
    """
    if part.whole:
        return report
    if not report.in_step_ns:
        longest = max((node.duration_ns for node in report.nodes), default=0)
        raise UsageError(
            f"no time inside steps was recorded in the requested part ({part.description})",
            f"the recording is {format_quantity(longest, 'ns')} long; omit these options"
            " to analyze all of it",
        )
    note = (
        f"only a part of the run was analyzed, {part.description}: everything else counts as"
        f" outside the steps"
    )
    if part.first_step is not None or part.end_step is not None:
        note += "; network counters, which are of the whole run, were left out"
    return replace(report, selection_text=part.description, notes=(note, *report.notes))


def observe_part(
    meter: NetworkMeter, chunks: Iterable[Chunk], part: PartOfRecording
) -> Iterable[Chunk]:
    """Let a meter observe only the analyzed part; all chunks pass through unchanged."""
    return (
        meter.observe(chunks) if part == WHOLE_RECORDING else _observe_trimmed(meter, chunks, part)
    )


def _observe_trimmed(
    meter: NetworkMeter, chunks: Iterable[Chunk], part: PartOfRecording
) -> Iterator[Chunk]:
    waiting: list[Chunk] = []

    def trimmed() -> Iterator[Chunk]:
        for chunk in chunks:
            waiting.append(chunk)
            yield _trim_chunk(chunk, part)

    for _ in meter.observe(trimmed()):
        yield waiting.pop()


def _trim_chunk(chunk: Chunk, part: PartOfRecording) -> Chunk:
    begin = chunk.start_ns if part.since_ns is None else part.since_ns
    end = chunk.end_ns if part.until_ns is None else part.until_ns
    if part.by_steps:
        begin = end = chunk.end_ns + 1
    series = {key: _trim_series(series, begin, end) for key, series in chunk.series.items()}
    processes = {pid: _trim_spans(process, begin, end) for pid, process in chunk.processes.items()}
    return replace(chunk, series=series, processes=processes)


def _trim_series(series: Series, begin: int, end: int) -> Series:
    rows = slice(*np.searchsorted(series.t_ns, [begin, end + 1]).tolist())
    return replace(series, t_ns=series.t_ns[rows], values=series.values[rows])


def _trim_spans(process: Process, begin: int, end: int) -> Process:
    spans = {
        kind: table.select((table.end_ns > begin) & (table.end_ns <= end))
        for kind, table in process.spans.items()
    }
    return replace(process, spans=spans)


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the recordings was read."""

    read_bytes: int
    all_bytes: int
    nodes: int
    """Nodes that were read completely."""
    all_nodes: int


ProgressCallback = Callable[[Progress], None]


class ProgressReporter:
    """Adds up the bytes read of all nodes, in any order, and reports progress."""

    def __init__(self, sizes: Sequence[int], on_progress: ProgressCallback | None) -> None:
        """Start with nothing read; sizes: bytes of each node; on_progress None = report nothing."""
        self._on_progress = on_progress
        self._sizes = sizes
        self._nodes = 0
        self._done_bytes = 0

    def update_node(self, number: int, read_bytes: int) -> None:
        """Report the bytes read of a node that is not complete."""
        self._report(min(read_bytes, self._sizes[number]))

    def finish_node(self, number: int) -> None:
        """Report that a node was read completely, or cannot be read."""
        self._nodes += 1
        self._done_bytes += self._sizes[number]
        self._report(0)

    def _report(self, read_bytes: int) -> None:
        if self._on_progress is not None:
            done_bytes, all_bytes = self._done_bytes + read_bytes, sum(self._sizes)
            self._on_progress(Progress(done_bytes, all_bytes, self._nodes, len(self._sizes)))


def watch_chunks(load: NodeLoader, within: Callable[[int], None] | None) -> Iterable[Chunk]:
    """Return the chunks of a node; `within` is called with the bytes read before each."""
    return load.chunks() if within is None else _report_chunks(load, within)


def _report_chunks(load: NodeLoader, within: Callable[[int], None]) -> Iterator[Chunk]:
    for chunk in load.chunks():
        within(load.read_bytes)
        yield chunk
        del chunk  # else it stays while the next one is read
