"""A main thread that sleeps where no span says why: timers, connections, and what is neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.phases.host_asleep import HostAsleep
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_NONE,
    SOURCE_DEVICE_SAMPLES,
    SOURCE_HOST_SPANS,
)
from clusterprof.analysis.timeline.spans import SpanTable, StackSamples
from clusterprof.analysis.timeline.stacks import StackTree
from clusterprof.probe import layout
from clusterprof.report.code import CodeLocation
from tests.support.builders import (
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

Piece = tuple[float, float, float, int]
HOOKED = {
    layout.DATA_WAIT: make_spans((9, 9.1, 0, 201, 1)),
    layout.COLLECTIVE: make_spans((9.2, 9.3, 7, 0, 1, layout.ALL_REDUCE)),
}
"""A wait for data and one for other ranks, both elsewhere: such waits have spans in this run."""


def claim(
    doing: str,
    *pieces: Piece,
    marks: Mapping[int, SpanTable] | None = None,
    other: str = "",
    world_size: str = "2",
    denied: Sequence[str] = (),
    marked: bool = True,
    source: int = SOURCE_DEVICE_SAMPLES,
) -> Claims:
    """`doing`: what the main thread does; `other`: another thread of the process."""
    rows = parse_activity(doing)
    end = rows[-1][1] / 1e9
    main = make_process(
        100,
        spans=HOOKED if marks is None else marks,
        thread=make_thread(rows, end, denied=denied),
        registration={"variables": {"WORLD_SIZE": world_size}},
    )
    if other:
        main.threads[101] = make_thread(parse_activity(other), end)  # type: ignore[index]
    timeline = make_rank(end, main, marked=marked)
    fed = make_breakdown(*({} for _ in pieces))
    got = HostAsleep().claim(
        timeline, make_lost_segments(*pieces, source=source, step=3), fed, HostAsleep.Limits()
    )
    assert got is not None
    return got


def evidence(got: Claims) -> dict[str, float]:
    return {item.name: item.value for item in got.evidence}


def test_timer_sleep_without_a_device_is_claimed_directly() -> None:
    # asleep for 0.4 of 1 s, which is what is lost; half of the samples asleep are in a timer
    got = claim("U0.6 S0.4", (0, 1, 0.4, PHASE_COMPUTE), source=SOURCE_HOST_SPANS)
    np.testing.assert_allclose(got.share, [1.0])
    got = claim("U0.6 S0.2 L0.2", (0, 1, 0.4, PHASE_COMPUTE), source=SOURCE_HOST_SPANS)
    np.testing.assert_allclose(got.share, [0.5])


def test_timer_sleep_is_claimed_by_its_expected_idle_overlap() -> None:
    # [0, 1): asleep for 0.4 s, idle for 0.5: by chance both for 0.4 * 0.5 = 0.2 of the 0.5 s lost.
    # [1, 2): asleep for 0.9 s and idle for 0.8: 0.72 of 0.8. [2, 3): asleep and idle all the time.
    pieces = [(i, i + 1, idle_s, PHASE_COMPUTE) for i, idle_s in enumerate((0.5, 0.8, 1.0))]
    got = claim("U0.6 S0.4 S0.9 U0.1 S1", *pieces)
    np.testing.assert_allclose(got.share, [0.4, 0.9, 1.0])
    assert got.grade == "B"
    # by the idle time of the three: (0.5 * 0.4 + 0.8 * 0.9 + 1.0 * 1.0) / 2.3
    assert evidence(got) == {"thread.in_timer_ratio": pytest.approx(1.92 / 2.3)}


def test_connection_waits_claim_only_certain_idle_time() -> None:
    # [0, 1): on the connection all the time, busy for 0.3 s: 0.7 idle, all of it meanwhile.
    # [1, 2): on it for 0.6 s, busy for 0.5: at least 0.1 s of the 0.5 idle.
    # [2, 3): on it for 0.4 s, busy for 0.5: possibly none. Together 2.0 s on it and 1.3 s busy: of
    # the 0.8 s that were beyond, 0.7 are certain.
    pieces = [(i, i + 1, idle_s, PHASE_COMPUTE) for i, idle_s in enumerate((0.7, 0.5, 0.5))]
    got = claim("W1 U0.4 W0.6 U0.6 W0.4", *pieces)
    np.testing.assert_allclose(got.share, [0.875, 0.175, 0.0])
    assert got.grade == "C"
    # by the idle time of the two that are claimed: (0.7 * 1.0 + 0.5 * 0.6) / 1.2
    assert evidence(got) == {"thread.on_connection_ratio": pytest.approx(1.0 / 1.2)}


def test_polls_count_as_connections_less_other_thread_time() -> None:
    # idle for 0.7 s and polling all the time; another thread computes for 0.4 of that second
    piece = (0, 1, 0.7, PHASE_COMPUTE)
    marks = {**HOOKED, layout.SYNC: make_spans((9.4, 9.5, 100_000_000, 1))}
    np.testing.assert_allclose(claim("I1", piece, marks=marks).share, [1.0])
    np.testing.assert_allclose(claim("I1", piece, marks=marks, other="U0.4 I0.6").share, [3 / 7])
    np.testing.assert_array_equal(claim("I1", piece, marks=marks, other="U0.8 I0.2").share, [0.0])


def test_a_poll_without_device_hooks_is_not_claimed() -> None:
    piece = (0, 1, 0.7, PHASE_COMPUTE)
    np.testing.assert_array_equal(claim("I1", piece).share, [0.0])
    np.testing.assert_allclose(claim("W1", piece).share, [1.0])  # a socket is no driver


@pytest.mark.parametrize(
    ("marked_kinds", "world_size", "share"),
    [
        ((), "2", 0.0),
        ((layout.COLLECTIVE,), "2", 0.0),  # it may be a wait for a worker
        ((layout.DATA_WAIT,), "2", 0.0),  # or for another rank
        ((layout.DATA_WAIT,), "1", 1.0),  # of which there is none
        ((layout.DATA_WAIT, layout.COLLECTIVE), "2", 1.0),
    ],
)
def test_connection_waits_need_spans_of_worker_and_rank_waits(
    marked_kinds: tuple[int, ...], world_size: str, share: float
) -> None:
    marks = {kind: HOOKED[kind] for kind in marked_kinds}
    piece = (0, 1, 0.7, PHASE_COMPUTE)
    np.testing.assert_allclose(claim("W1", piece, marks=marks, world_size=world_size).share, share)
    timer = claim("S1", piece, marks=marks, world_size=world_size)
    np.testing.assert_allclose(timer.share, [1.0])  # a timer is one in any case


@pytest.mark.parametrize("doing", ["L1", "D1", "N1", "M1", "F1", "R1", "U1"])
def test_locks_disks_and_work_are_not_claimed(doing: str) -> None:
    np.testing.assert_array_equal(claim(doing, (0, 1, 1.0, PHASE_COMPUTE)).share, [0.0])


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("do_wait", 1.0),  # for a process
        ("kernel_clone", 1.0),
        ("clock_nanosleep", 1.0),
        ("futex_do_wait", 0.0),  # for a lock, although a wait for a process is called nearly so
        ("futex_wait_queue", 0.0),
    ],
)
def test_sleep_places_are_recognized_by_their_kernel_names(
    monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    names = ("0", "1", "2", "3", name)  # the letter S is the fifth
    monkeypatch.setattr("tests.support.builders.WCHAN_NAMES", names)
    np.testing.assert_allclose(claim("S1", (0, 1, 1.0, PHASE_COMPUTE)).share, [share])


def test_sleep_is_split_by_the_share_of_samples() -> None:
    # asleep all the time, five samples in a timer and five on a lock: 0.5 s of the 1 s
    np.testing.assert_allclose(claim("S0.5 L0.5", (0, 1, 1.0, PHASE_COMPUTE)).share, [0.5])


def test_waiting_for_the_device_is_no_sleep() -> None:
    piece = (0, 1, 1.0, PHASE_COMPUTE)
    waits = {**HOOKED, layout.SYNC: make_spans((0, 1, layout.WHOLE_NS, 1))}
    np.testing.assert_array_equal(claim("S1", piece, marks=waits).share, [0.0])
    np.testing.assert_array_equal(claim("I1", piece, marks=waits).share, [0.0])
    # of 1 s asleep, 0.6 s wait for the device: the samples of the other 0.4 s are in a timer
    waits = {**HOOKED, layout.SYNC: make_spans((0, 0.6, layout.WHOLE_NS, 1))}
    np.testing.assert_allclose(claim("I0.6 S0.4", piece, marks=waits).share, [0.4])


def test_unread_sleep_is_not_claimed() -> None:
    piece = (0, 1, 1.0, PHASE_COMPUTE)
    np.testing.assert_array_equal(claim("S1", piece, denied=["wchan"]).share, [0.0])
    np.testing.assert_array_equal(claim("S1", piece, denied=["on_cpu_ns"]).share, [0.0])


def test_sleep_is_claimed_only_in_compute_phases() -> None:
    pieces = ((0, 1, 1.0, PHASE_DATA_WAIT), (1, 2, 1.0, PHASE_NONE), (2, 3, 1.0, PHASE_COMPUTE))
    np.testing.assert_array_equal(claim("S3", *pieces).share, [0.0, 0.0, 1.0])
    # without spans nothing is known to be a step
    np.testing.assert_array_equal(claim("S3", *pieces, marked=False).share, [0.0, 1.0, 0.0])


@pytest.mark.parametrize(("idle_s", "claimed"), [(1.9, False), (2.1, True)])
def test_little_sleep_is_not_claimed(idle_s: float, claimed: bool) -> None:
    # 10 s, 1 s of them asleep: 0.1 of the idle time, which must be 0.2 s (2 %) at least
    got = claim("U9 S1", (0, 10, idle_s, PHASE_COMPUTE))
    assert got.share.any() == claimed


TRAIN, SERVER, OWN_PIPE, QUEUE = range(2, 6)
STACKS = StackTree(
    (
        CodeLocation("/usr/lib/python3.11/multiprocessing/process.py", 1, "run"),
        CodeLocation("/job/train.py", 1, "main"),
        CodeLocation("/usr/lib/python3.11/http/client.py", 1, "getresponse"),
        CodeLocation("/job/reader.py", 1, "read"),
        CodeLocation("/usr/lib/python3.11/multiprocessing/connection.py", 1, "recv"),
    ),
    np.array([0, 0, 1, 2, 2, 2]),
    np.array([-1, 0, 1, 2, 3, 4]),
)
"""A rank started as a process; the line of its loop, and what it calls: a server, a pipe of its
own, a queue between processes."""


def claim_with_stacks(
    doing: str, world_size: str, *calls: int, path: str = "", other: str = "", synced_s: float = 0.0
) -> Claims:
    """Claim 0.7 s lost of 1 s without any hooked wait; calls: the stacks of 50 ms each.

    synced_s: for how long the thread first waits for the device.
    """
    rows = parse_activity(doing)
    start = np.array([ns(at / 20) for at in range(len(calls))], np.int64)
    zero = np.zeros(start.size, np.int64)
    asleep = zero + ord("S")
    samples = StackSamples(
        start, start, zero, np.array(calls, np.int64), zero + ns(0.05), zero, asleep
    )
    main = make_process(
        100,
        spans={layout.STEP: make_spans((0, 1, 0, 0, 0, 0))},
        thread=make_thread(rows, 1.0),
        registration={"variables": {"WORLD_SIZE": world_size} if world_size else {}},
    )
    if synced_s:
        main.spans[layout.SYNC] = make_spans((0, synced_s, layout.WHOLE_NS, 1))  # type: ignore[index]
    if other:
        main.threads[101] = make_thread(parse_activity(other), 1.0)  # type: ignore[index]
    timeline = make_rank(1.0, replace(main, stacks=samples))
    places = tuple(
        replace(location, file=path) if path else location for location in STACKS.locations
    )
    chunk = replace(timeline.chunk, stacks=replace(STACKS, locations=places))
    piece = make_lost_segments((0, 1, 0.7, PHASE_COMPUTE), step=3)
    got = HostAsleep().claim(
        replace(timeline, chunk=chunk), piece, make_breakdown({}), HostAsleep.Limits()
    )
    assert got is not None
    return got


@pytest.mark.parametrize(
    ("doing", "world_size", "calls", "share"),
    [
        ("W1", "", [SERVER] * 20, 1.0),  # no launcher: the process is alone
        ("W1", "2", [SERVER] * 20, 1.0),  # a server is no rank
        ("I1", "", [SERVER] * 20, 1.0),  # in poll, where drivers wait for devices, too
        ("W1", "", [OWN_PIPE] * 20, 1.0),
        ("W1", "2", [OWN_PIPE] * 20, 0.0),  # it may be a wait for another rank
        ("I1", "", [OWN_PIPE] * 20, 0.0),  # or for the device
        ("W1", "", [QUEUE] * 20, 0.0),  # a worker makes a batch
        ("W1", "", [SERVER] * 7, 0.0),  # too few to know
        # 0.8 s of 1 s for the server, 0.3 s busy: 0.5 of 0.7 s are certain.
        ("W1", "", [SERVER] * 16 + [QUEUE] * 4, 5 / 7),
    ],
)
def test_stacks_identify_the_awaited_server(
    doing: str, world_size: str, calls: list[int], share: float
) -> None:
    np.testing.assert_allclose(claim_with_stacks(doing, world_size, *calls).share, [share])


def test_a_known_call_gets_a_higher_grade_than_own_pipes() -> None:
    assert claim_with_stacks("W1", "", *[SERVER] * 20).grade == "B"
    assert claim_with_stacks("W1", "", *[OWN_PIPE] * 20).grade == "C"


def test_a_full_pipe_of_the_job_is_an_outside_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.builders.WCHAN_NAMES", ("0", "1", "2", "3", "pipe_write"))
    got = claim_with_stacks("S1", "", *[OWN_PIPE] * 20)
    assert (got.share.tolist(), got.grade) == ([1.0], "B")


def test_running_threads_of_the_job_reduce_only_pipe_waits() -> None:
    got = claim_with_stacks("W1", "", *[SERVER] * 20, other="U0.4 I0.6")
    np.testing.assert_allclose(got.share, [1.0])
    got = claim_with_stacks("W1", "", *[OWN_PIPE] * 20, other="U0.4 I0.6")
    np.testing.assert_allclose(got.share, [3 / 7])


def test_stacks_in_device_waits_are_ignored() -> None:
    # 0.1 s of 1 s wait for the device, as if for a queue; the other 0.9 s are for the server.
    got = claim_with_stacks("W1", "", *[QUEUE] * 2, *[SERVER] * 18, synced_s=0.1)
    np.testing.assert_allclose(got.share, [6 / 7])  # busy for 0.3 s


@pytest.mark.parametrize("path", ["0123456789abcdef.py", "client.py"])
def test_stacks_without_full_paths_are_ignored(path: str) -> None:
    assert not claim_with_stacks("W1", "", *[SERVER] * 20, path=path).share.any()


def test_timer_sleep_of_a_loading_worker_is_claimed() -> None:
    # The worker sleeps for 0.9 of its fetch of 1 s, in 6 of 9 samples in a timer. Of the wait 0.9
    # have no other reason: 0.6 are the timer's. Its sleep between fetches does not count.
    worker = make_process(
        201,
        parent=100,
        spans={layout.FETCH: make_spans((0, 1, 1, 0, 0, 0))},
        thread=make_thread(parse_activity("S0.6 L0.3 U0.1 L1"), 2.0),
    )
    timeline = make_rank(
        2.0, make_process(100, thread=make_thread(parse_activity("L2"), 2.0)), [worker]
    )
    pieces = make_lost_segments((0, 1, 1.0, PHASE_DATA_WAIT), (1, 2, 1.0, PHASE_COMPUTE), step=3)
    fed = make_breakdown({"user_cpu": 0.1}, {})
    got = HostAsleep().claim(timeline, pieces, fed, HostAsleep.Limits())
    assert got is not None
    np.testing.assert_allclose(got.share, [0.6, 0.0])
    assert (got.grade, evidence(got)) == ("B", {"worker.in_timer_ratio": pytest.approx(0.6)})


def test_the_grade_follows_the_larger_claimed_part() -> None:
    # 1 s of a wait for data is a timer of the worker; 0.7 s of a step a pipe of the job's own.
    worker = make_process(
        201,
        parent=100,
        spans={layout.FETCH: make_spans((0, 1, 1, 0, 0, 0))},
        thread=make_thread(parse_activity("S1 L1"), 2.0),
    )
    main = make_process(
        100,
        spans=HOOKED,
        thread=make_thread(parse_activity("L1 W1"), 2.0),
        registration={"variables": {"WORLD_SIZE": "2"}},
    )
    pieces = make_lost_segments((0, 1, 1.0, PHASE_DATA_WAIT), (1, 2, 0.7, PHASE_COMPUTE), step=3)
    fed, limits = make_breakdown({}, {}), HostAsleep.Limits()
    got = HostAsleep().claim(make_rank(2.0, main, [worker]), pieces, fed, limits)
    assert got is not None
    np.testing.assert_allclose(got.share, [1.0, 1.0])
    assert got.grade == "B"
    got = HostAsleep().claim(make_rank(2.0, main), pieces, fed, limits)
    assert got is not None
    assert got.grade == "C"
