"""Plain logs of Megatron-LM and its forks: iterations, and tables of timers.

## How to make the file

Keep the output of the rank that logs (the last one):

    torchrun … pretrain_gpt.py --log-interval 1 --timing-log-level 1 … 2>&1 | tee train.log

## How to analyze it

    clusterprof analyze train.log

## What is read

Lines `iteration N/ M | … | elapsed time per iteration (ms): T | …`, also as Megatron-DeepSpeed
writes them (`elapsed_time_per_iteration_ms=T`), and the tables of timers that follow (`(min, max)
time across ranks (ms):`, `max time …`, `times across ranks (ms):`, `time (ms) | name: T`). The size
of the world (`using world size: N`, `world_size ..... N`).

## How the numbers are computed

A line that stands for several iterations gives each their mean. Iterations follow each other from
zero, because the times of the lines are local and often whole seconds. Where the lines are at least
two seconds further apart than their iterations explain (evaluation, checkpoint), that time lies
between steps. Timers have no position in a step: their means over the log are notes. The answer is
the mean iteration, and the share of it in timers that are not compute.

## What it cannot see

The accelerator, and why an iteration took so long: no lost time is stated. A timer that differs
much between the fastest and the slowest rank shows that ranks wait for each other, not which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import mode
from typing import ClassVar

import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import read_lines
from clusterprof.probe import layout
from clusterprof.units import format_quantity

_ITERATION = re.compile(
    rb"\biteration[ =]+(\d{1,12}) ?/ *\d{1,12}\b.{0,400}?"
    rb"elapsed[ _]time[ _]per[ _]iteration[ _]\(?ms\)?[:=] *(\d{1,12}(?:\.\d{1,9})?)"
)
_ARGUMENTS = re.compile(rb"\n *(?:[\w\]\[:]+ +)?(?:tensor|pipeline)_model_parallel_size \.{3,}")
_TIME = re.compile(rb"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)\]")
_WORLD_SIZE = re.compile(
    rb"\b(?:using world size: |dist_world_size=|world_size \.{3,} )(\d{1,6})\b(?!\.)"
)
"""Also of a group of ranks, as DeepSpeed prints it: the largest is that of the job."""
_TABLE = re.compile(rb"\btimes? across ranks \(ms\):")
_TIMER = re.compile(
    rb"^[^|]{0,60}?([A-Za-z][\w/-]{2,63}) \.{2,}: \(?(\d+(?:\.\d+)?)(?:, (\d+(?:\.\d+)?)\))?\s*$"
)
_RANKED = re.compile(rb"\brank +\d{1,7}: (\d+(?:\.\d+)?)\s*$")
_RANKED_NAME = re.compile(rb"^ *([A-Za-z][\w/-]{2,63}):\s*$")
_OLD_TIMERS = re.compile(rb"\btime \(ms\) \|")
_OLD_TIMER = re.compile(rb"\| ([A-Za-z][\w/-]{2,63}): (\d+(?:\.\d+)?)")
_MAX_LINES, _MAX_TIMERS, _MAX_STEPS = 1 << 20, 64, 1 << 17
_MIN_PAUSE_NS = 2_000_000_000
_TIMERS_SHOWN = 6
_MIN_SPREAD = 1.2
_MIN_SHOWN_RATIO = 0.001  # of an iteration
_NOT_COMPUTE = re.compile(
    r"send|recv|all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|grads?-sync|comm|barrier"
    r"|batch-(?:generator|input)|data-?load|save-checkpoint|wait",
    re.IGNORECASE,
)
"""Of the names of Megatron's timers: communication, loading, checkpoints."""
_MAX_NS = 1 << 61
_MAX_NUMBER = 1 << 62
"""Greatest number of an iteration; a column of int64 holds it."""


@dataclass(slots=True)
class _Timer:
    """One timer over the whole log, ms."""

    count: int = 0
    fastest_ms: float = 0.0
    slowest_ms: float = 0.0

    def add(self, fastest_ms: float, slowest_ms: float) -> None:
        """Add one table's times of the fastest and the slowest rank."""
        self.count += 1
        self.fastest_ms += fastest_ms
        self.slowest_ms += slowest_ms


@dataclass(slots=True)
class _Log:
    """What was read of one log."""

    iterations: list[tuple[int, float, int]] = field(default_factory=list)
    """Number, mean duration in ms, and time of the line in ns, -1 if unknown."""
    timers: dict[str, _Timer] = field(default_factory=dict)
    ranked: tuple[str, list[float]] = ("", [])
    """Timer whose lines list the ranks, and the times so far."""
    world_size: int = 0
    """Ranks of the job; 0 if the log does not state them."""


