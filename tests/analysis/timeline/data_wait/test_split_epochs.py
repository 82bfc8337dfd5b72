"""Loaders that start new workers in every epoch: only those that live at a time count."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.timeline.data_wait.split import (
    PREFETCH_BATCHES,
    count_live_workers,
    estimate_prefetch_savings,
)
from clusterprof.analysis.timeline.model import Process, Rank
from clusterprof.probe.layout import DATA_WAIT, FETCH, LOADER_START
from tests.support.builders import (
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
    to_ns_array,
)

MAIN, WAITS = 100, 12
EPOCH_S = 20.0


def worker(pid: int, born: float, died: float) -> Process:
    """A worker that was first and last seen fetching."""
    return make_process(pid, MAIN, {FETCH: make_spans((born, born, 1), (died, died, 1))})


def test_workers_of_successive_epochs_do_not_overlap() -> None:
    first = [worker(201, 1, 10), worker(202, 1.5, 10.5)]
    second = [worker(203, 11, 20), worker(204, 11.5, 20.5), worker(205, 12, 19)]
    assert count_live_workers(first) == 2
    assert count_live_workers([*first, *second]) == 3
    assert count_live_workers([*second, *first]) == 3  # in any order
    assert count_live_workers([]) == 0


def test_overlapping_workers_are_counted_as_concurrent() -> None:
    # the next epoch's are started while the last one of this epoch still fetches
    assert count_live_workers([worker(201, 1, 10), worker(202, 1, 12), worker(203, 11, 20)]) == 2
    assert count_live_workers([worker(201, 1, 10), worker(202, 10, 20)]) == 2  # at 10 both do


def test_worker_samples_extend_the_worker_lifetime() -> None:
    # it fetches at 3 only, but was sampled for [0, 12]
    sampled = make_process(
        201, MAIN, {FETCH: make_spans((3, 3, 1))}, make_thread(parse_activity("I12"), 12)
    )
    assert count_live_workers([sampled, worker(202, 11, 20)]) == 2
    assert count_live_workers([sampled, worker(202, 13, 20)]) == 1


def test_an_unseen_worker_counts_as_always_alive() -> None:
    unseen = make_process(201, MAIN)
    assert count_live_workers([unseen, worker(202, 1, 2), worker(203, 3, 4)]) == 2
    assert count_live_workers([unseen, make_process(202, MAIN)]) == 2


def epoch(begin: float, pid: int) -> tuple[list[tuple[float, ...]], list[Process]]:
    """Waits and the two workers of an epoch: batch i is made in [i - 0.1, i + 0.8) by one of the
    two in turn, and waited for in [i, i + 0.8)."""
    waits, fetched = [], ([(begin - 0.5, begin - 0.5, 1)], [(begin - 0.5, begin - 0.5, 1)])
    for number in range(WAITS):
        at = begin + number
        waits.append((at, at + 0.8, number, pid + number % 2, 1))
        fetched[number % 2].append((at - 0.1, at + 0.8, 1))
    for calls in fetched:
        calls.append((begin + WAITS, begin + WAITS, 1))
    return waits, [
        make_process(pid + at, MAIN, {FETCH: make_spans(*c)}) for at, c in enumerate(fetched)
    ]


def build(epochs: int) -> Rank:
    waits, workers, starts = [], [], []
    for number in range(epochs):
        begin = 1 + number * EPOCH_S
        own_waits, own_workers = epoch(begin, 201 + 2 * number)
        waits += own_waits
        workers += own_workers
        starts.append((begin - 0.6, begin - 0.6, 2, 0, 1, 0))
    main = make_process(
        MAIN, spans={DATA_WAIT: make_spans(*waits), LOADER_START: make_spans(*starts)}
    )
    return make_rank(epochs * EPOCH_S, main, workers)


def test_a_second_epoch_has_the_same_savings_as_the_first() -> None:
    # A wait looks back over 4 batches of each of 2 workers: waits 8 to 11 of an epoch see nothing
    # of the one before. In the 8.8 s from the first of 9 waits to the end of the last, 9 * 0.9 -
    # 0.1 = 8 s were fetched, 4 s by each; 9 * 0.8 = 7.2 s were waited, so 1.6 s were there to hide
    # them in: 2.4 of 7.2 s are needed.
    assert PREFETCH_BATCHES == 4
    late = [number + 0.5 for number in range(8, WAITS)]
    single = estimate_prefetch_savings(build(1), to_ns_array([1 + at for at in late]))
    np.testing.assert_allclose(single, 2 / 3)
    both = build(2)
    for begin in (1, 1 + EPOCH_S):
        saved = estimate_prefetch_savings(both, to_ns_array([begin + at for at in late]))
        np.testing.assert_allclose(saved, 2 / 3)


@pytest.mark.parametrize("epochs", [1, 2])
def test_prefetch_saves_nothing_between_waits(epochs: int) -> None:
    saved = estimate_prefetch_savings(build(epochs), to_ns_array([0.5, 1.9, 14.0]))
    np.testing.assert_array_equal(saved, [0, 0, 0])
