"""Which network interfaces are real, so that what they say of their speed can be believed."""

from __future__ import annotations

from pathlib import Path

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.inventory import build_host_inventory


def nic(sys: Path, name: str, bus: str = "", driver: str = "", over: str = "") -> None:
    """An interface as sysfs shows it: on a bus, on top of another, or neither."""
    folder = sys / "class/net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text("up\n")
    (folder / "speed").write_text("10000\n")
    if bus:
        device = sys / f"devices/{name}"
        for kind, target in (("subsystem", bus), ("driver", driver)):
            (sys / f"bus/{target}").mkdir(parents=True, exist_ok=True)
            device.mkdir(parents=True, exist_ok=True)
            (device / kind).symlink_to(sys / f"bus/{target}")
        (folder / "device").symlink_to(device)
    if over:
        (folder / f"lower_{over}").symlink_to(sys / "class/net" / over)


def test_only_interfaces_backed_by_hardware_are_physical(tmp_path: Path) -> None:
    nic(tmp_path, "ens1", "pci", "mlx5_core")
    nic(tmp_path, "ens2", "pci", "vmxnet3")
    nic(tmp_path, "eth0", "virtio", "virtio_net")
    nic(tmp_path, "veth1")
    nic(tmp_path, "vlan9", over="ens1")
    nic(tmp_path, "docker0", over="veth1")
    nics = build_host_inventory(Roots(sys=tmp_path))["nics"]
    assert {entry["name"]: entry["physical"] for entry in nics} == {
        "docker0": False,
        "ens1": True,
        "ens2": False,
        "eth0": False,
        "veth1": False,
        "vlan9": True,
    }
    assert {entry["link_bytes_per_second"] for entry in nics} == {1_250_000_000}
