"""Histories of made-up jobs of any size: when each cause of a report took its time.

`add_history` spreads what every rank of a report lost over equal stretches: a culprit's own cause
comes in bursts, what others lost by it is waiting at the same time, everything else is even. All
sums are those of the report, to the nanosecond.
"""

from __future__ import annotations

import dataclasses
from functools import cache, lru_cache
from operator import add
from typing import Any

from clusterprof.report.history import WAITING_FOR_RANKS, History, RankHistory, SlowStep, Wait
from clusterprof.report.impact import CauseImpact, Impact
from clusterprof.report.model import Advice, RankLedger, Report
from tests.support.cluster_report import make_cluster_report

S = 1_000_000_000
_OF_OTHERS = ("storage-remote", "sync-imbalance")  # felt by those who waited
_LATE = "cpu-preprocess"  # once, in the middle of the run


def add_history(report: Report, stretches: int = 60, steps: int = 400) -> Report:
    """Return the report with a history of the same sums."""
    span = max(rank.window_ns for rank in report.ranks)
    stretch = -(-span // stretches)
    ranks = tuple(
        _make_rank(rank, at, stretches, stretch, steps) for at, rank in enumerate(report.ranks)
    )
    guilty = _find_main_culprit(report)
    waits = tuple(
        Wait(
            (2 + 3 * k) * span // 140,
            span // 400 + (k % 5) * span // 3000,
            (guilty + 1 + 7 * k) % len(ranks),
            guilty if k % 9 else None,
            "storage-remote" if k % 9 else "",
            40 + 11 * k,
        )
        for k in range(45)
    )
    slow = tuple(
        SlowStep(
            400 - 9 * k,
            (5 + 9 * k) * span // 100,
            span // 150 - k * span // 4000,
            guilty,
            (("storage-remote", span // 200), (WAITING_FOR_RANKS, span // 300)),
        )
        for k in range(6)
    )
    history = History(1_790_000_000 * S, stretch, stretches, ranks, waits, slow)
    return dataclasses.replace(report, history=history)


def make_one_hour_job(nodes: int, per_node: int, stretches: int = 360, steps: int = 5000) -> Report:
    """A job of one hour with everything a report can have: history, money and advice."""
    made = add_history(_scale(make_cluster_report(nodes, per_node), 12), stretches, steps)
    return dataclasses.replace(made, impact=make_job_impact(made), findings=_add_advice(made))


def make_job_impact(report: Report) -> Impact:
    """What the loss of a job costs at 2.50 EUR, and how much sooner it would be done."""

    def cost(ns: int) -> float:
        return ns / 3600e9 * 2.5

    job = max(rank.in_step_ns for rank in report.ranks)
    causes = tuple(
        CauseImpact(f.cause.id, cost(f.lost_ns), None, None, None, "the span graph has holes")
        if f.recoverable_ns is None
        else CauseImpact(f.cause.id, cost(f.lost_ns), job // 20, job // 25, job // 16)
        for f in report.findings
    )
    sticks = (
        ("goodput", 0.81, "productive time over recorded time"),
        ("MLPerf AU", None, "no accelerator time without input was measured"),
    )
    return Impact(
        2.5, "EUR", cost(report.lost_ns), job, causes, 41_200.0, 46_900.0, None, 0.92, 0.81, sticks
    )


def _add_advice(report: Report) -> tuple[Any, ...]:
    advice = (
        Advice(
            "Raise the number of requests that may be outstanding on /data",
            "worker.blocked_ratio is 91 % and the mount's queue is never full",
            "sudo sysctl -w sunrpc.tcp_slot_table_entries=128\nmount -o remount,nconnect=8 /data",
            "1.9 times the read rate, measured on this mount with eight readers",
            "clusterprof analyze again: storage-remote below 2 %",
            "more load on the file server; other jobs of the site share it",
        ),
        Advice(
            "Stage the dataset on the nodes' local disks before training",
            "every sample is read once per epoch and 310 GiB fit on /scratch",
            "srun --ntasks-per-node=1 rsync -a /data/train/ /scratch/train/",
            "all of it after the first epoch",
            "disk.read_bytes from /data is 0 after the first epoch",
            "",
        ),
    )
    first, *rest = report.findings
    return (dataclasses.replace(first, advice=advice), *rest)


def _find_main_culprit(report: Report) -> int:
    """The rank that caused most."""
    caused = [sum(ns for _, ns in rank.caused) for rank in report.ranks]
    return caused.index(max(caused))


def _make_rank(rank: RankLedger, at: int, stretches: int, stretch: int, steps: int) -> RankHistory:
    own = dict(rank.caused).get("storage-remote", 0) > 0
    lost: dict[str, tuple[int, ...]] = {}
    for cause, ns in rank.buckets:
        waits = cause in _OF_OTHERS and not (own and cause == "storage-remote")
        parts = _distribute(ns, _make_weights(cause, stretches, at % 4))
        name = WAITING_FOR_RANKS if waits else cause
        before = lost.get(name)
        lost[name] = parts if before is None else tuple(map(add, before, parts))
    in_step = _distribute(rank.in_step_ns, (1,) * stretches)
    ends = tuple((k + 1) * stretch * stretches // steps - (at % 7) * 1000 for k in range(steps))
    largest_first = sorted(lost.items(), key=lambda row: (-sum(row[1]), row[0]))
    return RankHistory(at, in_step, tuple(largest_first), ends)


@cache
def _make_weights(cause: str, stretches: int, at: int) -> tuple[int, ...]:
    if cause == "storage-remote":  # in bursts, and worse towards the end
        return tuple((3 + k * 6 // stretches) * (4 if k % 9 < 4 else 1) for k in range(stretches))
    if cause == _LATE:
        low, high = stretches * 40 // 100, stretches * 55 // 100 + 1
        return tuple(int(low <= k < high) for k in range(stretches))
    return tuple(5 + (k * 7 + at * 3) % 4 for k in range(stretches))


@lru_cache(4096)
def _distribute(ns: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Share an amount out by weights; the last takes what rounding left."""
    whole, done, at = sum(weights), 0, 0
    made: list[int] = []
    for weight in weights:
        at += weight
        made.append(ns * at // whole - done)
        done += made[-1]
    return tuple(made)


def _scale(value: Any, by: int, name: str = "") -> Any:
    """Multiply every time of a report: fields that end in `_ns`, and the buckets."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value)(**{key: _scale(field, by, key) for key, field in fields.items()})
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
            return (value[0], value[1] * by)
        return tuple(_scale(item, by, name) for item in value)
    if name.endswith("_ns") and isinstance(value, int) and name != "clock_bound_ns":
        return value * by
    return value
