"""Lost time by a job's own stopwatches: how much, its cause, and its culprit.

The nodes share CLOCK_MONOTONIC, so arrivals can be compared directly, which is impossible on a real
cluster. In each step every rank keeps sums by (cause, culprit) of what it spent since the common
instant of all ranks. They cover all of its time since then:

    left later than others (the network) + loop + data wait + waits and transfers + compute

The last member to arrive at an operation makes each other member wait; the wait is exactly the
difference of these sums. What the last member spent more than the other shares the wait in
proportion, under the same culprits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

STORAGE, PREPROCESS, CONTENTION = "storage-local", "cpu-preprocess", "cpu-contention"
WORK, TRANSFER, HAND_OVER = "work", "net-transfer", "hand-over"
NOBODY, OWN = -1, -2
SUMS = {
    "data_wait_ns": "data",
    "send_recv_ns": "send/recv",
    "compute_ns": "compute",
    "reduce_wait_ns": "reduce",
    "delayed_ns": "delayed",
    "waited_for_others_ns": "for others",
    "transfer_ns": "transfer",
    "kept_others_waiting_ns": "caused",
}
"""Of each rank, and how a table heads them."""
Sums = dict[tuple[str, int], float]
"""(cause, culprit) -> ns."""


def compute_truth(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return sums per rank in ns, and all lost time as rows (cause, culprit, victim, ns).

    `ranks`: what each printed, in order. The culprit of what was on its way is `NOBODY`.
    """
    lost_sums: list[Sums] = [defaultdict(float) for _ in ranks]
    rows = [_parse_log(log) for log in ranks]
    for step in range(ranks[0]["steps"]):
        for row, step_sums in zip(rows, _add_step(ranks, step, lost_sums)):
            for name, ns in step_sums.items():
                row[name] += ns
    lost = [
        (cause, culprit, rank, round(ns))
        for rank, sums in enumerate(lost_sums)
        for (cause, culprit), ns in sorted(sums.items())
        if round(ns)
    ]
    return {"steps": ranks[0]["steps"], "ranks": rows, "lost": lost}


def _parse_log(log: dict[str, Any]) -> dict[str, Any]:
    zeros = dict.fromkeys((*SUMS, "last_times"), 0)
    return {"rank": log["rank"], "host": log["host"], "total_ns": log["total_ns"], **zeros}


def _add_step(ranks: Sequence[dict[str, Any]], step: int, lost: list[Sums]) -> list[dict[str, int]]:
    """Add one step's lost time to `lost`; return each rank's sums of the step."""
    marks = [{name: at[step] for name, at in log["stamps"].items()} for log in ranks]
    before = [log["stamps"]["left_ns"][step - 1] if step else log["began_ns"] for log in ranks]
    rested = [log["stamps"]["left_delay_ns"][step - 1] if step else None for log in ranks]
    common = min(before)
    spent: list[Sums] = []
    for rank, (log, mark) in enumerate(zip(ranks, marks)):
        own: Sums = defaultdict(float)
        own[TRANSFER, NOBODY] += before[rank] - common
        delayed = mark["asked_delay_ns"] - (rested[rank] or mark["asked_delay_ns"])
        _split_work(own, mark["asked_ns"] - before[rank], delayed)
        for cause, ns in _split_data_wait(mark, log["items"]).items():
            own[cause, OWN] += ns
            lost[rank][cause, rank] += ns
        spent.append(own)
    for giver in range(len(ranks) - 1 if ranks[0]["chain"] else 0):
        taker = giver + 1
        come = {giver: marks[giver]["received_ns"], taker: marks[taker]["got_ns"]}
        go = {giver: marks[giver]["passed_ns"], taker: marks[taker]["received_ns"]}
        _charge_operation(come, go, spent, lost)
    for own, mark in zip(spent, marks):
        delayed = mark["arrived_delay_ns"] - mark["got_delay_ns"]
        _split_work(own, mark["arrived_ns"] - mark["passed_ns"], delayed)
    come = {rank: mark["arrived_ns"] for rank, mark in enumerate(marks)}
    _charge_operation(come, {rank: mark["left_ns"] for rank, mark in enumerate(marks)}, spent, lost)
    return _sum_marks(marks, come)


def _split_work(own: Sums, ns: int, delayed: int) -> None:
    """Split time into running and ready to run: CPU time taken by others is contention."""
    delayed = min(delayed, ns)
    own[CONTENTION, OWN] += delayed
    own[WORK, OWN] += ns - delayed


