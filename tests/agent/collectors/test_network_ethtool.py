"""Statistics of network cards: names as their drivers give them, and real ones of this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import pytest

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.collectors.network import EthtoolCollector, build_columns
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.network.netdev import EthtoolStatistics, list_network_cards
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable

PATIENCE = 20.0
MS = 1_000_000


def values(names: dict[str, int]) -> dict[tuple[str, str], Value]:
    """What a card called c with these statistics is said to count."""
    numbers = dict(enumerate(names.values()))
    columns = build_columns("c", list(names))
    return {(column.signal.name, column.device): column.value(numbers) for column in columns}


def test_mlx5_pauses_under_several_counter_names_count_once() -> None:
    # Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst
    assert values(
        {
            "rx_pause_ctrl_phy": 5,
            "tx_pause_ctrl_phy": 6,
            "rx_global_pause": 5,
            "rx_global_pause_duration": 100,
            "rx_global_pause_transition": 2,
            "tx_global_pause": 6,
            "tx_global_pause_duration": 200,
            "rx_prio3_pause": 30,
            "rx_prio3_pause_duration": 7,
            "rx_prio3_pause_transition": 9,
            "rx_prio4_pause": 4,
            "tx_prio3_pause": 50,
            "tx_pause_storm_warning_events": 8,
            "rx_prio0_marked": 3,
            "rx_ecn_mark": 11,
            "rx0_ecn_mark": 11,
            "rx_discards_phy": 13,
            "tx_discards_phy": 17,
            "rx_prio0_buf_discard": 13,
            "rx_prio3_bytes": 10**12,
            "rx_out_of_buffer": 19,
        }
    ) == {
        ("network.pause_frames_total", "c rx"): 5 + 30 + 4,
        ("network.pause_frames_total", "c tx"): 6 + 50,
        ("network.paused_ns_total", "c rx"): (100 + 7) * 1000,
        ("network.paused_ns_total", "c tx"): 200_000,
        ("network.ecn_marked_total", "c"): 14,
        ("network.discards_phy_total", "c"): 30,
        ("network.out_of_buffer_total", "c"): 19,
        ("network.priority_pause_frames_total", "c rx 3"): 30,
        ("network.priority_pause_frames_total", "c rx 4"): 4,
        ("network.priority_pause_frames_total", "c tx 3"): 50,
    }


def test_bnxt_pause_frames_are_not_counted_twice_by_priority() -> None:
    assert values(
        {
            "[0]: rx_discard_pkts": 99,
            "rx_pause_frames": 1,
            "rx_pfc_frames": 2,
            "rx_pfc_ena_frames_pri0": 2,
            "tx_pause_frames": 3,
            "tx_pfc_frames": 4,
            "pfc_pri0_rx_duration_us": 5,
            "pfc_pri0_rx_transitions": 6,
            "pfc_pri0_tx_duration_us": 7,
            "continuous_pause_events": 8,
            "rx_stat_discard": 9,
            "tx_stat_discard": 10,
            "rx_total_discard_pkts": 99,
            "rx_total_ring_discards": 11,
            "rx_total_oom_discards": 12,
        }
    ) == {
        ("network.pause_frames_total", "c rx"): 3,
        ("network.pause_frames_total", "c tx"): 7,
        ("network.paused_ns_total", "c rx"): 5_000,
        ("network.paused_ns_total", "c tx"): 7_000,
        ("network.discards_phy_total", "c"): 19,
        ("network.out_of_buffer_total", "c"): 23,
        ("network.priority_pause_frames_total", "c rx 0"): 2,
    }


def test_intel_priority_pauses_count_xoff_frames_without_xon_frames() -> None:
    ice = {
        "link_xon_rx.nic": 1,
        "link_xoff_rx.nic": 2,
        "link_xon_tx.nic": 3,
        "link_xoff_tx.nic": 4,
        "rx_priority_0_xon.nic": 5,
        "rx_priority_0_xoff.nic": 6,
        "tx_priority_7_xoff.nic": 7,
        "rx_dropped.nic": 8,
        "tx_dropped_link_down.nic": 9,
        "rx_dropped": 99,
    }
    expected = {
        ("network.pause_frames_total", "c rx"): 8,
        ("network.pause_frames_total", "c tx"): 11,
        ("network.discards_phy_total", "c"): 17,
        ("network.priority_pause_frames_total", "c rx 0"): 6,
        ("network.priority_pause_frames_total", "c tx 7"): 7,
    }
    assert values(ice) == expected
    i40e = {f"port.{name.removesuffix('.nic')}": n for name, n in ice.items() if n != 99}
    assert values(i40e) == expected


def test_a_cloud_nic_counts_packets_held_back_by_limits() -> None:
    assert values(
        {
            "tx_timeout": 1,
            "bw_in_allowance_exceeded": 2,
            "bw_out_allowance_exceeded": 3,
            "pps_allowance_exceeded": 4,
            "conntrack_allowance_exceeded": 50,
        }
    ) == {("network.shaped_total", "c"): 9}


def test_mlx4_and_ixgbe_priority_numbers_are_parsed() -> None:
    mlx4 = {
        "rx_pause": 1,
        "rx_pause_prio_3": 2,
        "rx_pause_duration_prio_3": 9,
        "tx_pause_prio_0": 4,
    }
    assert values(mlx4) == {
        ("network.pause_frames_total", "c rx"): 3,
        ("network.pause_frames_total", "c tx"): 4,
        ("network.paused_ns_total", "c rx"): 9_000,
        ("network.priority_pause_frames_total", "c rx 3"): 2,
        ("network.priority_pause_frames_total", "c tx 0"): 4,
    }
    ixgbe = {
        "rx_flow_control_xoff": 5,
        "rx_flow_control_xon": 99,
        "rx_pb_4_pxoff": 6,
        "rx_pb_4_pxon": 99,
        "rx_no_buffer_count": 7,
        "rx_missed_errors": 99,
    }
    assert values(ixgbe) == {
        ("network.pause_frames_total", "c rx"): 11,
        ("network.priority_pause_frames_total", "c rx 4"): 6,
        ("network.out_of_buffer_total", "c"): 7,
    }


def test_buffers_and_limits_of_virtual_cards_are_summed_over_queues_once() -> None:
    gve = {
        "rx_dropped": 99,
        "rx_no_buffers_posted[0]": 1,
        "rx_no_buffers_posted[11]": 2,
        "rx_queue_drop_cnt[0]": 99,
    }
    assert values(gve) == {("network.out_of_buffer_total", "c"): 3}
    ena = {"queue_0_rx_empty_rx_ring": 4, "queue_1_rx_empty_rx_ring": 5, "queue_1_rx_cnt": 99}
    assert values(ena) == {("network.out_of_buffer_total", "c"): 9}
    queues = {"rx0_hw_drop_overruns": 6, "rx1_hw_drop_overruns": 1, "tx0_hw_ratelimit_packets": 8}
    virtio = {"rx_hw_drop_overruns": 7, "rx_hw_drops": 99, "tx_hw_ratelimit_packets": 8, **queues}
    expected = {("network.out_of_buffer_total", "c"): 7, ("network.shaped_total", "c"): 8}
    assert values(virtio) == values(queues) == expected


def test_nics_without_pause_counters_have_no_values() -> None:
    assert values({"rx_queue_0_packets": 1, "rx_drops": 2, "tx_kicks": 3, "peer_ifindex": 4}) == {}


def test_a_counter_beyond_63_bits_is_unknown() -> None:
    assert values({"rx_pause_frames": 1 << 63}) == {
        ("network.pause_frames_total", "c rx"): Unavailable(
            "failed", "the driver's counter does not fit 63 bits", ""
        )
    }


class Cards:
    """Drivers by hand: names and values per interface, as the kernel would hand them out."""

    def __init__(self, drivers: dict[str, dict[str, int]]) -> None:
        self.drivers = drivers
        self.closed = 0

    def names(self, nic: str) -> list[str]:
        if nic not in self.drivers:
            raise Unavailable("absent", f"the driver of {nic} has no statistics of its own", "")
        return list(self.drivers[nic])

    def values(self, nic: str, indices: Sequence[int], count: int) -> list[int] | None:
        if nic not in self.drivers:
            raise Unavailable("absent", f"{nic}: no such device", "")
        numbers = list(self.drivers[nic].values())
        return [numbers[i] for i in indices] if len(numbers) == count else None

    def close(self) -> None:
        self.closed += 1


class Rig:
    def __init__(self, roots: Roots, drivers: dict[str, dict[str, int]]) -> None:
        self.now_ns = 0
        self.cards = Cards(drivers)
        self.collector = EthtoolCollector(
            Context(roots, None, list), self.clock, lambda: self.cards, first_wait_seconds=PATIENCE
        )
        self.columns = self.collector.open()

    def clock(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def next(self) -> dict[tuple[str, str], Value]:
        self.now_ns += MS
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                sample = self.collector.sample()
            except NothingNew:
                time.sleep(0.001)
                continue
            keys = [(signal.name, device) for signal, device in self.columns]
            return dict(zip(keys, sample, strict=True))
        raise AssertionError("nothing was read")

    def fresh(self) -> dict[tuple[str, str], Value]:
        self.next()
        return self.next()


def test_cards_are_reread_and_changed_counter_names_change_the_columns(host) -> None:
    roots = host("rdma-zoo")
    assert list_network_cards(roots) == [
        "ens1f1",
        "ens2f0",
        "ens3f0",
    ]  # neither bond, vlan, tap nor loopback
    drivers = {"ens2f0": {"x": 9, "rx_prio3_pause": 1}, "ens3f0": {"tx_pfc_frames": 2}}
    rig = Rig(roots, drivers)
    pause, item = "network.pause_frames_total", "network.priority_pause_frames_total"
    third = (item, "ens2f0 rx 3")
    assert rig.next() == {(pause, "ens2f0 rx"): 1, third: 1, (pause, "ens3f0 tx"): 2}
    drivers["ens2f0"]["rx_prio3_pause"] = 70
    assert rig.fresh() == {(pause, "ens2f0 rx"): 70, third: 70, (pause, "ens3f0 tx"): 2}
    gone = drivers.pop("ens3f0")
    assert rig.fresh()[pause, "ens3f0 tx"] == Unavailable("absent", "ens3f0: no such device", "")
    drivers["ens3f0"] = {**gone, "rx_pause_frames": 3}  # its names have changed
    with pytest.raises(DevicesChanged):
        rig.fresh()


def test_a_new_interface_changes_the_columns(host_copy) -> None:
    roots = host_copy("rdma-zoo")
    rig = Rig(roots, {"ens2f0": {"rx_pause_frames": 1}})
    rig.next()
    (roots.sys / "class/net/ens9").mkdir()
    with pytest.raises(DevicesChanged):
        rig.fresh()


def test_a_node_without_pause_counters_is_absent_with_a_reason(host) -> None:
    with pytest.raises(Unavailable) as raised:
        Rig(host("rdma-zoo"), {"ens2f0": {"rx_drops": 0}})
    assert raised.value.kind == "absent"


def test_ethtool_requests_have_the_layout_of_the_kernel() -> None:
    statistics = EthtoolStatistics()
    with_names = []
    for _, nic in socket.if_nameindex():
        try:
            names = statistics.names(nic)
        except Unavailable as why:
            assert why.kind in ("absent", "denied"), why.message
            continue
        with_names.append(nic)
        assert len(names) == statistics.count(nic) and all(names)
        everything = statistics.values(nic, range(len(names)), len(names))
        assert everything is not None and len(everything) == len(names)
        assert statistics.values(nic, [0], len(names) + 1) is None
    with pytest.raises(Unavailable) as raised:
        statistics.names("no-such-nic")
    assert raised.value.kind == "absent"
    with pytest.raises(Unavailable):
        statistics.names("a name that is too long")
    statistics.close()
    assert "lo" not in with_names
