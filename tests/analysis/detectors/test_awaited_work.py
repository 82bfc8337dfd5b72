"""For whom a training thread waits inside steps: who is named, for how much, and who never is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.attribution.rank.claims import compute_data_wait_breakdown
from clusterprof.analysis.detectors.awaited_work import (
    BUSY,
    CONNECTION,
    LOCK,
    TIMER,
    AwaitedWork,
    find_awaited_work,
)
from clusterprof.analysis.detectors.cpu.contention import CpuContention
from clusterprof.analysis.detectors.cpu.preprocess import CpuPreprocess
from clusterprof.analysis.detectors.phases.eval_host import EvalHost
from clusterprof.analysis.detectors.phases.host_asleep import HostAsleep
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    LostTime,
    Process,
    Rank,
)
from clusterprof.analysis.timeline.spans import StackSamples
from clusterprof.analysis.timeline.stacks import StackTree
from clusterprof.probe import layout
from clusterprof.report.code import CodeLocation
from clusterprof.report.model import UNKNOWN_RESOURCE, ResourceFacts
from tests.support.builders import (
    make_header,
    make_io_samples,
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)

END_S = 10.0
OUTSIDE, POLL, SLEEP, GET, PUT, POOL = range(2, 8)
"""Stacks of the training thread: in its own line, which polls or not, in a queue, in a pool."""
SOURCE = """\
import os, time

def poll(path):
    while not os.path.exists(path):
        time.sleep(0.01)

def rest():
    time.sleep(0.03)
