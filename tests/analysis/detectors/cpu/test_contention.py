"""A thread that was ready and had no CPU: the quota had run out, or somebody else was on it."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.detectors.cpu.contention import CpuContention
from clusterprof.analysis.detectors.cpu.throttled import CpuThrottled
from clusterprof.analysis.timeline.model import PHASE_CHECKPOINT, PHASE_COMPUTE, PHASE_DATA_WAIT
from tests.support.builders import (
    SECOND,
    make_counter,
    make_lost_segments,
    make_process,
    make_rank,
    make_thread,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

PIECES = make_lost_segments((0, 1, 1.0, PHASE_DATA_WAIT), (1, 2, 1.0, PHASE_DATA_WAIT), step=3)
ROWS = ({"runnable": 0.5}, {"runnable": 0.5})


def shares(series: dict) -> tuple[np.ndarray, np.ndarray]:
    timeline = make_rank(3, make_process(100), series=series)
    values = [
        d.claim(timeline, PIECES, make_breakdown(*ROWS), d.Limits())
        for d in (CpuThrottled(), CpuContention())
    ]
    assert all(claims is not None for claims in values)
    return values[0].share, values[1].share


def test_delay_without_a_quota_is_all_contention() -> None:
    throttled, contention = shares({})
    np.testing.assert_allclose(throttled, [0, 0])
    np.testing.assert_allclose(contention, [0.5, 0.5])


def test_quota_throttling_is_charged_up_to_the_thread_delay() -> None:
    # throttled 0.2 s in the first piece, 3 s (summed over CPUs) in the second
    series = {("cgroup.throttled_ns_total", ""): make_counter([0, 1, 2], [0, 0.2e9, 3.2e9])}
    throttled, contention = shares(series)
    np.testing.assert_allclose(throttled, [0.2, 0.5])
    np.testing.assert_allclose(contention, [0.3, 0.0])


def test_main_thread_delay_counts_inside_a_step() -> None:
    # main thread: 0.4 s runnable without a CPU, then 0.6 s computing
    main = make_process(100, thread=make_thread(parse_activity("R0.4 U0.6"), 2))
    pieces = make_lost_segments((0, 1, 1.0, PHASE_COMPUTE), (1, 2, 1.0, PHASE_CHECKPOINT), step=3)
    series = {
        ("pressure.cpu_some_ns_total", ""): make_counter([0, 1, 2], [0, 0.3 * SECOND, SECOND])
    }
    timeline = make_rank(2, main, series=series)
    got = CpuContention().claim(
        timeline, pieces, make_breakdown({}, {"runnable": 1.0}), CpuContention.Limits()
    )
    assert got is not None
    np.testing.assert_allclose(got.share, [0.4, 0.0])
    assert got.grade == "A"
    assert {item.name: round(item.value, 9) for item in got.evidence} == {
        "thread.runnable_ratio": 0.4,
        "pressure.cpu_some_ratio": 0.3,
    }
