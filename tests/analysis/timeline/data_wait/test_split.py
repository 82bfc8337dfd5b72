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
from tests.support.builders import activity, fetches, header, ints, io, process, rank, spans, thread
from tests.support.critical_threads import MAIN, MIB, WORKER, check_rows, fed, row


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
    rows = activity(text)
    marks = {FETCH: fetches(rows, (*fetch, read)), WORKER_START: spans((began, began, 0, 1, MAIN))}
    samples = thread(rows, end=rows[-1][1] / 1e9 + 1, denied=denied) if sampled else None
    worker = process(WORKER, MAIN, marks, samples)
    main = process(MAIN, spans={DATA_WAIT: spans((*wait, 0, WORKER, 1)), STEP: spans((0, 20))})
    return rank(30, main, [worker])


def test_a_worker_that_reads_all_the_time() -> None:
    breakdown = fed(one_worker("D5", (0, 5), (0, 5)), 0, 5)
    assert row(breakdown) == {"block_io": 1.0}
    assert breakdown.identified.tolist() == [True]
    assert breakdown.worker_pid.tolist() == [WORKER]


def test_a_worker_that_computes_all_the_time() -> None:
    assert row(fed(one_worker("U5", (0, 5), (0, 5), read=0), 0, 5)) == {"user_cpu": 1.0}


def wait_for_a_sleeping_process(doing: str, state: str = "S4") -> Rank:
    """The main thread waits for 4 s for a process of the job's own, which sleeps all the time."""
    maker = process(WORKER, MAIN, {}, thread(activity(state), end=5))
    marks = {DATA_WAIT: spans((0, 4, 0, WORKER, 1)), STEP: spans((0, 20))}
    return rank(30, process(MAIN, spans=marks, thread=thread(activity(doing), end=5)), [maker])


def test_a_thread_that_unpickles_what_it_waited_for_computes_itself() -> None:
    breakdown = fed(wait_for_a_sleeping_process("S1 U3"), 0, 4)
    assert row(breakdown) == {"user_cpu": 0.75, "unknown": 0.25}
    assert breakdown.worker_pid.tolist() == [MAIN]
    # It computes for a quarter of the wait: the other process is still the one that it waits for.
    breakdown = fed(wait_for_a_sleeping_process("S3 U1"), 0, 4)
    assert row(breakdown) == {"user_cpu": 0.25, "unknown": 0.75}
    assert breakdown.worker_pid.tolist() == [WORKER]
    # What the other process did comes first.
    breakdown = fed(wait_for_a_sleeping_process("S1 U3", "D2 S2"), 0, 4)
    assert row(breakdown) == {"block_io": 0.5, "user_cpu": 0.5}
    # With a worker of a loader its fetches count, not what the main thread does meanwhile.
    assert row(fed(one_worker("S5", (0, 5), (0, 5), read=0), 0, 5)) == {"unknown": 1.0}


def test_a_wait_in_which_the_thread_computes_itself_counts_once() -> None:
    # The other process has the lower number, so its waits are looked at first; then the main
    # thread's own are, of which this one is none.
    maker = process(MAIN - 1, MAIN, {}, thread(activity("S5"), end=6))
    waits = spans((0, 4, 0, MAIN - 1, 1), (4, 5, 0, MAIN, 1))
    main = process(
        MAIN,
        spans={DATA_WAIT: waits, STEP: spans((0, 20))},
        thread=thread(activity("S1 U3 D1"), end=6),
    )
    breakdown = fed(rank(30, main, [maker]), 0, 5)
    assert row(breakdown) == {"user_cpu": 0.6, "block_io": 0.2, "unknown": 0.2}


