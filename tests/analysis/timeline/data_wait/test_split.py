"""What the critical thread did, on timelines whose answer is arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.timeline.data_wait.fetches import fit_cpu_time
from clusterprof.analysis.timeline.data_wait.split import split_data_wait
from clusterprof.analysis.timeline.model import Int, Process, Rank
from clusterprof.analysis.timeline.spans import SpanTable
from clusterprof.probe.layout import DATA_WAIT, FETCH, STEP, WORKER_START
from tests.support.builders import (
    make_fetches,
    make_header,
    make_io_samples,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
    to_ns_array,
)
from tests.support.critical_threads import MAIN, MIB, WORKER, check_rows, list_shares, split_wait


def both(table: SpanTable) -> tuple[Int, Int]:
    return table.start_ns, table.end_ns


def one_worker(
    text: str,
    fetch: tuple[float, float],
    wait: tuple[float, float],
    read: int = MIB,
    began: float = -1,
    denied: tuple[str, ...] = (),
    sampled: bool = True,
) -> Rank:
    """A rank that waits once for a worker with one fetch; the worker's activity starts at 0."""
    rows = parse_activity(text)
    marks = {
        FETCH: make_fetches(rows, (*fetch, read)),
        WORKER_START: make_spans((began, began, 0, 1, MAIN)),
    }
    samples = make_thread(rows, end=rows[-1][1] / 1e9 + 1, denied=denied) if sampled else None
    worker = make_process(WORKER, MAIN, marks, samples)
    main = make_process(
        MAIN, spans={DATA_WAIT: make_spans((*wait, 0, WORKER, 1)), STEP: make_spans((0, 20))}
    )
    return make_rank(30, main, [worker])


def test_a_constantly_reading_worker_is_blocked_on_io() -> None:
    breakdown = split_wait(one_worker("D5", (0, 5), (0, 5)), 0, 5)
    assert list_shares(breakdown) == {"block_io": 1.0}
    assert breakdown.identified.tolist() == [True]
    assert breakdown.worker_pid.tolist() == [WORKER]


def test_a_constantly_computing_worker_uses_user_cpu() -> None:
    assert list_shares(split_wait(one_worker("U5", (0, 5), (0, 5), read=0), 0, 5)) == {
        "user_cpu": 1.0
    }


def wait_for_a_sleeping_process(doing: str, state: str = "S4") -> Rank:
    """The main thread waits for 4 s for a process of the job's own, which sleeps all the time."""
    maker = make_process(WORKER, MAIN, {}, make_thread(parse_activity(state), end=5))
    marks = {DATA_WAIT: make_spans((0, 4, 0, WORKER, 1)), STEP: make_spans((0, 20))}
    return make_rank(
        30,
        make_process(MAIN, spans=marks, thread=make_thread(parse_activity(doing), end=5)),
        [maker],
    )


def test_a_mostly_computing_waiting_thread_is_the_critical_thread() -> None:
    breakdown = split_wait(wait_for_a_sleeping_process("S1 U3"), 0, 4)
    assert list_shares(breakdown) == {"user_cpu": 0.75, "unknown": 0.25}
    assert breakdown.worker_pid.tolist() == [MAIN]
    # It computes for a quarter of the wait: the other process is still the one that it waits for.
    breakdown = split_wait(wait_for_a_sleeping_process("S3 U1"), 0, 4)
    assert list_shares(breakdown) == {"user_cpu": 0.25, "unknown": 0.75}
    assert breakdown.worker_pid.tolist() == [WORKER]
    # What the other process did comes first.
    breakdown = split_wait(wait_for_a_sleeping_process("S1 U3", "D2 S2"), 0, 4)
    assert list_shares(breakdown) == {"block_io": 0.5, "user_cpu": 0.5}
    # With a worker of a loader its fetches count, not what the main thread does meanwhile.
    assert list_shares(split_wait(one_worker("S5", (0, 5), (0, 5), read=0), 0, 5)) == {
        "unknown": 1.0
    }


def test_own_computing_within_a_wait_is_counted_only_once() -> None:
    # The other process has the lower number, so its waits are looked at first; then the main
    # thread's own are, of which this one is none.
    maker = make_process(MAIN - 1, MAIN, {}, make_thread(parse_activity("S5"), end=6))
    waits = make_spans((0, 4, 0, MAIN - 1, 1), (4, 5, 0, MAIN, 1))
    main = make_process(
        MAIN,
        spans={DATA_WAIT: waits, STEP: make_spans((0, 20))},
        thread=make_thread(parse_activity("S1 U3 D1"), end=6),
    )
    breakdown = split_wait(make_rank(30, main, [maker]), 0, 5)
    assert list_shares(breakdown) == {"user_cpu": 0.6, "block_io": 0.2, "unknown": 0.2}


