"""Interfaces and RDMA devices in the header: what a node has, and no address of it."""

from __future__ import annotations

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling import inventory
from clusterprof.agent.sampling.inventory import build_host_inventory


def test_network_cards_are_listed_before_other_interfaces(host) -> None:
    roots = host("rdma-zoo")
    assert inventory.list_network_interfaces(roots.sys, roots.proc) == [
        {
            "name": "ens1f1",
            "state": "down",
            "mtu": 1500,
            "physical": True,
            "driver": "mlx5_core",
            "pci": "0000:3b:00.1",
            "numa_node": 0,
        },
        {
            "name": "ens2f0",
            "link_bytes_per_second": 12_500_000_000,
            "state": "up",
            "mtu": 9000,
            "physical": True,
            "driver": "mlx5_core",
            "pci": "0000:5e:00.0",
            "numa_node": 0,
            "master": "bond0",
        },
        {
            "name": "ens3f0",
            "link_bytes_per_second": 25_000_000_000,
            "state": "up",
            "mtu": 9000,
            "physical": True,
            "driver": "bnxt_en",
            "pci": "0000:af:00.0",
            "numa_node": 1,
            "master": "bond0",
        },
        {
            "name": "bond0",
            "link_bytes_per_second": 37_500_000_000,
            "state": "up",
            "mtu": 9000,
            "kind": "bond",
            "physical": True,
            "lower": ["ens2f0", "ens3f0"],
        },
        {
            "name": "bond0.100",
            "link_bytes_per_second": 37_500_000_000,
            "state": "up",
            "mtu": 9000,
            "kind": "vlan",
            "physical": True,
            "lower": ["bond0"],
            "default_route": True,
        },
        {"name": "lo", "state": "unknown", "mtu": 65536, "physical": False},
        {"name": "tap0", "state": "up", "kind": "tun", "physical": False, "default_route": True},
    ]


def test_rdma_devices_are_listed_with_ports_and_interfaces(host) -> None:
    roots = host("rdma-zoo")
    hcas = {hca["name"]: hca for hca in inventory.list_rdma_devices(roots.sys)}
    assert list(hcas) == [*sorted(set(hcas) - {"cxi0"}), "cxi0"] and len(hcas) == 9
    assert hcas["cxi0"] == {
        "name": "cxi0",
        "netdevs": ["hsn0"],
        "ports": [{"port": "1", "link_layer": "Slingshot", "netdev": "hsn0"}],
    }
    assert hcas["mlx5_0"] == {
        "name": "mlx5_0",
        "driver": "mlx5_core",
        "pci": "0000:3b:00.0",
        "numa_node": 0,
        "ports": [{"port": "1", "link_layer": "InfiniBand"}],
    }
    assert hcas["bnxt_re0"] == {
        "name": "bnxt_re0",
        "driver": "bnxt_en",
        "pci": "0000:af:00.0",
        "numa_node": 1,
        "netdevs": ["ens3f0"],
        "ports": [{"port": "1", "link_layer": "Ethernet", "netdev": "ens3f0"}],
    }
    assert hcas["rdmap0s6"] == {
        "name": "rdmap0s6",
        "ports": [{"port": "1", "link_layer": "Unspecified"}],
    }


def test_a_long_interface_list_keeps_the_network_cards(tmp_path) -> None:
    net = tmp_path / "class/net"
    for number in range(300):
        (net / f"cali{number}").mkdir(parents=True)
    (net / "eth0/device").mkdir(parents=True)
    network_interfaces = inventory.list_network_interfaces(tmp_path, tmp_path)
    assert len(network_interfaces) == inventory.MAX_NICS
    assert network_interfaces[0] == {"name": "eth0", "physical": True}


def test_the_header_lists_nics_and_rdma_devices(host) -> None:
    inventory = build_host_inventory(host("rdma-zoo"))
    assert [nic["name"] for nic in inventory["nics"]][:2] == ["ens1f1", "ens2f0"]
    assert len(inventory["hcas"]) == 9
    nothing = build_host_inventory(host("container-no-sys"))
    assert (nothing["nics"], nothing["hcas"]) == ([], [])


def test_interfaces_of_this_machine_have_known_fields() -> None:
    roots = Roots()
    names = {nic["name"] for nic in inventory.list_network_interfaces(roots.sys, roots.proc)}
    known = {
        "name",
        "link_bytes_per_second",
        "state",
        "mtu",
        "kind",
        "physical",
        "driver",
        "pci",
        "numa_node",
        "master",
        "lower",
        "default_route",
        "mode",
        "down",
    }
    for nic in inventory.list_network_interfaces(roots.sys, roots.proc):
        assert set(nic) <= known
    assert not names or "lo" in names
