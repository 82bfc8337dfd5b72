"""A job of small kernels as a real driver would show it: reported, but not as lost time."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.plain import Plain
from clusterprof_lab.scenario import Trial, load_corpus
from clusterprof_lab.synth.make import make_trial
from clusterprof_lab.synth.record import write_story
from tests.support.stories import LOST_NS, make_single_rank_job, make_training, sum_lost_by_cause


@pytest.mark.parametrize(("sm_ratio", "advice"), [(0.3, ("larger-batch",)), (0.9, ())])
def test_small_kernels_are_distinguished_from_full_ones(tmp_path, sm_ratio, advice):
    rank, end = make_training()
    rank.device, rank.work = "GPU-1", [item._replace(sm_ratio=sm_ratio) for item in rank.work]
    write_story(make_single_rank_job(rank, end), tmp_path, np.random.default_rng(1))
    report = analyze(tmp_path)
    assert sum(sum_lost_by_cause(report).values()) == pytest.approx(LOST_NS, rel=0.05)
    (item,) = report.device_utilization.ranks
    assert (
        item.lost_ns + item.well_used_ns + item.under_used_ns + item.unmeasured_ns == item.busy_ns
    )
    assert item.busy_ns == pytest.approx(sum(w.end_ns - w.start_ns for w in rank.work), rel=0.02)
    levels = item.levels
    assert levels.sm_active_ratio == pytest.approx(sm_ratio, rel=0.03)
    # 40 of 80 GiB, to a thousandth; 90 W at rest, 660 at 0.9, in proportion between, of 700; no
    # sample is idle throughout, so that the rest is not known and its 90 W count as work
    assert levels.memory_free_ratio == pytest.approx(0.5, abs=0.001)
    most = 90 + 570 * sm_ratio / 0.9 + 90 * LOST_NS / item.busy_ns
    assert levels.power_ratio == pytest.approx(min(most / 700, 1.0), rel=0.03)
    assert item.advice == advice
    assert not any("fill" in finding.cause.id for finding in report.findings)


def test_only_idle_time_between_small_kernels_is_lost_time(tmp_path):
    tiny = next(scenario for scenario in load_corpus() if scenario.id == "launch-tiny-kernels")
    make_trial(Trial(tiny, "medium", 2, "dev"), tmp_path / "run", 2)
    report = analyze(tmp_path / "run" / "recording")
    launches = next(finding for finding in report.findings if finding.cause.id == "launch-bound")
    assert launches.lost_ns == sum_lost_by_cause(report)["launch-bound"]
    assert {rank.advice for rank in report.device_utilization.ranks} == {
        ("larger-batch", "fewer-launches")
    }
    for item, rank in zip(report.device_utilization.ranks, report.ranks):
        assert item.busy_ns <= rank.productive_ns + item.lost_ns  # idle time is not among it
        assert item.levels.sm_active_ratio < 0.3 and item.levels.host_on_cpu_ratio > 0.8
    text = " ".join(Plain().render(report).split())
    assert "Idle time between launches is reported as the cause launch-bound." in text
