"""Slow links, idle faster ones, RDMA and rails; every number by hand (`networks.shared`)."""

from __future__ import annotations

import pytest

from tests.support.networks import GB, make_hca, make_nic, split_transfers
from tests.support.synthetic.jobs import MS

QUIET = make_nic()


def test_a_link_slower_than_those_of_the_peers_is_a_bad_link() -> None:
    # Node 2's link came up at 5 GB/s, the others at 10. Over three nodes 4/3 of 100 MB are moved:
    # 26.67 ms at 5 GB/s, 13.33 at 10. Of 30 ms 13.33 are the link's, 3.33 beyond for no reason.
    given, shares = split_transfers(QUIET, QUIET, make_nic(speed=5 * GB))
    assert given == {"net-link": pytest.approx(40 * 13.3333, abs=0.01)}
    assert shares.excess_ns == pytest.approx(3 * 40 * 3.3333 * MS, abs=MS)
    [sign] = shares.shares["net-link"].symptoms
    assert (sign.node, sign.evidence.value) == (2, 5 * GB)
    assert (
        sign.evidence.note
        == "is less than the rate of the same links of other nodes: eth0 of node2"
    )
    # a fifth slower is the same kind of link
    assert split_transfers(QUIET, QUIET, make_nic(speed=8 * GB))[0] == {}


def test_a_faster_interface_that_stood_idle_on_both_nodes_is_a_wrong_path() -> None:
    # 100 ms at 1 GB/s, 10 ms at 10 GB/s over eth1; it took 120, 20 of them for no reason.
    both = {**make_nic(speed=1 * GB), **make_nic("eth1", sent=0.0, speed=10 * GB)}
    given, shares = split_transfers(both, both, took=[120 * MS] * 40)
    assert given == {"net-path": 40 * 90}
    assert shares.excess_ns == 2 * 40 * 20 * MS
    sign = shares.shares["net-path"].symptoms[0]
    assert (
        sign.evidence.note == "carried the traffic while eth1 was idle and is faster: eth0 of node0"
    )
    assert (sign.evidence.sign, sign.evidence.device) == ("faster-device-idle", "eth1")
    # on one of the nodes alone it leads nowhere
    assert split_transfers(both, make_nic(speed=1 * GB), took=[120 * MS] * 40)[0] == {}
    # in use it is no alternative, and less than twice as fast it is none either
    for other in (make_nic("eth1", sent=5 * GB), make_nic("eth1", sent=0.0, speed=1.9 * GB)):
        busy = {**make_nic(speed=1 * GB), **other}
        assert split_transfers(busy, busy, took=[120 * MS] * 40)[0] == {}


def test_a_single_node_on_the_slow_interface_is_named() -> None:
    wrong = {**make_nic(speed=1 * GB), **make_nic("eth1", sent=0.0, speed=10 * GB)}
    given, shares = split_transfers(QUIET, wrong, took=[120 * MS] * 40)
    assert given == {"net-path": 40 * 90}
    assert [sign.node for sign in shares.shares["net-path"].symptoms] == [1]


def test_idle_interfaces_are_ignored_when_the_nic_carried_little_traffic() -> None:
    # The job moved 10 GB, the NIC 1: something else carried it that is not recorded.
    both = {**make_nic(sent=1 * GB, speed=1 * GB), **make_nic("eth1", sent=0.0)}
    assert split_transfers(both, both, took=[120 * MS] * 40)[0] == {}


def test_unused_active_rdma_is_a_wrong_path() -> None:
    # As fast as the NIC beside it: no rate to win, but what is beyond is TCP's.
    both = {**QUIET, **make_hca(sent=0.0, speed=10 * GB)}
    given, shares = split_transfers(both, both)
    assert given == {"net-path": 800}
    sign = shares.shares["net-path"].symptoms[0]
    assert (sign.device, sign.evidence.sign) == ("mlx5_0/1", "port-unused")
    assert sign.evidence.device == "mlx5_0/1"
    down = {**both, "rdma.state_count mlx5_0/1": 1.0}
    assert split_transfers(down, down)[0] == {}


def test_rdma_in_use_determines_rate_and_symptoms() -> None:
    # 4 ms at 25 GB/s, the idle NIC beside it is no alternative; 26 of 30 ms are beyond.
    both = {**make_hca(), **make_nic(sent=0.1 * GB, speed=100 * GB)}
    given, shares = split_transfers(both, both)
    assert given == {} and shares.excess_ns == 2 * 40 * 26 * MS
    for name, cause in (
        ("rdma.symbol_errors_total", "net-link"),
        ("rdma.link_downed_total", "net-link"),
        ("rdma.retransmits_total", "net-link"),
        ("rdma.out_of_sequence_total", "net-link"),
        ("rdma.cnp_total", "net-congestion"),
        ("rdma.ecn_marked_total", "net-congestion"),
        ("rdma.discards_total", "net-congestion"),
    ):
        given, shares = split_transfers(both, {**both, f"{name} mlx5_0/1": 600})
        assert given == {cause: 40 * 26}, name
        assert shares.shares[cause].symptoms[0].device == "mlx5_0/1"


