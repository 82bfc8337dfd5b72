"""Pauses of a computing main thread: found between samples, unlike slow launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.cpu.preprocess import CpuPreprocess
from clusterprof.analysis.detectors.phases.eval_host import EvalHost
from clusterprof.analysis.timeline.model import PHASE_COMPUTE
from clusterprof.probe import layout
from tests.support.builders import activity, busy_counter, lost, process, rank, spans, thread
from tests.support.data_waits import feeding

STEPS = 12
"""Of 0.3 s each, three samples of the device in each."""


def claim(idle_s: Mapping[int, float], doing: str = "U3.6", usual_s: float = 0.01) -> Claims:
    """`idle_s`: idle time of samples that differ from the usual."""
    marks = {layout.STEP: spans(*((0.3 * i, 0.3 * (i + 1), i + 1) for i in range(STEPS)))}
    main = process(100, spans=marks, thread=thread(activity(doing), 3.6))
    series = {("gpu.busy_ns_total", "gpu-0"): busy_counter([(0, 3.6)], 3.6)}
    samples = range(3 * STEPS)
    rows = lost(
        *((0.1 * i, 0.1 * (i + 1), idle_s.get(i, usual_s), PHASE_COMPUTE) for i in samples),
        source=2,
    )
    rows.step[:] = [1 + i // 3 for i in samples]
    timeline = rank(3.6, main, device="gpu-0", series=series)
    got = EvalHost().claim(timeline, rows, feeding(*({} for _ in samples)), EvalHost.Limits())
    assert got is not None
    return got


def claimed_pieces(got: Claims) -> list[int]:
    assert set(np.round(got.share, 9)) <= {0.0, 1.0}
    return np.flatnonzero(got.share).tolist()


def test_a_pause_lies_between_two_samples_or_fills_one() -> None:
    # 0.14 s between samples 4 and 5; 0.1 s in 13, and 0.05 in the one behind; the others launch
    got = claim({4: 0.07, 5: 0.07, 13: 0.1, 14: 0.05})
    assert (claimed_pieces(got), got.grade) == ([4, 5, 12, 13, 14], "C")
    assert [item.name for item in got.evidence] == ["thread.on_cpu_ratio"]


@pytest.mark.parametrize(
    ("first", "grade"), [((3, 15, 27), "B"), ((3, 17, 27), "B"), ((3, 9, 27), "C"), ((3, 15), "C")]
)
def test_pauses_every_so_many_steps_are_surer(first, grade) -> None:
    # in steps 2, 6, 10; one of them at the end of its step; 2, 4, 10; two alone tell nothing
    pauses = {i + k: 0.07 for i in first for k in (0, 1)}
    got = claim(pauses)
    assert (claimed_pieces(got), got.grade) == (sorted(pauses), grade)


@pytest.mark.parametrize(
    ("idle_s", "doing", "usual_s"),
    [
        ({4: 0.04, 5: 0.04}, "U3.6", 0.01),  # 0.08 s: may be slow launching
        ({3 * i + 1: 0.1 for i in range(0, 12, 2)}, "U3.6", 0.01),  # in half of the steps
        ({4: 0.07, 5: 0.07}, "S3.6", 0.01),  # asleep
        ({4: 0.05, 5: 0.05}, "U3.6", 0.043),  # all samples are like that
    ],
)
def test_what_is_no_pause(idle_s, doing, usual_s) -> None:
    assert claimed_pieces(claim(idle_s, doing, usual_s)) == []


def claim_every_step(
    idle_s: tuple[float, float, float], loader: bool = False, doing: str = "U3.6"
) -> tuple[list[float], list[float]]:
    """Shares of `eval-host` and `cpu-preprocess` where the three samples of each step idle so."""
    marks = {layout.STEP: spans(*((0.3 * i, 0.3 * (i + 1), i + 1) for i in range(STEPS)))}
    if loader:
        marks[layout.LOADER_START] = spans((0.0, 0.01, 2))
    main = process(100, spans=marks, thread=thread(activity(doing), 3.6))
    series = {("gpu.busy_ns_total", "gpu-0"): busy_counter([(0, 3.6)], 3.6)}
    samples = range(3 * STEPS)
    rows = lost(
        *((0.1 * i, 0.1 * (i + 1), idle_s[i % 3], PHASE_COMPUTE) for i in samples), source=2
    )
    rows = replace(rows, step=np.arange(3 * STEPS) // 3 + 1)
    timeline = rank(3.6, main, device="gpu-0", series=series)
    fed = feeding(*({} for _ in samples))
    claims = [
        detector.claim(timeline, rows, fed, detector.Limits())
        for detector in (EvalHost(), CpuPreprocess())
    ]
    return tuple(got.share.round(3).tolist() for got in claims)  # type: ignore[union-attr]


def test_whole_samples_without_work_in_every_step_are_no_slow_launches() -> None:
    # all of the first sample, half of the next, 10 ms of the third: the pause has begun there
    evaluated, prepared = claim_every_step((0.1, 0.05, 0.01))
    assert prepared == [1.0] * 35 + [0.0] and not any(evaluated)  # no pause follows the last one
    evaluated, prepared = claim_every_step((0.1, 0.05, 0.01), loader=True)
    assert evaluated == [1.0] * 35 + [0.0] and not any(prepared)


@pytest.mark.parametrize(
    ("idle_s", "doing"),
    [
        ((0.077, 0.077, 0.077), "U3.6"),  # slow launches: some kernels run in every sample
        ((0.1, 0.1, 0.1), "U3.6"),  # kernels so short that no sample sees them
        ((0.1, 0.05, 0.01), "S3.6"),  # the thread sleeps
    ],
)
def test_what_may_be_slow_launches_is_not_claimed(
    idle_s: tuple[float, float, float], doing: str
) -> None:
    evaluated, prepared = claim_every_step(idle_s, doing=doing)
    assert not any(evaluated) and not any(prepared)
