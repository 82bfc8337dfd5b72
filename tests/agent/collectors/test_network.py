from __future__ import annotations

import pytest

from clusterprof.agent.collectors.network import NetworkCollector
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.opened_collector import OpenedCollector

NAMES = [
    "receive_bytes_total",
    "transmit_bytes_total",
    "receive_drops_total",
    "transmit_drops_total",
    "errors_total",
    "link_bytes_per_second",
    "carrier_changes_total",
]
TCP = [
    ("tcp.segments_sent_total", "", 54_915_039 + 227),  # first time + again
    ("tcp.retransmits_total", "", 227),
    ("tcp.timeouts_total", "", 115),
]


def nic(name: str, *values: object) -> list[tuple[str, str, object]]:
    return [(f"network.{what}", name, value) for what, value in zip(NAMES, values)]


def test_counters_and_link_speed_of_two_nics_are_read(host) -> None:
    assert OpenedCollector(NetworkCollector, host("h100-node")).read_all() == [
        # errors 2 + 1 both ways; 100 Gb/s = 12.5 GB/s
        *nic("ens1f0", 874_354_587_000, 563_352_563_000, 7, 3, 3, 12_500_000_000, 2),
        *nic("ens2f0", 5_000, 4_000, 0, 0, 0, 3_125_000_000, 4),
        *TCP,
    ]


def test_unused_nics_are_skipped_and_nics_down_have_no_speed(host) -> None:
    roots = host("two-nics-one-down")
    no_speed = Unavailable(
        "absent",
        f"{roots.sys}/class/net/eth2/speed: the driver does not report the speed of eth2",
        "",
    )
    assert OpenedCollector(NetworkCollector, roots).read_all() == [
        *nic("eth0", 7_000_000, 3_000_000, 2, 8, 5, 1_250_000_000, 2),
        *nic("eth2", 2_000, 1_000, 0, 0, 0, no_speed, 5),
        *TCP,
    ]


def test_a_container_without_sys_keeps_the_interfaces_with_traffic(host) -> None:
    roots = host("container-no-sys")
    speed = Unavailable(
        "absent",
        f"{roots.sys}/class/net/eth0/speed: no such file or directory",
        "mount sysfs at /sys",
    )
    changes = Unavailable(
        "absent", f"{roots.sys}/class/net/eth0/carrier_changes: no such file or directory", ""
    )
    snmp = Unavailable("absent", f"{roots.proc}/net/snmp: no such file or directory", "")
    netstat = Unavailable("absent", f"{roots.proc}/net/netstat: no such file or directory", "")
    assert OpenedCollector(NetworkCollector, roots).read_all() == [
        *nic("eth0", 648, 438, 0, 0, 0, speed, changes),
        ("tcp.segments_sent_total", "", snmp),
        ("tcp.retransmits_total", "", snmp),
        ("tcp.timeouts_total", "", netstat),
    ]


def test_counters_missing_in_an_old_kernel_have_reasons(host) -> None:
    roots = host("no-psi")
    changes = Unavailable(  # since Linux 3.15
        "absent", f"{roots.sys}/class/net/eth0/carrier_changes: no such file or directory", ""
    )
    assert OpenedCollector(NetworkCollector, roots).read_all() == [
        *nic("eth0", 10_000_000_000, 20_000_000_000, 3, 10, 2 + 9, 1_250_000_000, changes),
        *TCP[:2],
        ("tcp.timeouts_total", "", Unavailable("absent", "this kernel does not count it", "")),
    ]


def test_a_driver_that_reports_no_speed_leaves_the_other_values(host) -> None:
    roots = host("vm-two-cores")
    line = next(
        line for line in (roots.proc / "net/dev").read_text().splitlines() if "eth0:" in line
    )
    f = [int(word) for word in line.split(":")[1].split()]
    readings = OpenedCollector(NetworkCollector, roots).read_all()
    assert readings[:5] == nic("eth0", f[0], f[8], f[3], f[11], f[2] + f[10])
    assert [(name, device) for name, device, _ in readings[5:]] == [
        ("network.link_bytes_per_second", "eth0"),
        ("network.carrier_changes_total", "eth0"),
        *((name, device) for name, device, _ in TCP),
    ]
    names, values = (
        line.split()
        for line in (roots.proc / "net/netstat").read_text().splitlines()
        if line.startswith("TcpExt")
    )
    assert readings[-1][2] == int(dict(zip(names, values))["TCPTimeouts"])


