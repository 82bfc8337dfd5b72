"""A loader that waits for the network: derived from its sleep and from what the node received."""

from __future__ import annotations

import pytest

from clusterprof.probe.layout import DATA_WAIT, FETCH, WORKER_START
from tests.support.builders import (
    make_counter,
    make_fetches,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
)
from tests.support.critical_threads import MAIN, MIB, WORKER, list_shares, split_wait


@pytest.mark.parametrize(
    ("received", "child", "name"),
    [(50 * MIB, None, "socket"), (1000, None, "unknown"), (50 * MIB, WORKER, "unknown")],
)
def test_a_polling_loader_waits_for_the_network_if_bytes_arrive(received, child, name) -> None:
    # an HTTP client with a time limit polls before it receives; so does one that runs a decoder
    rows = parse_activity("I3 U1")
    marks = {FETCH: make_fetches(rows, (0, 4, 0)), WORKER_START: make_spans((-1, -1))}
    worker = make_process(WORKER, MAIN, marks, make_thread(rows, 5))
    main = make_process(MAIN, spans={DATA_WAIT: make_spans((0, 4, 0, WORKER, 1))})
    series = {("network.receive_bytes_total", "eth0"): make_counter([0, 5], [0, received])}
    given = make_rank(5, main, [worker], series=series)
    if child is not None:
        given.chunk.processes[300] = make_process(300, child, name="ffmpeg")
    assert list_shares(split_wait(given, 0, 4)) == {name: 0.75, "user_cpu": 0.25}


def test_an_idle_polling_loader_is_not_network_wait() -> None:
    # without spans: the same sleep, and the same bytes received
    worker = make_process(WORKER, MAIN, thread=make_thread(parse_activity("I4"), 5))
    main = make_process(MAIN, thread=make_thread(parse_activity("I4"), 5))
    series = {("network.receive_bytes_total", "eth0"): make_counter([0, 5], [0, 50 * MIB])}
    given = make_rank(5, main, [worker], series=series, marked=False)
    assert list_shares(split_wait(given, 0, 4)) == {"unknown": 1.0}
