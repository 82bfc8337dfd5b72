"""A part of a run, as a person asks for it, on the clocks of the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from clusterprof.attribution.window import WHOLE, Window
from clusterprof.errors import UsageError
from clusterprof.findings import Report
from clusterprof.timeline.model import Chunk, Process, Series, SpanTable
from clusterprof.timeline.network import NetworkMeter
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Header
from clusterprof.units import human

_FIRST_FRAMES = 64  # in which the header must stand


@dataclass(frozen=True, slots=True)
class Instant:
    """An instant of the run: so long after its start, or a time of the wall clock."""

    ns: int
    is_wall: bool = False
    """True: ns since 1970."""


@dataclass(frozen=True, slots=True)
class PartOfRun:
    """What is looked at; None = no bound."""

    since: Instant | None = None
    until: Instant | None = None
    first_step: int | None = None
    end_step: int | None = None
    """The first step that is not looked at."""
    said: str = ""
    """In the words of who asked."""

    @property
    def whole(self) -> bool:
        """True when nothing is left out."""
        bounds = self.since, self.until, self.first_step, self.end_step
        return all(bound is None for bound in bounds)


WHOLE_RUN = PartOfRun()


def windows_of(folders: Sequence[Path], part: PartOfRun) -> list[Window]:
    """Return the part on the clock of each node: by their wall clocks, from the first start on."""
    if part.since is None and part.until is None:
        return [Window(None, None, part.first_step, part.end_step)] * len(folders)
    starts = [_started(folder) for folder in folders]
    first_ns = min((wall for _, wall in starts), default=0)
    out = []
    for own_ns, wall_ns in starts:

        def here(at: Instant | None, own_ns: int = own_ns, wall_ns: int = wall_ns) -> int | None:
            if at is None:
                return None
            return own_ns + (at.ns if at.is_wall else first_ns + at.ns) - wall_ns

        out.append(Window(here(part.since), here(part.until), part.first_step, part.end_step))
    return out


def _started(folder: Path) -> tuple[int, int]:
    """When a node's recording began, on its own clock and by the wall clock."""
    for number, records in enumerate(NodeReader(folder).frames()):
        for record in records:
            if isinstance(record, Header):
                own = record.started.get("monotonic_ns", 0)
                return int(own), int(record.started.get("realtime_ns", own))
        if number >= _FIRST_FRAMES:
            break
    return 0, 0


def checked(report: Report, part: PartOfRun) -> Report:
    """Return the report with a note of the part; raises UsageError when nothing is in it."""
    if part.whole:
        return report
    if not report.in_step_ns:
        longest = max((node.duration_ns for node in report.nodes), default=0)
        raise UsageError(
            f"nothing inside steps was recorded in the part that was asked for ({part.said})",
            f"the recording is {human(longest, 'ns')} long; without these options all is analysed",
        )
    note = f"only a part of the run was analysed, {part.said}: all else counts as outside the steps"
    if part.first_step is not None or part.end_step is not None:
        note += "; network counters, which are of the whole run, were left out"
    return replace(report, part=part.said, notes=(note, *report.notes))


def seen_by(meter: NetworkMeter, chunks: Iterable[Chunk], window: Window) -> Iterable[Chunk]:
    """Let a meter see what lies inside a window of time; all chunks pass as they are."""
    return meter.watch(chunks) if window == WHOLE else _seen_by(meter, chunks, window)


def _seen_by(meter: NetworkMeter, chunks: Iterable[Chunk], window: Window) -> Iterator[Chunk]:
    passing: list[Chunk] = []

    def cut() -> Iterator[Chunk]:
        for chunk in chunks:
            passing.append(chunk)
            yield _cut(chunk, window)

    for _ in meter.watch(cut()):
        yield passing.pop()


def _cut(chunk: Chunk, window: Window) -> Chunk:
    begin = chunk.start_ns if window.since_ns is None else window.since_ns
    end = chunk.end_ns if window.until_ns is None else window.until_ns
    if window.by_steps:
        begin = end = chunk.end_ns + 1
    series = {key: _between(one, begin, end) for key, one in chunk.series.items()}
    processes = {pid: _ended(one, begin, end) for pid, one in chunk.processes.items()}
    return replace(chunk, series=series, processes=processes)


def _between(series: Series, begin: int, end: int) -> Series:
    rows = slice(*np.searchsorted(series.t_ns, [begin, end + 1]).tolist())
    return replace(series, t_ns=series.t_ns[rows], values=series.values[rows])


def _ended(process: Process, begin: int, end: int) -> Process:
    spans = {}
    for kind, table in process.spans.items():
        rows = (table.end_ns > begin) & (table.end_ns <= end)
        spans[kind] = SpanTable(
            table.start_ns[rows], table.end_ns[rows], table.a[rows], table.b[rows],
            table.c[rows], table.d[rows], table.sequence[rows],
        )  # fmt: skip
    return replace(process, spans=spans)