def test_system_cpu_counts_as_reading_only_with_reads() -> None:
    # 1 s of kernel code reading 200 MB; without a read it is the user's own doing
    reads = split_wait(one_worker("K1 D3 U1", (0, 5), (0, 5), read=200_000_000), 0, 5)
    assert list_shares(reads) == {"reading_cpu": 0.2, "block_io": 0.6, "user_cpu": 0.2}
    idle = split_wait(one_worker("K1 S3 U1", (0, 5), (0, 5), read=0), 0, 5)
    assert list_shares(idle) == {"user_cpu": 0.4, "unknown": 0.6}


def test_reading_cpu_is_bounded_by_the_bytes_read() -> None:
    # 1 MiB at 20 ns a byte explains 20.97 ms of the second in the kernel: 0.004194 of 5 s
    breakdown = split_wait(one_worker("K1 U4", (0, 5), (0, 5)), 0, 5)
    assert list_shares(breakdown) == {"reading_cpu": 0.004194, "user_cpu": 0.995806}


def test_half_reading_and_half_computing_are_split_evenly() -> None:
    assert list_shares(split_wait(one_worker("D2 U2", (0, 4), (0, 4)), 0, 4)) == {
        "block_io": 0.5,
        "user_cpu": 0.5,
    }


def test_waiting_for_a_cpu_counts_as_runnable() -> None:
    # U1 R2 U1: half of the fetch it was ready to run and had no CPU
    breakdown = split_wait(one_worker("U1 R2 U1", (0, 4), (0, 4), read=0), 0, 4)
    assert list_shares(breakdown) == {"user_cpu": 0.5, "runnable": 0.5}


def test_run_delay_stays_with_its_own_fetch() -> None:
    # 100 times a read of 80 ms and a computation of 40 ms that gets a CPU half of the time: in
    # one sample interval both are off the CPU, but only the reading one was ever seen blocked
    rows = parse_activity("D0.08 U0.02 R0.02 " * 100)
    starts = [0.12 * i for i in range(100)]
    calls = [(s, s + 0.08, MIB) for s in starts] + [(s + 0.08, s + 0.12, 0) for s in starts]
    worker = make_process(WORKER, MAIN, {FETCH: make_fetches(rows, *calls)}, make_thread(rows, 13))
    waits = make_spans(*[(s, s + 0.08, 0, WORKER) for s in starts])
    breakdown = split_data_wait(
        make_rank(13, make_process(MAIN, spans={DATA_WAIT: waits}), [worker]), *both(waits)
    )
    check_rows(breakdown)
    assert breakdown.block_io.mean() > 0.98


def test_late_booked_cpu_time_moves_to_the_neighbouring_fetch() -> None:
    # the clock of 5 ms of pure CPU showed 8, then 2: both were on a CPU all the time
    ms = 1e6
    kept = fit_cpu_time(np.array([8.0, 2.0, 0.0]) * ms, np.array([5.0, 5.0, 50.0]) * ms)
    assert kept.sum() == 10 * ms
    assert kept[0] == 5 * ms
    table = make_spans((0, 0.005, 1, 8 * ms), (0.005, 0.01, 1, 2 * ms))
    worker = make_process(WORKER, MAIN, {FETCH: table})
    main = make_process(MAIN, spans={DATA_WAIT: make_spans((0, 0.01, 0, WORKER))})
    assert list_shares(split_wait(make_rank(1, main, [worker]), 0, 0.01)) == {"user_cpu": 1.0}
    # with one fetch alone nothing can be moved, and nothing exceeds the wall time
    assert fit_cpu_time(np.array([8.0]) * ms, np.array([5.0]) * ms).tolist() == [5 * ms]


@pytest.mark.parametrize(
    ("letter", "name"),
    [
        ("N", "remote_io"),
        ("M", "memory"),
        ("S", "unknown"),
        ("D", "block_io"),
        ("W", "socket"),
        ("I", "unknown"),
        ("L", "unknown"),
        ("F", "block_io"),
    ],
)
def test_blocked_fetch_time_goes_to_its_wait_channel(letter: str, name: str) -> None:
    breakdown = split_wait(one_worker(f"{letter}3 U1", (0, 4), (0, 4)), 0, 4)
    assert list_shares(breakdown) == {name: 0.75, "user_cpu": 0.25}


