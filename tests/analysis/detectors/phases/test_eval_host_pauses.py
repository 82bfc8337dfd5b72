"""Pauses of a computing main thread: found between samples, unlike slow launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.cpu.preprocess import CpuPreprocess
from clusterprof.analysis.detectors.device.h2d_sync import H2dSync
from clusterprof.analysis.detectors.device.launch_bound import LaunchBound
from clusterprof.analysis.detectors.phases.eval_host import EvalHost
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, Int
from clusterprof.analysis.timeline.spans import StackSamples
from clusterprof.analysis.timeline.stacks import StackTree
from clusterprof.probe import layout
from clusterprof.report.code import CodeLocation
from tests.support.builders import (
    make_busy_counter,
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

STEPS = 12
"""Of 0.3 s each, three samples of the device in each."""


def claim(idle_s: Mapping[int, float], doing: str = "U3.6", usual_s: float = 0.01) -> Claims:
    """`idle_s`: idle time of samples that differ from the usual."""
    marks = {layout.STEP: make_spans(*((0.3 * i, 0.3 * (i + 1), i + 1) for i in range(STEPS)))}
    main = make_process(100, spans=marks, thread=make_thread(parse_activity(doing), 3.6))
    series = {("gpu.busy_ns_total", "gpu-0"): make_busy_counter([(0, 3.6)], 3.6)}
    samples = range(3 * STEPS)
    rows = make_lost_segments(
        *((0.1 * i, 0.1 * (i + 1), idle_s.get(i, usual_s), PHASE_COMPUTE) for i in samples),
        source=2,
    )
    rows.step[:] = [1 + i // 3 for i in samples]
    timeline = make_rank(3.6, main, device="gpu-0", series=series)
    got = EvalHost().claim(
        timeline, rows, make_breakdown(*({} for _ in samples)), EvalHost.Limits()
    )
    assert got is not None
    return got


def claimed_pieces(got: Claims) -> list[int]:
    assert set(np.round(got.share, 9)) <= {0.0, 1.0}
    return np.flatnonzero(got.share).tolist()


def test_pauses_between_samples_or_filling_a_sample_are_found() -> None:
    # 0.14 s between samples 4 and 5; 0.1 s in 13, and 0.05 in the one behind; the others launch
    got = claim({4: 0.07, 5: 0.07, 13: 0.1, 14: 0.05})
    assert (claimed_pieces(got), got.grade) == ([4, 5, 12, 13, 14], "C")
    assert [item.name for item in got.evidence] == ["thread.on_cpu_ratio"]


@pytest.mark.parametrize(
    ("first", "grade"), [((3, 15, 27), "B"), ((3, 17, 27), "B"), ((3, 9, 27), "C"), ((3, 15), "C")]
)
def test_regular_pauses_get_a_higher_grade(first, grade) -> None:
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
def test_short_frequent_or_usual_idle_time_is_no_pause(idle_s, doing, usual_s) -> None:
    assert claimed_pieces(claim(idle_s, doing, usual_s)) == []


def claim_every_step(
    idle_s: tuple[float, float, float], loader: bool = False, doing: str = "U3.6"
) -> tuple[list[float], list[float]]:
    """Shares of `eval-host` and `cpu-preprocess` where the three samples of each step idle so."""
    marks = {layout.STEP: make_spans(*((0.3 * i, 0.3 * (i + 1), i + 1) for i in range(STEPS)))}
    if loader:
        marks[layout.LOADER_START] = make_spans((0.0, 0.01, 2))
    main = make_process(100, spans=marks, thread=make_thread(parse_activity(doing), 3.6))
    series = {("gpu.busy_ns_total", "gpu-0"): make_busy_counter([(0, 3.6)], 3.6)}
    samples = range(3 * STEPS)
    rows = make_lost_segments(
        *((0.1 * i, 0.1 * (i + 1), idle_s[i % 3], PHASE_COMPUTE) for i in samples), source=2
    )
    rows = replace(rows, step=np.arange(3 * STEPS) // 3 + 1)
    timeline = make_rank(3.6, main, device="gpu-0", series=series)
    fed = make_breakdown(*({} for _ in samples))
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
def test_possible_slow_launches_are_not_claimed(
    idle_s: tuple[float, float, float], doing: str
) -> None:
    evaluated, prepared = claim_every_step(idle_s, doing=doing)
    assert not any(evaluated) and not any(prepared)


OWN, OPERATOR, RAW, OTHER, LIBRARY, OBJECTS = 2, 3, 4, 5, 6, 8
"""Stacks: an own line, one that calls an operator of PyTorch in Python or in C, another one that
may call NumPy, and one that broadcasts objects."""
DISTRIBUTED = "/env/lib/python3.11/site-packages/torch/distributed"
TABLE = StackTree(
    (
        CodeLocation("/job/train.py", 1, "train"),
        CodeLocation("/job/text.py", 7, "split"),
        CodeLocation(
            "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward"
        ),
        CodeLocation("/job/model.py", 9, "step"),
        CodeLocation("/job/scores.py", 3, "score"),
        CodeLocation("/env/lib/python3.11/site-packages/numpy/core/_methods.py", 118, "_mean"),
        CodeLocation(f"{DISTRIBUTED}/c10d_logger.py", 83, "wrapper"),
        CodeLocation(f"{DISTRIBUTED}/distributed_c10d.py", 3210, "_object_to_tensor"),
    ),
    np.array([0, 0, 1, 1, 1, 1, 5, 1, 7]),
    np.array([-1, 0, 1, 2, 3, 4, 5, 6, 7]),
)
Sample = tuple[int, float, str]
"""Stack, how late it came in ms, state; each stands for 50 ms."""


def build_stacks(samples: Sequence[Sample], start: Int) -> StackSamples:
    """Build samples that were due at some times, int64[n] ns."""
    zero = np.zeros(len(samples), np.int64)
    late = np.array([ns(ms / 1e3) for _, ms, _ in samples], np.int64)
    stack = np.array([number for number, _, _ in samples], np.int64)
    state = np.array([ord(letter) for _, _, letter in samples], np.int64)
    return StackSamples(start, start + late, zero, stack, zero + ns(0.05), zero, state)


def claim_by_stacks(
    samples: Sequence[Sample], loader: bool = False, table: StackTree = TABLE
) -> tuple[list[float], str]:
    """Shares and grades of `eval-host`, `cpu-preprocess` and `launch-bound`.

    0.5 s are lost in a step of 1 s, in which the thread is on a CPU for 0.7 s.
    """
    marks = {layout.STEP: make_spans((0.0, 1.0, 1))}
    if loader:
        marks[layout.LOADER_START] = make_spans((0.0, 0.01, 2))
    start = np.array([ns(0.001 + 0.9 * i / len(samples)) for i in range(len(samples))], np.int64)
    main = make_process(100, spans=marks, thread=make_thread(parse_activity("U0.7 S0.3"), 1.0))
    timeline = make_rank(1.0, replace(main, stacks=build_stacks(samples, start)), device="gpu-0")
    timeline = replace(timeline, chunk=replace(timeline.chunk, stacks=table))
    piece = make_lost_segments((0, 1, 0.5, PHASE_COMPUTE), step=1)
    detectors = EvalHost(), CpuPreprocess(), LaunchBound()
    claims = [
        detector.claim(timeline, piece, make_breakdown({}), detector.Limits())  # type: ignore[attr-defined]
        for detector in detectors
    ]
    shares = [round(float(got.share[0]), 6) for got in claims if got is not None]
    return shares, "".join(got.grade for got in claims if got is not None)


def test_code_with_late_samples_is_not_launching() -> None:
    # 10 of 20 samples are in a line of which 9 came late: half of 0.7 s on a CPU. Those of an
    # operator come at once, and count as launching; so do those of a line that gives the lock away
    # in C code of PyTorch.
    own: list[Sample] = [(OWN, 5.2, "R")] * 9 + [(OWN, 0.1, "R")]
    launching: list[Sample] = [(OPERATOR, 0.1, "R")] * 5 + [(RAW, 0.1, "R")] * 5
    assert claim_by_stacks(own + launching) == ([0.0, 0.35, 0.35], "ACB")
    assert claim_by_stacks(own + launching, loader=True) == ([0.35, 0.0, 0.35], "BBB")
    # What NumPy does launches nothing, whether it gives the lock away or not.
    library: list[Sample] = [(LIBRARY, 0.1, "R")] * 8 + [(OTHER, 0.1, "R")] * 2
    assert claim_by_stacks(library + launching)[0] == [0.0, 0.35, 0.35]
    # Two lines together have enough; a few late operators are chance.
    few: list[Sample] = [(OWN, 5.2, "R")] * 5 + [(OTHER, 5.2, "R")] * 5
    launching[:3] = [(OPERATOR, 5.2, "R")] * 3
    assert claim_by_stacks(few + launching)[0] == [0.0, 0.35, 0.35]
    # On a machine whose threads wake up in 0.05 ms, 0.2 ms are a wait for the lock.
    quick: list[Sample] = [(OWN, 0.2, "R")] * 10 + [(OPERATOR, 0.05, "R")] * 10
    assert claim_by_stacks(quick)[0] == [0.0, 0.0, 0.7]
    # A delay of zero is none: the thread had to wait for a CPU, and that was taken off.
    assert claim_by_stacks([*quick, *[(OTHER, 0.0, "S")] * 8])[0] == [0.0, 0.0, 0.7]
    assert claim_by_stacks([*quick, *[(OTHER, 0.05, "S")] * 8])[0] == [0.0, 0.35, 0.35]
    # A line that a disk lets wait now and then works on files: 9 of 19 samples on a CPU.
    files: list[Sample] = [*[(RAW, 0.1, "R")] * 9, (RAW, 0.1, "D"), *[(OPERATOR, 0.1, "R")] * 10]
    assert claim_by_stacks(files)[0] == [0.0, 0.0, 0.7]  # one is too few
    files[9:9] = [(RAW, 0.1, "R")] * 70 + [(RAW, 0.1, "D")] * 8
    assert claim_by_stacks(files)[0] == [
        *(0.0, pytest.approx(0.7 * 79 / 89, abs=1e-6), pytest.approx(0.7 * 10 / 89, abs=1e-6))
    ]
    # To pickle objects for other ranks is no launching.
    objects: list[Sample] = [(OBJECTS, 2.0, "R")] * 10 + [(OPERATOR, 0.1, "R")] * 10
    assert claim_by_stacks(objects)[0] == [0.0, 0.35, 0.35]
    # Samples asleep are no computation, and a sample whose lateness is not known is no evidence.
    assert claim_by_stacks([*own, *launching, *[(OWN, 0.2, "S")] * 20])[0] == [0.0, 0.35, 0.35]
    assert claim_by_stacks([*own, *launching, *[(OWN, 0.0, "R")] * 10])[0] == [
        *(0.0, pytest.approx(0.7 * 20 / 30, abs=1e-6), pytest.approx(0.7 * 10 / 30, abs=1e-6))
    ]


@pytest.mark.parametrize(
    ("samples", "table"),
    [
        # too few that came late; fewer than half of them
        ([(OWN, 5.2, "R")] * 7 + [(OPERATOR, 0.1, "R")] * 10, TABLE),
        ([(OWN, 5.2, "R")] * 8 + [(OWN, 0.1, "R")] * 9, TABLE),
        # less than a tenth of the time
        ([(OWN, 5.2, "R")] * 8 + [(OPERATOR, 0.1, "R")] * 73, TABLE),
        # operators come late, too: another thread has the lock
        ([(OWN, 5.2, "R")] * 10 + [(OPERATOR, 5.2, "R")] * 8 + [(OPERATOR, 0.1, "R")] * 23, TABLE),
        # the model itself computes slowly in Python
        ([(OPERATOR, 5.2, "R")] * 20, TABLE),
        # names are cut, so that nothing is known of PyTorch's files
        (
            [(OWN, 5.2, "R")] * 10,
            replace(
                TABLE,
                locations=tuple(replace(location, file="a.py") for location in TABLE.locations),
            ),
        ),
    ],
)
def test_inconclusive_stacks_leave_time_to_launching(
    samples: list[Sample], table: StackTree
) -> None:
    assert claim_by_stacks(samples, table=table)[0] == [0.0, 0.0, 0.7]


def test_own_code_after_a_device_wait_is_idle_time() -> None:
    # The host waits for 0.4 s. In the 0.6 s after it the device is idle for 0.5 s, and the thread
    # computes for 0.45 s, two thirds of them in its own code: 0.3 s of the 0.5 s. It also sleeps
    # for 0.15 s, so 0.35 s can be due to the wait: 0.05 s without that code.
    samples: list[Sample] = [(OWN, 5.2, "R")] * 20 + [(OPERATOR, 0.1, "R")] * 10
    start = np.array([ns(0.41 + 0.018 * i) for i in range(30)], np.int64)
    assert claim_after_wait(samples, start) == [0.6, 0.0, 0.1]
    # A host that spins in the wait is not in its own code there.
    spinning = np.array([ns(0.001 + 0.018 * i) for i in range(20)], np.int64)
    assert claim_after_wait([*[(OWN, 5.2, "R")] * 20, *samples], np.append(spinning, start)) == [
        *(0.6, 0.0, 0.1)
    ]


def test_own_code_without_a_cpu_is_not_a_device_wait() -> None:
    # As above, but the thread waits for a CPU instead of sleeping, two thirds of the 0.15 s in its
    # own code. The host takes 0.6 s and the device 0.5 s, so running ahead would hide 0.4 of the
    # 0.5 s; 0.3 s were own code, and for 0.1 s it had no CPU.
    samples: list[Sample] = [(OWN, 5.2, "R")] * 20 + [(OPERATOR, 0.1, "R")] * 10
    start = np.array([ns(0.41 + 0.018 * i) for i in range(30)], np.int64)
    assert claim_after_wait(samples, start, "S0.4 U0.45 R0.15") == [0.6, 0.0, 0.0]


def claim_after_wait(
    samples: Sequence[Sample], start: Int, doing: str = "S0.4 U0.45 S0.15"
) -> list[float]:
    """Shares of `eval-host`, `cpu-preprocess`, `h2d-sync` of a step with a wait for the device."""
    marks = {
        layout.STEP: make_spans((0.0, 1.0, 1)),
        layout.LOADER_START: make_spans((0.0, 0.01, 2)),
        layout.SYNC: make_spans((0.0, 0.4, layout.WHOLE_NS, 1)),
    }
    main = make_process(100, spans=marks, thread=make_thread(parse_activity(doing), 1.0))
    timeline = make_rank(1.0, replace(main, stacks=build_stacks(samples, start)), device="gpu-0")
    timeline = replace(timeline, chunk=replace(timeline.chunk, stacks=TABLE))
    pieces = make_lost_segments((0, 0.4, 0.0, PHASE_COMPUTE), (0.4, 1, 0.5, PHASE_COMPUTE), step=1)
    detectors = EvalHost(), CpuPreprocess(), H2dSync()
    claims = [
        detector.claim(timeline, pieces, make_breakdown({}, {}), detector.Limits())  # type: ignore[attr-defined]
        for detector in detectors
    ]
    return [round(float(got.share[1]), 6) for got in claims if got is not None]
