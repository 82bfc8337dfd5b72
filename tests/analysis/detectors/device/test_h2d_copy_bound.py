"""Copies that bus counters show, and hosts that sleep in the driver meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.device.h2d_copy_bound import H2dCopyBound
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, Series
from tests.support.builders import (
    make_lost_segments,
    make_process,
    make_rank,
    make_thread,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

PCIE = "gpu.pcie_receive_bytes_per_second"
SECOND = 1_000_000_000


def claim(doing: str, rates: list[float]) -> Claims:
    """doing: of the main thread. rates: of the bus in each second. The device idles for 0.5 s."""
    rows = parse_activity(doing)
    end = len(rates)
    main = make_process(100, thread=make_thread(rows, end))
    t_ns = np.arange(end + 1) * SECOND
    series = {(PCIE, "emulated-0"): Series(t_ns, np.array([*rates, 0.0]), False)}
    timeline = make_rank(end, main, series=series)
    pieces = [(i, i + 1, 0.5, PHASE_COMPUTE) for i in range(end)]
    fed = make_breakdown(*({} for _ in pieces))
    got = H2dCopyBound().claim(
        timeline, make_lost_segments(*pieces, source=2, step=3), fed, H2dCopyBound.Limits()
    )
    assert got is not None
    return got


def test_copy_time_follows_bytes_at_the_highest_rate() -> None:
    # 12 and 3 GB/s: the second copies for a quarter of the time, half of the 0.5 s lost; the first
    # has 1 s of copies in 0.5 s lost
    np.testing.assert_allclose(claim("U2", [12e9, 3e9]).share, [1.0, 0.5])


@pytest.mark.parametrize(("rates", "share"), [([12e9, 3e9], 1.0), ([0.1e9, 0.1e9], 0.0)])
def test_driver_sleep_during_bus_traffic_is_a_copy_wait(rates: list[float], share: float) -> None:
    # in a poll all the time: for 0.5 s of each second the device was idle meanwhile
    np.testing.assert_allclose(claim("I2", rates).share, [share, share])
