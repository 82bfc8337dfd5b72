"""Logs of MLPerf Training and HPC: staging, epochs or blocks, evaluations of a run.

## What is read

Lines with `:::MLLOG` and a JSON object behind it, among whatever else a program printed; one file
is one run, or one of several instances that ran side by side. `init_start` to `init_stop`,
`staging_…`, `epoch_…` or `block_…`, `eval_…` and `run_…` are understood, in milliseconds of the
wall clock.

    python train.py > result_0.txt

## How it is understood

Each run is a process of its own whose steps are its epochs; where there are none, its blocks (the
training between two evaluations); evaluations within are marked. What comes before the first step
is start-up, staging included. Notes say how long staging took, whether the first epoch was slower
than the middle one (cold caches), and, of three instances or more of one benchmark, which one is
slow: by its fastest epoch, which cold caches and chance do not slow.

## Where it is blind

Everything inside an epoch: no device, no rank but the one that logged, no cause.
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

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.columns import unread_ns
from clusterprof.importers.tables import SPAN_AT_MOST_NS, NodeTables
from clusterprof.importers.text_lines import json_of, lines_of, whole_ns
from clusterprof.probe import layout
from clusterprof.signals import GPU_BUSY

MARK = b":::MLLOG"
MILLISECOND_NS, SECOND_NS = 1_000_000, 1_000_000_000
INTERVALS_AT_MOST = 1 << 17
COLD_RATIO = 1.25
"""A first epoch that took so much longer than the middle one began with cold caches."""
SLOW_RATIO = 1.03
"""An instance is slow when its fastest epoch took so much longer than the middle one of all."""
INSTANCES_AT_LEAST = 3
_KEY = re.compile(r"([a-z_]{1,32})_(start|stop)$")
_WANTED = ("init", "staging", "epoch", "block", "eval", "run")


@dataclass(slots=True)
class Run:
    """One log."""

    path: Path
    said: dict[str, Any] = field(default_factory=dict)
    """submission_benchmark, submission_platform, …: values that describe the run."""
    spans: dict[str, list[tuple[int, int, int | None]]] = field(default_factory=dict)
    """By kind: start, end, number of the epoch if told."""
    first_ns: int = 0
    last_ns: int = 0

    @property
    def steps(self) -> list[tuple[int, int, int | None]]:
        """Its epochs, else its blocks, in order; what lies within another is left out."""
        every = sorted(
            self.spans.get("epoch") or self.spans.get("block") or [], key=lambda one: one[:2]
        )
        kept: list[tuple[int, int, int | None]] = []
        for one in every:
            if not kept or one[0] >= kept[-1][1]:
                kept.append(one)
        return kept


class Mllog:
    """Logs with `:::MLLOG` lines."""

    name: ClassVar[str] = "mllog"
    title: ClassVar[str] = "MLPerf log"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """A line of the log stands near the beginning."""
        return MARK + b" {" in head

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield every run. Raises CannotImportError when none has an epoch or a block."""
        runs: list[tuple[Run, Account]] = []
        for source, account in zip(sources, accounts):
            run = read_run(source, account)
            if run.steps:
                account.notes += _notes(run)
                runs.append((run, account))
            else:
                account.refuse("no epoch or block with a beginning and an end")
        if not runs:
            raise CannotImportError("no epoch or block with a beginning and an end")
        _compare(runs)
        for run, _ in runs:
            yield node_of(run, alone=len(runs) == 1)


