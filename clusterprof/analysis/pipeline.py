"""Analyze a recording, one node and one chunk at a time, on this machine or on a cluster.

    report = analyze("clusterprof-20260101-120000")
    report = analyze(["host1", "host2"])         # collected from node-local disks
    report = analyze("s3://bucket/run", cluster=Cluster(scheduler="tcp://node1:8786"))

`analyze` is also `clusterprof.analyze`. The command line fills an AnalysisRequest.

Open the paths of the command line for analysis: recordings, or files to import.

    with open_inputs([Path("my-run/")]) as inputs:
        inputs.paths, inputs.notes

Readers of foreign formats take time to load, so they are loaded only when needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.findings.report import RunContext, build_report
from clusterprof.analysis.importers.nccl.inspector import describe_inspector_logs
from clusterprof.analysis.inputs.profiler_traces import describe_dumps
from clusterprof.analysis.job.dives import describe_dives
from clusterprof.analysis.node.selection import WHOLE_RUN, PartOfRun, ProgressCallback, build_parts
from clusterprof.analysis.tasks.base import NO_CLUSTER, Cluster
from clusterprof.analysis.tasks.local_engine import Engine, JobRequest, LocalEngine
from clusterprof.errors import NoRecording, UsageError
from clusterprof.report.model import Report
from clusterprof.trace.reader import (
    NodeSources,
    SkippedInput,
    list_node_folders,
    require_permission,
)
from clusterprof.trace.remote import RemotePath, resolve_path
from clusterprof.trace.segments import is_segment
from clusterprof.util.gc_control import reduce_gc_frequency
from clusterprof.util.ranges import format_host_list


@dataclass(frozen=True, slots=True)
class Inputs:
    """Recordings to analyze, and notes on imported files."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    left_out: tuple[SkippedInput, ...] = ()
    """Files that were not read, or not to their end."""
    answers: tuple[str, ...] = ()
    """What imported files say about the question they are made for; enough without a recording."""


@contextmanager
def open_inputs(
    paths: Sequence[Path], jobs: int = 1, leave_unknown: bool = False, on_cluster: bool = False
) -> Iterator[Inputs]:
    """Yield the recordings among some paths, and import the foreign files.

    jobs: number of processes for the import (analysis.inputs.foreign). on_cluster: workers read
    the paths, so what is no file here is taken for a recording.

    Raises: NoRecording for files of no known format, unless `leave_unknown` leaves them
    out.
    """
    if len(paths) == 1:
        require_permission(paths[0])  # of several, one that cannot be read is left out
    is_recording = _is_no_file if on_cluster else _is_recording_or_missing
    if all(map(is_recording, paths)):
        yield Inputs(tuple(paths))
        return
    from clusterprof.analysis.inputs.foreign import import_inputs

    with import_inputs(paths, jobs, leave_unknown) as imported:
        yield Inputs(imported.paths, imported.notes, imported.list_left_out(), imported.answers)


def _is_recording_or_missing(path: Path) -> bool:
    """Return whether a path is a recording, or missing: then reading it reports the error."""
    try:
        is_remote = isinstance(path, RemotePath)
        return is_remote or not os.path.exists(path) or bool(list_node_folders(path))
    except NoRecording:
        return False


def _is_no_file(path: Path) -> bool:
    return not path.is_file() or is_segment(path.name)


_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AnalysisRequest:
    """What an analysis shall produce, and how; the defaults are those of `analyze`."""

    jobs: int = 1
    """Number of processes that share the nodes and the files to import."""
    limits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Limits of causes by cause id, as in a profile."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the site, as in a profile."""
    history: bool = False
    """Whether to report also what happened when (`Report.history`)."""
    on_progress: ProgressCallback | None = None
    """Called with the progress."""
    part: PartOfRun = WHOLE_RUN
    """The analyzed part; everything outside it counts as outside the steps."""
    leave_unknown: bool = False
    """Whether to leave files of no known format out and name them in a note."""
    cluster: Cluster = NO_CLUSTER
    """The Dask cluster whose workers analyze the nodes, in place of `jobs`."""
    queued_at_ns: int | None = None
    """When the job was submitted, ns since 1970; None = as its recordings state."""


DEFAULT_REQUEST = AnalysisRequest()


@dataclass(frozen=True, slots=True)
class Analysis:
    """A report, and the data it was built from."""

    report: Report
    folders: tuple[Path, ...]
    """Folders of the nodes, in the order of `across.nodes`."""
    across: JobState
    """Results of all nodes; `Report.ranks` are the ledgers of their ranks in order."""


