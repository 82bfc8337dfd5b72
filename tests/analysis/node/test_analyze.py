"""One node, chunk by chunk: what is held while the next chunk is read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from clusterprof.analysis.node.analyze import _Meter
from clusterprof.analysis.node.observations import EndingTracker, HostNotes
from clusterprof.analysis.node.setup import SetupCollector
from clusterprof.analysis.timeline.model import Chunk, Process
from clusterprof.analysis.timeline.network_counters import NetworkMeter
from clusterprof.analysis.timeline.spans import SpanTable
from clusterprof.probe import layout
from tests.support.builders import make_header

Watch = Callable[[Iterable[Chunk]], Iterable[Chunk]]


@pytest.mark.parametrize(
    "watch",
    [
        NetworkMeter().observe,
        HostNotes().watch,
        EndingTracker().watch,
        SetupCollector().watch,
        _Meter().watch,
    ],
)
def test_observers_release_a_chunk_before_the_next_is_read(watch: Watch) -> None:
    held: list[weakref.ref[np.ndarray]] = []
    alive: list[bool] = []

    def read() -> Iterator[Chunk]:
        for second in range(3):
            alive.append(any(spans() is not None for spans in held))
            start_ns = np.array([second * 10**9], np.int64)
            held.append(weakref.ref(start_ns))
            yield make_chunk(second, start_ns)
            del start_ns

    for chunk in watch(read()):
        assert chunk.processes
        del chunk
    assert alive == [False, False, False]


def make_chunk(second: int, start_ns: np.ndarray) -> Chunk:
    none = np.zeros(1, np.int64)
    table = SpanTable(start_ns, start_ns + 1000, none, none, none, none, none)
    process = Process(7, 1, 1, "python", {}, {layout.STEP: table}, {}, None)
    span_ns = second * 10**9, (second + 1) * 10**9
    return Chunk(make_header(), *span_ns, second == 0, False, {}, {7: process}, (), (), ())