class MegatronLog:
    """Importer of Megatron-LM logs."""

    name: ClassVar[str] = "megatron-log"
    title: ClassVar[str] = "Megatron-LM log"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a line is an iteration, or the arguments of Megatron are printed."""
        return _ITERATION.search(head) is not None or _ARGUMENTS.search(head) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node per log.

        Raises: CannotImportError when a log has no line of an iteration.
        """
        for source, account in zip(sources, accounts):
            log = _read_log(source, account)
            if not log.iterations:
                raise CannotImportError(
                    f"{source.path.name}: no line 'iteration N/ M | … | elapsed time per iteration"
                    " (ms): T'; give the output of the last rank, and set --log-interval"
                )
            yield _build_node(log, source, account)


def _read_log(source: Source, account: Account) -> _Log:
    log, in_table = _Log(), False
    for line in read_lines(source, account):
        line = line[:4096]
        match = _ITERATION.search(line) if b"iteration" in line else None
        if match is not None:
            in_table = False
            if len(log.iterations) < _MAX_LINES:
                row = int(match[1]), float(match[2]), _parse_line_time(line)
                log.iterations.append(row)
            else:
                account.skipped["iterations beyond the limit"] += 1
        elif _TABLE.search(line):
            in_table = True
        elif in_table:
            in_table = _read_timer(line, log)
        elif b"world" in line and (world := _WORLD_SIZE.search(line)):
            log.world_size = max(log.world_size, int(world[1]))
        elif _OLD_TIMERS.search(line):
            for name, value in _OLD_TIMER.findall(line):
                _add_timer(log, name, float(value), float(value))
    _finish_ranked(log)
    return log


def _read_timer(line: bytes, log: _Log) -> bool:
    """Read a line of a table of timers; return whether the table goes on."""
    ranked = _RANKED.search(line)
    if ranked is not None and log.ranked[0]:
        log.ranked[1].append(float(ranked[1]))
        return True
    _finish_ranked(log)
    name = _RANKED_NAME.match(line)
    if name is not None:
        log.ranked = (name[1].decode(), [])
        return True
    timer = _TIMER.match(line)
    if timer is None:
        return not line.strip()
    _add_timer(log, timer[1], float(timer[2]), float(timer[3] or timer[2]))
    return True


def _finish_ranked(log: _Log) -> None:
    name, times = log.ranked
    if times:
        _add_timer(log, name.encode(), min(times), max(times))
    log.ranked = ("", [])


def _add_timer(log: _Log, name: bytes, fastest_ms: float, slowest_ms: float) -> None:
    """Add a timer's times; those printed before the first iteration are part of none."""
    if not log.iterations:
        return
    key = name.decode("ascii", "replace")
    if key in log.timers or len(log.timers) < _MAX_TIMERS:
        log.timers.setdefault(key, _Timer()).add(fastest_ms, slowest_ms)


def _parse_line_time(line: bytes) -> int:
    """Parse the time of a line as ns of an unknown zone; -1 if it has none."""
    match = _TIME.search(line)
    if match is None:
        return -1
    try:
        time = datetime.fromisoformat(match[1].decode().replace(",", ".").partition(".")[0])
    except ValueError:
        return -1
    seconds = int(time.replace(tzinfo=timezone.utc).timestamp())
    fraction = match[1].replace(b",", b".").partition(b".")[2].ljust(6, b"0")
    return seconds * 1_000_000_000 + int(fraction[:6] or 0) * 1000


def _build_node(log: _Log, source: Source, account: Account) -> NodeTables:
    start, end, number = _place_steps(log, account)
    node = NodeTables("", MegatronLog.name, key=source.path.name.partition(".")[0])
    node.add_rank(1, world_size=log.world_size or None, device="unseen")
    node.add_spans(1, layout.STEP, start, end, number, 2, -1, -1)
    node.add_unmeasured_device("unseen", int(start[0]), int(end[-1]))
    account.read["iterations"] += start.size
    account.read["tables of timers"] += max((t.count for t in log.timers.values()), default=0)
    if log.timers:
        account.notes.append(_describe_timers(log.timers))
    account.answers.append(_describe_iteration(log.timers, (end - start) / 1e6))
    return node


