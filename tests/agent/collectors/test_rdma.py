from __future__ import annotations

import shutil
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Value
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.rdma_ports import (
    COUNTERS,
    LINK,
    PATIENCE,
    RdmaRig,
    make_not_counted,
    make_saturated,
    pick_port,
)

pytestmark = pytest.mark.usefixtures("closed_rdma_ports")


@pytest.fixture
def zoo(host) -> dict[tuple[str, str], Value]:
    return RdmaRig(host("rdma-zoo")).read_all()


def test_each_port_has_all_columns_in_order(host) -> None:
    rig = RdmaRig(host("rdma-zoo"))
    ports = ["bnxt_re0/1", "hfi1_0/1", "irdma0/1", "mlx4_0/1", "mlx5_0/1", "mlx5_1/1", "mlx5_2/1"]
    ports += ["rdmap0s6/1", "cxi0/1"]
    assert [(signal.name, device) for signal, device in rig.columns] == [
        (f"rdma.{name}", port) for port in ports for name in (*COUNTERS, *LINK)
    ]


def test_infiniband_words_become_bytes_and_saturated_counters_unknown(zoo) -> None:
    assert pick_port(zoo, "mlx5_0/1", COUNTERS) == [
        4 * 1_000_000_000_000,
        4 * 2_000_000_000_000,
        777,
        0,
        0,
        0,
        5,
        6 + 1 + 7 + 0,
        4,
        make_saturated("mlx5_0/1", "link_downed", 255),
        3,
        14,
        make_saturated("mlx5_0/1", "link_error_recovery", 255),
        make_not_counted(),
        make_not_counted(),
    ]
    assert pick_port(zoo, "mlx5_0/1", LINK) == [4, 50_000_000_000, 4]  # 400 Gb/s


def test_congestion_counters_of_a_roce_port_are_read(zoo) -> None:
    assert pick_port(zoo, "mlx5_2/1", COUNTERS) == [
        1000,
        2000,
        0,
        20 + 1,
        30,
        40,
        11,
        1 + 2 + 3 + 4,
        0,
        0,
        0,
        make_not_counted(),
        make_not_counted(),
        12,
        13,
    ]


def test_saturated_32_bit_data_counters_are_unknown(zoo) -> None:
    end = 0xFFFFFFFF
    assert pick_port(zoo, "mlx4_0/1", COUNTERS) == [
        make_saturated("mlx4_0/1", "port_rcv_data", end),
        make_saturated("mlx4_0/1", "port_xmit_data", end),
        make_saturated("mlx4_0/1", "port_xmit_wait", end),
        *[make_not_counted()] * 3,
        21,
        22 + 23,
        0,
        0,
        make_saturated("mlx4_0/1", "symbol_error", 0xFFFF),
        make_not_counted(),
        make_not_counted(),
        24,
        25,
    ]


def test_a_link_that_is_down_has_a_state_and_no_speed(zoo) -> None:
    down = Unavailable("absent", "the link of mlx5_1/1 is not up", "")
    assert pick_port(zoo, "mlx5_1/1", LINK) == [1, down, down]


def test_bnxt_ports_use_driver_counters_without_performance_management(zoo) -> None:
    port = "bnxt_re0/1"

    def keeps_no(name: str) -> Unavailable:
        return Unavailable("absent", f"{port} has no {name}", "")

    assert pick_port(zoo, port, COUNTERS) == [
        7000,
        6000,  # of RoCE, not of everything on the card
        keeps_no("port_xmit_wait"),
        5,
        6,
        7,
        4,
        3 + 2,
        8,
        keeps_no("link_downed"),
        keeps_no("symbol_error"),
        make_not_counted(),
        make_not_counted(),
        42,
        41,
    ]


def test_ports_with_only_driver_counters_are_read(zoo) -> None:
    missing = make_not_counted()
    assert pick_port(zoo, "irdma0/1", COUNTERS) == [
        1010,
        2020,
        missing,
        3,
        3,
        4,
        missing,
        5,
        13,
        *[missing] * 6,
    ]
    missing = make_not_counted()
    assert pick_port(zoo, "rdmap0s6/1", COUNTERS) == [
        111,
        222,
        *[missing] * 5,
        4,
        3,
        *[missing] * 6,
    ]


def test_counters_are_reread_and_become_unknown_when_saturated(host_copy) -> None:
    roots = host_copy("rdma-zoo")
    rig = RdmaRig(roots)
    file = roots.sys / "class/infiniband/mlx5_2/ports/1/counters/port_xmit_wait"
    seen: list[Any] = [rig.read_all()["rdma.transmit_wait_total", "mlx5_2/1"]]
    for value in (900, 0xFFFFFFFF):
        file.write_text(f"{value}\n")
        seen.append(rig.read_fresh()["rdma.transmit_wait_total", "mlx5_2/1"])
    assert seen == [0, 900, make_saturated("mlx5_2/1", "port_xmit_wait", 0xFFFFFFFF)]


def test_values_carry_the_time_of_reading(host) -> None:
    rig = RdmaRig(host("rdma-zoo"))
    before_ns = rig.now_ns
    rig.read_all()
    assert 0 < rig.collector.sampled_ns <= before_ns
    rig.read_fresh()
    assert rig.collector.sampled_ns > before_ns


def test_a_removed_device_changes_the_columns(host_copy) -> None:
    roots = host_copy("rdma-zoo")
    rig = RdmaRig(roots)
    rig.read_all()
    shutil.rmtree(roots.sys / "class/infiniband/mlx5_1")
    with pytest.raises(DevicesChanged):
        rig.read_fresh()
    rig.collector.close()
    rig.columns = rig.collector.open()
    assert "mlx5_1/1" not in {device for _, device in rig.columns}
    assert ("rdma.state_count", "mlx5_0/1") in rig.read_all()
    for kind in ("infiniband", "cxi"):
        shutil.rmtree(roots.sys / "class" / kind)
    with pytest.raises(DevicesChanged):
        rig.read_fresh()
    rig.collector.close()
    with pytest.raises(Unavailable) as raised:
        rig.collector.open()
    assert raised.value.kind == "absent"


def test_open_files_are_released_on_close(host, open_files) -> None:
    before = open_files()
    rig = RdmaRig(host("rdma-zoo"))
    rig.read_fresh()
    held = open_files() - before
    assert 0 < held <= 128 + 1
    rig.read_all()
    rig.collector._reader._worker.answered.wait(PATIENCE)
    rig.collector.close()
    assert open_files() == before


def test_a_machine_without_rdma_is_absent(host) -> None:
    with pytest.raises(Unavailable) as raised:
        RdmaRig(host("h100-node"))
    assert raised.value.kind == "absent"