def test_time_before_the_worker_starts_counts_as_no_worker() -> None:
    # wait 0-10: worker begins at 4, idles to 5, fetches 5-9, batch arrives at 10
    rows = one_worker("I5 D4 I1", (5, 9), (0, 10), began=4)
    assert list_shares(split_wait(rows, 0, 10)) == {
        "no_worker": 0.4,
        "no_work": 0.1,
        "block_io": 0.4,
        "delivery": 0.1,
    }


def test_worker_setup_before_the_first_fetch_counts_as_no_worker() -> None:
    # as above, but the fetch 5-9 is the first record after its loop began at 4
    rows = one_worker("I5 D4 I1", (5, 9), (0, 10), began=4)
    marks = rows.workers[0].spans
    first = replace(marks[FETCH], sequence=marks[WORKER_START].sequence + 1)
    worker = replace(rows.workers[0], spans={**marks, FETCH: first})
    timeline = make_rank(30, rows.main, [worker])
    assert list_shares(split_wait(timeline, 0, 10)) == {
        "no_worker": 0.5,
        "block_io": 0.4,
        "delivery": 0.1,
    }


def test_pieces_of_a_wait_are_split_separately() -> None:
    given = one_worker("I5 D4 I1", (5, 9), (0, 10), began=4)
    breakdown = split_data_wait(
        given, to_ns_array([0, 3, 6, 9, 10]), to_ns_array([3, 6, 9, 10, 12])
    )
    check_rows(breakdown)
    assert list_shares(breakdown, 0) == {"no_worker": 1.0}
    thirds = {"no_worker": 0.333333, "no_work": 0.333333, "block_io": 0.333333}
    assert list_shares(breakdown, 1) == thirds
    assert list_shares(breakdown, 2) == {"block_io": 1.0}
    assert list_shares(breakdown, 3) == {"delivery": 1.0}
    assert list_shares(breakdown, 4) == {
        "unknown": 1.0
    }  # outside the wait; the main thread has no samples
    assert breakdown.identified.tolist() == [True, True, True, True, False]
    assert breakdown.worker_pid.tolist() == [WORKER] * 4 + [0]


def test_idle_time_between_fetches_counts_as_no_work() -> None:
    # the awaited batch is that of the second fetch; from 2 to 5 the worker had nothing to do
    rows = parse_activity("D2 I3 D3")
    marks = {
        FETCH: make_fetches(rows, (0, 2, MIB), (5, 8, MIB)),
        WORKER_START: make_spans((-1, -1)),
    }
    worker = make_process(WORKER, MAIN, marks, make_thread(rows, 9))
    main = make_process(MAIN, spans={DATA_WAIT: make_spans((1, 8, 0, WORKER, 1))})
    # 1-2 and 5-8 in a fetch, 2-5 between: 4/7 and 3/7
    assert list_shares(split_wait(make_rank(9, main, [worker]), 1, 8)) == {
        "block_io": 0.571429,
        "no_work": 0.428571,
    }


def test_waiting_for_a_ready_batch_counts_as_delivery() -> None:
    assert list_shares(split_wait(one_worker("D2 I2", (0, 2), (3, 3.5)), 3, 3.5)) == {
        "delivery": 1.0
    }


def test_a_missing_fetch_record_makes_the_wait_unknown() -> None:
    # records 1 and 3 are there, 2 was dropped: what ended the wait 2-6 is not known
    rows = parse_activity("D8")
    table = make_fetches(rows, (0, 2, MIB), (6, 8, MIB))
    holed = replace(table, sequence=np.array([1, 3]))
    worker = make_process(
        WORKER, MAIN, {FETCH: holed, WORKER_START: make_spans((-1, -1))}, make_thread(rows, 9)
    )
    main = make_process(MAIN, spans={DATA_WAIT: make_spans((2, 6, 0, WORKER, 1))})
    assert list_shares(split_wait(make_rank(9, main, [worker]), 2, 6)) == {"unknown": 1.0}


