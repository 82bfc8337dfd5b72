"""Analyze the nodes of a job as tasks of this machine, and compare their ranks.

    job = LocalEngine(jobs=4).analyze_job(folders, parts, request)

An engine finds the nodes, analyzes each in a task and compares their ranks. LocalEngine
reads what this machine can read; analysis.tasks.dask_engine does the same on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from clusterprof.analysis.attribution.rank.chunk_boundary import PartOfRecording
from clusterprof.analysis.cross_rank.pipeline import analyze_across_ranks
from clusterprof.analysis.cross_rank.run_slices import RunMap
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.findings.history import build_history
from clusterprof.analysis.importers.nccl.flight_recorder import Dump
from clusterprof.analysis.inputs.profiler_traces import read_dumps
from clusterprof.analysis.node.analyze import NodeResult, analyze_node, map_ranks
from clusterprof.analysis.node.selection import (
    ProgressCallback,
    ProgressReporter,
    StartTimes,
    read_start_times,
)
from clusterprof.analysis.spill import SpillLocation, measure_size_bytes, open_spill
from clusterprof.analysis.tasks.base import PoolRunner, TaskFailure
from clusterprof.errors import NoRecording
from clusterprof.report.history import History
from clusterprof.trace.reader import NodeSources, SkippedInput, find_nodes
from clusterprof.util.gc_control import reduce_gc_frequency


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What the analysis of all nodes shall produce."""

    limits: Mapping[str, Any]
    """Bound limits object per cause id."""
    history: bool = False
    is_partial: bool = False
    """Whether only a part of the run is analyzed."""
    on_progress: ProgressCallback | None = None
    dumps: tuple[Dump, ...] = ()
    """Dumps of the flight recorder, to compare the operations with."""


@dataclass(frozen=True, slots=True)
class NodeTask:
    """The node that a task analyzes."""

    folder: Path
    part: PartOfRecording
    spill: SpillLocation


@dataclass(frozen=True, slots=True)
class JobResult:
    """Results of all nodes, compared."""

    folders: tuple[Path, ...]
    """Folders of the nodes, in the order of `across.nodes`."""
    across: JobState
    history: History | None
    skipped: tuple[SkippedInput, ...] = ()
    """Nodes that could not be analyzed."""
    dumps: tuple[Dump, ...] = ()
    """Dumps of the flight recorder, of each rank the latest of a hang and of its end."""
    unread_dumps: tuple[str, ...] = ()
    """Why other dumps could not be read."""


class Engine(Protocol):
    """Analyzes the nodes of a job where their recordings can be read."""

    def find_nodes(self, paths: Sequence[Path]) -> NodeSources:
        """Find the nodes in the given paths.

        Raises: NoRecording as trace.reader.find_nodes.
        """
        ...

    def read_starts(self, folders: Sequence[Path]) -> Sequence[StartTimes]:
        """Read when each recording began."""
        ...

    def analyze_job(
        self, folders: Sequence[Path], parts: Sequence[PartOfRecording], request: JobRequest
    ) -> JobResult:
        """Analyze the nodes and compare their ranks.

        Raises: NoRecording when not a single node can be analyzed.
        """
        ...


class LocalEngine:
    """Analyzes nodes on this machine."""

    def __init__(self, jobs: int = 1) -> None:
        """Take the number of processes that share the nodes."""
        self._jobs = jobs

    def find_nodes(self, paths: Sequence[Path]) -> NodeSources:
        """Find the nodes in the given paths."""
        return find_nodes(paths)

    def read_starts(self, folders: Sequence[Path]) -> Sequence[StartTimes]:
        """Read when each recording began."""
        return [read_start_times(folder) for folder in folders]

    def analyze_job(
        self, folders: Sequence[Path], parts: Sequence[PartOfRecording], request: JobRequest
    ) -> JobResult:
        """Analyze the nodes in the order of their folders, in several processes if requested.

        Raises: NoRecording when not a single node can be analyzed.
        """
        in_pool = self._jobs > 1 and len(folders) > 1
        with open_spill(folders) as spill, PoolRunner(self._jobs if in_pool else 1) as pool:
            tasks = [
                NodeTask(folder, part, spill.with_number(number))
                for number, (folder, part) in enumerate(zip(folders, parts), 1)
            ]
            outcomes = _run_tasks(tasks, request, pool if in_pool else None)
            nodes, skipped = split_outcomes(folders, outcomes)
            analyzed = select_analyzed(folders, outcomes)
            del outcomes
            # slices of a small recording are not worth sending
            run_map: RunMap = pool.map if in_pool and spill.address else map
            dumps, unread = read_dumps(folders)
            request = replace(request, dumps=tuple(dumps))
            across, history = compare_nodes(_take_all(nodes), spill, request, run_map)
        return JobResult(analyzed, across, history, skipped, tuple(dumps), tuple(unread))


