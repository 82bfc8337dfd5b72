"""Compare the ranks of all nodes on a cluster: one task leads, and slices of blame are its tasks.

    results of nodes ──> leading task ──> tasks that take the blocks of a slice where they lie
                                     ──> tasks that blame a slice with the blocks of all workers

The operations of a node stay on the worker that analyzed it, and go from there to the
workers that blame slices. What is read of all ranks at once (their history, and their steps
where no operations were marked) goes to the worker of the leading task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.cross_rank.run_slices import SliceBlame, SliceTask, blame_slice
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.node.analyze import NodeResult, list_ranks
from clusterprof.analysis.spill import SpillLocation, split_location
from clusterprof.analysis.tasks.dask_client import TIMEOUTS
from clusterprof.analysis.tasks.local_engine import JobRequest, compare_nodes, without_tables
from clusterprof.analysis.tasks.remote_nodes import NodeOutput, RemoteResult
from clusterprof.report.history import History

Wanted = list[tuple[int, int]]
"""Location and length of blocks, bytes."""
_POLL_S = 5.0


def compare_remote_nodes(
    results: Sequence[RemoteResult],
    keys: Sequence[str],
    numbers: Sequence[int],
    request: JobRequest,
) -> tuple[JobState, History | None]:
    """Compare the ranks of all nodes, from a task on a worker.

    keys: of the tasks that have analyzed the nodes. numbers: of the writers of their operations.
    """
    from distributed import Future, get_worker, worker_client

    nodes = [result.node for result in results if isinstance(result.node, NodeResult)]
    worker = get_worker()
    key = worker.get_current_task()

    def is_canceled() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state in ("cancelled", "resumed", "released", "forgotten")

    with worker_client() as client:
        outputs: dict[int, Any] = {n: Future(k, client) for n, k in zip(numbers, keys)}
        run_slices = RemoteSlices(client, outputs, is_canceled)
        spill = SpillLocation(blocks=_TableBlocks(nodes, run_slices.fetch))
        across, history = compare_nodes(nodes, spill, request, run_slices.map)
    return without_tables(across), history


class RemoteSlices:
    """Runs slices as tasks, with the blocks that they need."""

    def __init__(
        self, client: Any, outputs: Mapping[int, Any], is_canceled: Callable[[], bool]
    ) -> None:
        """Take the futures of results and operations, by number of the writer."""
        self._client, self._outputs, self._is_canceled = client, outputs, is_canceled

    def map(self, function: object, tasks: Sequence[SliceTask]) -> Iterator[SliceBlame]:
        """Yield the blame of each slice, in order; function: blame_slice."""
        assert function is blame_slice, "nothing else is divided"
        groups = self._group_by_worker()
        futures = [self._submit(task, groups) for task in tasks]
        while futures:
            yield self._wait(futures.pop(0))

    def fetch(self, wanted: Wanted) -> dict[int, NDArray[np.uint8]]:
        """Bring blocks to this worker, by location."""
        orders, pieces = self._select(wanted, self._group_by_worker())
        return _split_pieces(orders, [self._wait(future) for future in pieces])

    def _submit(self, task: SliceTask, groups: Sequence[Sequence[int]]) -> Any:
        wanted = [
            (location, length)
            for location, length in task.list_blocks()
            if isinstance(location, int)
        ]
        orders, pieces = self._select(wanted, groups)
        # stored on this worker, so that it goes to the worker of the slice directly
        stored = self._client.scatter(replace(task, spill=SpillLocation()), hash=False)
        return self._client.submit(blame_remote_slice, stored, orders, pieces, pure=False)

    def _select(
        self, wanted: Wanted, groups: Sequence[Sequence[int]]
    ) -> tuple[list[Wanted], list[Any]]:
        """Submit tasks that select blocks, each on the worker that has those of some nodes."""
        by_number: dict[int, Wanted] = {}
        for block in wanted:
            by_number.setdefault(split_location(block[0])[0], []).append(block)
        orders, pieces = [], []
        for group in groups:
            numbers = [number for number in group if number in by_number]
            if numbers:
                blocks = [by_number[number] for number in numbers]
                outputs = [self._outputs[number] for number in numbers]
                pieces.append(self._client.submit(select_blocks, outputs, blocks, pure=False))
                orders.append([block for part in blocks for block in part])
        return orders, pieces

    def _group_by_worker(self) -> list[list[int]]:
        """Group the writers whose operations are on one worker."""
        holders = self._client.who_has(list(self._outputs.values()))
        groups: dict[str, list[int]] = {}
        for number, output in self._outputs.items():
            workers = sorted(holders.get(output.key) or ("",))
            groups.setdefault(workers[0], []).append(number)
        return list(groups.values())

    def _wait(self, future: Any) -> Any:
        """Wait for a future; end when nobody waits for the comparison any more."""
        while True:
            try:
                return future.result(timeout=_POLL_S)
            except TIMEOUTS:
                if future.status != "pending":
                    raise
                if self._is_canceled():
                    raise RuntimeError("the comparison was canceled") from None


def select_blocks(outputs: Sequence[NodeOutput], wanted: Sequence[Wanted]) -> NDArray[np.uint8]:
    """Select blocks of several nodes, one after the other: uint8[bytes]."""
    parts = [np.zeros(0, np.uint8)]
    for (_, stored), blocks in zip(outputs, wanted):
        for location, length in blocks:
            offset = split_location(location)[1]
            parts.append(stored[offset : offset + length])
    return np.concatenate(parts)


def _split_pieces(
    orders: Sequence[Wanted], pieces: Sequence[NDArray[np.uint8]]
) -> dict[int, NDArray[np.uint8]]:
    """Split what select_blocks has returned into blocks, by location."""
    blocks = {}
    for order, data in zip(orders, pieces):
        begin = 0
        for location, length in order:
            blocks[location] = data[begin : begin + length]
            begin += length
    return blocks


def blame_remote_slice(
    task: SliceTask, orders: Sequence[Wanted], pieces: Sequence[NDArray[np.uint8]]
) -> SliceBlame:
    """Blame a slice with the blocks that were brought to this worker.

    orders: location and length of the blocks in each piece. pieces: uint8[bytes] each.
    """
    spill = SpillLocation(blocks=_split_pieces(orders, pieces))
    return blame_slice(replace(task, spill=spill))


class _TableBlocks(dict[int, NDArray[np.uint8]]):
    """Blocks that are read of all ranks at once, by location: brought when one is looked up."""

    def __init__(
        self, nodes: Sequence[NodeResult], fetch: Callable[[Wanted], dict[int, NDArray[np.uint8]]]
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._kinds: list[Wanted] = [[], []]
        for rank in list_ranks(nodes):
            for steps in (rank.implicit_steps, rank.suspected_steps):
                self._add(0, [(b.location, b.length) for b in steps.blocks] if steps else [])
            if rank.history is not None:
                self._add(1, [(rank.history.stored_block, rank.history.length)])
                self._add(1, [(block[0], block[1]) for block in rank.history.blocks])

    def _add(self, kind: int, blocks: Sequence[tuple[Any, int]]) -> None:
        self._kinds[kind] += [block for block in blocks if isinstance(block[0], int)]

    def __contains__(self, location: object) -> bool:
        if not super().__contains__(location):
            for kind, wanted in enumerate(self._kinds):
                if any(location == wanted_location for wanted_location, _ in wanted):
                    self._kinds[kind] = []
                    self.update(self._fetch(wanted))
        return super().__contains__(location)