def test_loading_in_the_main_thread_is_split() -> None:
    # fetch 0-4 half disk, then half a second of collating inside the wait
    rows = parse_activity("D2 U2 U1")
    marks = {FETCH: make_fetches(rows, (0, 4, MIB)), DATA_WAIT: make_spans((0, 5, 0, 0, 0))}
    main = make_process(MAIN, spans=marks, thread=make_thread(rows, 6))
    breakdown = split_wait(make_rank(6, main), 0, 5)
    assert list_shares(breakdown) == {"block_io": 0.4, "user_cpu": 0.6}
    assert breakdown.worker_pid.tolist() == [MAIN]
    assert breakdown.identified.tolist() == [True]


def test_an_unnamed_wait_goes_to_the_last_finishing_worker() -> None:
    def worker(pid: int, text: str, end: float) -> Process:
        rows = parse_activity(text)
        return make_process(
            pid, MAIN, {FETCH: make_fetches(rows, (0, end, 0))}, make_thread(rows, 6)
        )

    main = make_process(MAIN, spans={DATA_WAIT: make_spans((1, 5, -1, -1, 2))})
    breakdown = split_wait(
        make_rank(6, main, [worker(201, "S3 I2", 3), worker(202, "U5", 5)]), 1, 5
    )
    assert list_shares(breakdown) == {"user_cpu": 1.0}
    assert breakdown.worker_pid.tolist() == [202]
    assert breakdown.identified.tolist() == [False]


def test_an_unmeasured_fetch_is_split_by_process_samples() -> None:
    # 100 MB while the worker was on a CPU for 1 s, in the kernel for 3 s and blocked for 4 s
    rows = parse_activity("U1 K3 D4 I2")
    table = make_fetches(rows, (0, 8, -1))
    bare = replace(table, b=np.array([-1]), c=np.array([-1]), d=np.array([-1]))
    read = make_io_samples([0, 8, 10], read_bytes=[0, 200_000_000, 200_000_000])
    worker = make_process(WORKER, MAIN, {FETCH: bare}, make_thread(rows, 10), io=read)
    main = make_process(MAIN, spans={DATA_WAIT: make_spans((0, 8, -1, -1, 0))})
    breakdown = split_wait(make_rank(10, main, [worker]), 0, 8)
    assert list_shares(breakdown) == {"user_cpu": 0.125, "reading_cpu": 0.375, "block_io": 0.5}
    assert breakdown.identified.tolist() == [True]  # nobody else fetches


def test_a_reading_fetch_without_samples_is_blocked_on_io() -> None:
    breakdown = split_wait(one_worker("D3 U1", (0, 4), (0, 4), sampled=False), 0, 4)
    assert list_shares(breakdown) == {"block_io": 0.75, "user_cpu": 0.25}


def test_without_samples_and_reads_blocked_time_is_unknown() -> None:
    breakdown = split_wait(one_worker("D3 U1", (0, 4), (0, 4), read=0, sampled=False), 0, 4)
    assert list_shares(breakdown) == {"unknown": 0.75, "user_cpu": 0.25}


def test_denied_run_delay_is_estimated_from_thread_states() -> None:
    # in state R at 75 % of the samples, on a CPU for 25 %: half of the time it waited for one
    given = one_worker("U1 R2 D1", (0, 4), (0, 4), denied=("run_delay_ns",))
    result = list_shares(split_wait(given, 0, 4))
    assert result["user_cpu"] == 0.25
    assert result["runnable"] == pytest.approx(0.5, abs=0.02)
    assert result["block_io"] == pytest.approx(0.25, abs=0.02)


def test_an_unnamed_d_state_counts_as_io_only_with_reads() -> None:
    reads = one_worker("D3 U1", (0, 4), (0, 4), denied=("wchan",))
    assert list_shares(split_wait(reads, 0, 4)) == {"block_io": 0.75, "user_cpu": 0.25}
    none = one_worker("D3 U1", (0, 4), (0, 4), read=0, denied=("wchan",))
    assert list_shares(split_wait(none, 0, 4)) == {"unknown": 0.75, "user_cpu": 0.25}


def test_a_wait_without_spans_goes_to_the_busiest_worker() -> None:
    idle = make_process(201, MAIN, thread=make_thread(parse_activity("I10"), 10))
    busy = make_process(202, MAIN, thread=make_thread(parse_activity("D6 U2 I2"), 10))
    main = make_process(MAIN, thread=make_thread(parse_activity("I10"), 10))
    breakdown = split_wait(make_rank(10, main, [idle, busy], marked=False), 0, 8)
    assert list_shares(breakdown)["user_cpu"] == 0.25  # 2 of 8 s
    assert list_shares(breakdown)["block_io"] == pytest.approx(0.75, abs=0.02)
    assert breakdown.worker_pid.tolist() == [202]
    assert breakdown.identified.tolist() == [False]


