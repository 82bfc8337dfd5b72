"""What a node's network counters say of the time of operations, by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from clusterprof.analysis.timeline.model import Chunk, Process, Series
from clusterprof.analysis.timeline.network_counters import (
    CounterTotal,
    NetworkMeter,
    NodeNetworkTotals,
    ValueHistogram,
)
from clusterprof.analysis.timeline.spans import SpanTable
from clusterprof.probe import layout
from tests.support.builders import make_header, to_ns_array

SECOND = 1_000_000_000
BYTES, SPEED = ("network.transmit_bytes_total", "eth0"), ("network.link_bytes_per_second", "eth0")


def chunk(
    begin: float, end: float, operations: list[tuple[float, float]], **readings: object
) -> Chunk:
    """A chunk with one rank; a reading once a second, those outside [begin - 2, end] left out."""
    start, stop = to_ns_array([a for a, _ in operations]), to_ns_array([b for _, b in operations])
    none = np.zeros(start.size, np.int64)
    spans = {layout.COLLECTIVE: SpanTable(start, stop, none, none, none, none, none)}
    rank = Process(7, 1, 1, "python", {}, spans, {}, None)
    series = {}
    for (name, device), values in readings["of"].items():  # type: ignore[attr-defined]
        t_ns = np.arange(len(values)) * SECOND
        batch = (t_ns >= (begin - 2) * SECOND) & (t_ns <= end * SECOND)
        series[name, device] = Series(
            t_ns[batch], np.array(values, float)[batch], name.endswith("_total")
        )
    span = round(begin * SECOND), round(end * SECOND)
    return Chunk(make_header(), *span, begin == 0, False, series, {7: rank}, (), (), ())


def metered(*chunks: Chunk) -> NodeNetworkTotals:
    meter = NetworkMeter()
    assert list(meter.observe(chunks)) == list(chunks)
    return meter.finish()


def test_counter_growth_is_counted_only_during_operations() -> None:
    # The example of the module: 30 between 1 s and 2 s, 10 after it, nothing of the first 50.
    of = {BYTES: [0, 50, 80, 90], SPEED: [7, 8, 9, 9]}
    meter = metered(chunk(0, 10, [(1.2, 1.6), (2.9, 2.95)], of=of))
    count = meter.counts[BYTES]
    assert (count.total, count.covered_ns) == (40, 2 * SECOND)
    assert meter.total(*BYTES) == 40 and meter.per_second(*BYTES) == 20
    assert (count.rate_histogram.lowest, count.rate_histogram.highest) == (10, 30)
    # the gauge was read as 9 at the end of both intervals
    assert (meter.levels[SPEED].count, meter.levels[SPEED].quantile(0.5)) == (2, 9)
    assert meter.devices("network.transmit_bytes_total") == ["eth0"]


def test_counters_without_operations_give_no_rate() -> None:
    meter = metered(chunk(0, 10, [], of={BYTES: [0, 50, 80], SPEED: [7, 7, 7]}))
    assert meter.counts[BYTES].covered_ns == 0
    assert meter.per_second(*BYTES) is None
    assert meter.levels[SPEED].count == 0
    assert meter.total("tcp.retransmits_total", "") is None


def test_a_missing_reading_and_a_step_back_are_left_out() -> None:
    of = {BYTES: [0, 10, float("nan"), 40, 50, 5, 6]}
    meter = metered(chunk(0, 10, [(0, 10)], of=of))
    assert (meter.total(*BYTES), meter.counts[BYTES].covered_ns) == (10 + 10 + 1, 3 * SECOND)


def test_signals_of_other_resources_are_ignored() -> None:
    meter = metered(chunk(0, 10, [(0, 10)], of={("disk.reads_total", "vda"): [0, 1, 2]}))
    assert not meter.counts and not meter.levels


@pytest.mark.parametrize("cut", [3.0, 17.0, 40.0])
def test_chunk_size_leaves_the_counters_unchanged(cut: float) -> None:
    random = np.random.default_rng(1)
    of = {BYTES: np.cumsum(random.integers(0, 1000, 61)).tolist(), SPEED: list(range(61))}
    operations = [(5.5, 5.6), (8.2, 8.3), (16.5, 18.5), (39.5, 40.2), (55.0, 55.1)]
    whole = metered(chunk(0, 60, operations, of=of))
    parts, edges = [], [*np.arange(0, 60, cut), 60]
    for begin, end in pairwise(edges):
        mine = [operation for operation in operations if begin < operation[1] <= end]
        parts.append(chunk(begin, end, mine, of=of))
    assert metered(*parts) == whole


def test_quantiles_are_within_nine_percent_and_the_readings() -> None:
    spread = ValueHistogram()
    spread.add(np.array([1.0, 2.0, 4.0, 5.0]))
    assert spread.quantile(0.5) == 2.0
    assert 4.0 <= spread.quantile(0.75) <= 4.0 * 2 ** (1 / 8)
    assert spread.quantile(1.0) == 5.0
    assert np.isnan(ValueHistogram().quantile(0.5))


PORT = "rdma.receive_bytes_total", "mlx5_0/1"
LINK = "rdma.link_bytes_per_second", "mlx5_0/1"
NAN = float("nan")
RATE = 12_500_000_000  # of a link of 100 Gb/s


@pytest.mark.parametrize(
    ("what", "readings", "known"),
    [
        ("steady", [0, 1, 2, 3], [1, 1, 1]),
        ("at 1.05 of the link", [0, 1.05 * RATE], [1.05 * RATE]),
        ("reset to zero", [50, 60, 0, 7], [10, 7]),
        ("reset and more than before", [50, 60, 2, 70], [10, 68]),
        ("wrap at 32 bits", [2**32 - 5, 2**32 - 1, 6, 8], [4, 2]),
        ("wrap at 32 bits of words", [4 * (2**32 - 5), 4 * (2**32 - 1), 4 * 6], [16]),
        ("wrap at 48 bits", [2**48 - 9, 3, 5], [2]),
        ("wrap at 64 bits, as doubles", [2.0**64, 0, 4096], [4096]),
        ("clamped: its end is no reading", [10, 20, NAN, NAN], [10]),
        ("clamped and reset by hand", [10, NAN, 0, 5], [5]),
        ("backwards by one", [5, 4, 6], [2]),
        ("gone and back", [10, 20, NAN, 3, 4], [10, 1]),
        ("gone and back with the same count", [10, 20, NAN, 20, 21], [10, 1]),
        ("never known", [NAN, NAN], []),
        ("known once", [7], []),
        ("jumped by 2**40", [0, 5, 5 + 2**40, 6 + 2**40], [5, 1]),
        ("jumped by 2**62 and back", [0, 5, 2**62, 6, 7], [5, 1]),
        ("jumped twice", [0, 2**41, 2**42, 2**42 + 1], [1]),
        ("a jump and a step back", [0, 2**41, 4, 5], [1]),
        ("stands still", [9, 9, 9], [0, 0]),
    ],
)
def test_negative_and_impossible_rates_are_left_out(
    what: str, readings: list[float], known: list[float]
) -> None:
    end = len(readings)
    operations = [(0.0, float(end))]
    meter = metered(chunk(0, end, operations, of={PORT: readings, LINK: [RATE] * end}))
    count = meter.counts.get(PORT, CounterTotal())
    assert (count.total, count.covered_ns) == (sum(known), len(known) * SECOND)
    if known:
        assert (count.rate_histogram.lowest, count.rate_histogram.highest) == (
            min(known),
            max(known),
        )
        assert count.rate_histogram.lowest >= 0 and count.rate_histogram.highest <= 1.05 * RATE


def test_a_virtual_link_speed_does_not_limit_rates() -> None:
    # A tap says 10 Mb/s and carries a thousand times that; nobody knows what a bond's speed is
    # while it cannot be read.
    readings, slow = [0, 10**9, 2 * 10**9], [1_250_000] * 3
    names = BYTES, SPEED
    of = dict(zip(names, (readings, slow)))
    made_up = [{"name": "eth0", "physical": False}]
    timeline = chunk(0, 3, [(0.0, 3.0)], of=of)
    assert metered(replace(timeline, header=make_header(nics=made_up))).total(*BYTES) == 2 * 10**9
    physical = [{"name": "eth0", "physical": True}]
    assert metered(replace(timeline, header=make_header(nics=physical))).total(*BYTES) == 0
    unread = chunk(0, 3, [(0.0, 3.0)], of={BYTES: readings, SPEED: [NAN] * 3})
    assert metered(unread).total(*BYTES) == 2 * 10**9


def test_a_faster_link_uses_its_new_speed_limit() -> None:
    of = {PORT: [0, 1, 8 * RATE, 8 * RATE + 1], LINK: [RATE / 10, RATE / 10, RATE, RATE]}
    assert metered(chunk(0, 4, [(0.0, 4.0)], of=of)).total(*PORT) == 8 * RATE + 1
