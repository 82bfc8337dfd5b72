"""The allocator's counters beside what the main thread did not spend in user code."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.device.launch_alloc import LaunchAlloc
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, PHASE_DATA_WAIT
from clusterprof.probe import layout
from tests.support.builders import (
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

# [0, 1): asleep. [1, 2): 0.5 s in the kernel, 0.2 asleep. [2, 3) user code all along.
PIECES = (
    (0, 1, 1.0, PHASE_COMPUTE),
    (1, 2, 1.0, PHASE_COMPUTE),
    (2, 3, 1.0, PHASE_COMPUTE),
    (3, 4, 1.0, PHASE_DATA_WAIT),
    (6, 7, 1.0, PHASE_COMPUTE),
)
DOING = "S1 U0.3 K0.5 S0.2 U1 S4"


def claim(*readings: tuple[float, ...], steps: int = 4) -> Claims:
    marks = {
        layout.STEP: make_spans(*((i / steps, (i + 1) / steps, i) for i in range(steps))),
        layout.ALLOCATOR: make_spans(*readings),
    }
    main = make_process(100, spans=marks, thread=make_thread(parse_activity(DOING), 7))
    fed = make_breakdown(*({} for _ in PIECES))
    got = LaunchAlloc().claim(
        make_rank(7, main), make_lost_segments(*PIECES, step=5), fed, LaunchAlloc.Limits()
    )
    assert got is not None
    return got


def test_time_outside_user_code_during_allocation_retries_is_claimed() -> None:
    # the reading at 1 s speaks for what is before, and for what follows, but not 2 s and more later
    got = claim((0, 1, 3, 5, 2))
    np.testing.assert_allclose(got.share, [1.0, 0.7, 0, 0, 0])
    assert {item.name: item.value for item in got.evidence} == {
        "allocator.retries_total": 3,
        "allocator.mallocs_total": 5,
        "allocator.frees_total": 2,
    }


@pytest.mark.parametrize(
    ("counts", "churns"),
    [
        ((0, 4, 4), 1),  # a block got and given back in each of four steps
        ((0, 3, 9), 0),
        ((0, 90, 0), 0),  # it grows: the warm-up of a cache
        ((0, -1, -1), 0),  # torch before 2.2: not known
        ((1, -1, -1), 1),
    ],
)
def test_allocator_churn_in_every_step_is_claimed(counts, churns) -> None:
    share = claim((0, 1, *counts)).share
    np.testing.assert_allclose(share, [churns, 0.7 * churns, 0, 0, 0])


def test_a_piece_uses_the_allocator_reading_covering_its_time() -> None:
    # churn until 0 s and none after; none until 0 s, and then churn; read 2.5 s later only
    np.testing.assert_allclose(claim((-1, 0, 5), (0, 1, 0)).share, [0, 0, 0, 0, 0])
    np.testing.assert_allclose(claim((-1, 0, 0), (0, 1, 5)).share, [1.0, 0.7, 0, 0, 0])
    np.testing.assert_allclose(claim((-1, 0, 0), (0, 2.5, 5)).share, [0, 0.7, 0, 0, 0])
