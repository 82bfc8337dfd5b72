"""What the hosts had to do while data were on their way, by hand; times in seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.attribution.accumulator import Accumulator, merge_accumulators
from clusterprof.analysis.attribution.network.comm_threads import (
    COMM_THREAD_NAMES,
    DELAYED,
    ON_CPU,
    estimate_host_overhead_ns,
    sum_comm_thread_time,
)
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.timeline.model import Rank, ThreadTable
from clusterprof.probe import layout
from tests.support.builders import (
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)

WHOLE = Segment(0, ns(10), False)
OPERATIONS = make_spans((2, 4, 7), (6, 8, 7))  # for 4 of 10 s the rank is in one


def moving(mover: ThreadTable, name: str = COMM_THREAD_NAMES[0]) -> Rank:
    main = make_process(
        100, spans={layout.COLLECTIVE: OPERATIONS}, thread=make_thread(parse_activity("I10"), 10)
    )
    threads = {**main.threads, 101: replace(mover, name=name)}
    return make_rank(10, replace(main, threads=threads), device="")


def rates(column: str, inside: float, outside: float) -> ThreadTable:
    """A thread that does something for so much of its time in operations and outside them."""
    idle = make_thread(parse_activity("I10"), 10)
    t_s = idle.t_ns / 1e9
    busy = np.clip(t_s - 2, 0, 2) + np.clip(t_s - 6, 0, 2)
    grown = inside * busy + outside * (t_s - busy)
    return replace(idle, **{column: np.rint(grown * 1e9).astype(np.int64)})


def test_cpu_time_of_an_otherwise_idle_comm_thread_counts_fully() -> None:
    # 1 s of CPU in each operation; the data were on their way for 3 of the 4 s, or for only 1
    totals = sum_comm_thread_time(moving(make_thread(parse_activity("I2 U1 I3 U1 I3"), 10)), WHOLE)
    assert estimate_host_overhead_ns(totals, ON_CPU, ns(3)) == pytest.approx(ns(2))
    assert estimate_host_overhead_ns(totals, ON_CPU, ns(1)) == ns(1)
    assert estimate_host_overhead_ns(totals, DELAYED, ns(3)) == 0
    assert estimate_host_overhead_ns(totals, ON_CPU, 0) == 0


def test_constant_activity_of_a_comm_thread_counts_during_transfers_only() -> None:
    # ready to run, and no CPU, for half of the time wherever it is looked: 1.5 of 3 s
    totals = sum_comm_thread_time(moving(rates("run_delay_ns", 0.5, 0.5)), WHOLE)
    assert estimate_host_overhead_ns(totals, DELAYED, ns(3)) == pytest.approx(ns(1.5))
    # a tenth of the time outside, 0.6 of it inside: 3 s in all, less 0.1 of the 7 s in which no
    # data moved
    totals = sum_comm_thread_time(moving(rates("on_cpu_ns", 0.6, 0.1)), WHOLE)
    assert estimate_host_overhead_ns(totals, ON_CPU, ns(3)) == pytest.approx(ns(2.3))
    # less in operations than outside: it is no rate of theirs, but that of all the time, 0.24
    totals = sum_comm_thread_time(moving(rates("on_cpu_ns", 0.0, 0.4)), WHOLE)
    assert 0 < estimate_host_overhead_ns(totals, ON_CPU, ns(3)) < ns(0.4 * 3)


def test_only_comm_threads_count_and_chunking_keeps_their_sums() -> None:
    polls = rates("on_cpu_ns", 1.0, 1.0)
    assert sum_comm_thread_time(moving(polls, "NCCL Progress 1"), WHOLE) == {}
    assert estimate_host_overhead_ns({}, ON_CPU, ns(3)) == 0
    item = moving(rates("on_cpu_ns", 0.6, 0.1))
    halves = Segment(0, ns(5), False), Segment(ns(5), ns(10), False)
    parts = [Accumulator(sum_comm_thread_time(item, half)) for half in halves]
    assert merge_accumulators(*parts).totals == sum_comm_thread_time(item, WHOLE)