def _split_data_wait(
    mark: Mapping[str, int], items: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Split the wait for a batch by what the worker did meanwhile."""
    asked, got = mark["asked_ns"], mark["got_ns"]
    out = dict.fromkeys((STORAGE, PREPROCESS, CONTENTION), 0.0)
    for begun, read, made, *delays in zip(*items.values()):
        for start, end, cause, delay in (
            (begun, read, STORAGE, delays[0]),
            (read, made, PREPROCESS, delays[1]),
        ):
            inside = min(end, got) - max(start, asked)
            if inside > 0:
                late = inside * min(delay / (end - start), 1.0)
                out[CONTENTION] += late
                out[cause] += inside - late
    rest = max(got - asked - sum(out.values()), 0.0)
    woken = min(mark["got_delay_ns"] - mark["asked_delay_ns"], rest)
    out[CONTENTION] += woken
    out[HAND_OVER] = rest - woken
    return out


def _charge_operation(
    come: Mapping[int, int], go: Mapping[int, int], spent: list[Sums], lost: list[Sums]
) -> None:
    """Charge an operation: the waits for the last rank to arrive, then the transfer."""
    latest = max(come.values())
    last = next(rank for rank, at in come.items() if at == latest)
    shares = {rank: _split_wait(rank, last, spent, latest - at) for rank, at in come.items()}
    for rank, share in shares.items():
        for key, ns in (*share, ((TRANSFER, NOBODY), go[rank] - max(latest, come[rank]))):
            lost[rank][key] += ns
            spent[rank][key] += ns


def _split_wait(
    rank: int, last: int, spent: list[Sums], wait: int
) -> list[tuple[tuple[str, int], float]]:
    """Split a wait in proportion to what the last rank spent more of."""
    mine, theirs = spent[rank], spent[last]
    more = {}
    for (cause, culprit), ns in theirs.items():
        usual = mine.get((cause, culprit), 0.0)
        # What the last waited because of this rank is compared with what this rank itself spent.
        usual += mine.get((cause, OWN), 0.0) if culprit == rank else 0.0
        more[cause, last if culprit == OWN else culprit] = max(ns - usual, 0.0)
    total = sum(more.values())
    return [(key, wait * ns / total) for key, ns in more.items()] if wait else []


def _sum_marks(marks: Sequence[Mapping[str, int]], come: Mapping[int, int]) -> list[dict[str, int]]:
    latest = max(come.values())
    last = next(rank for rank, at in come.items() if at == latest)
    return [
        {
            "data_wait_ns": mark["got_ns"] - mark["asked_ns"],
            "send_recv_ns": mark["passed_ns"] - mark["got_ns"],
            "compute_ns": mark["arrived_ns"] - mark["passed_ns"],
            "reduce_wait_ns": mark["left_ns"] - mark["arrived_ns"],
            "delayed_ns": mark["arrived_delay_ns"] - mark["got_delay_ns"],
            "waited_for_others_ns": latest - mark["arrived_ns"],
            "transfer_ns": mark["left_ns"] - latest,
            "kept_others_waiting_ns": (rank == last) * sum(latest - at for at in come.values()),
            "last_times": int(rank == last),
        }
        for rank, mark in enumerate(marks)
    ]


def compute_shares(measured: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return the share of the time in steps by cause and culprit, as an analysis should find it."""
    in_step_ns = sum(row["total_ns"] for row in measured["ranks"])
    out: dict[str, dict[int, float]] = {}
    for cause, culprit, _, ns in measured["lost"]:
        by = out.setdefault(cause, {})
        by[culprit] = by.get(culprit, 0.0) + ns / in_step_ns
    return out


def format_truth(measured: dict[str, Any]) -> str:
    """Return the truth as two tables, in milliseconds per step and in percent of all time."""
    steps = measured["steps"]
    titles = ("step", *SUMS.values())
    lines = [f"  rank host   {''.join(f'{title:>11}' for title in titles)}   came last"]
    for row in measured["ranks"]:
        cells = "".join(f"{row[name] / steps / 1e6:>11.1f}" for name in ("total_ns", *SUMS))
        lines.append(f"  {row['rank']:<4} {row['host']:<6} {cells}{row['last_times']:>9} x")
    for cause, by in sorted(
        compute_shares(measured).items(), key=lambda entry: -sum(entry[1].values())
    ):
        culprits = sorted(by.items(), key=lambda entry: -entry[1])
        names = (f"{'nobody' if who < 0 else f'rank {who}'} {ns:.1%}" for who, ns in culprits)
        lines.append(f"  {cause:<15} {sum(by.values()):>6.1%}   {', '.join(names)}")
    return "\n".join(lines)
