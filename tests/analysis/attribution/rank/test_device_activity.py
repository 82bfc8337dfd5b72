"""Whether ranks end their steps together, and when a busy device spins: by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.attribution.rank.device_activity import (
    NO_ACTIVITY,
    DeviceWindows,
    detect_busy_wait,
)
from clusterprof.analysis.attribution.rank.lost_time import find_lost_intervals
from clusterprof.analysis.cross_rank.step_alignment import has_common_step_ends
from clusterprof.analysis.pipeline import analyze
from clusterprof.analysis.timeline.model import Chunk, Process, Rank, Series
from clusterprof.probe import layout
from clusterprof_lab.scenario import Trial, load_corpus
from clusterprof_lab.synth.make import make_sharded
from tests.support.builders import make_header, make_spans

MS = 1_000_000
STEP = 500 * MS


def ends(lengths_ms: np.ndarray, numbers: np.ndarray | None = None) -> tuple:
    count = np.arange(lengths_ms.size) if numbers is None else numbers
    return count, np.cumsum(lengths_ms.astype(np.int64) * MS)


def test_ranks_ending_steps_together_are_synchronous_despite_clock_offset() -> None:
    draw = np.random.default_rng(1)
    lengths = draw.integers(400, 600, 200)
    number, end = ends(lengths)
    jitter = draw.integers(-10, 10, 200) * MS  # of 500 ms
    assert has_common_step_ends([(number, end), (number, end + 3_000 * MS + jitter)])


def test_equally_fast_ranks_are_not_synchronous() -> None:
    draw = np.random.default_rng(2)
    first, other = (ends(500 + draw.integers(-10, 11, 400)) for _ in range(2))
    assert not has_common_step_ends([first, other])


def test_ranks_of_different_speed_are_not_synchronous() -> None:
    assert not has_common_step_ends([ends(np.full(50, 500)), ends(np.full(50, 560))])


def test_ranks_with_few_common_steps_are_not_synchronous() -> None:
    number = np.arange(100)
    step_ends = ends(np.full(100, 500))
    assert has_common_step_ends([step_ends, step_ends])
    assert not has_common_step_ends([step_ends, ends(np.full(100, 500), number + 50)])
    few = ends(np.full(7, 500))
    assert not has_common_step_ends([few, few])


def rank_with(values: list[float]) -> Rank:
    t_ns = np.arange(1, len(values) + 1) * 100 * MS
    series = Series(t_ns, np.array(values), False)
    chunk = Chunk(
        make_header(),
        0,
        int(t_ns[-1]),
        True,
        True,
        {("gpu.sm_active_ratio", "d"): series},
        {},
        (),
        (),
        (),
    )
    main = Process(1, 1, 0, "python", {}, {}, {}, None)
    return Rank(chunk, 0, 1, "d", True, main, (), True)


def with_steps(rank: Rank, step_ms: int, kind: int = layout.STEP) -> Rank:
    """The rank with steps of equal length, one after the other, for as long as it was recorded.

    kind: DATA_WAIT for a wait of 1 ms at the beginning of each instead.
    """
    start = np.arange(0, rank.chunk.end_ns, step_ms * MS)
    length_s = step_ms / 1e3 if kind == layout.STEP else 1e-3
    steps = make_spans(*((at / 1e9, at / 1e9 + length_s) for at in start.tolist()))
    return replace(rank, main=replace(rank.main, spans={kind: steps}))


def mean_activity(windows_count: int, step_ms: int, work_ms: int) -> list[float]:
    """The mean activity of windows of 100 ms: 0.9 in the first part of each step, then 0.05."""
    ms = np.arange(windows_count * 100) % step_ms
    return np.where(ms < work_ms, 0.9, 0.05).reshape(-1, 100).mean(axis=1).tolist()


def windows(n: int, idle_ns: int = 0) -> DeviceWindows:
    start = np.arange(n) * 100 * MS
    none = np.zeros(n, np.int64)
    return DeviceWindows(start, start + 100 * MS, none + idle_ns, none)


@pytest.mark.parametrize("count", [12, 40])
def test_each_window_is_counted_once_before_and_after_learning(count: int) -> None:
    # 12 windows are too few to learn from before they are divided; 40 are not.
    t_ns = np.arange(count + 1) * 1000 * MS
    busy = Series(t_ns, t_ns.astype(np.float64), False)
    active = Series(t_ns[1:], np.full(count, 0.9), False)
    timeline = rank_with([0.9])
    series = {("gpu.busy_ns_total", "d"): busy, ("gpu.sm_active_ratio", "d"): active}
    registration = {"variables": {"RANK": "0", "WORLD_SIZE": "2"}}
    main = replace(timeline.main, registration=registration)
    main = replace(main, spans={layout.STEP: make_spans((0, count, 0))})
    whole = replace(timeline.chunk, end_ns=int(t_ns[-1]), series=series)
    timeline = replace(timeline, chunk=whole, main=main)
    _, state = find_lost_intervals(timeline, RankState(), last=True)
    assert state.activity.windows_seen == count
    assert state.activity.phase_shares.windows == count


def test_activity_below_the_usual_level_is_busy_wait_in_proportion() -> None:
    # 16 windows to learn from: usual 0.9, spinning 0.05. Then one of which half is spinning:
    # 0.475 = (0.9 + 0.05) / 2; 0.815 is at work for nine tenths, which counts: at work all the time
    # it would be at 0.9, as the twelve are that are alike.
    learnt = [0.9] * 12 + [0.05] * 4
    values = [*learnt, 0.475, 0.815, 0.9, 0.815]
    spun, *_ = detect_busy_wait(rank_with(values), windows(len(values)), NO_ACTIVITY)
    assert (spun[16:] / MS).tolist() == pytest.approx([50.0, 10.0, 0.0, 10.0], abs=0.5)
    # before the first look, at 4 windows, nothing is judged
    assert not spun[:4].any()


def test_only_large_drops_of_varying_activity_are_busy_wait() -> None:
    # 28 windows at work, 0.63 to 0.90 in steps of 0.01, and 4 of spinning: the 90 % quantile is the
    # 29th of 32 from below, 0.87. A quarter of them, 8, lies within 0.05 of it (0.82 to 0.90 are
    # nine, within 0.04 there are eight: 0.83 to 0.90). Six times 0.04 below it is less than four
    # fifths, 0.696: of 0.75 nothing is said, 0.475 spins, and what the window after it lacks too.
    work = [0.63 + 0.01 * k for k in range(28)]
    values = [*work[::2], *[0.05] * 4, *work[1::2], 0.75, 0.9, 0.475, 0.75, 0.75]
    spun, *_ = detect_busy_wait(rank_with(values), windows(len(values)), NO_ACTIVITY)
    assert (spun[32:] > 0).tolist() == [False, False, True, True, False]


def test_idle_time_is_not_busy_wait() -> None:
    values = [0.9] * 12 + [0.05] * 4 + [0.45]  # busy for half of the window, at work in all of it
    spun, *_ = detect_busy_wait(rank_with(values), windows(len(values), idle_ns=0), NO_ACTIVITY)
    assert spun[16] > 0
    half = windows(len(values))
    half.idle_ns[16] = 50 * MS
    spun, *_ = detect_busy_wait(rank_with(values), half, NO_ACTIVITY)
    assert spun[16] == 0


@pytest.mark.parametrize("kind", [layout.STEP, layout.DATA_WAIT])
def test_busy_wait_shorter_than_a_window_is_found_from_steps(kind: int) -> None:
    # Steps of 120 ms, of which the last 36 are waiting: windows of 100 ms contain 16 to 36 ms of
    # it. Their activity is 0.594 to 0.764, never a third of the 0.9 of work.
    values = mean_activity(384, 120, 84)
    assert min(values) > 0.59
    rank = with_steps(rank_with(values), 120, kind)
    spun, *_ = detect_busy_wait(rank, windows(384), NO_ACTIVITY)
    assert spun[256:].sum() / (128 * 100 * MS) == pytest.approx(0.3, abs=0.04)
    # without steps they could also be work of another kind
    spun, *_ = detect_busy_wait(rank_with(values), windows(384), NO_ACTIVITY)
    assert not spun.any()


def test_noisy_or_constant_steps_show_no_busy_wait() -> None:
    draw = np.random.default_rng(5)
    values = draw.normal(0.7, 0.03, 384).tolist()
    spun, *_ = detect_busy_wait(with_steps(rank_with(values), 120), windows(384), NO_ACTIVITY)
    assert not spun.any()
    # every window is one step: nothing distinguishes its parts
    values = mean_activity(384, 100, 70)
    spun, *_ = detect_busy_wait(with_steps(rank_with(values), 100), windows(384), NO_ACTIVITY)
    assert not spun.any()


def test_a_job_whose_hosts_wait_in_collectives_does_not_busy_wait(tmp_path: Path) -> None:
    # Sharded: twelve collectives a step on the hosts, first use of kernels in the first steps.
    healthy = next(item for item in load_corpus() if item.id == "null-clean")
    make_sharded(Trial(healthy, "medium", 0, "dev"), tmp_path / "run")
    report = analyze(tmp_path / "run" / "recording")
    assert dict(report.unattributed_reasons).get("spinning", 0) < 0.01 * report.in_step_ns


@pytest.mark.parametrize("step_ms", [None, 120])
def test_chunking_does_not_change_busy_wait_detection(step_ms: int | None) -> None:
    draw = np.random.default_rng(3)
    values = draw.choice([0.9, 0.85, 0.4, 0.05], 500).tolist()
    rank, full_set = rank_with(values), windows(500)
    rank = rank if step_ms is None else with_steps(rank, step_ms)
    whole, _, after = detect_busy_wait(rank, full_set, NO_ACTIVITY)
    known, parts = NO_ACTIVITY, []
    for low, high in ((0, 3), (3, 130), (130, 131), (131, 500)):
        part = DeviceWindows(
            *(
                getattr(full_set, name)[low:high]
                for name in ("start_ns", "end_ns", "idle_ns", "slowed_ns")
            )
        )
        spun, _, known = detect_busy_wait(rank, part, known)
        parts.append(spun)
    assert whole.any()
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert (known.usual, known.busy_wait_level) == (after.usual, after.busy_wait_level)
    assert known.counts == after.counts


@pytest.mark.parametrize("per_step", [1, 4])
def test_device_steps_are_found_from_operations_of_another_thread(per_step: int) -> None:
    # As above, but the host waits for data at random; a thread runs operations, the last of each
    # step ending with the step of the device.
    values = mean_activity(384, 120, 84)
    draw = np.random.default_rng(7)
    begun_ms = np.sort(draw.choice(384 * 100, 320, replace=False)).tolist()
    waits = make_spans(*((at / 1e3, at / 1e3 + 1e-3) for at in begun_ms))
    other = layout.ALL_REDUCE | layout.OTHER_THREAD
    operations = make_spans(
        *(
            ((end - 5) / 1e3, end / 1e3, 9, number + 1, 0, other)
            for number, end in enumerate(range(120 // per_step, 384 * 100, 120 // per_step))
        )
    )
    rank = rank_with(values)
    ahead = replace(rank, main=replace(rank.main, spans={layout.DATA_WAIT: waits}))
    spun, *_ = detect_busy_wait(ahead, windows(384), NO_ACTIVITY)
    assert not spun.any()
    marked = {layout.DATA_WAIT: waits, layout.COLLECTIVE: operations}
    ahead = replace(rank, main=replace(rank.main, spans=marked))
    spun, *_ = detect_busy_wait(ahead, windows(384), NO_ACTIVITY)
    assert spun[256:].sum() / (128 * 100 * MS) == pytest.approx(0.3, abs=0.04)
