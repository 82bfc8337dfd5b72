"""Stories made by hand: one rank and one worker that does one thing for 50 ms of every batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clusterprof.probe import layout
from clusterprof.probe.hooks.process_groups import compute_group_number
from clusterprof.report.model import Report
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Gap, Record, Rows, Spans
from clusterprof_lab.synth.record import RecordingQuality, write_story
from clusterprof_lab.synth.story import Act, Mark, Node, Rank, Story, Thread, Work

MS = 1_000_000
SECOND = 1_000 * MS
FIRST_NS, BLOCKED_NS, DECODED_NS = 500 * MS, 50 * MS, 20 * MS
STEPS = 40
LOST_NS = STEPS * (BLOCKED_NS + DECODED_NS)


def make_training(
    doing: str = "block-io",
    what: str = "",
    resource: str = "",
    size: int = 1 << 20,
    operations: int = 8,
    *,
    rank: int = 0,
    node: str = "n0",
) -> tuple[Rank, int]:
    """A rank whose worker blocks, then decodes, while it and its device wait; and when it ends.

    Steps are of uneven length, so that samples fall everywhere in them.
    """
    pid = 1000 + 10 * rank
    main, worker = Thread(pid, pid, 900, "python"), Thread(pid + 1, pid + 1, pid, "pt_data_worker")
    worker.marks.append(Mark(10 * MS, 10 * MS, layout.WORKER_START, 0, 1, pid))
    worker.acts.append(Act(10 * MS, FIRST_NS, "idle"))
    main.acts.append(Act(0, FIRST_NS, "user"))
    work, at = [], FIRST_NS
    for step in range(STEPS):
        ready = at + BLOCKED_NS + DECODED_NS
        ends = ready + (83 + step * 7 % 10) * MS
        asks = Act(at, at + BLOCKED_NS, doing, resource, size, operations, 0, what)
        worker.acts += [asks, Act(asks.end_ns, ready, "user"), Act(ready, ends, "idle")]
        worker.marks.append(Mark(at, ready, layout.FETCH, 8))
        main.acts += [
            Act(at, ready, "idle"),
            Act(ready, ready + 30 * MS, "user"),
            Act(ready + 30 * MS, ends, "device"),
        ]
        main.marks.append(Mark(at, ready, layout.DATA_WAIT, step, pid + 1, 1, int(step == 0)))
        main.marks.append(Mark(at, ends, layout.STEP, step))
        work.append(Work(ready, ends, "compute"))
        at = ends
    return Rank(rank, node, main, [worker], "emulated-0", work), at


def make_data_parallel_job(ranks: int, per_node: int, late: int) -> Story:
    """Data-parallel ranks that leave an all-reduce together in every step, 5 ms after the last.

    Every worker reads for 2 ms of a batch, that of `late` for 60 ms; then each rank computes for
    80 ms and some.
    """
    group, members = compute_group_number(range(ranks)), tuple(range(ranks))
    nodes = {f"n{number}": Node(f"n{number}", 8) for number in range(-(-ranks // per_node))}
    collected = []
    for rank, pid in ((rank, 1000 + 10 * rank) for rank in members):
        main = Thread(pid, pid, 900, "python")
        workers = [Thread(pid + 1, pid + 1, pid, "pt_data_worker")]
        place = f"n{rank // per_node}", main, workers, f"emulated-{rank % per_node}"
        collected.append(Rank(rank, *place, [], groups={group: members}))
    at = FIRST_NS
    for step in range(STEPS):
        read = [(60 if rank == late else 2) * MS for rank in members]
        come = [at + ns + (80 + (3 * rank + step) % 6) * MS for rank, ns in enumerate(read)]
        leave = max(come) + 5 * MS
        for item, ns, came in zip(collected, read, come):
            ready, (worker,) = at + ns, item.workers
            worker.acts += [Act(at, ready, "block-io", "", 1 << 20), Act(ready, leave, "idle")]
            worker.marks.append(Mark(at, ready, layout.FETCH, 8))
            item.main.acts += [
                Act(at, ready, "idle"),
                Act(ready, came, "user"),
                Act(came, leave, "peer"),
            ]
            item.main.marks += [
                Mark(at, ready, layout.DATA_WAIT, step, worker.pid, 1, int(step == 0)),
                Mark(came, leave, layout.COLLECTIVE, group, step, 1 << 20, layout.ALL_REDUCE),
                Mark(at, leave, layout.STEP, step),
            ]
            item.work.append(Work(ready, came, "compute"))
        at = leave
    return Story(collected, nodes, 0, at + SECOND, world_size=ranks)


def record_story(
    story: Story,
    folder: Path,
    seen: RecordingQuality = RecordingQuality(),  # noqa: B008
    seed: int = 1,
) -> list[Record]:
    """Record a story of one node and return the records."""
    write_story(story, folder, np.random.default_rng(seed), seen)
    (node,) = list_node_folders(folder)
    return list(NodeReader(node))


def make_single_rank_job(
    rank: Rank, end_ns: int, node: Node | None = None, start_ns: int = 0
) -> Story:
    """A job of one rank."""
    return Story([rank], {rank.node: node or Node(rank.node)}, start_ns, end_ns)


def join_readings(records: list[Record], signal: str, device: str = "") -> np.ndarray:
    """All readings of a signal, joined."""
    parts = []
    for item in records:
        if isinstance(item, Columns):
            pairs = list(zip(item.signals, item.devices))
            if (signal, device) in pairs:
                parts.append(np.asarray(item.values[pairs.index((signal, device))]))
    return np.concatenate(parts)


def list_sample_times(records: list[Record], collector: str) -> np.ndarray:
    """When a collector was read."""
    frames = [r for r in records if isinstance(r, Columns) and r.collector == collector]
    return np.concatenate([np.asarray(frame.t_ns) for frame in frames])


def list_rows(records: list[Record], table: str, **only: int) -> dict[str, list]:
    """The rows of a table in which columns have some values; names instead of their numbers."""
    collected: dict[str, list] = {}
    for item in records:
        if isinstance(item, Rows) and item.table == table:
            columns = {name: np.asarray(c) for name, c in zip(item.names, item.columns)}
            keep = np.ones(len(item.columns[0]), np.bool_)
            for name, value in only.items():
                keep &= columns[name] == value
            for name, column in columns.items():
                words = item.strings.get(name)
                values = column[keep].tolist()
                stated = [words[v] if v >= 0 else "" for v in values] if words else values
                collected.setdefault(name, []).extend(stated)
    return collected


def list_spans(records: list[Record], pid: int) -> list[Spans]:
    """The frames of a process's spans."""
    return [item for item in records if isinstance(item, Spans) and item.pid == pid]


def list_gaps(records: list[Record]) -> dict[tuple[str, str], tuple[str, str]]:
    """Collector and signal of each gap, with its kind and reason."""
    selected = [item for item in records if isinstance(item, Gap)]
    return {(item.collector, item.signal): (item.kind, item.message) for item in selected}


def sum_lost_by_cause(report: Report) -> dict[str, int]:
    """Lost time inside steps by cause, all of it."""
    collected: dict[str, int] = {}
    for rank in report.ranks:
        for cause, ns in rank.buckets:
            collected[cause] = collected.get(cause, 0) + ns
    assert sum(collected.values()) == report.lost_ns
    assert report.productive_ns + report.lost_ns == report.in_step_ns
    return collected
