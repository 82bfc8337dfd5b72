"""Analyse a recording on this machine: one node at a time, one chunk at a time.

report = analyze(Path("clusterprof-20260101-120000"))
report = analyze(Path("host1"), Path("host2"))         # brought together from node-local disks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clusterprof.engine.dumps import dumps_of, notes_of
from clusterprof.engine.limits import bound
from clusterprof.engine.node import analyse_node
from clusterprof.engine.peers import across_ranks
from clusterprof.engine.report import build_report
from clusterprof.engine.spill import spilled
from clusterprof.findings import Report
from clusterprof.hostlists import fold
from clusterprof.trace.sources import find_nodes

_NONE: Mapping[str, Any] = MappingProxyType({})


def analyze(
    path: Path,
    *more: Path,
    jobs: int = 1,
    limits: Mapping[str, Mapping[str, Any]] = _NONE,
    facts: Mapping[str, Any] = _NONE,
) -> Report:
    """Say where the device time of a recording went, and why what was lost was lost.

    Several paths are one recording, each node of it counted once (`trace.sources`).
    `jobs` processes share the nodes. `limits` holds the limits of causes by cause id, as a
    profile gives them; an unknown id or key raises `UsageError`. `facts` are those of the site.
    Raises `NoRecording` when there is nothing to read.
    """
    bound_limits = bound(limits)
    sources = find_nodes([path, *more])
    folders = sources.folders
    with spilled(folders) as place:
        one = partial(analyse_node, limits=bound_limits, place=place)
        if jobs > 1 and len(folders) > 1:
            from multiprocessing import get_context  # one process has no use for it

            with get_context("spawn").Pool(min(jobs, len(folders))) as pool:
                # `map` keeps the order of the folders: the report depends not on who was quicker.
                nodes = pool.map(one, folders, chunksize=1)
        else:
            nodes = [one(folder) for folder in folders]
        across = across_ranks(nodes, place, bound_limits)
    title = fold(map(str, (path, *more))) if more else str(path)
    report = build_report(title, across, sources.left_out, facts)
    return replace(report, notes=(*report.notes, *notes_of(*dumps_of(folders))))
