"""Pipeline traces of Megatron (MegatronApp): passes of each stage and microbatch.

## How to make the file

Train with the tracing options of MegatronApp and merge the files of the ranks with its aggregation
script.

## How to analyze it

    clusterprof analyze pipeline.json

## What is read

Lists in Chrome JSON with begin and end events `forward` and `backward` (`args`: iteration,
microbatch, model_chunk, pp_rank), and instants `iteration begin`, `reduce` and `iteration end`. A
process of the trace is a stage of the pipeline. Times are microseconds of one clock.

## How the numbers are computed

An iteration is a step. A stage is busy in `forward` and `backward`; the rest of the iteration is
its bubble. From `iteration begin` until the last stage has arrived at `reduce`, a stage that idles
while others work waits for them. It needs the result of the previous stage for the same microbatch
(in the backward pass: of the next stage), so it waited until that stage had finished. If the result
was available all along, the exchange with the neighbors delayed the stage: an exchange lasts until
both sides have arrived. The stage then waited for the nearest stage that finished a piece of work
at that time, or else for the nearest one that still worked. Time between two passes in which no
stage works is transfer of the input of the next pass. The time from `reduce` to `iteration end` has
no cause.

## What it cannot see

Other activity of a stage (copies, optimizer), why a stage has more work than others, and transfers
while another stage works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.device_timeline import Intervals, merge_intervals
from clusterprof.analysis.importers.core.node_tables import NodeTables, compute_group_number
from clusterprof.analysis.importers.core.text import read_json_bytes
from clusterprof.analysis.importers.workloads.pipeline_stages import answer_heavy_stage
from clusterprof.probe import layout

_US_NS = 1000
_MAX_TIME_US = 1 << 52
_MAX_NUMBER = 1 << 31
StageKey = tuple[int, int]
WorkItem = tuple[int, int, int, int]  # iteration, model chunk, microbatch, 0 forward or 1 backward


class _Arguments(msgspec.Struct):
    iteration: int = 0
    microbatch: int = -1
    model_chunk: int = 0


class _Event(msgspec.Struct):
    name: str
    ph: str
    ts: float
    pid: int = 0
    tid: int = 0
    args: _Arguments | None = None


@dataclass(slots=True)
class _Stage:
    """Events of one process of the trace."""

    open_events: dict[str, list[float]] = field(default_factory=dict)
    work: list[tuple[int, int, WorkItem]] = field(default_factory=list)
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    """Time of each instant in ns, by its name and iteration."""


class MegatronPipeline:
    """Importer of MegatronApp pipeline traces."""

    name: ClassVar[str] = "megatron-pipeline"
    title: ClassVar[str] = "Megatron pipeline trace (MegatronApp)"
    reads_windows: ClassVar[bool] = True
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether this is a list of events with iterations and microbatches."""
        is_json = head.lstrip()[:1] in (b"[", b"{")
        return is_json and b'"iteration begin"' in head and b'"ph"' in head

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node per file, because all its stages share one clock.

        Raises: CannotImportError when a file is not JSON or has no complete forward or backward
        pass.
        """
        for source, account in zip(sources, accounts):
            stages = _read_stages(source, account)
            if not any(stage.work for stage in stages.values()):
                raise CannotImportError("the trace has no forward or backward with begin and end")
            yield _build_node(stages, account)


def _read_stages(source: Source, account: Account) -> dict[StageKey, _Stage]:
    try:
        content = msgspec.json.decode(read_json_bytes(source))
        listed = content.get("traceEvents") if isinstance(content, dict) else content
        events = listed if isinstance(listed, list) else []
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise CannotImportError(f"not readable JSON ({error})") from error
    stages: dict[StageKey, _Stage] = {}
    for parsed in sorted(_parse_events(events, account), key=lambda event: event.ts):
        stage = stages.setdefault((parsed.pid, parsed.tid), _Stage())
        _record_event(stage, parsed, account)
    unfinished = sum(
        len(open_starts) for stage in stages.values() for open_starts in stage.open_events.values()
    )
    if unfinished:
        account.skipped["passes without an end"] += unfinished
    return stages


def _parse_events(events: list[Any], account: Account) -> Iterator[_Event]:
    for entry in events:
        try:
            event = msgspec.convert(entry, _Event)
        except (msgspec.ValidationError, RecursionError, OverflowError):
            account.skipped["events of another kind"] += 1
            continue
        arguments = event.args or _Arguments()
        numbers = (event.tid, arguments.iteration, arguments.microbatch, arguments.model_chunk)
        is_plausible = all(abs(value) < _MAX_NUMBER for value in numbers)
        if is_plausible and 0 <= event.ts < _MAX_TIME_US and -1 < event.pid < 1 << 24:
            yield event
        else:
            account.skipped["events with impossible times or numbers"] += 1


def _record_event(stage: _Stage, event: _Event, account: Account) -> None:
    arguments = event.args or _Arguments()
    t_ns = round(event.ts * _US_NS)
    if event.ph in ("i", "I"):
        stage.marks.setdefault((event.name, arguments.iteration), t_ns)
    elif event.name not in ("forward", "backward"):
        account.skipped["events of another kind"] += 1
    elif event.ph == "B":
        stage.open_events.setdefault(event.name, []).append(event.ts)
    elif event.ph == "E" and stage.open_events.get(event.name):
        start = round(stage.open_events[event.name].pop() * _US_NS)
        direction = int(event.name == "backward")
        work_item = (arguments.iteration, arguments.model_chunk, arguments.microbatch, direction)
        stage.work.append((start, t_ns, work_item))
        account.read["forward and backward passes"] += 1
    else:
        account.skipped["ends without a begin"] += 1


def _build_node(stages: dict[StageKey, _Stage], account: Account) -> NodeTables:
    node = NodeTables("", MegatronPipeline.name)
    keys = sorted(stages)
    ranks = {key: rank for rank, key in enumerate(keys)}
    members = list(range(len(keys)))
    group = compute_group_number(members)
    for key in keys:
        stage, rank = stages[key], ranks[key]
        stage.work.sort()
        device = f"stage{rank}"
        node.add_device(device)
        node.add_rank(rank + 1, rank, len(keys), device)
        node.add_group(rank + 1, group, members)
        node_ranks = [ranks[other] for other in keys if other[0] == key[0]]
        own_group = compute_group_number(f"stage:{','.join(map(str, node_ranks))}")
        node.add_group(rank + 1, own_group, node_ranks, f"stage {key[0]}")
        if stage.work:
            _add_steps(node, stage, rank + 1, device, account, rank)
    exchanges = {lane: _find_exchanges(stages, lane) for lane in {lane for _, lane in keys}}
    arrivals = _add_waits(node, stages, ranks, group, exchanges)
    _add_marks(node, stages, ranks, group, arrivals)
    for lane, (start, end) in exchanges.items():
        lane_ranks = [ranks[key] for key in keys if key[1] == lane]
        lane_group = compute_group_number(f"exchange:{','.join(map(str, lane_ranks))}")
        for rank in lane_ranks:
            node.add_group(rank + 1, lane_group, lane_ranks)
            node.add_collectives(rank + 1, start, end, lane_group, np.arange(start.size))
    _compare_stages(stages, ranks, account)
    return node


def _compare_stages(
    stages: dict[StageKey, _Stage], ranks: dict[StageKey, int], account: Account
) -> None:
    """Note the stage that has much more work than the median one."""
    work = {ranks[key]: sum(e - s for s, e, _ in stage.work) for key, stage in stages.items()}
    answer_heavy_stage(work, account)


def _add_steps(
    node: NodeTables, stage: _Stage, pid: int, device: str, account: Account, rank: int
) -> None:
    start, end = (np.array([item[side] for item in stage.work], np.int64) for side in (0, 1))
    iterations = sorted({number for _, number in stage.marks} | {p[0] for *_, p in stage.work})
    begins, ends = [], []
    for number in iterations:
        items = [item for item in stage.work if item[2][0] == number]
        first = min((item[0] for item in items), default=0)
        last = max((item[1] for item in items), default=0)
        begins.append(stage.marks.get(("iteration begin", number), first))
        ends.append(max(stage.marks.get(("iteration end", number), last), begins[-1]))
    node.add_spans(pid, layout.STEP, begins, ends, iterations, 2, -1, -1)
    busy = merge_intervals(start, end)
    low, high = min(begins), max(ends)
    node.add_busy_time(
        device, *busy, min(low, int(start.min(initial=low))), max(high, int(end.max(initial=high)))
    )
    for kind, direction in ((layout.FORWARD, 0), (layout.BACKWARD, 1)):
        rows = np.array([work_item[3] == direction for *_, work_item in stage.work], np.bool_)
        node.add_spans(pid, kind, start[rows], end[rows])
    total_ns = sum(e - b for b, e in zip(begins, ends))
    if total_ns > 0:
        bubble = 1 - float((busy[1] - busy[0]).sum()) / total_ns
        account.notes.append(
            f"stage {rank}: {bubble:.1%} bubble (neither forward nor backward),"
            f" {(busy[1] - busy[0]).sum() / 1e6 / len(iterations):.1f} ms of work an iteration"
        )


def _add_waits(
    node: NodeTables,
    stages: dict[StageKey, _Stage],
    ranks: dict[StageKey, int],
    group: int,
    exchanges: dict[int, Intervals],
) -> dict[tuple[StageKey, int], int]:
    """Add each wait of one stage for another as a message sent when the wait ends.

    Returns per stage and iteration until when it waited for stages that still worked, ns.
    """
    finished = {
        key: {work_item: end for _, end, work_item in stage.work} for key, stage in stages.items()
    }
    chunks = 1 + max((work_item[1] for s in stages.values() for *_, work_item in s.work), default=0)
    spans = {
        key: np.array([item[:2] for item in stage.work], np.int64).reshape(-1, 2).T
        for key, stage in stages.items()
    }
    waits: dict[tuple[StageKey, StageKey], list[tuple[int, int]]] = {}
    arrivals: dict[tuple[StageKey, int], int] = {}
    for key in stages:
        for begin, end, work_item in _list_gaps(key, stages, exchanges[key[1]]):
            producer = _find_producer(key, work_item, stages, chunks)
            finished_ns = -1
            if producer is not None:
                finished_ns = finished[producer[0]].get(producer[1], -1)
            if producer is not None and begin < finished_ns <= end:
                waits.setdefault((producer[0], key), []).append((begin, finished_ns))
                begin = finished_ns
            while begin < end:
                awaited = _find_awaited_stage(key, begin, end, spans)
                if awaited is None:
                    break
                waits.setdefault((awaited[0], key), []).append((begin, awaited[1]))
                begin = awaited[1]
            arrivals[key, work_item[0]] = begin
    for (source, target), intervals in waits.items():
        arrive, leave = np.array(sorted(intervals), np.int64).T
        number = np.arange(arrive.size, dtype=np.int64)
        node.add_collectives(
            ranks[target] + 1, arrive, leave, group, number, -1, layout.RECV, peer=ranks[source]
        )
        node.add_collectives(
            ranks[source] + 1, leave, leave, group, number, -1, layout.SEND, peer=ranks[target]
        )
    return arrivals


def _list_gaps(
    key: StageKey, stages: dict[StageKey, _Stage], exchanges: Intervals
) -> Iterator[tuple[int, int, WorkItem]]:
    """Yield the gaps of a stage in each iteration without exchanges: begin, end, the work after it.

    From its begin until the last stage has arrived at `reduce`; after that no pass comes (-1).
    """
    for begin, end, work_item in _list_whole_gaps(key, stages):
        first, last = (
            int(exchanges[1].searchsorted(begin, "right")),
            int(exchanges[0].searchsorted(end)),
        )
        for start, stop in zip(
            exchanges[0][first:last].tolist(), exchanges[1][first:last].tolist()
        ):
            if start > begin:
                yield begin, start, work_item
            begin = stop
        if end > begin:
            yield begin, end, work_item


def _find_exchanges(stages: dict[StageKey, _Stage], lane: int) -> Intervals:
    """Find when no stage of a pipeline worked between two passes of an iteration.

    The next pass has its input from an earlier one: the stages exchange data meanwhile.
    """
    works = [stage.work for key, stage in stages.items() if key[1] == lane]
    items = sorted(item for work in works for item in work)
    start, end, iteration = (
        np.array([(start, end, work_item[0]) for start, end, work_item in items], np.int64)
        .reshape(-1, 3)
        .T
    )
    busy_start, busy_end = merge_intervals(start, end)
    after = start.searchsorted(busy_start[1:])
    is_same_iteration = (iteration[after] == iteration[after - 1]) & (len(works) > 1)
    return busy_end[:-1][is_same_iteration], busy_start[1:][is_same_iteration]


def _list_whole_gaps(
    key: StageKey, stages: dict[StageKey, _Stage]
) -> Iterator[tuple[int, int, WorkItem]]:
    stage = stages[key]
    for iteration, items in groupby(sorted(stage.work, key=_get_iteration), _get_iteration):
        before = stage.marks.get(("iteration begin", iteration), None)
        for start, end, work_item in items:
            if before is not None and start > before:
                yield before, start, work_item
            before = end if before is None else max(before, end)
        reduced = [other.marks.get(("reduce", iteration), -1) for other in stages.values()]
        if before is not None and min(reduced) >= 0 and max(reduced) > before:
            yield before, max(reduced), (iteration, -1, -1, -1)


def _get_iteration(item: tuple[int, int, WorkItem]) -> int:
    return item[2][0]


def _find_producer(
    key: StageKey, work_item: WorkItem, stages: dict[StageKey, _Stage], chunks: int
) -> tuple[StageKey, WorkItem] | None:
    """Find the stage whose result a piece of work needs, and that result."""
    iteration, chunk, microbatch, direction = work_item
    stage, lane = key
    last = max(stage_ for stage_, lane_ in stages if lane_ == lane)
    source = stage - 1 if direction == 0 else stage + 1
    if source < 0:
        source, chunk = last, chunk - 1
    elif source > last:
        source, chunk = 0, chunk + 1
    producer = (source, lane)
    if producer not in stages or producer == key or not 0 <= chunk < chunks:
        return None
    return producer, (iteration, chunk, microbatch, direction)


def _find_awaited_stage(
    key: StageKey, from_ns: int, until_ns: int, spans: dict[StageKey, NDArray[np.int64]]
) -> tuple[StageKey, int] | None:
    """Find the nearest stage that worked in this time, and until when it is waited for.

    Neighbors are held up until both have arrived, so a wait propagates from stage to stage. A
    stage that finished in this time comes before one that works on. spans: int64[2, n], starts
    and ends of the work of each stage, ns.
    """
    ring = sorted(neighbor for neighbor in spans if neighbor[1] == key[1])
    position = ring.index(key)
    working: tuple[StageKey, int] | None = None
    for distance in range(1, len(ring) // 2 + 1):
        neighbors = {
            ring[(position - distance) % len(ring)],
            ring[(position + distance) % len(ring)],
        } - {key}
        candidates = []
        for neighbor in neighbors:
            starts, ends = spans[neighbor]
            row = int(ends.searchsorted(until_ns, side="right")) - 1
            if row >= 0 and ends[row] > from_ns:
                candidates.append((int(ends[row]), neighbor))
            elif working is None and row + 1 < ends.size and starts[row + 1] < until_ns:
                working = neighbor, until_ns
        if candidates:
            end_ns, neighbor = max(candidates)
            return neighbor, end_ns
    return working


def _add_marks(
    node: NodeTables,
    stages: dict[StageKey, _Stage],
    ranks: dict[StageKey, int],
    group: int,
    arrivals: dict[tuple[StageKey, int], int],
) -> None:
    """Add what all stages pass together: the begin of an iteration, and `reduce` at its end.

    Stages wait at `reduce` for the last one; as long as others still work, in `_add_waits`.
    """
    iterations = sorted({number for stage in stages.values() for _, number in stage.marks})
    for offset, name in enumerate(("iteration begin", "reduce")):
        complete = [n for n in iterations if all((name, n) in s.marks for s in stages.values())]
        index = [2 * iterations.index(n) + offset for n in complete]
        last = [max(stage.marks[name, n] for stage in stages.values()) for n in complete]
        for key, stage in stages.items():
            marks = [stage.marks[name, n] for n in complete]
            leave = marks
            if name == "reduce":
                marks = [
                    max(mark, arrivals.get((key, n), mark)) for mark, n in zip(marks, complete)
                ]
                leave = last
            node.add_collectives(ranks[key] + 1, marks, leave, group, index)