def test_a_wait_for_own_threads_goes_to_the_busiest_thread() -> None:
    # The main thread waits from 1 to 5 s. One of its threads reads for 3 s of it and computes 1 s,
    # another one hardly does anything; the driver's thread works for the main thread.
    threads = {
        MAIN: make_thread(parse_activity("U1 L4 U1"), 6),
        101: replace(make_thread(parse_activity("U1 D3 U1 I1"), 6), name="python"),
        102: replace(make_thread(parse_activity("S5.5 U0.5"), 6), name="python"),
        103: replace(make_thread(parse_activity("U6"), 6), name="pt_autograd_0"),
    }
    waits = {DATA_WAIT: make_spans((1, 5, -1, -1, -1, -1))}
    main = replace(make_process(MAIN, spans=waits), threads=threads)
    breakdown = split_wait(make_rank(6, main), 1, 5)
    assert list_shares(breakdown)["user_cpu"] == 0.25
    assert list_shares(breakdown)["block_io"] == pytest.approx(0.75, abs=0.02)
    assert breakdown.identified.tolist() == [False]
    # One thread alone makes them, then. So does one process, beside any threads.
    del threads[102]
    alone = split_wait(make_rank(6, replace(main, threads=threads)), 1, 5)
    assert (alone.identified.tolist(), alone.worker_pid.tolist()) == ([True], [MAIN])
    # Its workers, if it has any that are active, make the batches.
    worker = make_process(WORKER, MAIN, thread=make_thread(parse_activity("I1 U2 I3"), 6))
    by_worker = split_wait(make_rank(6, main, [worker]), 1, 5)
    assert list_shares(by_worker) == {"user_cpu": 0.5, "unknown": 0.5}
    assert (by_worker.identified.tolist(), by_worker.worker_pid.tolist()) == ([True], [WORKER])


def test_the_fetching_thread_is_found_by_cpu_time() -> None:
    # Four fetches of 1 s: another thread computes for 0.5 s and is blocked in a read for 0.5 s.
    text = "U0.5 D0.5 " * 4
    calls = [(second, second + 1, MIB) for second in range(4)]
    threads = {
        MAIN: make_thread(parse_activity("L4"), 5),
        101: replace(make_thread(parse_activity(text), 5), name="python"),
        102: replace(make_thread(parse_activity("S2 U2"), 5), name="python"),
    }
    marks = {
        DATA_WAIT: make_spans((0, 4, -1, -1, -1, -1)),
        FETCH: make_fetches(parse_activity(text), *calls),
    }
    main = replace(make_process(MAIN, spans=marks), threads=threads)
    assert list_shares(split_wait(make_rank(5, main), 0, 4)) == {"user_cpu": 0.5, "block_io": 0.5}


def test_a_wait_without_any_signal_is_unknown() -> None:
    breakdown = split_wait(make_rank(10, make_process(MAIN), [], marked=False), 0, 8)
    assert list_shares(breakdown) == {"unknown": 1.0}
    assert breakdown.worker_pid.tolist() == [0]
    none = split_data_wait(make_rank(10, make_process(MAIN), []), to_ns_array([]), to_ns_array([]))
    assert none.unknown.shape == (0,)


def test_an_empty_interval_is_unknown() -> None:
    assert list_shares(split_wait(one_worker("D5", (0, 5), (0, 5)), 3, 3)) == {"unknown": 1.0}


def test_page_reads_without_disk_reads_go_to_the_mount() -> None:
    from tests.support.builders import make_counter

    rows = parse_activity("D4")
    marks = {FETCH: make_fetches(rows, (0, 4, 100 * MIB)), WORKER_START: make_spans((-1, -1))}
    worker = make_process(WORKER, MAIN, marks, make_thread(rows, 5))
    main = make_process(MAIN, spans={DATA_WAIT: make_spans((0, 4, 0, WORKER, 1))})
    series = {
        ("disk.read_bytes_total", "vda"): make_counter([0, 5], [0, 0]),
        ("nfs.read_bytes_total", "/data"): make_counter([0, 5], [0, 100 * MIB]),
    }
    node = make_header(mounts=[{"point": "/data", "type": "nfs4"}])
    given = make_rank(5, main, [worker], series=series, node=node)
    assert list_shares(split_wait(given, 0, 4)) == {"remote_io": 1.0}
