"""Over many short waits the totals are right to 2 points, though samples are 100 ms apart.

The worker's life is drawn at random; what it did is summed exactly from the drawing, and what
`feed` says is summed over the waits. CPU clocks lag by a tick, waits for a CPU are booked late.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.timeline.data_wait.blocked import SHARE_NAMES
from clusterprof.analysis.timeline.data_wait.split import split_data_wait
from clusterprof.probe.layout import DATA_WAIT, FETCH, WORKER_START
from tests.support.builders import (
    make_fetches,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    measure_activity_ns,
    ns,
    parse_activity,
)

POINTS = 0.02
MAIN, WORKER = 100, 201
LETTER_OF = {"user_cpu": "U", "runnable": "R", "block_io": "D", "unknown": "S", "no_work": "I"}
KINDS = {
    "disk": ("DUDRDU", (4, 1, 3, 0.5, 2, 1), 1 << 22),
    "compute": ("UUURUU", (1, 1, 1, 1, 1, 1), 0),
    "asleep": ("USUSUS", (1, 2, 1, 2, 1, 2), 0),
}


def life(draw: random.Random, kinds: list[str], seconds: float):
    """An activity of fetches of 20 to 150 ms with idle time between, and their spans."""
    words, calls, at = [], [], 0.0
    while at < seconds:
        letters, weights, read = KINDS[draw.choice(kinds)]
        length = draw.uniform(0.02, 0.15)
        parts = [w * draw.uniform(0.5, 1.5) for w in weights]
        words += [f"{k}{length * p / sum(parts):.6f}" for k, p in zip(letters, parts)]
        taken = sum(float(word[1:]) for word in words[-len(letters) :])
        calls.append((at, at + taken, read))
        idle = round(draw.uniform(0, 0.06), 6)
        words.append(f"I{idle}")
        at += taken + idle
    return parse_activity(" ".join(words)), calls


def lagging(table, draw: random.Random):
    """The CPU clock as the kernel keeps it: what was not booked at the end shows in the next."""
    lag = np.array([draw.uniform(0, 4e6) for _ in table.b]).astype(np.int64)
    shifted = np.maximum(table.b - lag + np.append(0, lag[:-1]), 0)
    return replace(table, b=shifted)


def late(table, rows):
    """run_delay rises only when a wait for a CPU is over."""
    waits = np.array([(end, end - start) for start, end, letter in rows if letter == "R"])
    waits = waits.reshape(-1, 2)
    booked = np.concatenate([[0], np.cumsum(waits[:, 1])]).astype(np.int64)
    return replace(table, run_delay_ns=booked[np.searchsorted(waits[:, 0], table.t_ns, "right")])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "kinds", [["disk"], ["compute"], ["disk", "compute"], ["disk", "asleep"], [*KINDS]], ids=str
)
def test_totals_over_many_short_waits_are_accurate(kinds: list[str], seed: int) -> None:
    draw = random.Random(seed)
    rows, calls = life(draw, kinds, 30)
    table = lagging(make_fetches(rows, *calls), draw)
    marks = {FETCH: table, WORKER_START: make_spans((-1, -1))}
    worker = make_process(WORKER, MAIN, marks, late(make_thread(rows, 32), rows))
    # each wait begins somewhere in the idle time before a fetch and ends with it
    waits = [(max(0.0, start - draw.uniform(0, 0.02)), end) for start, end, _ in calls]
    begin = np.maximum([ns(s) for s, _ in waits], np.append(0, [ns(e) for _, e in waits[:-1]]))
    finish = np.array([ns(e) for _, e in waits], np.int64)
    table_rows = [(s / 1e9, e / 1e9, 0, WORKER, 1) for s, e in zip(begin, finish)]
    main = make_process(MAIN, spans={DATA_WAIT: make_spans(*table_rows)})
    breakdown = split_data_wait(make_rank(32, main, [worker]), begin.astype(np.int64), finish)
    length = finish - begin
    by_key = {name: float(getattr(breakdown, name) @ length) / length.sum() for name in SHARE_NAMES}
    low_high = list(zip(begin.tolist(), finish.tolist()))
    for name, letter in LETTER_OF.items():
        true = (
            sum(measure_activity_ns(near(rows, s, e), letter, s, e) for s, e in low_high)
            / length.sum()
        )
        assert by_key[name] == pytest.approx(true, abs=POINTS), (name, by_key)
    assert sum(by_key[name] for name in SHARE_NAMES if name not in LETTER_OF) < POINTS


def near(rows: list[tuple[int, int, str]], low: int, high: int) -> list[tuple[int, int, str]]:
    """The part of an activity that touches an interval: summing all of it each time is slow."""
    starts = [row[0] for row in rows]
    first = max(0, int(np.searchsorted(starts, low)) - 1)
    return rows[first : int(np.searchsorted(starts, high)) + 1]
