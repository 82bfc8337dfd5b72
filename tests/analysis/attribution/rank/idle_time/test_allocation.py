"""Idle time of a device whose queue hides waits, from samples every 0.1 s."""

from __future__ import annotations

import random

import numpy as np
import pytest

from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.attribution.rank.lost_time import find_lost_intervals
from clusterprof.analysis.timeline.model import LostTime, Rank
from clusterprof.probe import layout
from tests.support.builders import make_busy_counter, make_process, make_rank, make_spans

BUSY = ("gpu.busy_ns_total", "emulated-0")
WORKER = 201
STEPS = 2000
LAUNCH_S, WORK_S, SHORT_S, LONG_S = 0.01, 0.03, 0.005, 0.06


class QueuedJob:
    """Steps that launch 30 ms of work in 10 ms, then wait for data for 5 or 60 ms."""

    def __init__(self) -> None:
        draw = random.Random(7)
        self.starts, self.waits, self.busy, self.idle_s = [], [], [], []
        at = free = 1.0
        for _ in range(STEPS):
            self.starts.append(at)
            begin = max(at, free)
            if self.idle_s:  # until this step launched, the device had nothing to do
                self.idle_s[-1] = max(at - free, 0.0)
            free = begin + WORK_S
            self.busy.append((begin, free))
            wait_s = draw.choice((SHORT_S, LONG_S))
            self.waits.append((at + LAUNCH_S, at + LAUNCH_S + wait_s))
            self.idle_s.append(0.0)
            at += LAUNCH_S + wait_s
        self.end = at

    def build_rank(self, until: float, world_size: int = 1) -> Rank:
        """The rank as it was recorded up to a time: spans are written when they end."""
        ends = [*self.starts[1:], self.end]
        steps = [
            (begin, end, number)
            for number, (begin, end) in enumerate(zip(self.starts, ends))
            if end <= until
        ]
        waits = [
            (begin, end, number, WORKER, 2)
            for number, (begin, end) in enumerate(self.waits)
            if end <= until
        ]
        table = {layout.STEP: make_spans(*steps), layout.DATA_WAIT: make_spans(*waits)}
        main = make_process(100, spans=table, registration={"world_size": world_size})
        busy = [(low, min(high, until)) for low, high in self.busy if low < until]
        series = {BUSY: make_busy_counter(busy, until)}
        return make_rank(until, main, series=series, device="emulated-0")


def sum_by_step(pieces: list[LostTime]) -> np.ndarray:
    """Lost time of each step, s."""
    lost = np.zeros(STEPS)
    for piece in pieces:
        inside = piece.step >= 0
        np.add.at(lost, piece.step[inside], piece.lost_ns[inside] / 1e9)
    return lost


@pytest.fixture(scope="module")
def job() -> QueuedJob:
    return QueuedJob()


@pytest.fixture(scope="module")
def whole(job: QueuedJob) -> list[LostTime]:
    settled, _ = find_lost_intervals(job.build_rank(job.end), RankState(), last=True)
    return [lost for _, lost, _ in settled]


def test_waits_that_the_queue_hides_lose_nothing(job: QueuedJob, whole: list[LostTime]) -> None:
    lost_s, true_s = sum_by_step(whole), np.array(job.idle_s)
    hidden = true_s == 0
    assert 0.5 < hidden.mean() < 0.7
    # The work of a step is known to a percent or so, and a window's idle time exactly.
    assert lost_s[hidden].mean() < 0.0003
    np.testing.assert_allclose(lost_s[~hidden], true_s[~hidden], atol=0.003)
    assert lost_s.sum() == pytest.approx(true_s.sum(), rel=1e-3)


def test_in_a_job_of_several_ranks_all_waits_are_idle_for_the_same_part(job: QueuedJob) -> None:
    settled, _ = find_lost_intervals(job.build_rank(job.end, 2), RankState(), last=True)
    lost_s, true_s = sum_by_step([lost for _, lost, _ in settled]), np.array(job.idle_s)
    assert lost_s[true_s == 0].mean() > 0.0003
    assert lost_s.sum() == pytest.approx(true_s.sum(), rel=1e-3)


def lies_in_launching(job: QueuedJob, t_s: float) -> bool:
    """Whether a step has launched a part of its work at a time, and not all."""
    return any(begin + 0.003 < t_s < begin + LAUNCH_S - 0.003 for begin in job.starts)


@pytest.mark.parametrize("in_launching", [False, True])
def test_chunks_settle_the_same_lost_time_as_the_whole(
    job: QueuedJob, whole: list[LostTime], in_launching: bool
) -> None:
    cuts = 0
    for cut_s in np.arange(64.0, 80.0, 0.1).tolist():
        first, state = find_lost_intervals(job.build_rank(cut_s), RankState())
        assert state.settled_ns is not None
        if lies_in_launching(job, state.settled_ns / 1e9) != in_launching:
            continue
        rest, _ = find_lost_intervals(job.build_rank(job.end), state, last=True)
        pieces = [lost for _, lost, _ in (*first, *rest)]
        np.testing.assert_allclose(sum_by_step(pieces), sum_by_step(whole), atol=2e-6)
        cuts += 1
        if cuts == 8:
            break
    assert cuts == 8
