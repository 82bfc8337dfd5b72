"""Which column of a table is the rank, the step, the start, the end or the duration; its unit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_UNITS = {
    "ns": 1.0, "nanosecond": 1.0, "nanoseconds": 1.0,
    "us": 1e3, "usec": 1e3, "µs": 1e3, "microsecond": 1e3, "microseconds": 1e3,
    "ms": 1e6, "msec": 1e6, "millis": 1e6, "millisecond": 1e6, "milliseconds": 1e6,
    "s": 1e9, "sec": 1e9, "secs": 1e9, "second": 1e9, "seconds": 1e9,
}  # fmt: skip
_UNIT = re.compile(r"[\s_(\[/]([a-zµ]+)[)\]]?$")

RANK = (
    "rank",
    "global_rank",
    "rank_id",
    "worker",
    "worker_id",
    "worker_rank",
    "process",
    "trainer",
)
STEP = ("step", "global_step", "iteration", "iter", "step_id", "step_number", "batch", "batch_idx")
START = ("start", "start_time", "step_start", "begin", "begin_time", "ts_start")
END = ("end", "end_time", "step_end", "stop", "stop_time", "finish", "ts_end")
DURATION = (
    "duration", "step_time", "step_duration", "iteration_time", "iter_time", "batch_time",
    "batch_time_norm", "elapsed", "elapsed_time", "time_per_step", "dur",
)  # fmt: skip
HOST = ("host", "hostname", "node", "node_name")
JOB = ("job", "job_id", "job_name", "run", "run_id")
_OF_OPERATIONS = ("optype", "op", "op_type", "operation", "kernel", "stage_name", "mb_id")
"""Heads of tables with several rows for one step of a rank."""
_STEP_ELSE = ("time",)  # a count, where the duration is another column


@dataclass(frozen=True, slots=True)
class Columns:
    """Numbers of the columns; None = not there. Units in ns, 0 = not stated."""

    rank: int
    step: int
    start: int | None = None
    end: int | None = None
    duration: int | None = None
    host: int | None = None
    job: int | None = None
    start_unit: float = 0.0
    end_unit: float = 0.0
    duration_unit: float = 0.0


def columns_of(heads: Sequence[str]) -> Columns | None:
    """Return what the columns are; None when they make no table of step times."""
    plain = [_plain(head) for head in heads]
    rank, step = _find(plain, RANK), _find(plain, STEP)
    start, end = _find(plain, START), _find(plain, END)
    duration = _find(plain, DURATION)
    if step is None and duration is not None:
        step = _find(plain, _STEP_ELSE)
    if any(name in _OF_OPERATIONS for name, _ in plain):
        return None
    if rank is None or step is None or (duration is None and (start is None or end is None)):
        return None
    unit = {at: plain[at][1] for at in (start, end, duration) if at is not None}
    return Columns(
        rank, step, start, end, duration, _find(plain, HOST), _find(plain, JOB),
        *(unit.get(at, 0.0) if at is not None else 0.0 for at in (start, end, duration)),
    )  # fmt: skip


def _find(plain: Sequence[tuple[str, float]], names: Sequence[str]) -> int | None:
    """The column of the first of some names that is there."""
    heads = [name for name, _ in plain]
    return next((heads.index(name) for name in names if name in heads), None)


def _plain(head: str) -> tuple[str, float]:
    """A head in small letters, without its unit, and that: `Step Time (ms)` -> step_time, 1e6."""
    head = head.strip().lower()
    unit = 0.0
    match = _UNIT.search(head)
    if match and match[1] in _UNITS:
        unit = _UNITS[match[1]]
        head = head[: match.start()].rstrip("_ \t")
    return re.sub(r"[\s.\-]+", "_", head).strip("_"), unit