def analyze(
    paths: Path | str | Sequence[Path | str],
    *,
    jobs: int = 1,
    limits: Mapping[str, Mapping[str, Any]] = _EMPTY,
    facts: Mapping[str, Any] = _EMPTY,
    history: bool = False,
    on_progress: ProgressCallback | None = None,
    part: PartOfRun = WHOLE_RUN,
    leave_unknown: bool = False,
    cluster: Cluster = NO_CLUSTER,
    queued_at_ns: int | None = None,
) -> Report:
    """Analyze where the device time of a recording went, and the causes of lost time.

    paths: one recording, or several folders or files that belong to one run; each node
    counts once. Files of other tools are imported first (docs/importers).
    jobs: number of processes that share the nodes.
    limits: limits of causes by cause id, as in a profile.
    facts: facts of the site, as in a profile.
    history: report also what happened when (`Report.history`).
    on_progress: called with the progress (analysis.node.selection.Progress).
    part: everything outside this part of the run counts as outside the steps.
    leave_unknown: leave files of no known format out, and name them in a note.
    cluster: the Dask cluster whose workers read and analyze the nodes (docs/scale.md).
    queued_at_ns: when the job was submitted, ns since 1970; None = as its recordings state.

    Raises: UsageError for no path at all, for an unknown cause id or key in `limits`, and for
    a part without steps; NoRecording when there is nothing to read; ClusterFailed when the
    cluster cannot be used.
    """
    request = AnalysisRequest(
        jobs, limits, facts, history, on_progress, part, leave_unknown, cluster, queued_at_ns
    )
    return analyze_with_request(_list_paths(paths), request)


def _list_paths(paths: Path | str | Sequence[Path | str]) -> list[Path]:
    return [Path(paths)] if isinstance(paths, Path | str) else [Path(path) for path in paths]


def analyze_with_request(paths: Sequence[Path], request: AnalysisRequest) -> Report:
    """Analyze a recording as requested; errors are those of `analyze`."""
    return analyze_with_details(paths, request).report


def analyze_with_details(
    paths: Sequence[Path], request: AnalysisRequest = DEFAULT_REQUEST
) -> Analysis:
    """Analyze a recording, and return also the data the report was built from.

    Recordings of imported files are removed by then: open_analysis keeps them.
    """
    with open_analysis(paths, request) as analysis:
        return analysis


@contextmanager
def open_analysis(
    paths: Sequence[Path], request: AnalysisRequest = DEFAULT_REQUEST
) -> Iterator[Analysis]:
    """Analyze a recording; inside the context the recordings of imported files still exist.

    Raises: as `analyze`.
    """
    if not paths:
        raise UsageError("no recording was given", "give the folder that `record` wrote")
    limits = build_limits(request.limits)
    paths = [resolve_path(path) for path in paths]
    on_cluster = bool(request.cluster)
    with open_inputs(paths, request.jobs, request.leave_unknown, on_cluster) as inputs:
        title = format_host_list(map(str, paths)) if len(paths) > 1 else str(paths[0])
        # what was imported lies in a temporary folder that no worker sees
        cluster = request.cluster if inputs.paths == tuple(paths) else NO_CLUSTER
        with reduce_gc_frequency(), _open_engine(cluster, request.jobs) as engine:
            analysis = _run_analysis(engine, title, inputs, limits, request)
        yield analysis


@contextmanager
def _open_engine(cluster: Cluster, jobs: int) -> Iterator[Engine]:
    if not cluster:
        yield LocalEngine(jobs)
        return
    from clusterprof.analysis.tasks.dask_engine import open_dask_engine

    with open_dask_engine(cluster) as engine:
        yield engine


def _run_analysis(
    engine: Engine, title: str, inputs: Inputs, limits: Mapping[str, Any], request: AnalysisRequest
) -> Analysis:
    sources = engine.find_nodes(inputs.paths) if inputs.paths else NodeSources(())
    parts = build_parts(sources.folders, request.part, engine.read_starts)
    job_request = JobRequest(limits, request.history, not request.part.whole, request.on_progress)
    job = engine.analyze_job(sources.folders, parts, job_request)
    dumps = describe_dumps(job.dumps, job.unread_dumps)
    logs = describe_inspector_logs(job.folders)
    dives = describe_dives(job.folders, job.across.nodes)
    notes = (*inputs.notes, *dives, *dumps, *logs)
    left_out = (*sources.skipped, *job.skipped, *inputs.left_out)
    context = RunContext(
        left_out,
        request.facts,
        notes,
        job.history,
        request.part,
        inputs.answers,
        request.queued_at_ns,
    )
    return Analysis(build_report(title, job.across, context), job.folders, job.across)
