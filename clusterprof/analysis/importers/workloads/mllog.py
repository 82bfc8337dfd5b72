"""Logs of MLPerf Training and HPC: staging, epochs or blocks, and evaluations of a run.

## How to make the file

    python train.py > result_0.txt

## How to analyze it

    clusterprof analyze result_0.txt

## What is read

Lines with `:::MLLOG` followed by a JSON object, mixed with any other output of a program. Times are
milliseconds of the wall clock. The keys `init_start` to `init_stop`, `staging_…`, `epoch_…` or
`block_…`, `eval_…` and `run_…` are used. One file is one run, or one of several instances that ran
concurrently.

## How the numbers are computed

Each run is a separate process whose steps are its epochs. Without epochs its steps are its blocks;
a block is the training between two evaluations. Evaluations within a step are marked. The time
before the first step is start-up, including staging. Notes show the duration of staging, and
whether the first epoch was slower than the median epoch (cold caches). For three or more instances
of one benchmark a note names the slow instance. It is judged by its fastest epoch, which cold
caches and chance do not slow down.

## What it cannot see

Everything inside an epoch: no device, no rank except the one that logged, no cause.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.columns import list_unread_times
from clusterprof.analysis.importers.core.node_tables import MAX_DURATION_NS, NodeTables
from clusterprof.analysis.importers.core.text import (
    convert_to_ns,
    name_trace,
    parse_json,
    read_lines,
)
from clusterprof.probe import layout
from clusterprof.signals import GPU_BUSY

LINE_MARK = b":::MLLOG"
MILLISECOND_NS, SECOND_NS = 1_000_000, 1_000_000_000
MAX_INTERVALS = 1 << 17
COLD_RATIO = 1.25
"""Ratio of the first epoch to the median of the others above which caches were cold."""
SLOW_RATIO = 1.03
"""Ratio of an instance's fastest epoch to the median of all instances above which it is slow."""
MIN_INSTANCES = 3
_KEY = re.compile(r"([a-z_]{1,32})_(start|stop)$")
_SIZE_KEYS = ("number_of_ranks", "number_of_nodes", "accelerators_per_node")
_INTERVAL_KINDS = ("init", "staging", "epoch", "block", "eval", "run")


