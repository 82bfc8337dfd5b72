"""Devices that wait in collectives shorter than a sample: no window is of spinning alone.

The job: 60 steps of 0.28 s, of which the last 0.1 s are at less activity than the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lean_recordings import SM, Step, cluster, recorded, without
from tests.support.recordings import SECOND

N = 60
SHORT = Step(compute=0.18, launch=0.02)


@pytest.mark.parametrize("missing", ["collectives", "spans"])
def test_small_kernels_of_all_ranks_are_work(tmp_path: Path, missing: str) -> None:
    # 0.18 s at 0.9, then 0.1 s of small kernels at 0.5: the same on all ranks
    job = without(cluster([SHORT] * N, [SHORT] * N, [SHORT] * N, on_device=True), missing)
    for script in job:
        script.gauges = {SM: [(s, e, 0.5 if v < 0.1 else v) for s, e, v in script.gauges[SM]]}
    report = recorded(without(job, "collectives"), tmp_path)
    assert report.lost_ns == 0


@pytest.mark.parametrize("missing", ["collectives", "spans"])
def test_one_rank_without_shows_that_the_others_wait_for_it(tmp_path: Path, missing: str) -> None:
    # The others are at 0.5 for the 0.1 s at the end of each step, rank 1 never is.
    job = without(cluster([SHORT] * N, [SHORT] * N, [SHORT] * N, on_device=True), missing)
    for number, script in enumerate(job):
        low = 0.9 if number == 1 else 0.5
        script.gauges = {SM: [(s, e, low if v < 0.1 else v) for s, e, v in script.gauges[SM]]}
    report = recorded(without(job, "collectives"), tmp_path)
    # (0.9 - 0.5) / (0.9 - 0.054) of 0.1 s in 60 steps is 2.84 s; samples of which no fifth is at
    # less activity are left out, unless the one before is not
    for rank in (0, 2):
        found_ns = dict(report.ranks[rank].buckets)["synchronization"]
        assert 1.9 < found_ns / SECOND <= 2.85
    assert dict(report.ranks[1].buckets).get("synchronization", 0) == 0
    [finding] = [finding for finding in report.findings if finding.cause.id == "synchronization"]
    assert finding.culprits[0].rank == 1