def test_a_failed_speed_read_means_the_link_is_down(host_copy, as_nobody) -> None:
    roots = host_copy("two-nics-one-down")
    speed = roots.sys / "class/net/eth0/speed"
    speed.chmod(0)
    with as_nobody():
        value = OpenedCollector(NetworkCollector, roots).read_value(
            "network.link_bytes_per_second", "eth0"
        )
    assert isinstance(value, Unavailable) and value.kind == "denied"
    speed.chmod(0o644)
    speed.unlink()
    speed.mkdir()  # reading it fails with EISDIR; the kernel's EINVAL takes the same way
    value = OpenedCollector(NetworkCollector, roots).read_value(
        "network.link_bytes_per_second", "eth0"
    )
    assert value == Unavailable("absent", f"{speed}: the link is down", "")


def rewrite(roots, old: str, new: str) -> None:
    path = roots.proc / "net/dev"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_counters_are_reread_and_a_reset_is_reported_unchanged(host_copy) -> None:
    roots = host_copy("h100-node")
    network = OpenedCollector(NetworkCollector, roots)
    rewrite(roots, "ens2f0: 5000 ", "ens2f0: 6000 ")
    assert network.read_value("network.receive_bytes_total", "ens2f0") == 6_000
    rewrite(roots, "ens2f0: 6000 ", "ens2f0: 40 ")  # the driver was reset: series.rise voids it
    assert network.read_value("network.receive_bytes_total", "ens2f0") == 40


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("  eth1:       0       0", "  eth1:      64       1", id="a NIC woke up"),
        pytest.param("  eth2:", "  eth3:", id="a NIC was renamed"),
        pytest.param(
            "  eth2:    2000 ",
            " tap0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14\n eth2: 2000 ",
            id="a NIC came",
        ),
    ],
)
def test_a_changed_set_of_interfaces_changes_the_columns(host_copy, old: str, new: str) -> None:
    roots = host_copy("two-nics-one-down")
    network = OpenedCollector(NetworkCollector, roots)
    network.read_all()
    rewrite(roots, old, new)
    with pytest.raises(DevicesChanged):
        network.read_all()
    network.close()


def test_a_changed_tcp_table_header_is_parsed_again(host_copy) -> None:
    roots = host_copy("h100-node")
    network = OpenedCollector(NetworkCollector, roots)
    assert network.read_value("tcp.timeouts_total") == 115
    (roots.proc / "net/netstat").write_text(
        "TcpExt: SyncookiesSent New TCPTimeoutsX TCPTimeouts\nTcpExt: 1 2 3 116\n"
        "IpExt: A\nIpExt: 9\n"
    )
    assert network.read_value("tcp.timeouts_total") == 116


def bonded(network: OpenedCollector) -> tuple[object, list[tuple[str, dict[str, str]]]]:
    """How many members of the bond are up, and what has happened to them since the last call."""
    return network.read_value("network.bond_members_up_count", "bond0"), network.collector.events()


def test_a_bond_member_that_is_down_is_reported_once(host_copy) -> None:
    roots = host_copy("roce-cloud-node")
    network = OpenedCollector(NetworkCollector, roots)
    first, second = ({"bond": "bond0", "nic": nic} for nic in ("eth0", "eth1"))
    assert bonded(network) == (1, [("bond-member-down", second)])
    assert bonded(network) == (1, [])
    states = [roots.sys / f"class/net/{nic}/bonding_slave/mii_status" for nic in ("eth0", "eth1")]
    states[1].write_text("up\n")
    assert bonded(network) == (2, [("bond-member-up", second)])
    for state in states:
        state.write_text("going down\n")  # any word but up
    assert bonded(network) == (0, [("bond-member-down", first), ("bond-member-down", second)])
    states[0].unlink()
    network.close()
    again = OpenedCollector(NetworkCollector, roots)
    unknown, events = bonded(again)
    assert isinstance(unknown, Unavailable) and unknown.kind == "absent" and events == []
    again.close()


def test_a_new_bond_member_changes_the_columns(host_copy, open_files) -> None:
    roots = host_copy("roce-cloud-node")
    before = open_files()
    network = OpenedCollector(NetworkCollector, roots)
    network.read_all()
    (roots.sys / "class/net/bond0/lower_rdma0").symlink_to("../rdma0")
    with pytest.raises(DevicesChanged):
        network.read_all()
    network.close()
    assert open_files() == before
