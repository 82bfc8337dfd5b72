"""Which block device stands on which, as the header of a recording has it."""

from __future__ import annotations

from pathlib import Path

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.inventory import build_host_inventory


def standing(roots: Roots) -> dict[str, list[str] | None]:
    return {disk["name"]: disk.get("on") for disk in build_host_inventory(roots)["disks"]}


def test_volumes_list_their_underlying_disks(host) -> None:
    assert standing(host("lustre-nfs")) == {
        "dm-0": ["md0"],
        "md0": ["nvme0n1", "nvme1n1"],
        "nvme0n1": None,
        "nvme1n1": None,
        "nvme2n1": None,
    }


def block(sys: Path, name: str, device: str, backing: str = "") -> None:
    folder = sys / "class/block" / name
    folder.mkdir(parents=True)
    (folder / "size").write_text("8\n")
    (folder / "dev").write_text(device + "\n")
    if backing:
        (folder / "loop").mkdir()
        (folder / "loop/backing_file").write_text(backing + "\n")


def test_a_loop_device_lists_the_disk_of_the_backing_file(tmp_path: Path) -> None:
    block(tmp_path / "sys", "sda", "8:0")
    block(tmp_path / "sys", "loop0", "7:0", "/data/image.squashfs")
    block(tmp_path / "sys", "loop1", "7:1", "/tmp/image")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:0 / /data rw - ext4 /dev/sda rw\n2 0 0:30 / /tmp rw - tmpfs tmpfs rw\n"
    )
    assert standing(Roots(tmp_path / "proc", tmp_path / "sys")) == {
        "loop0": ["sda"],
        "loop1": None,
        "sda": None,
    }
