"""Data waits of one rank, and what its critical thread did meanwhile."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.timeline.data_wait.blocked import SHARE_NAMES
from clusterprof.analysis.timeline.data_wait.split import split_data_wait
from clusterprof.analysis.timeline.model import DataWaitBreakdown, Rank
from tests.support.builders import to_ns_array

MIB = 1 << 20
WORKER = 201
MAIN = 100


def list_shares(breakdown: DataWaitBreakdown, index: int = 0) -> dict[str, float]:
    """List the shares of one interval that are not zero, rounded to a millionth."""
    values = {name: round(float(getattr(breakdown, name)[index]), 6) for name in SHARE_NAMES}
    return {name: value for name, value in values.items() if value}


def check_rows(breakdown: DataWaitBreakdown) -> None:
    table = np.stack([getattr(breakdown, name) for name in SHARE_NAMES])
    assert (table >= 0).all()
    np.testing.assert_allclose(table.sum(axis=0), 1.0, rtol=0, atol=1e-12)


def split_wait(given: Rank, start: float, end: float) -> DataWaitBreakdown:
    breakdown = split_data_wait(given, to_ns_array([start]), to_ns_array([end]))
    check_rows(breakdown)
    return breakdown