def test_system_cpu_belongs_to_the_reading_when_there_was_one() -> None:
    # 1 s of kernel code reading 200 MB; without a read it is the user's own doing
    reads = fed(one_worker("K1 D3 U1", (0, 5), (0, 5), read=200_000_000), 0, 5)
    assert row(reads) == {"reading_cpu": 0.2, "block_io": 0.6, "user_cpu": 0.2}
    idle = fed(one_worker("K1 S3 U1", (0, 5), (0, 5), read=0), 0, 5)
    assert row(idle) == {"user_cpu": 0.4, "unknown": 0.6}


def test_reading_cpu_is_bounded_by_what_the_bytes_can_cost() -> None:
    # 1 MiB at 20 ns a byte explains 20.97 ms of the second in the kernel: 0.004194 of 5 s
    breakdown = fed(one_worker("K1 U4", (0, 5), (0, 5)), 0, 5)
    assert row(breakdown) == {"reading_cpu": 0.004194, "user_cpu": 0.995806}


def test_half_and_half() -> None:
    assert row(fed(one_worker("D2 U2", (0, 4), (0, 4)), 0, 4)) == {"block_io": 0.5, "user_cpu": 0.5}


def test_runnable_without_a_cpu() -> None:
    # U1 R2 U1: half of the fetch it was ready to run and had no CPU
    breakdown = fed(one_worker("U1 R2 U1", (0, 4), (0, 4), read=0), 0, 4)
    assert row(breakdown) == {"user_cpu": 0.5, "runnable": 0.5}


def test_a_wait_for_a_cpu_stays_with_the_fetch_that_had_it() -> None:
    # 100 times a read of 80 ms and a computation of 40 ms that gets a CPU half of the time: in
    # one sample interval both are off the CPU, but only the reading one was ever seen blocked
    rows = activity("D0.08 U0.02 R0.02 " * 100)
    starts = [0.12 * i for i in range(100)]
    calls = [(s, s + 0.08, MIB) for s in starts] + [(s + 0.08, s + 0.12, 0) for s in starts]
    worker = process(WORKER, MAIN, {FETCH: fetches(rows, *calls)}, thread(rows, 13))
    waits = spans(*[(s, s + 0.08, 0, WORKER) for s in starts])
    breakdown = split_data_wait(
        rank(13, process(MAIN, spans={DATA_WAIT: waits}), [worker]), *both(waits)
    )
    check_rows(breakdown)
    assert breakdown.block_io.mean() > 0.98


def test_cpu_time_booked_late_goes_back_to_its_neighbour() -> None:
    # the clock of 5 ms of pure CPU showed 8, then 2: both were on a CPU all the time
    ms = 1e6
    kept = fit_cpu_time(np.array([8.0, 2.0, 0.0]) * ms, np.array([5.0, 5.0, 50.0]) * ms)
    assert kept.sum() == 10 * ms
    assert kept[0] == 5 * ms
    table = spans((0, 0.005, 1, 8 * ms), (0.005, 0.01, 1, 2 * ms))
    worker = process(WORKER, MAIN, {FETCH: table})
    main = process(MAIN, spans={DATA_WAIT: spans((0, 0.01, 0, WORKER))})
    assert row(fed(rank(1, main, [worker]), 0, 0.01)) == {"user_cpu": 1.0}
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
def test_what_a_fetch_was_blocked_on(letter: str, name: str) -> None:
    breakdown = fed(one_worker(f"{letter}3 U1", (0, 4), (0, 4)), 0, 4)
    assert row(breakdown) == {name: 0.75, "user_cpu": 0.25}


def test_before_the_worker_began_there_was_none() -> None:
    # wait 0-10: worker begins at 4, idles to 5, fetches 5-9, batch arrives at 10
    rows = one_worker("I5 D4 I1", (5, 9), (0, 10), began=4)
    assert row(fed(rows, 0, 10)) == {
        "no_worker": 0.4,
        "no_work": 0.1,
        "block_io": 0.4,
        "delivery": 0.1,
    }


