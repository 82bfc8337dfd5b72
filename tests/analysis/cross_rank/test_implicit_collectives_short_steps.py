"""Devices that wait in collectives shorter than a sample: no window is of spinning alone.

The job: 60 steps of 0.28 s, of which the last 0.1 s are at less activity than the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.output.renderers.text import wording
from clusterprof.probe import layout
from tests.support.recordings import SECOND, Script
from tests.support.reduced_recordings import (
    POWER,
    SM,
    Step,
    make_cluster,
    record_and_analyze,
    remove_signals,
)

N = 60
SHORT = Step(compute=0.18, launch=0.02)


ISSUE_S = 40e-6


def issued(scripts: list[Script]) -> list[Script]:
    """The same with hosts that only issue the operations, as with NCCL."""
    for script in scripts:
        script.main_spans = [
            (span[0], span[1], span[1] + ISSUE_S, *span[3:])
            if span[0] == layout.COLLECTIVE
            else span
            for span in script.main_spans
        ]
    return scripts


def bounds(scripts: list[Script], folder: Path) -> tuple[str, str]:
    """How the lost part of the time in steps relates to the truth, and the productive part."""
    report = record_and_analyze(scripts, folder)
    assert wording.is_lower_bound(report) is any(
        blind.what == "waits in collectives" for blind in report.coverage_gaps
    )
    by_name = {metric.name: metric.bound for metric in report.metrics}
    return by_name["lost.ratio"], by_name["productive.ratio"]


def test_busy_time_that_may_be_waiting_makes_the_loss_a_lower_bound(tmp_path: Path) -> None:
    # Collectives on the device: with SM activity waiting is seen, with nothing it is not known.
    def job() -> list[Script]:
        return issued(make_cluster([SHORT] * N, [SHORT] * N, on_device=True))

    assert bounds(remove_signals(job(), SM, POWER), tmp_path / "nothing") == ("at least", "at most")
    report = record_and_analyze(remove_signals(job(), SM, POWER), tmp_path / "again")
    assert wording.describe_no_loss(report).startswith("Not known: the accelerators were busy")
    assert wording.describe_total_loss(report).startswith("At least 0.0 % of emulated")
    assert bounds(job(), tmp_path / "activity") == ("exact", "exact")


def test_loss_is_exact_when_hosts_wait_in_collectives(tmp_path: Path) -> None:
    job = make_cluster([SHORT] * N, [SHORT] * N)
    assert bounds(remove_signals(job, SM, POWER), tmp_path) == ("exact", "exact")


@pytest.mark.parametrize("missing", ["collectives", "spans"])
def test_low_activity_of_all_ranks_counts_as_work(tmp_path: Path, missing: str) -> None:
    # 0.18 s at 0.9, then 0.1 s of small kernels at 0.5: the same on all ranks
    job = remove_signals(
        make_cluster([SHORT] * N, [SHORT] * N, [SHORT] * N, on_device=True), missing
    )
    for script in job:
        script.gauges = {SM: [(s, e, 0.5 if v < 0.1 else v) for s, e, v in script.gauges[SM]]}
    report = record_and_analyze(remove_signals(job, "collectives"), tmp_path)
    assert report.lost_ns == 0


@pytest.mark.parametrize("missing", ["collectives", "spans", "waits"])
def test_a_rank_without_low_activity_reveals_waiting_peers(tmp_path: Path, missing: str) -> None:
    # The others are at 0.5 for the 0.1 s at the end of each step, rank 1 never is.
    job = make_cluster([SHORT] * N, [SHORT] * N, [SHORT] * N, on_device=True)
    job = issued(job) if missing == "waits" else remove_signals(job, missing, "collectives")
    for number, script in enumerate(job):
        low = 0.9 if number == 1 else 0.5
        script.gauges = {SM: [(s, e, low if v < 0.1 else v) for s, e, v in script.gauges[SM]]}
    report = record_and_analyze(job, tmp_path)
    # (0.9 - 0.5) / (0.9 - 0.054) of 0.1 s in 60 steps is 2.84 s; samples of which no fifth is at
    # less activity are left out, unless the one before is not
    for rank in (0, 2):
        waited_ns = dict(report.ranks[rank].buckets)["synchronization"]
        assert 1.9 < waited_ns / SECOND <= 2.85
    assert dict(report.ranks[1].buckets).get("synchronization", 0) == 0
    [finding] = [finding for finding in report.findings if finding.cause.id == "synchronization"]
    assert finding.culprits[0].rank == 1
