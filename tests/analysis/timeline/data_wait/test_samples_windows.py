"""What a thread did in windows of a tenth of a second, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.timeline.data_wait.blocked import get_read_context
from clusterprof.analysis.timeline.data_wait.samples import ThreadWindows, measure_thread_windows
from tests.support.builders import make_chunk, make_thread, parse_activity

TICK_NS = 100_000_000
READS = "D0.2 " + "K0.02 D0.08 " * 9  # from 0.2 s on every sample finds it on a CPU


def seen(text: str, loads: bool) -> ThreadWindows:
    start_ns = np.arange(3, 9) * TICK_NS
    table = make_thread(parse_activity(text), 1.0)
    return measure_thread_windows(
        table, start_ns, start_ns + TICK_NS, get_read_context(make_chunk(1.0)), loads
    )


def test_an_unsampled_loader_window_gets_the_usual_mix() -> None:
    result = seen(READS, loads=True)
    assert result.on_cpu == pytest.approx(0.2)
    assert result.storage == pytest.approx(0.8)
    assert result.reading == pytest.approx(0.2)  # all of it in the kernel
    assert result.active == pytest.approx(1.0)


def test_kernel_time_counts_as_reading_only_for_loaders() -> None:
    assert seen(READS, loads=False).reading == pytest.approx(0.0)
    # Decoding in the kernel, asleep otherwise: blocked on nothing that is storage.
    idle = seen("I0.2 " + "K0.02 I0.08 " * 9, loads=True)
    assert (idle.storage, idle.reading) == (pytest.approx(0.0), pytest.approx(0.0))