def test_a_worker_that_sets_itself_up_before_its_first_fetch_is_not_there_yet() -> None:
    # as above, but the fetch 5-9 is the first record after its loop began at 4
    rows = one_worker("I5 D4 I1", (5, 9), (0, 10), began=4)
    marks = rows.workers[0].spans
    first = replace(marks[FETCH], sequence=marks[WORKER_START].sequence + 1)
    worker = replace(rows.workers[0], spans={**marks, FETCH: first})
    timeline = rank(30, rows.main, [worker])
    assert row(fed(timeline, 0, 10)) == {"no_worker": 0.5, "block_io": 0.4, "delivery": 0.1}


def test_pieces_of_a_wait_get_what_happened_inside_them() -> None:
    given = one_worker("I5 D4 I1", (5, 9), (0, 10), began=4)
    breakdown = split_data_wait(given, ints([0, 3, 6, 9, 10]), ints([3, 6, 9, 10, 12]))
    check_rows(breakdown)
    assert row(breakdown, 0) == {"no_worker": 1.0}
    thirds = {"no_worker": 0.333333, "no_work": 0.333333, "block_io": 0.333333}
    assert row(breakdown, 1) == thirds
    assert row(breakdown, 2) == {"block_io": 1.0}
    assert row(breakdown, 3) == {"delivery": 1.0}
    assert row(breakdown, 4) == {"unknown": 1.0}  # outside the wait; the main thread has no samples
    assert breakdown.identified.tolist() == [True, True, True, True, False]
    assert breakdown.worker_pid.tolist() == [WORKER] * 4 + [0]


def test_prefetch_ran_dry_between_two_fetches() -> None:
    # the awaited batch is that of the second fetch; from 2 to 5 the worker had nothing to do
    rows = activity("D2 I3 D3")
    marks = {FETCH: fetches(rows, (0, 2, MIB), (5, 8, MIB)), WORKER_START: spans((-1, -1))}
    worker = process(WORKER, MAIN, marks, thread(rows, 9))
    main = process(MAIN, spans={DATA_WAIT: spans((1, 8, 0, WORKER, 1))})
    # 1-2 and 5-8 in a fetch, 2-5 between: 4/7 and 3/7
    assert row(fed(rank(9, main, [worker]), 1, 8)) == {"block_io": 0.571429, "no_work": 0.428571}


def test_a_batch_that_was_ready_is_only_delivered() -> None:
    assert row(fed(one_worker("D2 I2", (0, 2), (3, 3.5)), 3, 3.5)) == {"delivery": 1.0}


def test_a_missing_record_is_not_taken_for_a_ready_batch() -> None:
    # records 1 and 3 are there, 2 was dropped: what ended the wait 2-6 is not known
    rows = activity("D8")
    table = fetches(rows, (0, 2, MIB), (6, 8, MIB))
    holed = replace(table, sequence=np.array([1, 3]))
    worker = process(WORKER, MAIN, {FETCH: holed, WORKER_START: spans((-1, -1))}, thread(rows, 9))
    main = process(MAIN, spans={DATA_WAIT: spans((2, 6, 0, WORKER, 1))})
    assert row(fed(rank(9, main, [worker]), 2, 6)) == {"unknown": 1.0}


def test_the_main_thread_loads_itself() -> None:
    # fetch 0-4 half disk, then half a second of collating inside the wait
    rows = activity("D2 U2 U1")
    marks = {FETCH: fetches(rows, (0, 4, MIB)), DATA_WAIT: spans((0, 5, 0, 0, 0))}
    main = process(MAIN, spans=marks, thread=thread(rows, 6))
    breakdown = fed(rank(6, main), 0, 5)
    assert row(breakdown) == {"block_io": 0.4, "user_cpu": 0.6}
    assert breakdown.worker_pid.tolist() == [MAIN]
    assert breakdown.identified.tolist() == [True]