"""
POLL_LINE, SLEEP_LINE = 5, 8


def stack_table(file: str) -> StackTree:
    places = (
        CodeLocation("/job/train.py", 1, "main"),
        CodeLocation("/job/train.py", 2, "ask"),
        CodeLocation(file, POLL_LINE, "poll"),
        CodeLocation(file, SLEEP_LINE, "rest"),
        CodeLocation("/usr/lib/python3.11/multiprocessing/queues.py", 1, "Queue.get"),
        CodeLocation("/usr/lib/python3.11/multiprocessing/queues.py", 2, "Queue.put"),
        CodeLocation("/usr/lib/python3.11/multiprocessing/pool.py", 1, "IMapIterator.next"),
    )
    return StackTree(places, np.array([0, 0, *[1] * 6]), np.array([-1, 0, 1, 2, 3, 4, 5, 6]))


def sample_stacks(stack: int, state: str) -> StackSamples:
    start = np.arange(0, ns(END_S), ns(0.1), dtype=np.int64)
    zero = np.zeros(start.size, np.int64)
    states = zero + ord(state)
    return StackSamples(start, start, zero, zero + stack, zero + ns(0.1), zero, states)


def job(
    doing: str,
    *others: Process,
    stack: int = 0,
    state: str = "S",
    file: str = "/gone.py",
    node: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    denied: Sequence[str] = (),
) -> Rank:
    """A rank of 10 s whose training thread does something beside other processes."""
    main = make_process(
        100,
        spans={layout.STEP: make_spans((0, END_S, 0, 0, 0, 0))},
        thread=make_thread(parse_activity(doing), END_S, denied=denied),
        **(more or {}),
    )
    if stack:
        main = replace(main, stacks=sample_stacks(stack, state))
    timeline = make_rank(END_S, main, node=replace(make_header(), **(node or {})))
    known = {item.pid: item for item in (main, *others)}
    chunk = replace(timeline.chunk, processes=known, stacks=stack_table(file))
    return replace(timeline, chunk=chunk)


def helper(doing: str, pid: int = 201, parent: int = 100, **more: Any) -> Process:
    return make_process(pid, parent, thread=make_thread(parse_activity(doing), END_S), **more)


def pieces() -> LostTime:
    """The whole job as one lost segment of 10 s of which 8 are lost."""
    return make_lost_segments((0, END_S, 8, PHASE_COMPUTE), step=3)


def find_alone(timeline: Rank) -> AwaitedWork:
    (work,) = find_awaited_work(timeline, pieces())
    return work


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "feed.py"
    file.write_text(SOURCE)
    return str(file)


LATER = {"started": {"monotonic_ns": 0, "boottime_ns": 0, "realtime_ns": 1 << 62}}
"""A recording that began after the file of the job was written."""
POLLS = "U1 S9"


def test_a_poll_names_the_only_process_that_was_active(source: str) -> None:
    # Asleep for 9 of 10 s in a loop that polls. The child computes for 9 s and rests for one:
    # 0.9 x 0.9 of the lost time.
    work = find_alone(job(POLLS, helper("U9 I1"), stack=POLL, file=source, node=LATER))
    assert (work.wait_reason, work.resource) == (TIMER, "process python pid 201")
    assert (work.takes_output, work.is_sure) == (False, True)
    np.testing.assert_allclose(work.share, [0.9])
    np.testing.assert_allclose(work.active_share, [0.81])


def test_a_process_outside_the_job_is_less_certain(source: str) -> None:
    other = helper("U10", parent=1)
    assert not find_alone(job(POLLS, other, stack=POLL, file=source, node=LATER)).is_sure


@pytest.mark.parametrize(
    ("stack", "node"),
    [
        (SLEEP, LATER),  # the line is in no loop: the sleep is the reason
        (POLL, {}),  # the file may have changed since: not known
        (0, LATER),  # no stacks
    ],
)
def test_a_busy_process_beside_a_plain_sleep_is_not_awaited(
    stack: int, node: Mapping[str, Any], source: str
) -> None:
    timeline = job(POLLS, helper("U10"), stack=stack, file=source, node=node)
    assert find_awaited_work(timeline, pieces()) == ()


def test_two_active_processes_are_not_named(source: str) -> None:
    both = helper("U10"), helper("U10", 202)
    assert not find_awaited_work(job(POLLS, *both, stack=POLL, file=source, node=LATER), pieces())


def test_a_process_that_is_mostly_idle_is_not_awaited(source: str) -> None:
    timeline = job(POLLS, helper("U1 I4 U4 I1"), stack=POLL, file=source, node=LATER)
    assert find_awaited_work(timeline, pieces()) == ()


def count_up(per_s: int, *, twice: bool = False) -> list[int]:
    return [at * per_s * (2 if twice else 1) for at in range(11)]


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (50_000, True),  # all that the training process reads
        (25_000, True),  # read twice
        (10_000, False),  # a fifth: a log
        (80_000, False),  # more than it reads
    ],
)
def test_the_writer_of_the_read_bytes_is_named_without_source(written: int, named: bool) -> None:
    times = list(range(11))
    reading = {"io": make_io_samples(times, read_chars=count_up(50_000), write_chars=count_up(0))}
    writer = helper(
        "U10", io=make_io_samples(times, write_chars=count_up(written), read_chars=count_up(0))
    )
    other = helper(
        "U10", 202, io=make_io_samples(times, write_chars=count_up(0), read_chars=count_up(0))
    )
    works = find_awaited_work(job(POLLS, writer, other, more=reading), pieces())
    assert [(work.pids, work.is_sure) for work in works] == [((201,), True)] * named


REQUESTS = "U1 W4 U1 W4"


@pytest.mark.parametrize(
    ("serving", "named"),
    [
        ("I1 U4 I1 U4", True),  # computes while it is waited for, and only then
        ("U10", False),  # always busy: the answer may come from another machine
        ("I1 U2 I3 U2 I2", False),  # active in half of the waits
    ],
)
def test_a_server_active_during_requests_is_named(serving: str, named: bool) -> None:
    works = find_awaited_work(job(REQUESTS, helper(serving, parent=1)), pieces())
    assert bool(works) == named
    if named:
        assert (works[0].wait_reason, works[0].is_sure) == (CONNECTION, True)
        np.testing.assert_allclose(works[0].share, [0.8])
        # 8 of 10 s on a CPU, all of them in waits: 0.8 / 0.8 of these
        np.testing.assert_allclose(works[0].active_share, [0.8], atol=0.02)


def test_a_server_is_local_without_connections_to_other_machines() -> None:
    listed = {"collectors": [{"name": "sockets", "status": "available"}]}
    work = find_alone(job(REQUESTS, helper("U10"), node=listed))
    assert work.pids == (201,)


def test_a_full_queue_names_its_consumer_process() -> None:
    work = find_alone(job("U1 L9", helper("U10"), stack=PUT))
    assert (work.wait_reason, work.takes_output, work.pids) == (LOCK, True, (201,))
    timeline = job("U1 L9", helper("U6 R4"), stack=PUT)
    breakdown = compute_data_wait_breakdown(timeline, pieces())
    got = EvalHost().claim(timeline, pieces(), breakdown, EvalHost.Limits())
    assert got is not None
    # 0.9 of the lost time in waits; the logger has a CPU for 6 of 10 s
    np.testing.assert_allclose(got.share, [0.54])
    assert (got.grade, got.resource) == ("B", "process python pid 201")
    assert got.resource_facts == ResourceFacts("process", pid=201)
    starved = CpuContention().claim(timeline, pieces(), breakdown, CpuContention.Limits())
    assert starved is not None
    np.testing.assert_allclose(starved.share, [0.36])
    assert starved.resource == "process python pid 201"
    assert starved.resource_facts == got.resource_facts


def test_an_empty_queue_names_its_producer_and_activity() -> None:
    timeline = job("U1 L9", helper("U5 D5"), stack=GET)
    breakdown = compute_data_wait_breakdown(timeline, pieces())
    np.testing.assert_allclose(breakdown.user_cpu, [0.45])
    np.testing.assert_allclose(breakdown.unknown, [1 - 0.9])
    assert breakdown.worker_pid.tolist() == [201]
    got = CpuPreprocess().claim(timeline, pieces(), breakdown, CpuPreprocess.Limits())
    assert got is not None
    np.testing.assert_allclose(got.share, [0.45])
    numbers = {item.name: item.value for item in got.evidence}
    assert numbers == pytest.approx({"awaited.on_cpu_ratio": 0.5, "awaited.waiting_ratio": 0.9})


def test_a_lock_without_a_known_call_names_no_process() -> None:
    assert find_awaited_work(job("U1 L9", helper("U10"), stack=OUTSIDE), pieces()) == ()
    assert find_awaited_work(job("U1 L9", helper("U10")), pieces()) == ()


def test_waits_without_a_sleep_place_are_identified_by_call() -> None:
    # 4 of 10 s asleep in questions to a manager process, which computes for half of all time
    hidden: dict[str, Any] = {"denied": ("wchan",)}
    work = find_alone(job("U6 I4", helper("U1 I5 U4"), stack=GET, **hidden))
    assert (work.wait_reason, work.pids) == (LOCK, (201,))
    np.testing.assert_allclose(work.share, [0.4])
    assert find_awaited_work(job("U6 I4", helper("U10"), stack=OUTSIDE, **hidden), pieces()) == ()


def test_the_processes_of_a_pool_are_named_together() -> None:
    both = helper("U5 I5"), helper("I5 U5", 202)
    work = find_alone(job("U1 L9", *both, stack=POOL))
    assert (work.pids, work.resource) == ((201, 202), "2 processes python pid 201, 202")
    assert work.resource_facts == UNKNOWN_RESOURCE
    # each computes for half of the time: 0.5 in the mean, which is also the most of each
    np.testing.assert_allclose(work.active_share, [0.45])


def test_a_thread_that_writes_is_named_as_a_thread() -> None:
    timeline = job("U1 L9", stack=PUT)
    timeline.main.threads[101] = make_thread(parse_activity("D10"), END_S)  # type: ignore[index]
    work = find_alone(timeline)
    assert (work.tid, work.resource) == (101, "thread  101")
    assert work.resource_facts == UNKNOWN_RESOURCE


def test_other_ranks_and_their_processes_are_not_awaited(source: str) -> None:
    other = helper("U10", parent=1, spans={layout.STEP: make_spans((0, END_S, 0, 0, 0, 0))})
    child = helper("U10", 202, parent=201)
    timeline = job(POLLS, other, child, stack=POLL, file=source, node=LATER)
    assert find_awaited_work(timeline, pieces()) == ()


def test_a_poll_loop_without_pause_is_a_busy_wait(source: str) -> None:
    timeline = job("U10", helper("U10"), stack=POLL, state="R", file=source, node=LATER)
    work = find_alone(timeline)
    assert work.wait_reason == BUSY
    np.testing.assert_allclose(work.active_share, [1.0])


def claim_sleep(timeline: Rank) -> tuple[float, Mapping[str, float]]:
    breakdown = compute_data_wait_breakdown(timeline, pieces())
    got = HostAsleep().claim(timeline, pieces(), breakdown, HostAsleep.Limits())
    assert got is not None
    return float(got.share[0]), {item.name: item.value for item in got.evidence}


def test_poll_sleep_for_a_known_process_is_not_claimed(source: str) -> None:
    known: dict[str, Any] = {"stack": POLL, "file": source, "node": LATER}
    assert claim_sleep(job(POLLS, helper("U10"), **known))[0] == 0.0
    share, numbers = claim_sleep(job(POLLS, **known))
    # 9 of 10 s asleep; of the 8 s that are lost, as much as chance would have it
    assert share == pytest.approx(0.9)
    assert numbers["thread.polling_ratio"] == 1.0
    share, numbers = claim_sleep(job(POLLS, helper("U10"), **{**known, "stack": SLEEP}))
    assert share == pytest.approx(0.9)
    assert "thread.polling_ratio" not in numbers


def test_a_poll_for_outside_data_names_no_process(source: str) -> None:
    # 50 kB a second are read and no process of the job writes: the busy one has nothing to do with
    times = list(range(11))
    reading = {"io": make_io_samples(times, read_chars=count_up(50_000), write_chars=count_up(0))}
    other = helper(
        "U10", io=make_io_samples(times, write_chars=count_up(0), read_chars=count_up(0))
    )
    timeline = job(POLLS, other, stack=POLL, file=source, node=LATER, more=reading)
    assert find_awaited_work(timeline, pieces()) == ()


def wait_for_batches(feeding: str, busy: str) -> Rank:
    """A rank that takes batches from a queue; 201 writes what it reads, 202 writes nothing."""
    times = list(range(11))
    main = make_process(
        100,
        spans={layout.DATA_WAIT: make_spans((1, END_S, -1, -1, -1, -1))},
        thread=make_thread(parse_activity("U1 I9"), END_S),
        io=make_io_samples(times, read_chars=count_up(50_000), write_chars=count_up(0)),
    )
    feeder = helper(
        feeding, io=make_io_samples(times, write_chars=count_up(50_000), read_chars=count_up(0))
    )
    other = helper(
        busy, 202, io=make_io_samples(times, write_chars=count_up(0), read_chars=count_up(0))
    )
    return make_rank(END_S, main, [feeder, other])


def waits_for_data() -> LostTime:
    return make_lost_segments((1, END_S, 8, PHASE_DATA_WAIT), step=3)


def test_a_queue_feeder_is_identified_by_its_bytes() -> None:
    timeline, waits = wait_for_batches("U4 S6", "U10"), waits_for_data()
    breakdown = compute_data_wait_breakdown(timeline, waits)
    assert (breakdown.worker_pid.tolist(), breakdown.identified.tolist()) == ([201], [True])
    # from 1 s on it computes for 3 s of 9 and sleeps for 6
    np.testing.assert_allclose(breakdown.user_cpu, [3 / 9])
    np.testing.assert_allclose(breakdown.unknown, [6 / 9])
    got = HostAsleep().claim(timeline, waits, breakdown, HostAsleep.Limits())
    assert got is not None
    np.testing.assert_allclose(got.share, [6 / 9])
    assert got.resource == "process python pid 201"


def test_a_sleeping_feeder_is_named_with_its_sleep() -> None:
    # The training thread waits for a pipe for 9 of 10 s; the one that writes into it is asleep.
    times = list(range(11))
    reading = {"io": make_io_samples(times, read_chars=count_up(50_000), write_chars=count_up(0))}
    feeder = helper(
        "S10", io=make_io_samples(times, write_chars=count_up(50_000), read_chars=count_up(0))
    )
    busy = helper(
        "U10", 202, io=make_io_samples(times, write_chars=count_up(0), read_chars=count_up(0))
    )
    timeline = job("U1 W9", feeder, busy, more=reading)
    (work,) = find_awaited_work(timeline, pieces())
    assert (work.pids, work.timer_ratio) == ((201,), 1.0)
    share, numbers = claim_sleep(timeline)
    assert share == pytest.approx(0.9)
    assert numbers["awaited.in_timer_ratio"] == pytest.approx(0.9)


def list_pids(works: Sequence[AwaitedWork]) -> list[int]:
    return [pid for work in works for pid in work.pids]


def test_a_rarely_waiting_poll_loop_awaits_no_process(source: str) -> None:
    # The feeder is ahead and rests; the loop hardly ever waits.
    timeline = job("U9.8 S0.2", helper("U3 I7"), stack=POLL, file=source, node=LATER)
    assert list_pids(find_awaited_work(timeline, pieces())) == []
