"""How near cards lie to GPUs, which ports are rails, and whether GPUDirect is there: by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.doctor.sources import check_fabric
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling import inventory

GPU = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330"}
NIC = {"class": "0x020000", "vendor": "0x15b3", "device": "0x1021"}


class Machine:
    """PCI devices in a folder; a card is an RDMA device as the inventory lists it."""

    def __init__(self, folder: Path) -> None:
        self.roots = Roots(folder / "proc", folder / "sys")
        self.hcas: list[dict[str, Any]] = []

    def pci(self, way: str, kind: dict[str, str], numa: int = -1) -> str:
        device = self.roots.sys / "devices" / way
        device.mkdir(parents=True)
        for name, value in {**kind, "numa_node": str(numa)}.items():
            (device / name).write_text(f"{value}\n")
        link = self.roots.sys / "bus/pci/devices" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
        return device.name

    def card(self, name: str, way: str, numa: int = -1, **more: Any) -> None:
        pci = self.pci(way, NIC, numa)
        port = {"port": "1", "link_layer": "Ethernet"}
        self.hcas.append({"name": name, "driver": "mlx5_core", "pci": pci, "ports": [port], **more})

    def proc(self, **files: str) -> None:
        for name, text in files.items():
            path = self.roots.proc / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def describe(self) -> dict[str, Any]:
        return inventory.describe_fabric(self.roots, [], self.hcas)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("card", "numa", "path"),
    [
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0", 0, "switch"),
        ("pci0000:10/0000:10:02.0/0000:20:00.0", 0, "root"),
        ("pci0000:30/0000:30:01.0/0000:31:00.0", 0, "numa"),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "system"),
    ],
)
def test_a_gpu_nic_path_is_named_after_the_common_bridge(
    machine: Machine, card: str, numa: int, path: str
) -> None:
    machine.pci("pci0000:10/0000:10:01.0/0000:11:00.0/0000:13:00.0", GPU, 0)
    machine.card("mlx5_0", card, numa)
    entry = {"gpu": "0000:13:00.0", "numa_node": 0, "nics": ["mlx5_0"], "path": path}
    assert machine.describe() == {"gpu_nics": [entry]}


def test_all_nics_at_the_shortest_distance_are_named(machine: Machine) -> None:
    machine.pci("pci0000:10/0000:10:01.0/0000:11:00.0/0000:13:00.0", GPU, 0)
    machine.pci("pci0000:80/0000:80:01.0/0000:83:00.0", GPU, 1)
    machine.card("far", "pci0000:10/0000:10:01.0/0000:14:00.0", 0)
    machine.card("near", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0", 0)
    machine.card("a", "pci0000:90/0000:90:01.0/0000:91:00.0", 1)
    machine.card("b", "pci0000:a0/0000:a0:01.0/0000:a1:00.0", 1)
    rows = [(nic["nics"], nic["path"]) for nic in machine.describe()["gpu_nics"]]
    assert rows == [(["near"], "switch"), (["a", "b"], "numa")]


def test_a_flat_pci_tree_reports_no_gpu_nic_paths(machine: Machine) -> None:
    machine.pci("pci0000:00/0000:00:05.0", GPU)
    machine.card("mlx5_0", "pci0000:00/0000:00:06.0")
    assert "gpu_nics" not in machine.describe()


def test_display_controllers_are_not_listed_as_gpus(machine: Machine) -> None:
    machine.card("mlx5_0", "pci0000:10/0000:10:01.0/0000:12:00.0", 0)
    for slot, kind in enumerate(
        (
            {"class": "0x030000", "vendor": "0x1a03"},  # the board's controller
            {"class": "0x030000", "vendor": "0x8086"},  # a processor's graphics
            {"class": "0x040300", "vendor": "0x10de"},  # sound of a GPU
            {"class": "0x068000", "vendor": "0x10de"},  # NVSwitch
        )
    ):
        machine.pci(f"pci0000:10/0000:10:0{slot + 2}.0/0000:{slot + 20}:00.0", kind, 0)
    assert machine.describe() == {}
    machine.pci("pci0000:10/0000:10:08.0/0000:28:00.0", {"class": "0x120000", "vendor": "0x1002"})
    assert [nic["gpu"] for nic in machine.describe()["gpu_nics"]] == ["0000:28:00.0"]


def test_rails_are_matched_to_gpus_by_distance(machine: Machine) -> None:
    for number in (2, 10, 3):
        root = f"pci0000:{number:02x}/0000:{number:02x}:01.0"
        machine.pci(f"{root}/0000:{number:02x}:05.0", GPU, 0)
        machine.card(f"mlx5_{number}", f"{root}/0000:{number:02x}:06.0", 0)
    machine.card("storage", "pci0000:50/0000:50:01.0/0000:51:00.0", 0)
    machine.card("slow", "pci0000:60/0000:60:01.0/0000:61:00.0", 0, driver="mlx4_core")
    rails = machine.describe()["rails"]
    assert rails == [{"ports": ["mlx5_2/1", "mlx5_3/1", "mlx5_10/1"], "link_layer": "Ethernet"}]
    machine.card("mlx5_9", "pci0000:50/0000:50:02.0/0000:52:00.0", 0)
    assert [rail["ports"] for rail in machine.describe()["rails"]][1:] == [
        ["mlx5_9/1", "storage/1"]
    ]


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03\n"
NO_WAY = (
    "GPUDirect: no module and no dma-buf, data pass through the host; load nvidia-peermem"
    " (modprobe nvidia-peermem)"
)


@pytest.mark.parametrize(
    ("files", "entry", "missing"),
    [
        (
            {"modules": "nvidia 1 0\nnvidia_peermem 16384 0 - Live 0x0\n"},
            {"module": "nvidia_peermem"},
            (),
        ),
        (
            {
                "modules": "nv_peer_mem 1 0\n",
                "driver__nvidia__version": CLOSED,
                "sys__kernel__osrelease": "6.8.0-1\n",
            },
            {"module": "nv_peer_mem", "dma_buf": False},
            (),
        ),
        (
            {
                "modules": "nvidia 1 0\n",
                "driver__nvidia__version": OPEN,
                "sys__kernel__osrelease": "5.12.0\n",
            },
            {"module": "", "dma_buf": True},
            (),
        ),
        (
            {
                "modules": "nvidia 1 0\n",
                "driver__nvidia__version": OPEN,
                "sys__kernel__osrelease": "5.4.0\n",
            },
            {"module": "", "dma_buf": False},
            (NO_WAY,),
        ),
        (
            {"modules": "nvidia 1 0\n"},
            {"module": ""},
            ("nvidia-peermem: unknown whether the driver offers dma-buf instead",),
        ),
        (
            {"driver__nvidia__version": OPEN, "sys__kernel__osrelease": "6.1.0\n"},
            {"dma_buf": True},
            ("GPUDirect: /proc/modules cannot be read, so its state is unknown",),
        ),
    ],
)
def test_gpudirect_support_is_detected_with_missing_parts(
    machine: Machine, files: dict[str, str], entry: dict[str, Any], missing: tuple[str, ...]
) -> None:
    machine.pci("pci0000:10/0000:10:01.0/0000:13:00.0", GPU, 0)
    machine.card("mlx5_0", "pci0000:10/0000:10:01.0/0000:12:00.0", 0)
    machine.proc(**files)
    assert machine.describe()["gpudirect"] == entry
    port = machine.roots.sys / "class/infiniband/mlx5_0"
    port.mkdir(parents=True)
    (port / "device").symlink_to(machine.roots.sys / "bus/pci/devices/0000:12:00.0")
    assert check_fabric(machine.roots).missing == missing


def test_gpudirect_is_checked_only_with_nvidia_and_rdma(machine: Machine) -> None:
    machine.proc(modules="nvidia_peermem 1 0\n")
    machine.pci("pci0000:10/0000:10:01.0/0000:13:00.0", {**GPU, "vendor": "0x1002"}, 0)
    machine.card("mlx5_0", "pci0000:10/0000:10:01.0/0000:12:00.0", 0)
    assert "gpudirect" not in machine.describe()
    machine.pci("pci0000:20/0000:20:01.0/0000:23:00.0", GPU, 0)
    machine.hcas.clear()
    assert "gpudirect" not in machine.describe()


def test_a_plain_machine_has_no_fabric(tmp_path: Path) -> None:
    look = check_fabric(Roots(tmp_path / "proc", tmp_path / "sys"))
    assert (look.name, look.status, look.found) == ("fabric", "absent", "")


def test_a_gpu_without_a_nic_on_its_socket_is_reported(machine: Machine) -> None:
    machine.pci("pci0000:10/0000:10:01.0/0000:13:00.0", GPU, 0)
    machine.pci("pci0000:80/0000:80:01.0/0000:81:00.0", NIC, 1)
    port = machine.roots.sys / "class/infiniband/mlx5_0"
    port.mkdir(parents=True)
    (port / "device").symlink_to(machine.roots.sys / "bus/pci/devices/0000:81:00.0")
    machine.proc(modules="nvidia_peermem 1 0\n")
    assert check_fabric(machine.roots).missing == (
        "a card near GPU 0000:13:00.0: the nearest, mlx5_0, is of another NUMA node",
    )
