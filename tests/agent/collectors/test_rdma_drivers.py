"""Ports of drivers that depart from the specification, and files that are not as they should be."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.collectors.rdma import RdmaCollector
from clusterprof.agent.sampling import inventory
from clusterprof.errors import Unavailable
from tests.support.opened_collector import pread_as_cgroupfs_does
from tests.support.rdma_ports import COUNTERS, LINK, PATIENCE, RdmaRig, make_not_counted, pick_port

pytestmark = pytest.mark.usefixtures("closed_rdma_ports")


@pytest.fixture
def zoo(host) -> dict[tuple[str, str], Value]:
    return RdmaRig(host("rdma-zoo")).read_all()


def test_omni_path_flits_count_as_eight_bytes(zoo) -> None:
    missing = make_not_counted()
    assert pick_port(zoo, "hfi1_0/1", COUNTERS) == [
        8 * 345_091_702_026,
        8 * 273_558_326_543,
        33,
        32,
        missing,
        31,  # the card's own: ticks of waiting, backward and forward marks
        missing,
        missing,
        0,
        0,
        missing,
        34,
        missing,
        missing,
        missing,
    ]


def test_a_renamed_omni_path_card_is_recognized_by_its_driver(host_copy) -> None:
    roots = host_copy("rdma-zoo")
    folder = roots.sys / "class/infiniband"
    (folder / "hfi1_0").rename(folder / "ibp5s0")
    assert RdmaRig(roots).read_all()["rdma.receive_bytes_total", "ibp5s0/1"] == 4 * 345_091_702_026
    (folder / "ibp5s0/device").mkdir()
    (folder / "ibp5s0/device/driver").symlink_to("../../../../bus/pci/drivers/hfi1")
    assert RdmaRig(roots).read_all()["rdma.receive_bytes_total", "ibp5s0/1"] == 8 * 345_091_702_026


def test_slingshot_values_are_parsed_without_their_timestamps(zoo) -> None:
    missing = make_not_counted()
    marked = 10 + sum(range(8))
    assert pick_port(zoo, "cxi0/1", COUNTERS) == [
        88_000,
        99_000,
        missing,
        missing,
        missing,
        marked,
        missing,
        4 + 5,
        2,
        missing,
        3,
        *[missing] * 4,
    ]
    no_width = Unavailable("absent", "the driver reports no width", "")
    assert pick_port(zoo, "cxi0/1", LINK) == [4, 25_000_000_000, no_width]


@pytest.mark.parametrize(
    ("link", "speed", "expected"),
    [
        ("0", "200000", (1, "the link of cxi0/1 is not up")),
        ("1", "0", (4, "the driver does not report the rate of cxi0/1")),
        ("up", "200000", ("not understood", "not understood")),
    ],
)
def test_unusable_slingshot_link_states_and_speeds_have_reasons(
    host_copy, link: str, speed: str, expected: tuple[Any, str]
) -> None:
    roots = host_copy("rdma-zoo")
    shutil.rmtree(roots.sys / "class/infiniband")  # a node of such cards only
    properties = roots.sys / "class/cxi/cxi0/device/properties"
    (properties / "link").write_text(f"{link}\n")
    (properties / "speed").write_text(f"{speed}\n")
    state, rate, _ = pick_port(RdmaRig(roots).read_all(), "cxi0/1", LINK)
    printed = state.message.split(": ")[-1] if isinstance(state, Unavailable) else state
    assert isinstance(rate, Unavailable)
    assert (printed, rate.message.split(": ")[-1]) == expected


def test_without_the_cxi_class_slingshot_is_found_by_interface(host_copy) -> None:
    roots = host_copy("rdma-zoo")
    shutil.rmtree(roots.sys / "class/infiniband")
    (roots.sys / "class/net/hsn0").mkdir()
    (roots.sys / "class/cxi/cxi0/device").rename(roots.sys / "class/net/hsn0/device")
    shutil.rmtree(roots.sys / "class/cxi")
    (roots.sys / "class/net/hsn1/device").mkdir(parents=True)  # of that name, and no such card
    result = RdmaRig(roots).read_all()
    assert pick_port(result, "hsn0/1", ["receive_bytes_total", "state_count"]) == [88_000, 4]
    assert {device for _, device in result} == {"hsn0/1"}
    [hca] = inventory.list_rdma_devices(roots.sys)
    assert (hca["name"], hca["ports"][0]["netdev"]) == ("hsn0", "hsn0")


def test_device_counters_are_not_assigned_to_either_of_two_ports(host_copy) -> None:
    roots = host_copy("rdma-zoo")
    device = roots.sys / "class/infiniband/hfi1_0"
    shutil.copytree(device / "ports/1", device / "ports/2")
    result = RdmaRig(roots).read_all()
    for port in ("hfi1_0/1", "hfi1_0/2"):
        assert pick_port(result, port, ["ecn_marked_total", "transmit_wait_total"]) == [
            make_not_counted(),
            33,
        ]


def test_text_and_negative_numbers_are_rejected(host_copy) -> None:
    roots = host_copy("rdma-zoo")
    port = roots.sys / "class/infiniband/mlx5_2/ports/1"
    rig = RdmaRig(roots)
    rig.read_all()
    (port / "counters/port_rcv_data").write_text("-7\n")
    (port / "counters/port_xmit_data").write_text("0x12 overflow\n")
    (port / "hw_counters/packet_seq_err").write_text("\n")
    result = rig.read_fresh()
    names = ["receive_bytes_total", "transmit_bytes_total", "retransmits_total"]
    assert pick_port(result, "mlx5_2/1", names) == [
        Unavailable("failed", "port_rcv_data of mlx5_2/1 is -7: not a valid count", ""),
        Unavailable("absent", "mlx5_2/1 has no port_xmit_data", ""),
        Unavailable("absent", "mlx5_2/1 has no packet_seq_err", ""),  # not the sum of the others
    ]


def test_a_counter_is_not_continued_from_a_different_file(host_copy) -> None:
    roots = host_copy("rdma-zoo")
    port = roots.sys / "class/infiniband/bnxt_re0/ports/1"
    data = port / "counters/port_rcv_data"
    data.write_text("2000\n")
    rig = RdmaRig(roots)
    assert rig.read_all()["rdma.receive_bytes_total", "bnxt_re0/1"] == 8000
    data.write_text("N/A (no PMA)\n")  # rx_roce_only_bytes says 7000
    result = rig.read_fresh()["rdma.receive_bytes_total", "bnxt_re0/1"]
    assert result == Unavailable("absent", "bnxt_re0/1 has no port_rcv_data", "")


def test_a_counter_file_that_returns_is_read_again(host_copy, monkeypatch) -> None:
    roots = host_copy("rdma-zoo")
    rig = RdmaRig(roots)
    rig.read_all()
    monkeypatch.setattr("os.pread", pread_as_cgroupfs_does)  # sysfs answers ENODEV alike
    file = roots.sys / "class/infiniband/mlx5_2/ports/1/counters/port_rcv_data"
    file.unlink()
    gone = rig.read_fresh()["rdma.receive_bytes_total", "mlx5_2/1"]
    assert isinstance(gone, Unavailable) and gone.kind == "absent"
    file.write_text("11\n")
    assert rig.read_fresh()["rdma.receive_bytes_total", "mlx5_2/1"] == 44


def test_forbidden_ports_are_denied_and_leave_the_others(host_copy, as_nobody) -> None:
    roots = host_copy("rdma-zoo")
    collector = RdmaCollector(Context(roots, None, list), first_wait_seconds=PATIENCE)
    ports = roots.sys / "class/infiniband/mlx5_2/ports/1"
    ports.chmod(0)
    with as_nobody():
        columns = collector.open()
        by_key = {(s.name, d): v for (s, d), v in zip(columns, collector.sample())}
    ports.chmod(0o755)
    collector.close()
    state = by_key["rdma.state_count", "mlx5_2/1"]
    assert isinstance(state, Unavailable) and state.kind == "denied"
    assert by_key["rdma.receive_bytes_total", "mlx5_0/1"] == 4 * 10**12