@dataclass(slots=True)
class LoggedRun:
    """One log."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    """submission_benchmark, submission_platform, …: values that describe the run."""
    spans: dict[str, list[tuple[int, int, int | None]]] = field(default_factory=dict)
    """By kind: start and end in ns, number of the epoch or None."""
    first_ns: int = 0
    last_ns: int = 0

    @property
    def steps(self) -> list[tuple[int, int, int | None]]:
        """Epochs of the run, else its blocks, in order; those inside another are left out."""
        candidates = sorted(
            self.spans.get("epoch") or self.spans.get("block") or [], key=lambda span: span[:2]
        )
        disjoint: list[tuple[int, int, int | None]] = []
        for span in candidates:
            if not disjoint or span[0] >= disjoint[-1][1]:
                disjoint.append(span)
        return disjoint

    @property
    def ranks(self) -> int | None:
        """Ranks of the run, else its accelerators; None if the log states neither."""
        ranks, nodes, size = (self.values.get(key) for key in _SIZE_KEYS)
        if isinstance(ranks, int) and ranks > 0:
            return ranks
        if isinstance(nodes, int) and isinstance(size, int) and nodes > 0 and size > 0:
            return nodes * size
        return None  # the number in "16xNVIDIA DGX H100" counts systems


class Mllog:
    """Importer of logs with `:::MLLOG` lines."""

    name: ClassVar[str] = "mllog"
    title: ClassVar[str] = "MLPerf log"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a line of the log is near the beginning."""
        return LINE_MARK + b" {" in head

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield every run.

        Raises: CannotImportError when no run has an epoch or a block.
        """
        runs: list[tuple[LoggedRun, Account]] = []
        for source, account in zip(sources, accounts):
            run = read_run(source, account)
            if run.steps:
                account.notes += _build_notes(run)
                runs.append((run, account))
            else:
                account.refuse("the log has no epoch or block with start and stop")
        if not runs:
            raise CannotImportError("no log has an epoch or block with start and stop")
        slowest = _compare_instances(runs)
        runs[0][1].answers += [*_describe_startup([run for run, _ in runs]), *slowest]
        for run, _ in runs:
            yield build_node(run, is_only_run=len(runs) == 1)


def read_run(source: Source, account: Account) -> LoggedRun:
    """Read one log; broken lines are counted."""
    run, open_intervals = LoggedRun(source.path), dict[str, tuple[int, int | None]]()
    times = array("q")
    for line in read_lines(source, account):
        offset = line.find(LINE_MARK)
        if offset < 0:
            continue
        record = parse_json(line[offset + len(LINE_MARK) :])
        t_ns = (
            convert_to_ns(record.get("time_ms"), MILLISECOND_NS)
            if isinstance(record, dict)
            else None
        )
        key = record.get("key") if isinstance(record, dict) else None
        if t_ns is None or t_ns <= 0 or not isinstance(key, str):
            account.skipped["lines without a time or a key"] += 1
            continue
        times.append(t_ns)
        match = _KEY.match(key)
        if match and match[1] in _INTERVAL_KINDS:
            _add_interval(run, open_intervals, match[1], match[2] == "start", t_ns, record, account)
        elif key.startswith(("submission_", *_SIZE_KEYS)) and len(run.values) < 64:
            run.values.setdefault(key, record.get("value"))
    account.read["log lines"] += len(times)
    median_ns = sorted(times)[len(times) // 2] if times else 0
    near = [time_ns_ for time_ns_ in times if abs(time_ns_ - median_ns) <= MAX_DURATION_NS // 2]
    run.first_ns, run.last_ns = min(near, default=0), max(near, default=0)
    if len(near) < len(times):
        account.skipped["lines with a far-off time"] += len(times) - len(near)
    for kind in open_intervals:
        account.skipped[f"{kind} without a stop"] += 1
    for kind, spans in run.spans.items():
        account.read[f"{kind} spans"] += len(spans)
    return run


def _add_interval(
    run: LoggedRun,
    open_intervals: dict[str, tuple[int, int | None]],
    kind: str,
    begins: bool,
    t_ns: int,
    record: Mapping[str, Any],
    account: Account,
) -> None:
    metadata = record.get("metadata")
    number = metadata.get("epoch_num") if isinstance(metadata, dict) else None
    epoch = number if isinstance(number, int) and 0 <= number < 1 << 40 else None
    if begins:
        if kind in open_intervals:
            account.skipped[f"{kind} without a stop"] += 1
        open_intervals[kind] = (t_ns, epoch)
        return
    opened = open_intervals.pop(kind, None)
    spans = run.spans.setdefault(kind, [])
    if opened is None or t_ns < opened[0] or len(spans) >= MAX_INTERVALS:
        account.skipped[f"{kind} that stops before it starts"] += 1
    elif t_ns > opened[0]:
        spans.append((opened[0], t_ns, opened[1]))


def build_node(run: LoggedRun, is_only_run: bool) -> NodeTables:
    """Build the node of a run, with one process."""
    name = name_trace(run.path)
    node = NodeTables("", "mllog", 0, key=name)
    if not is_only_run:
        node.job = f"{run.path.parent.name}/{name}"
    node.add_device("unseen", name=str(run.values.get("submission_platform", ""))[:200])
    node.add_rank(1, world_size=run.ranks, device="unseen")
    steps = run.steps
    numbers = [index if number is None else number for index, (_, _, number) in enumerate(steps, 1)]
    if len(set(numbers)) < len(numbers):
        numbers = list(range(1, len(numbers) + 1))
    table = np.array([step[:2] for step in steps], np.int64).T
    last_ns = max(run.last_ns, int(table[1, -1]))
    t_ns = list_unread_times(run.first_ns, last_ns, table)
    node.add_series(GPU_BUSY.name, "unseen", t_ns, np.full(t_ns.size, np.nan))  # unread
    node.add_spans(1, layout.STEP, table[0], table[1], numbers, 2, -1, -1)
    for kind in ("init", "staging", "epoch", "block", "run"):
        intervals = (
            np.array([span[:2] for span in run.spans.get(kind, [])], np.int64).reshape(-1, 2).T
        )
        if intervals.size and kind != "run":
            node.add_named_spans(1, kind, intervals[0], intervals[1])
    intervals = (
        np.array([span[:2] for span in run.spans.get("eval", [])], np.int64).reshape(-1, 2).T
    )
    if intervals.size:
        node.add_spans(1, layout.EVAL, intervals[0], intervals[1])
    return node


def _list_lengths(spans: Sequence[tuple[int, int, int | None]]) -> list[float]:
    return [(end - start) / SECOND_NS for start, end, _ in spans]


def _build_notes(run: LoggedRun) -> list[str]:
    notes = []
    run_s = sum(_list_lengths(run.spans.get("run", []))) or (run.last_ns - run.first_ns) / SECOND_NS
    staging_s = sum(_list_lengths(run.spans.get("staging", [])))
    if staging_s and run_s:
        notes.append(
            f"staging took {staging_s:.1f} s before training, {100 * staging_s / run_s:.1f} %"
            f" of the run"
        )
    steps = _list_lengths(run.steps)
    unit = "epoch" if run.spans.get("epoch") else "block"
    if len(steps) >= 3:
        first, typical = steps[0], median(steps[1:])
        is_cold = first > COLD_RATIO * typical
        if is_cold and unit == "epoch":
            notes.append(
                f"the first epoch took {first:.1f} s, the median {typical:.1f} s: it began with"
                " cold caches, or with compilation"
            )
        elif unit == "epoch":
            notes.append(f"the first epoch took {first:.1f} s, the median {typical:.1f} s")
    return notes


def _compare_instances(runs: Sequence[tuple[LoggedRun, Account]]) -> list[str]:
    """Note which instance of one benchmark on one platform is slow, and return it as answers."""
    answers = []
    instances_by_kind: dict[tuple[str, str, Path], list[tuple[float, LoggedRun, Account]]] = {}
    for run, account in runs:
        kind, platform = (
            str(run.values.get(f"submission_{key}", ""))[:200] for key in ("benchmark", "platform")
        )
        fastest = min(_list_lengths(run.steps))
        instances_by_kind.setdefault((kind, platform, run.path.parent), []).append(
            (fastest, run, account)
        )
    for (kind, _, _), instances in instances_by_kind.items():
        if len(instances) < MIN_INSTANCES:
            continue
        unit = "epoch" if all(run.spans.get("epoch") for _, run, _ in instances) else "block"
        typical = median(fastest for fastest, _, _ in instances)
        slow = sorted(
            (instance for instance in instances if instance[0] > SLOW_RATIO * typical),
            key=lambda instance: -instance[0],
        )
        name = f"{len(instances)} instances of {kind}" if kind else f"{len(instances)} instances"
        if slow:
            fastest, run, account = slow[0]
            text = f"of {name}: its fastest {unit} took {fastest:.1f} s, the median {typical:.1f} s"
            account.notes.append(f"the slowest {text}")
            answers.append(f"slowest is {run.path.name}, {text}")
        else:
            instances[0][2].notes.append(
                f"{name}: none is slow (fastest {unit}s within"
                f" {100 * (SLOW_RATIO - 1):.0f} % of {typical:.1f} s)"
            )
    return answers


def _describe_startup(runs: Sequence[LoggedRun]) -> list[str]:
    """Describe how long the runs took to start, and the part of it that was staging."""
    startups = [(run.steps[0][0] - run.first_ns) / SECOND_NS for run in runs]
    shares = [
        SECOND_NS * startup / max(run.last_ns - run.first_ns, 1)
        for startup, run in zip(startups, runs)
    ]
    text = (
        f"start-up took {_format_range(startups)} s, {_format_range([100 * s for s in shares])} %"
    )
    text += " of the run" if len(runs) == 1 else f" of each of {len(runs)} runs"
    trained = [sum(_list_lengths(run.spans.get("run", []))) for run in runs]
    if any(trained):
        text += f"; from run_start to run_stop {_format_range([s for s in trained if s])} s"
    staging = [sum(_list_lengths(run.spans.get("staging", []))) for run in runs]
    staged = [seconds for seconds in staging if seconds]
    if staged:
        text += f"; staging took {_format_range(staged)} s"
        text += f" in {len(staged)} of them" if len(staged) < len(runs) else ""
    platforms = {str(run.values.get("submission_platform", ""))[:100] for run in runs} - {""}
    return [f"{platforms.pop()}: {text}" if len(platforms) == 1 else text]


def _format_range(values: Sequence[float]) -> str:
    ends = f"{min(values):,.1f}", f"{max(values):,.1f}"
    return " to ".join(dict.fromkeys(ends))