def _place_steps(log: _Log, account: Account) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place the iterations one after the other; int64[n] start, end (ns) and number each.

    Raises: CannotImportError when they add up to more than any job lasts.
    """
    numbers = [row[0] for row in log.iterations]
    gaps = [b - a for a, b in pairwise(numbers) if b > a]
    interval = mode(gaps) if gaps else 1
    spans: list[tuple[int, int, int]] = []
    t_ns = paused_ns = restarts = 0
    before: tuple[int, int] | None = None  # number and time of the line before
    for number, mean_ms, line_ns in log.iterations:
        is_next = before is not None and number > before[0]
        count = number - before[0] if is_next and before else max(min(interval, number), 1)
        restarts += before is not None and not is_next
        length_ns = round(mean_ms * 1e6)
        length_of_all_ns = count * length_ns
        pause_ns = 0
        if before is not None and min(before[1], line_ns) >= 0:
            pause_ns = line_ns - before[1] - length_of_all_ns
            pause_ns = pause_ns if pause_ns >= _MIN_PAUSE_NS else 0
        is_long = len(spans) + count > _MAX_STEPS or t_ns + pause_ns + length_of_all_ns > _MAX_NS
        if is_long or number > _MAX_NUMBER:
            account.skipped["iterations beyond the limit"] += 1
            continue
        t_ns += pause_ns
        paused_ns += pause_ns
        for index in range(count):
            spans.append((t_ns, t_ns + length_ns, number - count + 1 + index))
            t_ns += length_ns
        before = number, line_ns
    if not spans or spans[-1][1] <= 0:
        raise CannotImportError("the iterations have no usable duration")
    if restarts:
        account.notes.append(f"iteration numbers go back {restarts:,} times: restarts of the job")
    if interval > 1:
        account.notes.append(
            f"a line stands for {interval:,} iterations: each of them gets their mean"
            " (--log-interval 1 shows each)"
        )
    if paused_ns:
        account.notes.append(
            f"{paused_ns / 1e9:,.1f} s between the lines are not part of an iteration (evaluation,"
            " checkpoint, restart)"
        )
    table = np.array(spans, np.int64)
    return table[:, 0], table[:, 1], table[:, 2]


def _describe_iteration(timers: dict[str, _Timer], iteration_ms: np.ndarray) -> str:
    """Describe how long an iteration takes, and how much of it is not compute, by the timers.

    iteration_ms: float64[n], ms. Timers may contain each other, so they are not summed.
    """
    mean_ms = float(iteration_ms.mean())
    mean = format_quantity(mean_ms * 1e6, "ns")
    text = f"an iteration takes {mean}, mean of {iteration_ms.size:,}"
    means = {name: timer.slowest_ms / timer.count for name, timer in timers.items()}
    if not means:
        return f"{text}; no timers: --timing-log-level 2 shows what it consists of"
    waits = {name: ms for name, ms in means.items() if _NOT_COMPUTE.search(name)}
    parts = []
    if waits:
        parts.append(f"not compute: {_format_shares(waits, mean_ms)}")
    if max(waits.values(), default=0.0) < _MIN_SHOWN_RATIO * mean_ms:
        parts.append(f"the longest: {_format_shares(means, mean_ms)}")
    return f"{text}; of it, timers of the slowest rank, {'; '.join(parts)}"


def _format_shares(timers: dict[str, float], mean_ms: float) -> str:
    """Format the longest timers as shares of the mean iteration; both in ms."""
    longest = sorted(timers.items(), key=lambda item: -item[1])[:_TIMERS_SHOWN]
    parts = [
        f"{name} {format_quantity(ms / mean_ms, 'ratio')}"
        for name, ms in longest
        if ms >= _MIN_SHOWN_RATIO * mean_ms
    ]
    return ", ".join(parts) or f"none of {format_quantity(_MIN_SHOWN_RATIO, 'ratio')} or more"


def _describe_timers(timers: dict[str, _Timer]) -> str:
    """Describe the timers with the largest means, slowest rank first."""
    longest = sorted(timers.items(), key=lambda item: -item[1].slowest_ms / item[1].count)
    parts = []
    for name, timer in longest[:_TIMERS_SHOWN]:
        fastest, slowest = timer.fastest_ms / timer.count, timer.slowest_ms / timer.count
        part = f"{name} {slowest:,.1f} ms"
        if slowest > _MIN_SPREAD * fastest:
            part += f" (fastest rank {fastest:,.1f} ms)"
        parts.append(part)
    return "timers, mean of the slowest rank: " + ", ".join(parts)
