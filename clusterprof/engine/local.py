"""Analyse a recording on this machine: one node at a time, one chunk at a time.

report = analyze(Path("clusterprof-20260101-120000"))
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
from clusterprof.findings import Report
from clusterprof.trace.reader import node_folders

_NONE: Mapping[str, Any] = MappingProxyType({})


def analyze(
    path: Path,
    *,
    jobs: int = 1,
    limits: Mapping[str, Mapping[str, Any]] = _NONE,
    facts: Mapping[str, Any] = _NONE,
) -> Report:
    """Say where the device time of a recording went, and why what was lost was lost.

    `jobs` processes share the nodes. `limits` holds the limits of causes by cause id, as a
    profile gives them; an unknown id or key raises `UsageError`. `facts` are those of the site.
    Raises `NoRecording` when there is nothing to read.
    """
    bound_limits = bound(limits)
    folders = node_folders(path)
    if jobs > 1 and len(folders) > 1:
        from multiprocessing import get_context  # one process has no use for it

        with get_context("spawn").Pool(min(jobs, len(folders))) as pool:
            # `map` keeps the order of the folders: the report does not depend on who was quicker.
            nodes = pool.map(partial(analyse_node, limits=bound_limits), folders, chunksize=1)
    else:
        nodes = [analyse_node(folder, bound_limits) for folder in folders]
    report = build_report(str(path), across_ranks(nodes))
    return replace(report, notes=(*report.notes, *notes_of(*dumps_of(folders))))