def test_a_wait_that_names_no_worker_waited_for_the_last_to_finish() -> None:
    def worker(pid: int, text: str, end: float) -> Process:
        rows = activity(text)
        return process(pid, MAIN, {FETCH: fetches(rows, (0, end, 0))}, thread(rows, 6))

    main = process(MAIN, spans={DATA_WAIT: spans((1, 5, -1, -1, 2))})
    breakdown = fed(rank(6, main, [worker(201, "S3 I2", 3), worker(202, "U5", 5)]), 1, 5)
    assert row(breakdown) == {"user_cpu": 1.0}
    assert breakdown.worker_pid.tolist() == [202]
    assert breakdown.identified.tolist() == [False]


def test_a_fetch_that_did_not_measure_itself_is_distinguished_from_its_process() -> None:
    # 100 MB while the worker was on a CPU for 1 s, in the kernel for 3 s and blocked for 4 s
    rows = activity("U1 K3 D4 I2")
    table = fetches(rows, (0, 8, -1))
    bare = replace(table, b=np.array([-1]), c=np.array([-1]), d=np.array([-1]))
    read = io([0, 8, 10], read_bytes=[0, 200_000_000, 200_000_000])
    worker = process(WORKER, MAIN, {FETCH: bare}, thread(rows, 10), io=read)
    main = process(MAIN, spans={DATA_WAIT: spans((0, 8, -1, -1, 0))})
    breakdown = fed(rank(10, main, [worker]), 0, 8)
    assert row(breakdown) == {"user_cpu": 0.125, "reading_cpu": 0.375, "block_io": 0.5}
    assert breakdown.identified.tolist() == [True]  # nobody else fetches


def test_without_samples_a_fetch_that_read_was_blocked_on_the_disk() -> None:
    breakdown = fed(one_worker("D3 U1", (0, 4), (0, 4), sampled=False), 0, 4)
    assert row(breakdown) == {"block_io": 0.75, "user_cpu": 0.25}


def test_without_samples_and_reads_blocked_time_is_unknown() -> None:
    breakdown = fed(one_worker("D3 U1", (0, 4), (0, 4), read=0, sampled=False), 0, 4)
    assert row(breakdown) == {"unknown": 0.75, "user_cpu": 0.25}


def test_denied_run_delay_is_distinguished_from_states() -> None:
    # in state R at 75 % of the samples, on a CPU for 25 %: half of the time it waited for one
    given = one_worker("U1 R2 D1", (0, 4), (0, 4), denied=("run_delay_ns",))
    result = row(fed(given, 0, 4))
    assert result["user_cpu"] == 0.25
    assert result["runnable"] == pytest.approx(0.5, abs=0.02)
    assert result["block_io"] == pytest.approx(0.25, abs=0.02)


def test_a_nameless_d_is_a_read_only_where_bytes_were_read() -> None:
    reads = one_worker("D3 U1", (0, 4), (0, 4), denied=("wchan",))
    assert row(fed(reads, 0, 4)) == {"block_io": 0.75, "user_cpu": 0.25}
    none = one_worker("D3 U1", (0, 4), (0, 4), read=0, denied=("wchan",))
    assert row(fed(none, 0, 4)) == {"unknown": 0.75, "user_cpu": 0.25}


def test_a_rank_without_spans_is_recognized_by_its_busiest_worker() -> None:
    idle = process(201, MAIN, thread=thread(activity("I10"), 10))
    busy = process(202, MAIN, thread=thread(activity("D6 U2 I2"), 10))
    main = process(MAIN, thread=thread(activity("I10"), 10))
    breakdown = fed(rank(10, main, [idle, busy], marked=False), 0, 8)
    assert row(breakdown)["user_cpu"] == 0.25  # 2 of 8 s
    assert row(breakdown)["block_io"] == pytest.approx(0.75, abs=0.02)
    assert breakdown.worker_pid.tolist() == [202]
    assert breakdown.identified.tolist() == [False]


