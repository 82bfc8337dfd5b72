"""Analyze the nodes of a job on the workers of a Dask cluster, where their recordings lie.

    with open_dask_engine(Cluster(scheduler="tcp://node1:8786")) as engine:
        sources = engine.find_nodes(paths)

    client                     workers
    find_nodes  ───────────>   what does each of you see at these paths?
    analyze_job ───────────>   one task per node, on a worker that sees its recording
                <───────────   results of nodes; their operations stay on the workers
                ───────────>   one task that leads the comparison of all ranks, in slices
                <───────────   who waited for whom

Dask repeats the tasks of a worker that dies, those too whose operations died with it. A
node that no living worker sees is left out and reported; so is all that was not finished
when the scheduler goes away.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from clusterprof import __version__
from clusterprof.analysis.attribution.rank.chunk_boundary import PartOfRecording
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.inputs.profiler_traces import select_latest_dumps
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.node.selection import ProgressReporter, StartTimes
from clusterprof.analysis.spill import SpillLocation
from clusterprof.analysis.tasks.base import Cluster, TaskFailure
from clusterprof.analysis.tasks.dask_client import (
    LOST,
    NO_WORKER,
    POLL_S,
    RETRIES,
    SCHEDULER_LOST,
    DaskRunner,
    WorkerWatch,
    get_outcome,
    open_client,
    put_number,
    wait_for_futures,
)
from clusterprof.analysis.tasks.local_engine import (
    JobRequest,
    JobResult,
    NodeTask,
    compare_nodes,
    select_analyzed,
    split_outcomes,
    without_tables,
)
from clusterprof.analysis.tasks.remote_blame import compare_remote_nodes
from clusterprof.analysis.tasks.remote_nodes import (
    FolderFacts,
    RemoteResult,
    describe_folder,
    run_remote_node,
    take_result,
)
from clusterprof.analysis.tasks.remote_recordings import RemoteSource, find_remote_sources
from clusterprof.errors import NoRecording
from clusterprof.report.history import History
from clusterprof.trace.reader import NodeSources, SkippedInput, select_copies


@contextmanager
def open_dask_engine(cluster: Cluster) -> Iterator[DaskEngine]:
    """Connect to a cluster; tasks that are left over, as after Ctrl-C, are canceled.

    Raises: as dask_client.open_client.
    """
    with open_client(cluster) as client:
        engine = DaskEngine(client)
        try:
            yield engine
        finally:
            engine.cancel_tasks()


class DaskEngine:
    """Analyzes nodes on the workers of a cluster."""

    def __init__(self, client: Any) -> None:
        """Take a connected client of distributed."""
        self._client = client
        self._sources: list[RemoteSource] = []
        self._facts: list[FolderFacts] = []
        self._futures: list[Any] = []
        self._results: list[Any] = []
        """By node: the future of its result, which stays on the workers as well."""

    def find_nodes(self, paths: Sequence[Path]) -> NodeSources:
        """Find the nodes that the workers see in the given paths, each recording once.

        Raises: NoRecording when no worker sees a path, or there is nothing to read.
        """
        sources, skipped = find_remote_sources(self._client, paths)
        runner = DaskRunner(self._client, [source.workers for source in sources])
        described = runner.run_tasks(describe_folder, [source.folder for source in sources])
        unique: list[RemoteSource] = []
        facts: list[FolderFacts] = []
        for source, outcome in zip(sources, described):
            if isinstance(outcome, TaskFailure):
                why, remedy = outcome.why, outcome.remedy
                skipped.append(SkippedInput(source.folder, why, remedy, is_copy=False))
            else:
                unique.append(source)
                facts.append(outcome)
        if not unique:
            raise NoRecording("; ".join(f"{node.path}: {node.why}" for node in skipped))
        chosen, copies = select_copies(
            [source.folder for source in unique],
            [(fact.identity, fact.size_bytes) for fact in facts],
        )
        self._sources = [unique[index] for index in chosen]
        self._facts = [facts[index] for index in chosen]
        folders = tuple(source.folder for source in self._sources)
        return NodeSources(folders, (*skipped, *copies))

    def read_starts(self, folders: Sequence[Path]) -> Sequence[StartTimes]:
        """Return when each recording began; folders: those that find_nodes has returned."""
        return [facts.starts for facts in self._facts]

    def analyze_job(
        self, folders: Sequence[Path], parts: Sequence[PartOfRecording], request: JobRequest
    ) -> JobResult:
        """Analyze the nodes and compare their ranks on the workers.

        folders: those that find_nodes has returned.
        Raises: NoRecording when not a single node can be analyzed.
        """
        progress = ProgressReporter([f.size_bytes for f in self._facts], request.on_progress)
        request = replace(request, on_progress=None)  # stays here
        outputs = self._submit_nodes(folders, parts, request)
        results = self._collect_results(outputs, progress)
        outcomes = [result.node for result in results]
        _, skipped = split_outcomes(folders, outcomes)
        dumps = select_latest_dumps(dump for result in results for dump in result.dumps)
        request = replace(request, dumps=tuple(dumps))
        across, history, lost, failure = self._compare(outputs, outcomes, request)
        for index in lost:
            outcomes[index] = NO_WORKER
        if lost:
            _, skipped = split_outcomes(folders, outcomes)
        if failure is not None:
            subject = Path("waits between ranks")
            skipped = (*skipped, SkippedInput(subject, failure.why, failure.remedy, is_copy=False))
        return JobResult(
            select_analyzed(folders, outcomes),
            across,
            history,
            skipped,
            tuple(dumps),
            tuple(why for result in results for why in result.unread_dumps),
        )

    def cancel_tasks(self) -> None:
        """Cancel what is still running, or waits for a worker."""
        if self._client.status == "running" and self._futures:
            self._client.cancel([*self._futures, *self._results], force=True)
        self._futures, self._results = [], []

    # --- nodes ---

    def _submit_nodes(
        self, folders: Sequence[Path], parts: Sequence[PartOfRecording], request: JobRequest
    ) -> list[Any]:
        """Submit the analysis of each node; return the futures of results with operations."""
        outputs = []
        for index, (folder, part) in enumerate(zip(folders, parts)):
            task = NodeTask(folder, part, SpillLocation(number=index + 1))
            output = self._client.submit(
                run_remote_node,
                task,
                request,
                __version__,
                workers=list(self._sources[index].workers) or None,
                pure=False,
                retries=RETRIES,
            )
            outputs.append(output)
        self._futures += outputs
        return outputs

    def _collect_results(
        self, outputs: Sequence[Any], progress: ProgressReporter
    ) -> list[RemoteResult]:
        """Wait for the result of each node, in whatever order they come."""
        # as early as possible, so that the report of a lost cluster has what was finished
        futures = [self._client.submit(take_result, out, pure=False, priority=1) for out in outputs]
        self._results = futures
        results: dict[int, RemoteResult] = {}
        restrictions = [source.workers for source in self._sources]
        for index, outcome in wait_for_futures(self._client, futures, restrictions):
            is_failure = isinstance(outcome, TaskFailure)
            results[index] = RemoteResult(outcome) if is_failure else outcome
            progress.finish_node(index)
        return [results[index] for index in range(len(outputs))]

    # --- all nodes together ---

    def _compare(
        self,
        outputs: Sequence[Any],
        outcomes: Sequence[NodeResult | TaskFailure],
        request: JobRequest,
    ) -> tuple[JobState, History | None, list[int], TaskFailure | None]:
        """Compare the ranks of the analyzed nodes in a task.

        Returns also the nodes whose operations are lost with all workers that see them, and why
        the ranks could not be compared at all: then the rest stands without that.
        """
        analyzed = [
            index for index, outcome in enumerate(outcomes) if isinstance(outcome, NodeResult)
        ]
        lost: list[int] = []
        while True:
            outcome, unreachable = self._run_comparison(outputs, analyzed, request)
            if not unreachable:
                break
            lost += unreachable
            analyzed = [index for index in analyzed if index not in unreachable]
        if not isinstance(outcome, TaskFailure):
            across, history = outcome
            return across, history, lost, None
        nodes = [node for node in outcomes if isinstance(node, NodeResult)]
        spill = SpillLocation(blocks={}, why_no_file=outcome.why)
        across, no_history = compare_nodes(nodes, spill, request)
        return without_tables(across), no_history, [], outcome

    def _run_comparison(
        self, outputs: Sequence[Any], analyzed: Sequence[int], request: JobRequest
    ) -> tuple[Any, list[int]]:
        """Run the comparison; return its outcome, or the nodes that it waits for in vain."""
        if not analyzed:
            return NO_WORKER, []
        future = self._client.submit(
            compare_remote_nodes,
            [self._results[index] for index in analyzed],
            [outputs[index].key for index in analyzed],
            [index + 1 for index in analyzed],
            request,
            pure=False,
            retries=RETRIES,
        )
        self._futures.append(future)
        finished: queue.Queue[int] = queue.Queue()
        future.add_done_callback(partial(put_number, finished, 0))
        watch = WorkerWatch(self._client, [source.workers for source in self._sources])
        while True:
            with suppress(queue.Empty):
                finished.get(timeout=POLL_S)
            if future.status not in ("pending", LOST):
                return get_outcome(future), []
            if self._client.status != "running":
                return SCHEDULER_LOST, []
            unreachable = watch.list_unreachable(analyzed)
            if unreachable:
                holders = self._client.who_has([outputs[index] for index in unreachable])
                unreachable = [
                    index for index in unreachable if not holders.get(outputs[index].key)
                ]
            if unreachable:
                self._client.cancel([future], force=True)
                return None, unreachable
