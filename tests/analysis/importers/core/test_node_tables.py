"""What an importer gathers comes out as the records of a recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clusterprof.analysis.importers.core.node_tables import NodeTables, number_groups
from clusterprof.analysis.importers.core.node_tables import compute_group_number as group_number
from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks
from clusterprof.analysis.timeline.spans import StepSpans
from clusterprof.probe import layout
from clusterprof.probe.hooks.process_groups import compute_group_number as number_of
from clusterprof.trace.encoder import write_node
from clusterprof.trace.schema import Clock, Columns, Event, Spans

S = 1_000_000_000


def made() -> NodeTables:
    node = NodeTables("dgx-07", "kineto", wall_minus_own_ns=5 * S)
    node.add_device("gpu0", vendor="nvidia")
    node.add_device("gpu0", name="H100")
    node.add_rank(4711, rank=3, world_size=8, device="gpu0", local_rank=1)
    node.add_group(4711, group_number([3, 1]), [3, 1])
    node.add_spans(4711, layout.STEP, [2 * S, 5 * S], [5 * S, 6 * S], a=[7, 8], b=2)
    node.add_collectives(
        4711,
        [3 * S],
        [4 * S],
        group_number([1, 3]),
        [0],
        bytes_=64,
        operation=layout.ALL_REDUCE,
        exposed_ns=[S // 2],
    )
    node.add_busy_time("gpu0", np.array([2 * S, 4 * S]), np.array([3 * S, 5 * S]), 2 * S, 6 * S)
    node.add_series("gpu.power_watts", "gpu0", [2 * S, 4 * S], [300.5, np.nan])
    return node


def test_group_numbers_equal_those_of_the_probe() -> None:
    assert group_number([9, 0, 4]) == number_of([0, 4, 9])
    assert group_number("tp") != group_number("dp")


def test_header_and_first_records_identify_host_and_rank() -> None:
    node = made()
    header = node.header()
    assert header.node["hostname"] == header.node["display"] == "dgx-07"
    assert header.started == {"monotonic_ns": 2 * S, "boottime_ns": 2 * S, "realtime_ns": 7 * S}
    assert header.devices == [{"id": "gpu0", "vendor": "nvidia", "name": "H100"}]
    assert header.versions["importer"] == "kineto"
    clock, registered, announced = next(node.records())
    assert clock == Clock(2 * S, 2 * S, 7 * S)
    assert isinstance(registered, Event) and registered.attributes["rank"] == 3
    assert isinstance(announced, Event)
    assert announced.attributes == {"pid": 4711, "group": number_of([1, 3]), "ranks": [1, 3]}


def test_records_are_ordered_by_second() -> None:
    slices = list(made().records())[1:]
    first = [
        min(r.t_ns[0] if isinstance(r, Columns) else 9 * S for r in slice_) for slice_ in slices
    ]
    assert first == sorted(first)
    spans = [r for slice_ in slices for r in slice_ if isinstance(r, Spans)]
    ends = [end for r in spans for end in r.columns["end_ns"]]
    assert ends == [4 * S, 4 * S, 5 * S, 6 * S]
    assert [r.first_sequence for r in spans] == [1, 3, 4]
    kinds = [kind for r in spans for kind in r.columns["kind"]]
    assert kinds == [layout.COLLECTIVE, layout.EXPOSED_COLLECTIVE, layout.STEP, layout.STEP]
    # The measure names the operation, which is span number 1 in the order of their ends.
    assert spans[0].columns["a"][1] == 1 and spans[0].columns["b"][1] == S // 2


def test_a_written_node_is_read_back_with_rank_and_device(tmp_path: Path) -> None:
    node = made()
    write_node(tmp_path / "n", node.header(), node.records())
    (chunk,) = NodeLoader(tmp_path / "n").chunks()
    (rank,) = find_ranks(chunk)
    assert (rank.rank, rank.device, rank.marked) == (3, "gpu0", True)
    busy = chunk.series["gpu.busy_ns_total", "gpu0"]
    assert busy.t_ns.tolist() == [2 * S, 3 * S, 4 * S, 5 * S, 6 * S]
    assert busy.values.tolist() == [0, S, S, 2 * S, 2 * S]
    power = chunk.series["gpu.power_watts", "gpu0"].values
    assert power[0] == 300.5 and np.isnan(power[1])
    assert rank.main.get_spans(StepSpans).step.tolist() == [7, 8]


def test_a_silent_hour_adds_no_records() -> None:
    node = NodeTables("", "x")
    node.add_series("gpu.busy_ratio", "0", [0, 3600 * S], [0.0, 1.0])
    # The opening, a slice for each reading, and the end.
    assert sum(1 for _ in node.records()) == 4
    assert node.header().node["display"] == "unknown-host"


def test_groups_with_equal_members_get_distinct_numbers() -> None:
    numbers = number_groups({"0": [0, 1], "1": [2, 3], "2": [1, 0]})
    assert numbers == {"0": number_of([0, 1]), "1": number_of([2, 3]), "2": number_of([0, 1], "2")}


def test_an_empty_node_makes_an_empty_recording(tmp_path: Path) -> None:
    node = NodeTables("a", "x")
    write_node(tmp_path / "n", node.header(), node.records())
    assert NodeLoader(tmp_path / "n").facts().first_ns == 0