def test_a_wait_for_threads_of_the_own_process_is_what_the_busiest_of_them_did() -> None:
    # The main thread waits from 1 to 5 s. One of its threads reads for 3 s of it and computes 1 s,
    # another one hardly does anything; the driver's thread works for the main thread.
    threads = {
        MAIN: thread(activity("U1 L4 U1"), 6),
        101: replace(thread(activity("U1 D3 U1 I1"), 6), name="python"),
        102: replace(thread(activity("S5.5 U0.5"), 6), name="python"),
        103: replace(thread(activity("U6"), 6), name="pt_autograd_0"),
    }
    waits = {DATA_WAIT: spans((1, 5, -1, -1, -1, -1))}
    main = replace(process(MAIN, spans=waits), threads=threads)
    breakdown = fed(rank(6, main), 1, 5)
    assert row(breakdown)["user_cpu"] == 0.25
    assert row(breakdown)["block_io"] == pytest.approx(0.75, abs=0.02)
    assert breakdown.identified.tolist() == [False]
    # One thread alone makes them, then. So does one process, beside any threads.
    del threads[102]
    alone = fed(rank(6, replace(main, threads=threads)), 1, 5)
    assert (alone.identified.tolist(), alone.worker_pid.tolist()) == ([True], [MAIN])
    # Its workers, if it has any that are active, make the batches.
    worker = process(WORKER, MAIN, thread=thread(activity("I1 U2 I3"), 6))
    by_worker = fed(rank(6, main, [worker]), 1, 5)
    assert row(by_worker) == {"user_cpu": 0.5, "unknown": 0.5}
    assert (by_worker.identified.tolist(), by_worker.worker_pid.tolist()) == ([True], [WORKER])


def test_a_thread_that_fetches_is_found_by_its_cpu_time() -> None:
    # Four fetches of 1 s: another thread computes for 0.5 s and is blocked in a read for 0.5 s.
    text = "U0.5 D0.5 " * 4
    calls = [(second, second + 1, MIB) for second in range(4)]
    threads = {
        MAIN: thread(activity("L4"), 5),
        101: replace(thread(activity(text), 5), name="python"),
        102: replace(thread(activity("S2 U2"), 5), name="python"),
    }
    marks = {DATA_WAIT: spans((0, 4, -1, -1, -1, -1)), FETCH: fetches(activity(text), *calls)}
    main = replace(process(MAIN, spans=marks), threads=threads)
    assert row(fed(rank(5, main), 0, 4)) == {"user_cpu": 0.5, "block_io": 0.5}


def test_nothing_known_is_all_unknown() -> None:
    breakdown = fed(rank(10, process(MAIN), [], marked=False), 0, 8)
    assert row(breakdown) == {"unknown": 1.0}
    assert breakdown.worker_pid.tolist() == [0]
    none = split_data_wait(rank(10, process(MAIN), []), ints([]), ints([]))
    assert none.unknown.shape == (0,)


def test_an_empty_interval_is_unknown() -> None:
    assert row(fed(one_worker("D5", (0, 5), (0, 5)), 3, 3)) == {"unknown": 1.0}


def test_reads_of_a_page_go_to_the_mount_when_no_disk_read_them() -> None:
    from tests.support.builders import counter

    rows = activity("D4")
    marks = {FETCH: fetches(rows, (0, 4, 100 * MIB)), WORKER_START: spans((-1, -1))}
    worker = process(WORKER, MAIN, marks, thread(rows, 5))
    main = process(MAIN, spans={DATA_WAIT: spans((0, 4, 0, WORKER, 1))})
    series = {
        ("disk.read_bytes_total", "vda"): counter([0, 5], [0, 0]),
        ("nfs.read_bytes_total", "/data"): counter([0, 5], [0, 100 * MIB]),
    }
    node = header(mounts=[{"point": "/data", "type": "nfs4"}])
    given = rank(5, main, [worker], series=series, node=node)
    assert row(fed(given, 0, 4)) == {"remote_io": 1.0}
