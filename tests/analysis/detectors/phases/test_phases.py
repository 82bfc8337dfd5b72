"""Causes that a phase decides: the phase beats the resource behind it."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.detectors.cpu.gc import CpuGc
from clusterprof.analysis.detectors.device.device_throttled import DeviceThrottled
from clusterprof.analysis.detectors.device.h2d_copy import H2dCopy
from clusterprof.analysis.detectors.device.launch_bound import LaunchBound
from clusterprof.analysis.detectors.device.launch_recompile import LaunchRecompile
from clusterprof.analysis.detectors.phases.checkpoint import Checkpoint
from clusterprof.analysis.detectors.phases.startup import Startup
from clusterprof.analysis.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_H2D,
    PHASE_NONE,
    PHASE_STARTUP,
    PHASE_THROTTLED,
)
from clusterprof.probe import layout
from tests.support.builders import (
    make_gauge,
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

ALL = (PHASE_CHECKPOINT, PHASE_GC, PHASE_H2D, PHASE_THROTTLED, PHASE_DATA_WAIT, PHASE_NONE)
PIECES = make_lost_segments(*((i, i + 1, 0.5, phase) for i, phase in enumerate(ALL)), step=3)
BLOCKED = make_breakdown(*({"block_io": 1.0} for _ in ALL))


@pytest.mark.parametrize(
    ("detector", "phase"),
    [
        (Checkpoint(), PHASE_CHECKPOINT),
        (CpuGc(), PHASE_GC),
        (H2dCopy(), PHASE_H2D),
        (DeviceThrottled(), PHASE_THROTTLED),
    ],
)
def test_a_phase_detector_claims_whole_pieces_of_its_phase_only(detector, phase) -> None:
    got = detector.claim(make_rank(6, make_process(100)), PIECES, BLOCKED, detector.Limits())
    np.testing.assert_array_equal(got.share, [1.0 if p == phase else 0.0 for p in ALL])


def test_checkpoint_evidence_states_mean_duration_and_bytes() -> None:
    table = make_spans((0, 0.4, 1000), (10, 10.8, 3000), (20, 20.6, -1))
    timeline = make_rank(30, make_process(100, spans={layout.CHECKPOINT: table}))
    got = Checkpoint().claim(timeline, PIECES, BLOCKED, Checkpoint.Limits())
    # (0.4 + 0.8 + 0.6) / 3 s; the size of the third is not known: (1000 + 3000) / 2
    assert {item.name: item.value for item in got.evidence} == {
        "checkpoint.mean_ns": pytest.approx(ns(0.6)),
        "checkpoint.mean_bytes": 2000.0,
    }


def test_pieces_below_the_limit_are_not_claimed() -> None:
    pieces = make_lost_segments((0, 0.001, 0.001, PHASE_GC), (1, 1.2, 0.2, PHASE_GC))
    limits = CpuGc.Limits(collection_at_least_ns=ns(0.1))
    got = CpuGc().claim(make_rank(2, make_process(100)), pieces, make_breakdown({}, {}), limits)
    np.testing.assert_array_equal(got.share, [0.0, 1.0])


def test_h2d_copy_is_confirmed_by_traffic_on_the_bus() -> None:
    table = make_spans((2, 2.5, 100, 0), (2.5, 2.5001, 100, 1))
    main = make_process(100, spans={layout.H2D: table})
    series = {
        ("gpu.pcie_receive_bytes_per_second", "gpu-0"): make_gauge([0, 2, 3], [5.0, 12e9, 1.0])
    }
    got = H2dCopy().claim(
        make_rank(6, main, device="gpu-0", series=series), PIECES, BLOCKED, H2dCopy.Limits()
    )
    assert got.grade == "A"
    # the copy piece is [2, 3); one of two copies was non-blocking
    assert {item.name: item.value for item in got.evidence} == {
        "h2d.blocking_ratio": 0.5,
        "gpu.pcie_receive_bytes_per_second": 12e9,
    }


def test_a_non_blocking_h2d_copy_continues_after_its_mark() -> None:
    # 25 GB take 1 s, 5 GB 0.2 s. Behind the first: [2, 2.5) of 0.5 s idle, [2.5, 3.5) of 1 s idle
    # (0.5 s of the copy). The second blocked: it is over at its end. Behind the third 0.1 s idle.
    table = make_spans((2, 2, 25e9, 1), (4, 5, 25e9, 0), (6, 6, 5e9, 1), (7, 7, 25e9, 1))
    main = make_process(100, spans={layout.H2D: table})
    pieces = (
        (2, 2.5, 0.5, PHASE_COMPUTE),
        (2.5, 3.5, 1.0, PHASE_COMPUTE),
        (5, 6, 1.0, PHASE_COMPUTE),
        (6, 6.5, 0.1, PHASE_COMPUTE),
        (7, 8, 1.0, PHASE_DATA_WAIT),
    )
    blocked = make_breakdown(*({} for _ in pieces))
    timeline = make_rank(8, main)
    got = H2dCopy().claim(timeline, make_lost_segments(*pieces, step=3), blocked, H2dCopy.Limits())
    np.testing.assert_allclose(got.share, [1.0, 0.5, 0.0, 1.0, 0.0])
    got = H2dCopy().claim(timeline, make_lost_segments(*pieces, step=-1), blocked, H2dCopy.Limits())
    np.testing.assert_array_equal(got.share, [0.0] * 5)


def test_a_copy_of_pageable_memory_always_blocks() -> None:
    # 128 MB in 30 ms are 4 GB/s, staged by the host; the second call only issues its copy. Neither
    # goes on behind the first, which is over at its end.
    table = make_spans((2, 2.03, 128e6, 1), (2.5, 2.50005, 128e6, 1))
    pieces = make_lost_segments(
        (2, 2.03, 0.03, PHASE_H2D), (2.03, 2.1, 0.07, PHASE_COMPUTE), step=3
    )
    timeline = make_rank(6, make_process(100, spans={layout.H2D: table}))
    got = H2dCopy().claim(timeline, pieces, make_breakdown({}, {}), H2dCopy.Limits())
    assert {item.name: item.value for item in got.evidence} == {"h2d.blocking_ratio": 1.0}
    np.testing.assert_array_equal(got.share, [1.0, 0.0])


def test_launch_bound_needs_a_main_thread_that_is_busy() -> None:
    # [0, 1) 0.7 s on the CPU, [1, 2) asleep, [2, 3) 0.4 s on the CPU: below one half; [3, 4) busy
    # nearly all the time: its short sleep is between launches
    main = make_process(
        100, thread=make_thread(parse_activity("U0.7 S0.3 S1 U0.4 S0.6 U0.9 S0.1"), 4)
    )
    pieces = make_lost_segments(*((i, i + 1, 0.5, PHASE_COMPUTE) for i in range(4)), step=4)
    got = LaunchBound().claim(
        make_rank(4, main), pieces, make_breakdown({}, {}, {}), LaunchBound.Limits()
    )
    np.testing.assert_allclose(got.share, [0.7, 0.0, 0.0, 1.0])


def test_launch_bound_leaves_the_warm_up_to_startup() -> None:
    waits = {layout.DATA_WAIT: make_spans((0, 0, 0))}
    main = make_process(100, thread=make_thread(parse_activity("U1"), 1), spans=waits)
    pieces = make_lost_segments((0, 1, 0.5, PHASE_COMPUTE), step=0)
    timeline = make_rank(1, main)
    got = LaunchBound().claim(timeline, pieces, make_breakdown({}), LaunchBound.Limits())
    np.testing.assert_array_equal(got.share, [0.0])
    got = Startup().claim(timeline, pieces, make_breakdown({}), Startup.Limits())
    np.testing.assert_array_equal(got.share, [1.0])
    # without a mark of any wait for data, the first step may have been one
    unknown = Startup().claim(
        make_rank(1, make_process(100)), pieces, make_breakdown({}), Startup.Limits()
    )
    np.testing.assert_array_equal(unknown.share, [0.0])


def test_startup_claims_compilation_anywhere_and_missing_workers_in_the_first_step() -> None:
    rows = make_breakdown({"no_worker": 0.7, "user_cpu": 0.3}, {})
    phases = ((0, 1, 1.0, PHASE_DATA_WAIT), (1, 2, 1.0, PHASE_STARTUP))
    timeline = make_rank(2, make_process(100))
    first = Startup().claim(timeline, make_lost_segments(*phases, step=0), rows, Startup.Limits())
    np.testing.assert_allclose(first.share, [0.7, 1.0])
    later = Startup().claim(timeline, make_lost_segments(*phases, step=9), rows, Startup.Limits())
    np.testing.assert_allclose(later.share, [0.0, 1.0])
    later = Startup().claim(timeline, make_lost_segments(*phases, step=10), rows, Startup.Limits())
    np.testing.assert_allclose(later.share, [0.0, 0.0])


def test_launch_recompile_states_the_share_of_repeated_compilations() -> None:
    marks = {layout.COMPILE: make_spans((0, 1, 0), (1, 1.5, 1), (5, 6.5, 2), (7, 8, -1))}
    timeline = make_rank(9, make_process(100, spans=marks))
    got = LaunchRecompile().claim(timeline, PIECES, BLOCKED, LaunchRecompile.Limits())
    np.testing.assert_array_equal(got.share, np.zeros(len(ALL)))
    pieces = make_lost_segments((5, 6, 0.7, PHASE_STARTUP), (6, 7, 0.7, PHASE_COMPUTE), step=40)
    got = LaunchRecompile().claim(
        timeline, pieces, make_breakdown({}, {}), LaunchRecompile.Limits()
    )
    np.testing.assert_array_equal(got.share, [1.0, 0.0])
    assert {item.name: item.value for item in got.evidence} == {
        "compile.mean_ns": ns(1.0),
        "compile.again_ratio": 2 / 3,  # of one it is not known
    }
    untold = make_rank(9, make_process(100, spans={layout.COMPILE: make_spans((5, 6.5, -1))}))
    got = LaunchRecompile().claim(untold, pieces, make_breakdown({}, {}), LaunchRecompile.Limits())
    assert [item.name for item in got.evidence] == ["compile.mean_ns"]


def test_device_throttled_evidence_states_the_clock() -> None:
    series = {("gpu.sm_clock_hertz", "gpu-0"): make_gauge([0, 3, 4], [1.98e9, 0.99e9, 1.98e9])}
    timeline = make_rank(6, make_process(100), device="gpu-0", series=series)
    got = DeviceThrottled().claim(timeline, PIECES, BLOCKED, DeviceThrottled.Limits())
    # the throttled piece is [3, 4)
    assert [(item.name, item.value) for item in got.evidence] == [("gpu.sm_clock_hertz", 0.99e9)]
