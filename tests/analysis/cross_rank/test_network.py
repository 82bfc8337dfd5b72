"""How much moved between ranks, how fast and over what, beside hand-made counters.

The jobs of `networks`: 40 all-reduces of 100 MB over two nodes, of which each rank sends
2 * 1/2 * 100 MB = 100 MB, in 30 ms: 3.33 GB/s.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterprof.analysis.attribution.network.transfer_time import (
    TransferTotals,
    compute_upper_edge,
)
from clusterprof.analysis.cross_rank.network import (
    build_flow_evidence,
    format_gigabits,
    has_slow_path,
)
from tests.support.networks import GB, TOOK, make_all_reduces, make_hca, make_links, make_nic
from tests.support.synthetic.jobs import MS

MB = 1_000_000


def flow_evidence(transfers: TransferTotals, *nodes: dict) -> dict[str, tuple[float, str]]:
    known = {number: make_links(number, node) for number, node in enumerate(nodes)}
    return {
        evidence_row.name: (evidence_row.value, evidence_row.note)
        for evidence_row in build_flow_evidence(transfers, known)
    }


def test_moved_bytes_and_rate_are_reported_with_the_link_rate() -> None:
    # 3.33 of 10 GB/s; the link of node 1 is the slower one: 80 Gb/s
    result = flow_evidence(
        make_all_reduces(TOOK), make_nic(speed=20 * GB), make_nic("eth1", speed=10 * GB)
    )
    assert result["network.moved_bytes"] == (
        4000 * MB,
        "sent by each rank in 40 operations of 95.4 MiB, over sockets of eth0, eth1",
    )
    rate, note = result["network.bytes_per_second"]
    assert rate == pytest.approx(100 * MB / 0.030)
    assert note == "in transfer: 33.3 % of the 80 Gb/s of eth1"


def test_an_unknown_link_rate_is_replaced_by_the_fastest_tenth() -> None:
    # a tenth took 20 ms; the class that ends above it is counted
    result = flow_evidence(
        make_all_reduces([20 * MS] * 8 + [30 * MS] * 32), make_nic(speed=None), make_nic(speed=None)
    )
    rate, note = result["network.bytes_per_second"]
    assert rate == pytest.approx(4000 * MB / (8 * 0.020 + 32 * 0.030))
    edge_ns = compute_upper_edge(195)  # 2 ** (195 / 8) = 21.7 ms: the first edge above 20 ms
    assert compute_upper_edge(194) < 20 * MS <= edge_ns
    mib = 100 * MB / (edge_ns / 1e9) / (1 << 30)
    fastest = f"the fastest tenth of them {mib:.1f} GiB/s"
    assert note == f"in transfer; {fastest}; the rate of the links is not known"


def test_only_devices_that_carried_the_traffic_are_named() -> None:
    over_rdma = flow_evidence(
        make_all_reduces(TOOK),
        {**make_nic(sent=MB), **make_hca()},
        {**make_nic(sent=MB), **make_hca()},
    )
    assert over_rdma["network.moved_bytes"][1].endswith(", over RDMA by mlx5_0/1")
    # 4 of the 10 GB that the job sent at least went over eth0: less than half
    idle = flow_evidence(make_all_reduces(TOOK), make_nic(sent=4 * GB), make_nic(sent=4 * GB))
    assert idle["network.moved_bytes"][1] == "sent by each rank in 40 operations of 95.4 MiB"


def test_transfers_within_a_node_use_no_link_rate() -> None:
    result = flow_evidence(make_all_reduces(TOOK, nodes=(0, 0)), make_nic())
    assert result["network.moved_bytes"][1].endswith(" within one node")
    assert "the fastest tenth" in result["network.bytes_per_second"][1]
    known = {0: make_links(0, make_nic())}
    assert (
        build_flow_evidence(make_all_reduces(TOOK, nodes=(0, 0)), known, between_nodes=True) == ()
    )


def test_a_very_slow_rate_within_a_node_is_marked() -> None:
    # 100 MB in a second: 0.0931 of a gibibyte; 40 operations in 20 steps
    slow = make_all_reduces([1000 * MS] * 40, nodes=(0, 0))
    by_key = {
        evidence_row.name: evidence_row
        for evidence_row in build_flow_evidence(slow, {0: make_links(0, make_nic())}, steps=20)
    }
    least = "of the 1.0 GiB/s that sockets within a node reach at least"
    assert by_key["network.bytes_per_second"].note == f"9.3 % {least}"
    path = by_key["network.path_ratio"]
    assert path.value == pytest.approx(100 * MB / (1 << 30))
    assert path.note == f"{least}; shared memory, PCIe and NVLink reach more"
    assert by_key["network.operation_bytes"].value == 100 * MB
    assert by_key["network.operations_per_step_count"].value == 2
    assert has_slow_path(tuple(by_key.values()))
    fast = build_flow_evidence(
        make_all_reduces(TOOK, nodes=(0, 0)), {0: make_links(0, make_nic())}
    )  # 3.33 GB/s
    assert not has_slow_path(fast)
    assert [item.name for item in fast] == [
        "network.moved_bytes",
        "network.bytes_per_second",
        "network.operation_bytes",
        "network.path_ratio",
    ]


def test_small_operations_are_not_judged_by_a_rate() -> None:
    small = make_all_reduces([1000 * MS] * 40, nodes=(0, 0), size=MB)  # each sends 1 MB of 1 MiB
    by_key = {
        evidence_row.name: evidence_row.note
        for evidence_row in build_flow_evidence(small, {0: make_links(0, make_nic())})
    }
    assert "network.path_ratio" not in by_key
    assert by_key["network.bytes_per_second"] == (
        "in transfer; the fastest tenth of them hardly faster; operations this small"
        " say little about the path"
    )


def test_operations_of_unknown_size_report_only_their_count() -> None:
    transfers = make_all_reduces(TOOK, size=-1)
    (flow_evidence,) = build_flow_evidence(
        transfers, {0: make_links(0, make_nic()), 1: make_links(1, make_nic())}
    )
    assert (flow_evidence.name, flow_evidence.value) == ("network.operations_count", 40)
    assert flow_evidence.note == "operations of each rank, of unknown size, over sockets of eth0"


def test_no_rate_is_reported_for_operations_overlapping_computation() -> None:
    transfers = make_all_reduces(TOOK)
    transfers.cells = [replace(cell, overlapped=True) for cell in transfers.cells]
    evidence = flow_evidence(transfers, make_nic(), make_nic())
    assert list(evidence) == ["network.moved_bytes", "network.operation_bytes"]


def test_rates_are_formatted_in_gigabits_per_second() -> None:
    assert [format_gigabits(value) for value in (125e6, 1.25e9, 50e9)] == [
        "1 Gb/s",
        "10 Gb/s",
        "400 Gb/s",
    ]
