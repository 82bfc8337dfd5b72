"""Lost time shared out among sampled stacks, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.lines.lost_time_by_stack import (
    PEERS,
    RankStackTimes,
    StackTimeSums,
    merge_stack_sums,
)
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.rank.claims import compute_data_wait_breakdown
from clusterprof.analysis.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    LostTime,
    Process,
    Rank,
)
from clusterprof.analysis.timeline.spans import StackSamples
from clusterprof.probe import layout
from tests.support.builders import (
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)

MS = 1_000_000
SEGMENT = Segment(0, ns(10), False)
Sample = tuple[float, int, str]


def _with_stacks(
    of: Process, samples: Sequence[Sample], late_ms: float | Sequence[float] = 0.0
) -> Process:
    """A process with samples (time s, stack, state), each of which stands for 50 ms."""
    start = np.array([ns(t) for t, _, _ in samples], np.int64)
    stack = np.array([number for _, number, _ in samples], np.int64)
    state = np.array([ord(letter or "\0") for _, _, letter in samples], np.int64)
    zero = np.zeros(start.size, np.int64)
    return replace(
        of,
        stacks=StackSamples(
            start,
            start + (np.asarray(late_ms) * MS).astype(np.int64),
            np.arange(start.size),
            stack,
            zero + 50 * MS,
            zero,
            state,
        ),
    )


def _share(timeline: Rank, pieces: LostTime, **shares: Sequence[float]) -> RankStackTimes:
    parts = {
        cause.replace("_", "-"): np.rint(np.array(share) * SHARE_SCALE).astype(np.int64)
        for cause, share in shares.items()
    }
    unclaimed = SHARE_SCALE - sum(parts.values())
    sums = StackTimeSums()
    breakdown = compute_data_wait_breakdown(timeline, pieces)
    sums.add(timeline, SEGMENT, pieces, parts, unclaimed, breakdown)
    code = sums.finish()
    assert code is not None
    return code


def _by_stack(code: RankStackTimes, cause: str) -> dict[int, tuple[float, int]]:
    """Milliseconds and samples by stack."""
    return {int(s): (ms / MS, int(n)) for s, ms, n, _ in code.lost[cause].T.tolist()}


def test_a_sample_carries_the_loss_of_its_sampling_interval() -> None:
    main = _with_stacks(make_process(100), [(1.0, 1, ""), (1.5, 2, ""), (1.9, 1, ""), (3.0, 3, "")])
    # 1 to 2 s: 0.6 of 1 s is lost, all of it in saves. Each sample: 50 ms x 0.6.
    pieces = make_lost_segments((1, 2, 0.6, PHASE_CHECKPOINT))
    code = _share(make_rank(10, main), pieces, checkpoint=[1.0])
    assert _by_stack(code, "checkpoint") == {1: (60.0, 2), 2: (30.0, 1)}
    assert code.lost["checkpoint"][3].tolist() == [2 * (30 * MS) ** 2, (30 * MS) ** 2]
    assert code.in_steps[:3].tolist() == [[1, 2, 3], [100 * MS, 50 * MS, 50 * MS], [2, 1, 1]]
    assert code.samples == 4


def test_causes_share_a_sample_and_the_rest_is_unattributed() -> None:
    main = _with_stacks(make_process(100), [(1.5, 1, "")])
    pieces = make_lost_segments((1, 2, 1.0, PHASE_COMPUTE))
    code = _share(make_rank(10, main), pieces, launch_bound=[0.5], cpu_gc=[0.25])
    assert _by_stack(code, "launch-bound") == {1: (25.0, 1)}
    assert _by_stack(code, "cpu-gc") == {1: (12.5, 1)}
    assert _by_stack(code, "unattributed") == {1: (12.5, 1)}


def test_causes_take_the_samples_that_match_their_thread_state() -> None:
    main = _with_stacks(
        make_process(100), [(1.2, 1, "R"), (1.5, 2, "S"), (1.7, 3, "D"), (1.8, 4, "")]
    )
    pieces = make_lost_segments((1, 2, 1.0, PHASE_COMPUTE))
    code = _share(make_rank(10, main), pieces, launch_bound=[0.5], host_asleep=[0.5])
    assert sorted(_by_stack(code, "launch-bound")) == [1, 4]  # the state of 4 is not known
    assert sorted(_by_stack(code, "host-asleep")) == [2, 3, 4]


def test_matching_samples_carry_the_loss_of_samples_in_other_states() -> None:
    # 0.2 of 1 s is lost to a sleep; four samples of 50 ms carry 40 ms of it, all in the one asleep.
    samples = [(1.2, 1, "S"), (1.4, 2, "R"), (1.6, 2, "R"), (1.8, 2, "R")]
    main = _with_stacks(make_process(100), samples)
    code = _share(
        make_rank(10, main), make_lost_segments((1, 2, 0.2, PHASE_COMPUTE)), host_asleep=[1.0]
    )
    assert _by_stack(code, "host-asleep") == {1: (40.0, 1)}
    # With 0.5 s lost it carries no more than its own 50 ms.
    code = _share(
        make_rank(10, main), make_lost_segments((1, 2, 0.5, PHASE_COMPUTE)), host_asleep=[1.0]
    )
    assert _by_stack(code, "host-asleep") == {1: (50.0, 1)}


def test_writing_loss_goes_to_sleeping_samples_with_enough_time() -> None:
    samples = [(1.2, 1, "D"), (1.4, 2, "R"), (1.6, 2, "R"), (1.8, 2, "R")]
    main = _with_stacks(make_process(100), samples)
    code = _share(
        make_rank(10, main), make_lost_segments((1, 2, 0.2, PHASE_COMPUTE)), eval_host=[1.0]
    )
    assert _by_stack(code, "eval-host") == {1: (40.0, 1)}
    # 0.8 s cannot all be the sleep of a quarter of the samples: the thread computed.
    code = _share(
        make_rank(10, main), make_lost_segments((1, 2, 0.8, PHASE_COMPUTE)), eval_host=[1.0]
    )
    assert _by_stack(code, "eval-host") == {1: (40.0, 1), 2: (120.0, 3)}


def test_a_late_sample_counts_as_on_a_cpu() -> None:
    main = _with_stacks(make_process(100), [(1.2, 1, "S")], late_ms=2)
    pieces = make_lost_segments((1, 2, 1.0, PHASE_COMPUTE))
    code = _share(make_rank(10, main), pieces, launch_bound=[0.5], host_asleep=[0.5])
    assert _by_stack(code, "launch-bound") == {1: (25.0, 1)}
    assert _by_stack(code, "host-asleep") == {1: (25.0, 1)}  # better than no line at all


def test_late_samples_during_a_disk_wait_count_as_page_faults() -> None:
    # Stack 1 came 100 ms late. The recorder found the thread in a wait for a disk until 1.3 s.
    samples = [(1.2, 1, ""), (1.5, 2, "S")]
    pieces = make_lost_segments((1, 2, 1.0, PHASE_COMPUTE))
    for doing, stacks in (("D1.35 S8.65", [1, 2]), ("U1.35 S8.65", [2])):
        main = make_process(100, thread=make_thread(parse_activity(doing), 10))
        main = _with_stacks(main, samples, late_ms=[100, 0])
        code = _share(make_rank(10, main), pieces, storage_local=[1.0])
        assert sorted(_by_stack(code, "storage-local")) == stacks


def test_lock_loss_is_shared_among_the_possible_lock_holders() -> None:
    # The last sample is of a thread that the main thread waited for: not late, and no holder.
    samples = [(1.2, 1, "S"), (1.4, 2, ""), (1.4, 3, ""), (1.8, 2, ""), (1.9, 4, "")]
    main = _with_stacks(make_process(100), samples)
    assert main.stacks is not None
    threads = np.array([0, 1, 2, 1, 1])
    interval_ns = np.array([50, 10, 10, 20, 50]) * MS
    end_ns = main.stacks.start_ns + np.where(main.stacks.stack < 4, interval_ns, 0)
    changed = replace(main.stacks, thread=threads, interval_ns=interval_ns, end_ns=end_ns)
    main = replace(main, stacks=changed)
    pieces = make_lost_segments((1, 2, 1.0, PHASE_COMPUTE))
    code = _share(make_rank(10, main), pieces, cpu_gil=[0.5])
    assert _by_stack(code, "cpu-gil") == {2: (375.0, 2), 3: (125.0, 1)}
    assert _by_stack(code, "unattributed") == {1: (25.0, 1)}


def test_waits_for_peers_are_counted_apart_from_causes() -> None:
    main = _with_stacks(make_process(100), [(1.5, 1, "S"), (4.0, 2, "R")])
    pieces = make_lost_segments((1, 2, 0.5, PHASE_COLLECTIVE))
    code = _share(make_rank(10, main), pieces)
    assert _by_stack(code, PEERS) == {1: (25.0, 1)}
    assert code.in_steps[0].tolist() == [2]


def test_samples_in_a_device_wait_carry_no_loss() -> None:
    synced = {layout.SYNC: make_spans((1.0, 1.6, ns(0.6), 1))}
    main = _with_stacks(make_process(100, spans=synced), [(1.5, 1, "S"), (1.8, 2, "R")])
    pieces = make_lost_segments((1, 2, 0.4, PHASE_COMPUTE))
    code = _share(make_rank(10, main), pieces, launch_bound=[1.0])
    # Its end leaves the queue empty: the 0.4 s follow at once.
    assert _by_stack(code, "launch-bound") == {2: (50.0, 1)}


def test_loss_after_several_device_waits_fills_the_time_after_each() -> None:
    # 0.1 s lie between the waits and 0.5 s behind them. Of 0.4 s lost, 0.1 and 0.3 follow.
    synced = {layout.SYNC: make_spans((1.0, 1.2, ns(0.2), 1), (1.3, 1.5, ns(0.2), 1))}
    samples = [(1.1, 1, "S"), (1.25, 2, "R"), (1.4, 3, "S"), (1.6, 4, "R"), (1.81, 5, "R")]
    main = _with_stacks(make_process(100, spans=synced), samples)
    code = _share(
        make_rank(10, main), make_lost_segments((1, 2, 0.4, PHASE_COMPUTE)), launch_bound=[1.0]
    )
    assert _by_stack(code, "launch-bound") == {2: (50.0, 1), 4: (50.0, 1)}


def test_a_wait_for_a_worker_is_spread_over_its_whole_fetch() -> None:
    fetched = {layout.FETCH: make_spans((1.0, 3.0, 1, ns(2), 0, 0))}
    worker = _with_stacks(
        make_process(201, parent=100, spans=fetched),
        [(0.5, 9, "R"), (1.5, 1, "R"), (2.5, 2, "R"), (3.5, 9, "R")],
    )
    waits = {layout.DATA_WAIT: make_spans((2.0, 3.0, 0, 201, 1, 0))}
    main = _with_stacks(make_process(100, spans=waits), [(2.5, 8, "S")])
    # 0.8 s are lost in the second half of a fetch of 2 s: each sample carries 50 ms x 0.4.
    pieces = make_lost_segments((2, 3, 0.8, PHASE_DATA_WAIT))
    code = _share(make_rank(10, main, [worker]), pieces, cpu_preprocess=[1.0])
    assert _by_stack(code, "cpu-preprocess") == {1: (20.0, 1), 2: (20.0, 1)}
    assert code.in_steps[0].tolist() == [8]


def test_the_loss_of_a_wait_goes_to_the_awaited_fetch() -> None:
    # The batch of [0, 2) arrives at 2.1 s, when the next fetch has begun. The wait from 3 to 3.5 s
    # is for that one; no fetch ended after the last wait had begun.
    fetched = {layout.FETCH: make_spans((0.0, 2.0, 1, ns(2), 0, 0), (2.0, 4.0, 1, ns(2), 0, 0))}
    samples = [(0.5, 1, "R"), (1.5, 2, "R"), (2.5, 3, "R"), (4.5, 4, "R")]
    worker = _with_stacks(make_process(201, parent=100, spans=fetched), samples)
    times = (1.6, 2.1), (3.0, 3.5), (4.0, 5.0)
    waits = {layout.DATA_WAIT: make_spans(*((*bounds, 0, 201, 1, 0) for bounds in times))}
    main = _with_stacks(make_process(100, spans=waits), [(2.5, 8, "S")])
    pieces = make_lost_segments(*((*bounds, 0.5, PHASE_DATA_WAIT) for bounds in times))
    code = _share(make_rank(10, main, [worker]), pieces, cpu_preprocess=[1.0, 1.0, 1.0])
    # 0.5 s in 2 s: 50 ms x 0.25; the last wait has no fetch: 50 ms x 0.5.
    by_stack = _by_stack(code, "cpu-preprocess")
    assert by_stack == {1: (12.5, 1), 2: (12.5, 1), 3: (12.5, 1), 4: (25.0, 1)}


def test_loss_of_waits_for_own_threads_goes_to_their_stacks() -> None:
    # In the wait the main thread is in stack 8. Thread 101 computes until 1.5 s, then it reads;
    # thread 102 sleeps. The sample at 2.5 s is in no wait: the main thread's own counts there.
    samples = [(1.2, 8, "S"), (1.2, 1, ""), (1.2, 5, ""), (1.8, 8, "S"), (1.8, 2, ""), (2.5, 3, "")]
    waits = {layout.DATA_WAIT: make_spans((1.0, 2.0, -1, -1, -1, -1))}
    main = _with_stacks(make_process(100, spans=waits), samples)
    assert main.stacks is not None
    main = replace(
        main,
        threads={
            100: make_thread(parse_activity("U1 S1 U1"), 3),
            101: make_thread(parse_activity("U1.5 D0.5 U1"), 3),
            102: make_thread(parse_activity("S3"), 3),
        },
        stacks=replace(main.stacks, thread=np.array([0, 101, 102, 0, 101, 0])),
    )
    pieces = make_lost_segments((1, 2, 0.8, PHASE_DATA_WAIT), (2, 3, 0.2, PHASE_COMPUTE))
    shares = {"cpu_preprocess": [0.5, 0.0], "storage_local": [0.5, 0.0]}
    code = _share(make_rank(3, main), pieces, **shares)
    # 0.4 s for each of the causes, of which a sample of 50 ms carries 20 ms; one that fits carries
    # those of the two others too, as far as it has room.
    assert _by_stack(code, "cpu-preprocess") == {1: (50.0, 1)}
    assert _by_stack(code, "storage-local") == {2: (30.0, 1), 5: (30.0, 1)}
    assert _by_stack(code, "unattributed") == {3: (10.0, 1)}
    # Processes that make batches are not sampled: then the main thread's own samples count.
    code = _share(make_rank(3, main, [make_process(201, parent=100)]), pieces, **shares)
    assert set(_by_stack(code, "storage-local")) == {8}


def test_time_not_lost_counts_as_work_without_a_device() -> None:
    samples = [(0.5, 1, "R"), (1.5, 2, "R"), (1.6, 2, "S"), (2.5, 3, "S"), (3.5, 4, "R")]
    main = _with_stacks(make_process(100), samples)
    # Lost: 20 % of 1 to 2 s, 90 % of 2 to 3 s, where the thread sleeps; 3 to 4 s is a collective.
    pieces = make_lost_segments(
        (1, 2, 0.2, PHASE_COMPUTE), (2, 3, 0.9, PHASE_DATA_WAIT), (3, 4, 0.5, PHASE_COLLECTIVE)
    )
    without_device = _share(make_rank(10, main, device=""), pieces, host_asleep=[1.0, 1.0, 1.0])
    assert without_device.worked[:3].tolist() == [[1, 2], [50 * MS, 80 * MS], [1, 2]]
    assert _share(make_rank(10, main), pieces, host_asleep=[1.0, 1.0, 1.0]).worked.size == 0


def test_a_provisional_segment_counts_only_when_another_step_ends() -> None:
    main = _with_stacks(make_process(100), [(1.5, 1, "")])
    timeline, pieces = make_rank(10, main), make_lost_segments((1, 2, 1.0, PHASE_COMPUTE))
    breakdown = compute_data_wait_breakdown(timeline, pieces)
    sums, none = StackTimeSums(), np.full(1, SHARE_SCALE, np.int64)
    sums.add(timeline, replace(SEGMENT, provisional=True), pieces, {}, none, breakdown)
    assert sums.finish() is None
    sums.confirm()
    code = sums.finish()
    assert code is not None and _by_stack(code, "unattributed") == {1: (50.0, 1)}


def test_sums_merge_in_any_order() -> None:
    first, second = np.array([[1.0, 3], [5, 6], [1, 1], [25, 36]]), np.array([[3.0], [4], [2], [8]])
    expected = [[1, 3], [5, 10], [1, 3], [25, 44]]
    assert merge_stack_sums(first, second).tolist() == expected
    assert merge_stack_sums(second, first).tolist() == expected
