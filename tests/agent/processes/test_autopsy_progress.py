"""When ranks count as standing still, and when not. Times are seconds here."""

from __future__ import annotations

from array import array

import pytest

from clusterprof.agent.processes.autopsy import DIVERGED_STEPS, HungRanks, ProgressWatch
from clusterprof.agent.processes.span_rings import RankProgress
from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Spans

SECOND = 1_000_000_000


def block(*spans: tuple[int, float]) -> Spans:
    """Spans of (kind, end in seconds), each a tenth of a second long."""
    columns = {name: array("q", [0] * len(spans)) for name in SPAN_FIELDS}
    columns["kind"] = array("q", [kind for kind, _ in spans])
    columns["end_ns"] = array("q", [round(end * SECOND) for _, end in spans])
    columns["start_ns"] = array("q", [round((end - 0.1) * SECOND) for _, end in spans])
    return Spans(1, 1, 1, 0, {}, columns)


def rank(pid: int, *ends: float, waits_since: float = 0.0) -> RankProgress:
    """A rank that stepped at these times, and is in an operation since."""
    progress = RankProgress(pid, 1)
    for end in ends:
        progress.add(block((layout.STEP, end)))
    progress.waits_since_ns = round(waits_since * SECOND)
    return progress


def check(
    *ranks: RankProgress, now: float, ended: float = 0.0, asleep: bool = False
) -> HungRanks | None:
    return ProgressWatch().check(ranks, round(ended * SECOND), asleep, round(now * SECOND))


def test_samples_and_garbage_collection_do_not_count_as_progress() -> None:
    progress = rank(1, 10, 11)
    progress.add(block((layout.STACK_SAMPLE, 20), (layout.GC, 21), (layout.INTERPRETER_WAIT, 22)))
    assert progress.last_ns == 11 * SECOND
    progress.add(block((layout.DATA_WAIT, 30), (layout.STACK_SAMPLE, 31)))
    assert progress.last_ns == 30 * SECOND
    assert progress.longest_pause_ns == 19 * SECOND
    assert progress.steps == 2


def test_a_failed_operation_ends_with_the_next_step() -> None:
    progress = rank(1, 10, 11, waits_since=12)
    progress.add(block((layout.DATA_WAIT, 13)))
    assert progress.waits_since_ns == 12 * SECOND
    progress.add(block((layout.STEP, 14)))
    assert progress.waits_since_ns == 0


def test_a_dataloader_worker_is_not_a_rank() -> None:
    worker = RankProgress(2, 1)
    worker.add(block((layout.FETCH, 1), (layout.STACK_SAMPLE, 2)))
    assert not worker.is_rank
    worker.add(block((layout.COLLECTIVE, 3)))
    assert worker.is_rank


def test_ranks_without_earlier_pauses_hang_after_30_seconds() -> None:
    ranks = rank(1, 10, 11, waits_since=11.5), rank(2, 10, 11)
    assert check(*ranks, now=40.9) is None  # the last step was 29.9 s ago
    standstill = check(*ranks, now=41)
    assert standstill is not None
    assert standstill.waiting == (1,)
    assert standstill.silent == (2,)
    assert standstill.since_ns == 11 * SECOND
    assert standstill.bound_ns == 30 * SECOND


@pytest.mark.parametrize(("pause", "bound"), [(5, 30), (20, 60), (90, 270), (500, 300)])
def test_the_hang_time_follows_the_longest_pause(pause: float, bound: int) -> None:
    # 3 x 5 = 15 s is less than 30; 3 x 500 s more than 300.
    slow = rank(1, 1000, 1000 + pause)
    assert ProgressWatch().compute_bound_ns([slow, rank(2, 1000)]) == bound * SECOND


def test_a_configured_hang_time_takes_precedence() -> None:
    watch = ProgressWatch(5 * SECOND)
    assert watch.compute_bound_ns([rank(1, 1000, 1100)]) == 5 * SECOND


def test_evaluation_on_a_single_rank_counts_as_progress() -> None:
    evaluating = rank(2, 10, 11)
    evaluating.add(block((layout.DATA_WAIT, 60)))
    assert check(rank(1, 10, 11, waits_since=11.5), evaluating, now=61) is None


def test_steps_of_a_rank_without_the_others_are_a_hang() -> None:
    watch = ProgressWatch()
    waiting, stepping = rank(1, 10, 11, waits_since=12), rank(2, 10, 11)
    assert watch.check([waiting, stepping], 0, False, 17 * SECOND) is None
    for number in range(DIVERGED_STEPS - 1):
        stepping.add(block((layout.STEP, 20 + 3 * number)))
    assert watch.check([waiting, stepping], 0, False, 50 * SECOND) is None
    stepping.add(block((layout.STEP, 50)))  # the tenth
    standstill = watch.check([waiting, stepping], 0, False, 51 * SECOND)
    assert standstill is not None
    assert (standstill.waiting, standstill.stepping) == ((1,), (2,))
    assert standstill.since_ns == 12 * SECOND


def test_the_last_rank_of_a_finished_job_does_not_hang() -> None:
    saving = rank(1, 10, 11)
    assert check(saving, now=100, ended=12) is None
    assert check(saving, rank(2, 11), now=100, ended=9) is not None  # of an incarnation before
    # One that waits in an operation for a rank that has ended does.
    assert check(rank(1, 10, 11, waits_since=11.5), now=100, ended=12) is not None


def test_a_single_process_hangs_only_if_it_sleeps() -> None:
    assert check(rank(1, 10, 11), now=100) is None
    assert check(rank(1, 10, 11), now=100, asleep=True) is not None


def test_no_hang_is_reported_without_ranks() -> None:
    assert check(now=100) is None
