"""What the kernel tells only afterwards: waits booked when they end, delays without a sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.timeline.data_wait.blocked import (
    NO_SAMPLES,
    ensure_min_io,
    estimate_blocked_shares,
    get_read_context,
)
from clusterprof.analysis.timeline.data_wait.split import split_data_wait
from clusterprof.probe.layout import DATA_WAIT, FETCH
from tests.support.builders import activity, fetches, ns, process, rank, spans, thread

WORKER = 201
MAIN = 100


def test_a_wait_for_a_cpu_of_seconds_is_booked_when_it_ends_and_belongs_to_all_of_it() -> None:
    # Two fetches of 2.97 s wait 2.7 s each for a CPU. The kernel adds that to run_delay when the
    # waits end, at 2.96 and 5.93: the first in a sample interval that lies partly in the second.
    rows = activity("U0.26 R2.7 U0.01 U0.26 R2.7 U0.01 U0.6")
    whole = thread(rows, 7)
    booked = 2_700_000_000 * ((whole.t_ns > ns(2.96)) + 1 * (whole.t_ns > ns(5.93)))
    span = fetches(rows, (0, 2.97, 0), (2.97, 5.94, 0), (5.94, 6.54, 0))
    worker = process(WORKER, MAIN, {FETCH: span}, replace(whole, run_delay_ns=booked))
    main = process(MAIN, spans={DATA_WAIT: spans((0, 2.97, 0, WORKER), (2.97, 5.94, 1, WORKER))})
    got = split_data_wait(rank(7, main, [worker]), span.start_ns, span.end_ns)
    np.testing.assert_allclose(got.runnable[:2] * 2.97, [2.7, 2.7], rtol=0.02)


def test_io_that_only_delay_accounting_saw_is_remote_where_the_bytes_were() -> None:
    # No sample fell into a blocked moment; the kernel counted 60 % of the time as waits for pages,
    # of which the mount's own counters say that they read nine in ten.
    unseen = estimate_blocked_shares(
        NO_SAMPLES, get_read_context(rank(1, process(MAIN)).chunk), 0.0, 0.0
    )
    assert (unseen.block_io, unseen.remote_io, unseen.unknown) == (0.0, 0.0, 1.0)
    got = ensure_min_io(unseen, 0.6, 0.9)
    assert (got.block_io, got.remote_io, got.unknown) == pytest.approx((0.06, 0.54, 0.4))
