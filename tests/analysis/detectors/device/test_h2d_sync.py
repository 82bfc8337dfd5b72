"""Waits for the device: what they expose, beside what launching costs anyway."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.device.h2d_sync import H2dSync
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, PHASE_DATA_WAIT
from clusterprof.probe import layout
from tests.support.builders import (
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

WHOLE = layout.WHOLE_NS
LIMITS = H2dSync.Limits()


def claim(pieces, marks: dict) -> Claims:
    steps = {layout.STEP: make_spans((0, 10, 0), (10, 20, 1))}
    timeline = make_rank(20, make_process(100, spans={**steps, **marks}))
    rows = make_lost_segments(*((start, end, idle, phase) for start, end, idle, phase, _ in pieces))
    rows.step[:] = [step for *_, step in pieces]
    fed = make_breakdown(*({} for _ in pieces))
    got = H2dSync().claim(timeline, rows, fed, H2dSync.Limits())
    assert got is not None
    return got


def test_device_waits_claim_idle_time_hideable_by_running_ahead() -> None:
    # Step 0: 10 s, the host waits 5 of them for the device, works 5; the device is busy for 7.
    # Step 1 has no such wait: its idle time is something else's.
    pieces = ((0, 10, 3.0, PHASE_COMPUTE, 0), (10, 20, 4.0, PHASE_COMPUTE, 1))
    got = claim(pieces, {layout.SYNC: make_spans((2, 8, ns(5), 40))})
    np.testing.assert_allclose(got.share, [1.0, 0.0])
    assert {item.name: item.value for item in got.evidence} == {
        "sync.waits_per_step_count": 40,
        "sync.waited_per_step_ns": pytest.approx(ns(5)),
        "host.per_step_ns": pytest.approx(ns(5)),
    }


def test_launch_time_beyond_device_time_is_not_charged_to_waits() -> None:
    # The host waits 2 s for a batch and 1 s for the device, works 7; the device is busy for
    # 10 - 2 - 4 = 4: 3 of the 4 s idle in the step would have been idle all the same.
    pieces = ((0, 2, 2.0, PHASE_DATA_WAIT, 0), (2, 10, 4.0, PHASE_COMPUTE, 0))
    marks = {layout.SYNC: make_spans((5, 6, WHOLE, 1)), layout.DATA_WAIT: make_spans((0, 2))}
    got = claim(pieces, marks)
    np.testing.assert_allclose(got.share, [0.0, 0.25])


def test_a_device_wait_in_a_launch_bound_step_is_unclaimed() -> None:
    # The host works 9.9 s, the device 5: of 5 s idle 4.9 are launching
    got = claim(((0, 10, 5.0, PHASE_COMPUTE, 0),), {layout.SYNC: make_spans((9.9, 10, WHOLE, 1))})
    np.testing.assert_array_equal(got.share, [0.0])


@pytest.mark.parametrize(
    ("doing", "share"),
    [
        ("U2 S4 U4", 1.0),  # at work for 6 s, of which 5 may have been idle ones
        ("U2 S4 U1 R1 F2", 0.8),  # at work for 4 of the 5 s idle, in a log for 2
        ("U1 S4 F5", 0.2),
        ("U2 S4 U3.6 F0.4", 1.0),  # a nap of less than a tenth of 5 s
        ("U3.5 S6.5", 0.4),  # at work for 2 s before the wait, asleep for 4 s after it
    ],
)
def test_host_sleep_outside_waits_is_not_launch_time(doing, share) -> None:
    marks = {layout.STEP: make_spans((0, 10, 3)), layout.SYNC: make_spans((2, 6, WHOLE, 1))}
    timeline = make_rank(
        10, make_process(100, spans=marks, thread=make_thread(parse_activity(doing), 10))
    )
    # the host waits for 4 s and works 6, the device is busy for 5: what launching takes is 1 of 5 s
    got = H2dSync().claim(
        timeline,
        make_lost_segments((0, 10, 5.0, PHASE_COMPUTE), step=3),
        make_breakdown({}),
        LIMITS,
    )
    np.testing.assert_allclose(got.share, [min(share, 0.8)])


@pytest.mark.parametrize("marks", [{}, {layout.SYNC: make_spans((30, 31, WHOLE, 1))}])
def test_steps_without_device_waits_give_no_claim(marks) -> None:
    got = claim(((0, 10, 5.0, PHASE_COMPUTE, 0),), marks)
    np.testing.assert_array_equal(got.share, [0.0])
