"""In which part of a wait a device stood still: the end of it, for its queue drains first."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.attribution.rank.lost_time import find_lost_intervals
from clusterprof.analysis.timeline.intervals import allocate_by_wait_age
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, PHASE_DATA_WAIT, PHASE_GC, PHASE_H2D
from clusterprof.probe import layout
from tests.support.builders import make_busy_counter, make_process, make_rank, make_spans

BUSY = ("gpu.busy_ns_total", "emulated-0")
WORKER = 201


def pieces_of(table: dict, busy: list[tuple[float, float]], end: float) -> list[tuple]:
    """Pieces as (start, end, phase) in s; all of each is lost. Windows are 0.1 s long."""
    main = make_process(100, spans=table)
    timeline = make_rank(
        end, main, series={BUSY: make_busy_counter(busy, end)}, device="emulated-0"
    )
    rows = []
    for _, lost, _ in find_lost_intervals(timeline, RankState(), last=True)[0]:
        for s, e, n, phase in zip(lost.start_ns, lost.end_ns, lost.lost_ns, lost.phase):
            assert phase == PHASE_COMPUTE or e - s == n
            rows.append((round(s / 1e9, 6), round(e / 1e9, 6), round(n / 1e9, 6), int(phase)))
    return rows


def test_idle_time_lies_at_the_end_of_multi_window_waits() -> None:
    # the wait [1.04, 1.15) had its device at work until 1.12; the 0.01 s of the window before it
    # is from between two kernels, at 1.02
    table = {
        layout.STEP: make_spans((1, 1.5, 0)),
        layout.DATA_WAIT: make_spans((1.04, 1.15, 0, WORKER, 2)),
    }
    assert pieces_of(table, [(0, 1.02), (1.03, 1.12), (1.15, 2)], 2) == [
        (1.0, 1.04, 0.01, PHASE_COMPUTE),
        (1.12, 1.15, 0.03, PHASE_DATA_WAIT),
    ]


def test_a_wait_start_is_idle_when_its_remainder_is_idle() -> None:
    # drained at 1.06; idle through the window [1.1, 1.2) and up to the end of the wait at 1.23
    table = {layout.STEP: make_spans((1, 1.5, 0)), layout.H2D: make_spans((1.04, 1.23, 1000, 0))}
    assert pieces_of(table, [(0, 1.06), (1.23, 2)], 2) == [
        (1.06, 1.1, 0.04, PHASE_H2D),
        (1.1, 1.2, 0.1, PHASE_H2D),
        (1.2, 1.23, 0.03, PHASE_H2D),
    ]


def test_idle_time_of_a_window_goes_to_its_longer_wait() -> None:
    # the first wait has lasted 0.13 at its end, the second 0.03: what was queued before the first
    # lasted 0.11, and behind it the device had a step's work to do
    table = {
        layout.STEP: make_spans((0.8, 1.2, 0), (1.2, 1.6, 1)),
        layout.DATA_WAIT: make_spans((0.91, 1.04, 0, WORKER, 2), (1.05, 1.08, 1, WORKER, 2)),
    }
    assert pieces_of(table, [(0, 1.02), (1.04, 2)], 2) == [(1.02, 1.04, 0.02, PHASE_DATA_WAIT)]


def test_queued_work_lasts_equally_for_all_waits_of_a_window() -> None:
    group = np.array([0, 0, 1, 1, 1, 2])
    age = np.array([40, 30, 137, 37, 10, 9])
    room = np.array([40, 30, 20, 37, 10, 9])
    # 25 was queued: 15 and 5. 35: 20, which is all there is room for, and 2. Alone: as it was.
    assert allocate_by_wait_age(group, age, room, np.array([10, 10, 22, 0, 0, 4])).tolist() == [
        15,
        5,
        20,
        2,
        0,
        4,
    ]
    # 45 is no sum of max(0, age - q): between q = 12 (46) and 13 (44), the first row gets it
    assert allocate_by_wait_age(group[:2], age[:2], room[:2], np.array([45, 0])).tolist() == [
        28,
        17,
    ]


def test_allocation_by_wait_age_keeps_the_sum_of_every_group() -> None:
    random = np.random.default_rng(5)
    group = np.sort(random.integers(0, 20, 90))
    group = np.unique(group, return_inverse=True)[1]
    age = random.integers(1, 1000, 90)
    room = np.minimum(age, random.integers(0, 1000, 90))
    amount = (room * random.uniform(0, 1, 90)).astype(np.int64)
    out = allocate_by_wait_age(group, age, room, amount)
    assert (out >= 0).all() and (out <= room).all()
    assert np.bincount(group, out).tolist() == np.bincount(group, amount).tolist()


def test_a_copy_right_after_a_wait_continues_its_idle_time() -> None:
    # Nothing is launched between the wait [1.01, 1.05) and the copy [1.05, 1.06): the device, idle
    # since 1.02, is so to the end of both. The collection is over before what was queued.
    table = {
        layout.STEP: make_spans((1, 1.5, 0)),
        layout.DATA_WAIT: make_spans((1.01, 1.05, 0, WORKER, 2)),
        layout.H2D: make_spans((1.05, 1.06, 1000, 0)),
        layout.GC: make_spans((1.08, 1.088)),
    }
    assert pieces_of(table, [(0, 1.02), (1.06, 2)], 2) == [
        (1.02, 1.05, 0.03, PHASE_DATA_WAIT),
        (1.05, 1.06, 0.01, PHASE_H2D),
    ]


def test_idle_time_goes_to_long_host_pauses_over_short_copies() -> None:
    # A copy of 0.02 s behind what was queued, and a collection of 0.06 s of which 0.03 were idle.
    table = {
        layout.STEP: make_spans((1, 1.5, 0)),
        layout.H2D: make_spans((1.01, 1.03, 1000, 0)),
        layout.GC: make_spans((1.035, 1.095)),
    }
    assert pieces_of(table, [(0, 1.065), (1.095, 2)], 2) == [(1.065, 1.095, 0.03, PHASE_GC)]


def test_idle_time_is_placed_outside_device_waits_first() -> None:
    # idle for 0.03 of the window [1.0, 1.1), of which 0.04 are a wait for the device
    table = {
        layout.STEP: make_spans((1, 1.5, 0)),
        layout.SYNC: make_spans((1.02, 1.06, layout.WHOLE_NS, 1)),
    }
    assert pieces_of(table, [(0, 1.06), (1.09, 2)], 2) == [
        (1.0, 1.02, 0.01, PHASE_COMPUTE),
        (1.06, 1.1, 0.02, PHASE_COMPUTE),
    ]
    # idle for 0.08, more than there is outside the wait: the rest is in it
    assert pieces_of(table, [(0, 1.02), (1.1, 2)], 2) == [
        (1.0, 1.02, 0.02, PHASE_COMPUTE),
        (1.02, 1.06, 0.02, PHASE_COMPUTE),
        (1.06, 1.1, 0.04, PHASE_COMPUTE),
    ]