def read_run(source: Source, account: Account) -> Run:
    """Read one log; what is broken is counted."""
    run, open_ = Run(source.path), dict[str, tuple[int, int | None]]()
    times = array("q")
    for line in lines_of(source, account):
        at = line.find(MARK)
        if at < 0:
            continue
        one = json_of(line[at + len(MARK) :])
        when = whole_ns(one.get("time_ms"), MILLISECOND_NS) if isinstance(one, dict) else None
        key = one.get("key") if isinstance(one, dict) else None
        if when is None or when <= 0 or not isinstance(key, str):
            account.skipped["lines without a time or a key"] += 1
            continue
        times.append(when)
        match = _KEY.match(key)
        if match and match[1] in _WANTED:
            _interval(run, open_, match[1], match[2] == "start", when, one, account)
        elif key.startswith("submission_") and len(run.said) < 64:
            run.said.setdefault(key, one.get("value"))
    account.read["log lines"] += len(times)
    middle = sorted(times)[len(times) // 2] if times else 0
    near = [when for when in times if abs(when - middle) <= SPAN_AT_MOST_NS // 2]
    run.first_ns, run.last_ns = min(near, default=0), max(near, default=0)
    if len(near) < len(times):
        account.skipped["lines of quite another time"] += len(times) - len(near)
    for kind in open_:
        account.skipped[f"{kind} without an end"] += 1
    for kind, spans in run.spans.items():
        account.read[f"{kind} spans"] += len(spans)
    return run


def _interval(
    run: Run,
    open_: dict[str, tuple[int, int | None]],
    kind: str,
    begins: bool,
    when: int,
    one: Mapping[str, Any],
    account: Account,
) -> None:
    more = one.get("metadata")
    number = more.get("epoch_num") if isinstance(more, dict) else None
    epoch = number if isinstance(number, int) and 0 <= number < 1 << 40 else None
    if begins:
        if kind in open_:
            account.skipped[f"{kind} without an end"] += 1
        open_[kind] = (when, epoch)
        return
    begun = open_.pop(kind, None)
    spans = run.spans.setdefault(kind, [])
    if begun is None or when < begun[0] or len(spans) >= INTERVALS_AT_MOST:
        account.skipped[f"{kind} that ends before it begins"] += 1
    elif when > begun[0]:
        spans.append((begun[0], when, begun[1]))


def node_of(run: Run, alone: bool) -> NodeTables:
    """Return a run as a node with one process."""
    name = run.path.name.split(".")[0]
    node = NodeTables(name, "mllog", 0, key=name)
    if not alone:
        node.job = f"{run.path.parent.name}/{name}"
    node.device("unseen", name=str(run.said.get("submission_platform", ""))[:200])
    node.rank(1, device="unseen")
    steps = run.steps
    numbers = [at if number is None else number for at, (_, _, number) in enumerate(steps, 1)]
    if len(set(numbers)) < len(numbers):
        numbers = list(range(1, len(numbers) + 1))
    table = np.array([one[:2] for one in steps], np.int64).T
    last_ns = max(run.last_ns, int(table[1, -1]))
    t_ns = unread_ns(run.first_ns, last_ns, table)
    node.series(GPU_BUSY.name, "unseen", t_ns, np.full(t_ns.size, np.nan))  # nobody read it
    node.spans(1, layout.STEP, table[0], table[1], numbers, 2, -1, -1)
    for kind in ("init", "staging", "epoch", "block", "run"):
        found = np.array([one[:2] for one in run.spans.get(kind, [])], np.int64).reshape(-1, 2).T
        if found.size and kind != "run":
            node.named_spans(1, kind, found[0], found[1])
    found = np.array([one[:2] for one in run.spans.get("eval", [])], np.int64).reshape(-1, 2).T
    if found.size:
        node.spans(1, layout.EVAL, found[0], found[1])
    return node


def _lengths(spans: Sequence[tuple[int, int, int | None]]) -> list[float]:
    return [(end - start) / SECOND_NS for start, end, _ in spans]


def _notes(run: Run) -> list[str]:
    said = []
    whole = sum(_lengths(run.spans.get("run", []))) or (run.last_ns - run.first_ns) / SECOND_NS
    staged = sum(_lengths(run.spans.get("staging", [])))
    if staged and whole:
        said.append(
            f"staging took {staged:.1f} s before training, {100 * staged / whole:.1f} % of the run"
        )
    steps = _lengths(run.steps)
    word = "epoch" if run.spans.get("epoch") else "block"
    if len(steps) >= 3:
        first, middle = steps[0], median(steps[1:])
        slower = first > COLD_RATIO * middle
        if slower and word == "epoch":
            said.append(
                f"the first epoch took {first:.1f} s, the middle one {middle:.1f} s: it began with"
                " cold caches, or with compiling"
            )
        elif word == "epoch":
            said.append(f"the first epoch took {first:.1f} s, the middle one {middle:.1f} s")
    return said


def _compare(runs: Sequence[tuple[Run, Account]]) -> None:
    """Say which instance of one benchmark on one platform is slow."""
    alike: dict[tuple[str, str, Path], list[tuple[float, Run, Account]]] = {}
    for run, account in runs:
        kind, platform = (
            str(run.said.get(f"submission_{key}", ""))[:200] for key in ("benchmark", "platform")
        )
        best = min(_lengths(run.steps))
        alike.setdefault((kind, platform, run.path.parent), []).append((best, run, account))
    for (kind, _, _), some in alike.items():
        if len(some) < INSTANCES_AT_LEAST:
            continue
        word = "epoch" if all(run.spans.get("epoch") for _, run, _ in some) else "block"
        middle = median(best for best, _, _ in some)
        slow = sorted(
            (one for one in some if one[0] > SLOW_RATIO * middle), key=lambda one: -one[0]
        )
        name = f"{len(some)} instances of {kind}" if kind else f"{len(some)} instances"
        if slow:
            best, run, account = slow[0]
            account.notes.append(
                f"the slowest of {name}: its fastest {word} took {best:.1f} s, the middle one's"
                f" {middle:.1f} s"
            )
        else:
            some[0][2].notes.append(
                f"{name} side by side: none is slow (fastest {word}s within"
                f" {100 * (SLOW_RATIO - 1):.0f} % of {middle:.1f} s)"
            )
