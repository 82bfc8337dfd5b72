"""Analyse a recording on this machine: one node at a time, one chunk at a time.

report = analyze(Path("clusterprof-20260101-120000"))
report = analyze(Path("host1"), Path("host2"))         # brought together from node-local disks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clusterprof.attribution.window import Window
from clusterprof.engine.dumps import dumps_of, notes_of
from clusterprof.engine.given import Given, given
from clusterprof.engine.history import history_of
from clusterprof.engine.limits import bound
from clusterprof.engine.node import NodeResult, analyse_node
from clusterprof.engine.onset import with_onsets
from clusterprof.engine.part import WHOLE_RUN, PartOfRun, checked, windows_of
from clusterprof.engine.peers import Across, across_ranks
from clusterprof.engine.progress import Stand, Tell
from clusterprof.engine.report import build_report
from clusterprof.engine.spill import spilled
from clusterprof.findings import Report
from clusterprof.hostlists import fold
from clusterprof.trace.sources import find_nodes

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Analysed:
    """A report, and what it was made of."""

    report: Report
    folders: tuple[Path, ...]
    """Of the nodes, in the order of `across.nodes`."""
    across: Across
    """`Report.ranks` are the books of its nodes, one node after the other."""


def analyze(
    path: Path,
    *more: Path,
    jobs: int = 1,
    limits: Mapping[str, Mapping[str, Any]] = _NONE,
    facts: Mapping[str, Any] = _NONE,
    history: bool = False,
    tell: Tell | None = None,
    part: PartOfRun = WHOLE_RUN,
    leave_unknown: bool = False,
) -> Report:
    """Say where the device time of a recording went, and why what was lost was lost.

    Several paths are one recording, each node of it counted once (`trace.sources`); files of
    foreign formats become recordings first (`engine.imported`).
    `jobs` processes share the nodes. `limits` holds the limits of causes by cause id, as a
    profile gives them; an unknown id or key raises `UsageError`. `facts` are those of the site.
    `history` asks for what happened when, too (`Report.history`); `tell` is told how far it is.
    Of a `part` of the run everything else counts as outside the steps; an empty one raises
    `UsageError`. With `leave_unknown` files of no known format are left out, and named in a note.
    Raises `NoRecording` when there is nothing to read.
    """
    return analysed(
        path, *more, jobs=jobs, limits=limits, facts=facts, history=history, tell=tell, part=part,
        leave_unknown=leave_unknown,
    ).report  # fmt: skip


def analysed(path: Path, *more: Path, **options: Any) -> Analysed:
    """Do what `analyze` does, and keep what the report was made of.

    What foreign files became is gone by then: `analysing` holds it.
    """
    with analysing(path, *more, **options) as made:
        return made


@contextmanager
def analysing(
    path: Path,
    *more: Path,
    jobs: int = 1,
    limits: Mapping[str, Mapping[str, Any]] = _NONE,
    facts: Mapping[str, Any] = _NONE,
    history: bool = False,
    tell: Tell | None = None,
    part: PartOfRun = WHOLE_RUN,
    leave_unknown: bool = False,
) -> Iterator[Analysed]:
    """Do what `analysed` does; inside, the folders of foreign files are still there."""
    bound_limits = bound(limits)
    with given([path, *more], jobs, leave_unknown) as found:
        title = fold(map(str, (path, *more))) if more else str(path)
        asked = _Asked(title, jobs, bound_limits, facts, history, tell, part)
        yield _analysed(found, asked)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `analysed` was asked for."""

    title: str
    jobs: int
    limits: Mapping[str, Any]
    facts: Mapping[str, Any]
    history: bool
    tell: Tell | None
    part: PartOfRun


def _analysed(found: Given, asked: _Asked) -> Analysed:
    sources = find_nodes(found.paths)
    folders = sources.folders
    jobs, history, tell, part = asked.jobs, asked.history, asked.tell, asked.part
    stand = Stand(folders, tell)
    nodes: list[NodeResult] = []
    with spilled(folders) as place:
        one = partial(_one, limits=asked.limits, place=place, history=history)
        work = list(zip(folders, windows_of(folders, part)))
        if jobs > 1 and len(folders) > 1:
            from multiprocessing import get_context  # one process has no use for it

            with get_context("spawn").Pool(min(jobs, len(folders))) as pool:
                # `imap` keeps the order of the folders: the report depends not on who was quicker.
                for node in pool.imap(one, work):
                    nodes.append(node)
                    stand.node_done()
        else:
            for item in work:
                nodes.append(one(item, within=stand.within if tell else None))
                stand.node_done()
        across = across_ranks(nodes, place, asked.limits)
        happened = history_of(across, place, not part.whole) if history else None
    report = build_report(asked.title, across, sources.left_out, asked.facts)
    notes = (*report.notes, *found.notes, *notes_of(*dumps_of(folders)))
    report = with_onsets(checked(replace(report, notes=notes, history=happened), part))
    return Analysed(report, tuple(folders), across)


def _one(item: tuple[Path, Window], **options: Any) -> NodeResult:
    """A function that a worker process can be told by its name."""
    return analyse_node(item[0], window=item[1], **options)