def test_a_port_blocked_a_fifth_of_the_time_is_congestion() -> None:
    # 10 GB are 2.5e9 words; as many ticks in which the port waited are half of the time.
    both = make_hca()
    waits = {**both, "rdma.transmit_wait_total mlx5_0/1": 2.5e9}
    given, shares = split_transfers(both, waits)
    assert given == {"net-congestion": 40 * 26}
    assert shares.shares["net-congestion"].symptoms[0].evidence.value == 0.5
    assert split_transfers(both, {**both, "rdma.transmit_wait_total mlx5_0/1": 0.6e9})[0] == {}


def test_rails_with_unequal_traffic_are_a_wrong_path() -> None:
    # Two rails of 25 GB/s: 2 ms for 100 MB, 28 beyond.
    even = {**make_hca("a/1"), **make_hca("b/1")}
    uneven = {**make_hca("a/1"), **make_hca("b/1", sent=4 * GB)}
    given, shares = split_transfers(even, uneven)
    assert given == {"net-path": 40 * 28}
    [sign] = shares.shares["net-path"].symptoms
    assert (sign.node, sign.device, sign.evidence.value) == (1, "b/1", 0.4)
    assert split_transfers(even, {**make_hca("a/1"), **make_hca("b/1", sent=6 * GB)})[0] == {}


def eight(*sent: float, down: int | None = None) -> dict[str, float]:
    """Eight rails of 25 GB/s with what each sent."""
    out: dict[str, float] = {}
    for number, amount in enumerate(sent):
        out |= make_hca(f"r{number}/1", sent=amount)
    if down is not None:
        out[f"rdma.state_count r{down}/1"] = 1.0
    return out


RAILS = [{"ports": [f"r{number}/1" for number in range(8)]}]
FULL = 10 * GB


def test_an_idle_rail_among_busy_rails_is_a_wrong_path() -> None:
    # 100 MB over eight rails of 25 GB/s take 0.5 ms, over seven 0.57; of 30 ms 29.43 are beyond.
    even, one_off = eight(*[FULL] * 8), eight(*[FULL] * 7, 0.0)
    given, shares = split_transfers(even, one_off, rails=RAILS)
    assert given == {"net-path": pytest.approx(40 * 29.4286, abs=0.01)}
    [sign] = shares.shares["net-path"].symptoms
    assert (sign.node, sign.device, sign.evidence.value) == (1, "r7/1", 0.0)
    assert sign.evidence.note == "of the traffic of r0/1 went over this rail: r7/1 of node1"
    # the header did not say that they belong together
    assert split_transfers(even, one_off)[0] == {}


def test_a_rail_with_its_link_down_is_reported_as_down() -> None:
    even = eight(*[FULL] * 8)
    _, shares = split_transfers(even, eight(*[FULL] * 3, 0.0, *[FULL] * 4, down=3), rails=RAILS)
    [sign] = shares.shares["net-path"].symptoms
    assert sign.evidence.note == (
        "of the traffic of r0/1 went over this rail, whose link is down: r3/1 of node1"
    )


def test_a_job_on_few_rails_has_no_idle_rail_symptom() -> None:
    two = eight(FULL, FULL, *[0.0] * 6)
    assert split_transfers(two, two, rails=RAILS)[0] == {}


def test_bond_members_count_once_and_are_no_idle_interfaces() -> None:
    # The standby member is idle and twice as fast; were it not of the bond, 50 of 120 ms would be
    # the wrong path's: 100 MB take 100 ms at 1 GB/s and 50 at 2.
    both = {
        **make_nic("bond0", speed=1 * GB),
        **make_nic("eth0", speed=1 * GB),
        **make_nic("eth1", sent=0.0, speed=2 * GB),
    }
    took = [120 * MS] * 40
    assert split_transfers(both, both, took=took, lower={"bond0": ["eth0", "eth1"]})[0] == {}
    assert split_transfers(both, both, took=took, lower={"bond0": ["eth0"]})[0] == {
        "net-path": 40 * 50
    }
    # The bond carried 3 GB of the job's 10, its members the same 3 again: too little to be sure.
    few = {
        **make_nic("bond0", sent=3 * GB, speed=1 * GB),
        **make_nic("eth0", sent=3 * GB, speed=1 * GB),
        **make_nic("eth2", sent=0.0, speed=2 * GB),
    }
    assert split_transfers(few, few, took=took, lower={"bond0": ["eth0"]})[0] == {}
    assert split_transfers(few, few, took=took)[0] == {"net-path": 40 * 50}


def test_an_exceeded_link_speed_is_ignored() -> None:
    for carried, known in ((1.05, True), (1.06, False)):
        both = make_hca(sent=60 * carried * GB, speed=1 * GB)
        _, shares = split_transfers(both, both)
        assert shares.by_rate is known
