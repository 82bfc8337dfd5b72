"""Links that degrade: what a table of readings, a minute apart, must make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.node.link_trends import LinkTrends
from clusterprof.analysis.timeline.model import Chunk
from clusterprof.trace.schema import Event
from tests.support.builders import make_chunk, make_counter, make_gauge, make_header

GPU, PORT = "GPU-1", "mlx5_0/1"
RESEAT = ": reseat or replace the card, its riser or the cable before it fails"
REPLAYS = "gpu.pcie_replays_total"
NODE = replace(
    make_header(), devices=[{"id": GPU, "index": 0, "pcie_width_max": 16, "pcie_generation_max": 5}]
)


def notes(*chunks: Chunk) -> tuple[str, ...]:
    trends = LinkTrends()
    for part in chunks:
        trends.observe(part)
    return trends.describe_links()


def count_by_minute(name: str, device: str, errors: Sequence[int], before: int = 100) -> Chunk:
    """A recording with so many errors in each minute; the counter began long before."""
    totals = np.concatenate([[before], before + np.cumsum(errors)])
    times = [0.0, *(60.0 * minute + 30 for minute in range(len(errors)))]
    return make_chunk(
        60.0 * len(errors), series={(name, device): make_counter(times, totals)}, node=NODE
    )


def read_by_minute(name: str, device: str, values: Sequence[float]) -> Chunk:
    times = [60.0 * minute + 30 for minute in range(len(values))]
    return make_chunk(
        60.0 * len(values), series={(name, device): make_gauge(times, values)}, node=NODE
    )


def test_more_than_eight_replays_a_minute_are_reported() -> None:
    assert notes(count_by_minute(REPLAYS, GPU, [0, 9, 1])) == (
        f"the PCIe link of {GPU}: 10 packets sent again, 9 in one minute (NVIDIA's limit is 8)"
        + RESEAT,
    )
    assert notes(count_by_minute(REPLAYS, GPU, [8, 8, 8])) == ()


def test_replays_that_rise_are_named_below_the_limit() -> None:
    # Quarters of three minutes: 1 error in the first, 4 + 4 + 4 = 12 in the last.
    rising = [0, 0, 1, 0, 1, 2, 2, 3, 3, 4, 4, 4]
    assert notes(count_by_minute(REPLAYS, GPU, rising)) == (
        f"the PCIe link of {GPU}: 24 packets sent again, 4 in one minute (NVIDIA's limit is 8),"
        " rising from 1 in the first quarter of the time to 12 in the last" + RESEAT,
    )
    assert notes(count_by_minute(REPLAYS, GPU, rising[::-1])) == ()  # it recovers
    assert notes(count_by_minute(REPLAYS, GPU, [4] * 12)) == ()  # it stays: 12 and 12
    assert notes(count_by_minute(REPLAYS, GPU, [0] * 11 + [8])) == ()  # fewer than ten
    assert notes(count_by_minute(REPLAYS, GPU, [0, 0, 0, 8, 8])) == ()  # five minutes: no trend


@pytest.mark.parametrize(
    ("name", "device", "link", "what", "count", "limit"),
    [
        ("gpu.nvlink_replays_total", GPU, "an NVLink of", "packets sent again", 1, 0),
        ("gpu.nvlink_recoveries_total", GPU, "an NVLink of", "times trained again", 1, 0),
        ("gpu.nvlink_symbol_errors_total", GPU, "an NVLink of", "symbol errors", 1, 0),
        ("gpu.nvlink_crc_errors_total", GPU, "an NVLink of", "damaged flits and data", 6001, 6000),
        ("rdma.symbol_errors_total", PORT, "the link of port", "symbol errors", 11, 10),
        ("rdma.receive_errors_total", PORT, "the link of port", "damaged packets received", 11, 10),
        ("rdma.link_recoveries_total", PORT, "the link of port", "recoveries", 11, 10),
        ("rdma.link_downed_total", PORT, "the link of port", "times down", 1, 0),
    ],
)
def test_each_link_error_counter_has_a_limit(
    name: str, device: str, link: str, what: str, count: int, limit: int
) -> None:
    [note] = notes(count_by_minute(name, device, [0, count]))
    assert note.startswith(f"{link} {device}: {count:,} {what}, {count:,} in one ")
    assert (f" is {limit:,})" if limit else "(none is normal)") in note
    assert notes(count_by_minute(name, device, [0, limit])) == ()


def test_the_symbol_error_limit_applies_per_hour() -> None:
    # 6 in the 59th minute and 6 in the 61st are of two hours.
    errors = [0] * 58 + [6, 0, 6] + [0] * 59
    assert notes(count_by_minute("rdma.symbol_errors_total", PORT, errors)) == ()
    [note] = notes(count_by_minute("rdma.symbol_errors_total", PORT, [0] * 50 + [6, 6]))
    assert "12 symbol errors, 12 in one hour (the limit of ibqueryerrors is 10)" in note


def test_counter_resets_and_missing_readings_add_no_errors() -> None:
    for values in ([100, 0, 5], [100, np.nan, 200], [np.nan, np.nan, np.nan]):
        readings = make_counter([0, 60, 120], values)
        assert notes(make_chunk(180, series={(REPLAYS, GPU): readings}, node=NODE)) == ()


def test_readings_shared_by_chunks_are_counted_only_once() -> None:
    # The second chunk begins at 60 s and repeats the reading before it, as chunks do.
    first = make_chunk(60, series={(REPLAYS, GPU): make_counter([0, 30, 55], [0, 5, 5])}, node=NODE)
    later = make_counter([30, 55, 70, 90], [5, 5, 5, 9])
    second = replace(
        make_chunk(120, series={(REPLAYS, GPU): later}, node=NODE), start_ns=60 * 10**9
    )
    assert notes(first, second) == ()  # 5 in the first minute, 4 in the second
    later = make_counter([30, 55, 70, 90], [5, 5, 5, 14])
    second = replace(
        make_chunk(120, series={(REPLAYS, GPU): later}, node=NODE), start_ns=60 * 10**9
    )
    [note] = notes(first, second)
    assert "14 packets sent again, 9 in one minute" in note


def test_a_link_that_loses_lanes_is_reported() -> None:
    width = "gpu.pcie_width_count"
    assert notes(read_by_minute(width, GPU, [16] * 4 + [8] * 5)) == (
        f"the PCIe link of {GPU} fell from 16 lanes to 8 lanes" + RESEAT,
    )
    assert notes(read_by_minute(width, GPU, [16] * 4 + [8] * 4)) == ()  # not for five minutes yet
    assert notes(read_by_minute(width, GPU, [8] * 4)) == (
        f"the PCIe link of {GPU} has 8 lanes at most, not 16 lanes" + RESEAT,
    )
    assert notes(read_by_minute(width, GPU, [16, np.nan, 16])) == ()
    assert notes(read_by_minute(width, GPU, [np.nan, np.nan])) == ()


def test_a_lower_pcie_generation_on_idle_gpus_is_ignored() -> None:
    generation = "gpu.pcie_generation_count"
    assert notes(read_by_minute(generation, GPU, [5, 5, *[1] * 9])) == ()
    assert notes(read_by_minute(generation, GPU, [4, 4, *[1] * 9])) == (
        f"the PCIe link of {GPU} has generation 4 at most, not generation 5: check the slot's"
        " setting in the firmware, or reseat the card",
    )
    assert notes(read_by_minute(generation, "GPU-2", [1, 1])) == ()  # unknown what is possible


def test_lost_nvlinks_and_port_lanes_are_reported() -> None:
    assert notes(read_by_minute("gpu.nvlink_active_count", GPU, [18, 18, *[17] * 6])) == (
        f"{GPU} fell from 18 NVLinks up to 17 NVLinks up" + RESEAT,
    )
    assert notes(read_by_minute("rdma.link_width_lanes_count", PORT, [4, *[1] * 6])) == (
        f"the link of port {PORT} fell from 4 lanes to 1 lanes" + RESEAT,
    )


def test_a_port_with_a_reduced_rate_is_reported() -> None:
    width, speed = "rdma.link_width_lanes_count", "rdma.link_bytes_per_second"
    rates = [50e9, 50e9, np.nan, *[25e9] * 5]  # in between it was down
    assert notes(read_by_minute(speed, PORT, rates)) == (
        f"the link of port {PORT} fell from 400 Gb/s to 200 Gb/s" + RESEAT,
    )
    assert notes(read_by_minute(speed, PORT, rates[:-2])) == ()  # 50 GB/s within five minutes
    # A port that lost lanes is slower for that reason: one note.
    lanes = read_by_minute(width, PORT, [4, 4, *[2] * 6])
    both = replace(lanes, series={**lanes.series, **read_by_minute(speed, PORT, rates).series})
    assert notes(both) == (f"the link of port {PORT} fell from 4 lanes to 2 lanes" + RESEAT,)


NVLINK = "gpu.nvlink_replays_total"
SWITCH = (3, "a switch", "00000000:05:00.0")


def with_events(part: Chunk, *events: dict[str, Any], kind: str = "nvlink-errors") -> Chunk:
    attributes = [{"collector": "gpu_nvidia", "device": GPU, **event} for event in events]
    return replace(part, events=tuple(Event(30 * 10**9, kind, each) for each in attributes))


def test_the_nvlink_with_errors_is_named() -> None:
    errors = count_by_minute(NVLINK, GPU, [0, 4])
    assert notes(with_events(errors, {"errors": [(3, NVLINK, 4)], "remotes": [SWITCH]})) == (
        f"NVLink 3 of {GPU} (to a switch at 00000000:05:00.0): 4 packets sent again,"
        " 4 in one minute (none is normal)" + RESEAT,
    )
    # NVML says nothing of the other end; errors of another kind, or of another GPU, do not count.
    others = [{"errors": [(5, "gpu.nvlink_crc_errors_total", 4)]}, {"device": "GPU-2"}]
    others[1]["errors"] = [(7, NVLINK, 4)]
    [note] = notes(with_events(errors, *others, {"errors": [(3, NVLINK, 4)]}))
    assert note.startswith(f"NVLink 3 of {GPU}: 4 packets sent again, 4 in one minute")


def test_the_nvlink_with_most_errors_is_named_first() -> None:
    errors = count_by_minute(NVLINK, GPU, [0, 24])
    first = {"errors": [(0, NVLINK, 1), (3, NVLINK, 10)], "remotes": [SWITCH]}
    [note] = notes(with_events(errors, first, {"errors": [(3, NVLINK, 10), (11, NVLINK, 3)]}))
    assert note == (
        f"NVLinks 3, 11 and 0 of {GPU}: 24 packets sent again, 20 of them on NVLink 3 (to a switch"
        " at 00000000:05:00.0), 24 in one minute (none is normal)" + RESEAT
    )
    many = {"errors": [(link, NVLINK, 20 - link) for link in range(18)]}
    [note] = notes(with_events(errors, many))
    assert note.startswith(f"NVLinks 0, 1, 2 and 15 more of {GPU}: 24 packets sent again, 20 of")


def test_nvlink_errors_below_the_limit_are_not_reported() -> None:
    crc = "gpu.nvlink_crc_errors_total"
    errors = count_by_minute(crc, GPU, [0, 6000])
    assert notes(with_events(errors, {"errors": [(3, crc, 6000)]})) == ()


def test_an_nvlink_above_the_bit_error_rate_of_nvidia_is_named() -> None:
    quiet = make_chunk(60, node=NODE)
    rates = [[0, 15e-255], [1, 1e-12], [2, 2e-12]]
    again = {"error_rates": [[2, 1e-13]], "remotes": [(2, "a GPU", "")]}
    assert notes(with_events(quiet, {"error_rates": rates}, again)) == (
        f"NVLink 2 of {GPU} (to a GPU): an effective bit error rate of 2e-12"
        " (NVIDIA's limit is 1e-12)" + RESEAT,
    )


def test_the_nvlinks_that_went_down_are_named() -> None:
    active = "gpu.nvlink_active_count"
    fell = read_by_minute(active, GPU, [18, 18, *[16] * 6])
    states = [{"down": [1, 3, 9], "remotes": [SWITCH]}, {"up": [1], "down": []}]
    assert notes(with_events(fell, *states, kind="nvlink-states")) == (
        f"{GPU} fell from 18 NVLinks up to 16 NVLinks up, without NVLink 3"
        " (to a switch at 00000000:05:00.0), NVLink 9" + RESEAT,
    )
    # A PCIe link of that GPU is another matter.
    lanes = read_by_minute("gpu.pcie_width_count", GPU, [16] * 4 + [8] * 5)
    [note] = notes(with_events(lanes, *states, kind="nvlink-states"))
    assert note == f"the PCIe link of {GPU} fell from 16 lanes to 8 lanes" + RESEAT