def _run_tasks(
    tasks: Sequence[NodeTask], request: JobRequest, pool: PoolRunner | None
) -> list[NodeResult | TaskFailure]:
    on_progress = request.on_progress
    sizes = [measure_size_bytes([task.folder]) if on_progress else 0 for task in tasks]
    progress = ProgressReporter(sizes, on_progress)
    run = partial(run_node_task, limits=request.limits, history=request.history)
    outcomes: list[NodeResult | TaskFailure] = []
    if pool is not None:
        for number, outcome in enumerate(pool.run_tasks(run, tasks)):
            outcomes.append(outcome)
            progress.finish_node(number)
        return outcomes
    for number, task in enumerate(tasks):
        outcomes.append(
            run(task, within=partial(progress.update_node, number) if on_progress else None)
        )
        progress.finish_node(number)
    return outcomes


@reduce_gc_frequency()
def run_node_task(
    task: NodeTask,
    limits: Mapping[str, Any],
    history: bool,
    within: Callable[[int], None] | None = None,
) -> NodeResult | TaskFailure:
    """Analyze one node; at module level so that worker processes find it.

    limits: bound limits object per cause id. within: called with the bytes read so far.
    """
    try:
        return analyze_node(
            task.folder, limits, spill=task.spill, history=history, within=within, part=task.part
        )
    except MemoryError:
        return TaskFailure("memory ran out", "analyze with fewer --jobs, or with more memory")
    except OSError as error:
        return TaskFailure(str(error), "analyze it alone to see whether it can be read")


def split_outcomes(
    folders: Sequence[Path], outcomes: Sequence[NodeResult | TaskFailure]
) -> tuple[list[NodeResult], tuple[SkippedInput, ...]]:
    """Return the results of the nodes, and those nodes that have none.

    Raises: NoRecording when no node has a result.
    """
    nodes = [outcome for outcome in outcomes if isinstance(outcome, NodeResult)]
    skipped = tuple(
        SkippedInput(folder, outcome.why, outcome.remedy, is_copy=False)
        for folder, outcome in zip(folders, outcomes)
        if isinstance(outcome, TaskFailure)
    )
    if skipped and not nodes:
        whys = dict.fromkeys(node.why for node in skipped)
        raise NoRecording(f"no node could be analyzed: {'; '.join(whys)}", skipped[0].remedy)
    return nodes, skipped


def select_analyzed(
    folders: Sequence[Path], outcomes: Sequence[NodeResult | TaskFailure]
) -> tuple[Path, ...]:
    """Select the folders of the nodes that have a result."""
    pairs = zip(folders, outcomes)
    return tuple(folder for folder, outcome in pairs if isinstance(outcome, NodeResult))


def _take_all(nodes: list[NodeResult]) -> Iterator[NodeResult]:
    """Yield all nodes, and keep none: the passes replace the results of their ranks."""
    nodes.reverse()
    while nodes:
        yield nodes.pop()


def compare_nodes(
    nodes: Iterable[NodeResult], spill: SpillLocation, request: JobRequest, run_map: RunMap = map
) -> tuple[JobState, History | None]:
    """Compare the ranks of all nodes, and build the history where it was requested.

    spill: where the nodes have stored their operations. run_map: runs the slices.
    """
    across = analyze_across_ranks(nodes, spill, request.limits, run_map, request.dumps)
    history = build_history(across, spill, request.is_partial) if request.history else None
    return across, history


def without_tables(state: JobState) -> JobState:
    """Return the state without what refers to stored operations: nothing reads it any more."""
    nodes = map_ranks(
        state.nodes,
        lambda rank: replace(
            rank, operations=None, implicit_steps=None, suspected_steps=None, history=None
        ),
    )
    return replace(state, nodes=nodes, spill=SpillLocation(), run_map=map)
