"""Two loops recorded on an NVIDIA H200, against what CUPTI measured in a window at their end.

tests/recordings/h200/rewrite.py says where they come from. `slow-dataset`: two workers prepare a
batch in 12 ms, and the device needs a third of that. `sleep`: each step reads the loss, then sleeps
for 6 ms of 12.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from clusterprof.analysis.node.selection import PartOfRun
from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report
from tests.support.report_laws import check_conservation

FOLDER = Path(__file__).parents[1] / "recordings" / "h200"
TRUTH = json.loads((FOLDER / "truth.json").read_text(encoding="utf-8"))


@cache
def report(name: str) -> Report:
    # The first steps warm up; the step at which the trace ended is not the loop's.
    part = PartOfRun(first_step=20, end_step=TRUTH[name]["steps_before"] - 2)
    return analyze(FOLDER / name, part=part)


@pytest.mark.parametrize("name", ["slow-dataset", "sleep"])
def test_every_nanosecond_is_attributed(name: str) -> None:
    check_conservation(report(name))


@pytest.mark.parametrize("name", ["slow-dataset", "sleep"])
def test_busy_time_matches_kernel_time(name: str) -> None:
    truth = TRUTH[name]
    busy_ratio = truth["busy_ns"] / (truth["ended_ns"] - truth["began_ns"])
    assert report(name).productive_ns / report(name).in_step_ns == pytest.approx(
        busy_ratio, abs=0.02
    )


def test_data_wait_loss_matches_time_without_kernels() -> None:
    truth, (first, *_) = TRUTH["slow-dataset"], report("slow-dataset").findings
    idle_ratio = truth["idle_in_waits_ns"] / (truth["ended_ns"] - truth["began_ns"])
    assert first.cause.id == "cpu-preprocess"
    assert first.share_ratio == pytest.approx(idle_ratio, abs=0.02)


def test_sleep_after_a_device_wait_is_the_first_finding() -> None:
    """The sleep is 49 % of a step; a fifth of it is left to h2d-sync and to what is not known."""
    first, second, *_ = report("sleep").findings
    assert (first.cause.id, second.cause.id) == ("host-asleep", "h2d-sync")
    assert 0.38 < first.share_ratio < 0.52
    assert second.share_ratio < 0.13
    (line, *_) = first.lines
    assert (line.place.file, line.place.line) == ("/project/bench/_gpu_jobs.py", 91)
