"""Our readers of storage on the tree node_exporter is tested on: every counter that both know.

Which of theirs is which of ours is the table of docs/agreement.md, read here. The trees are not
ours to ship: they are read where they lie, beside the repository.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from clusterprof.agent.collectors.disk import DiskCollector
from clusterprof.agent.collectors.memory import MemoryCollector
from clusterprof.agent.collectors.network_filesystems import MountsCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable
from tests.support.archives import unpack_archive
from tests.support.node_exporter import PAGE, SHARED, list_values
from tests.support.opened_collector import OpenedCollector

needs_trees = pytest.mark.skipif(
    not SHARED.exists(), reason="the third-party fixture trees do not lie beside the repository"
)
# Of disks their label is ours; of mounts the protocol is that of one mount of the tree each.
POINTS = {"tcp": "/mnt/nfs/test", "udp": "/mnt/nfs/test-dupe"}
OURS_ALONE = {"fd0"}  # they leave floppies out
THEIRS_ALONE = {"sr0", "mmcblk0p1", "mmcblk0p2"}  # we leave out idle drives and partitions
BELOW_ZERO = ("nfs.queue_ns_total", "/mnt/nfs/test-dupe:ACCESS")


class Row(NamedTuple):
    signal: str
    metric: str
    factor: float
    """Theirs times this is ours."""


def rows(section: str) -> list[Row]:
    """The table under a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    matches = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (\S+) \|", text, re.MULTILINE)
    assert matches, section
    return [Row(signal, metric, float(factor)) for signal, metric, factor in matches]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    folder = unpack_archive(SHARED / "proc.tar.gz", tmp_path_factory.mktemp("node-exporter"))
    return Roots(folder / "proc", folder / "no-sys")


def ours(kind: type, roots: Roots, pid: int) -> dict[tuple[str, str], object]:
    return {
        (name, device): value
        for name, device, value in OpenedCollector(kind, roots, [pid]).read_all()
    }


@needs_trees
def test_disk_values_equal_node_exporter(tree: Roots, theirs: dict) -> None:
    mine = ours(DiskCollector, tree, 10)
    table = rows("disk")
    assert {name for name, _ in mine} == {row.signal for row in table}  # all that we know of a disk
    for row in table:
        wanted = {
            dict(labels)["device"]: v for labels, v in list_values(theirs, row.metric).items()
        }
        got = {device: value for (name, device), value in mine.items() if name == row.signal}
        assert set(got) - OURS_ALONE == set(wanted) - THEIRS_ALONE
        for device, value in got.items():
            if device not in OURS_ALONE:
                assert value == pytest.approx(wanted[device] * row.factor, rel=1e-12)


@needs_trees
def test_nfs_mount_values_equal_node_exporter(tree: Roots, theirs: dict) -> None:
    mine = ours(MountsCollector, tree, 10)
    compared = 0
    for row in rows("mounts"):
        for labels, number in list_values(theirs, row.metric).items():
            label = dict(labels)
            operation = label.get("operation", "")
            if operation == "NULL":
                continue  # a ping, which we do not read
            device = POINTS[label["protocol"]] + (f":{operation}" if operation else "")
            value = mine[row.signal, device]
            compared += 1
            if (row.signal, device) == BELOW_ZERO:
                # They print what the kernel wrote, 292,000 years; we say that it cannot be.
                assert number > 9e12 and value == Unavailable(
                    "failed", "the kernel's counter ran below zero", ""
                )
            elif isinstance(value, Unavailable):
                assert (row.signal, label["protocol"], number) == ("nfs.connects_total", "udp", 0)
            else:
                assert value == pytest.approx(number * row.factor, rel=1e-12), (row, device)
    assert compared == 2 * 9 + 5 * 5  # two mounts; READ and WRITE of both, ACCESS of one


@needs_trees
def test_retransmissions_are_transmissions_less_requests(tree: Roots, theirs: dict) -> None:
    requests = list_values(theirs, "node_mountstats_nfs_operations_requests_total")
    sent = list_values(theirs, "node_mountstats_nfs_operations_transmissions_total")
    mine = ours(MountsCollector, tree, 10)
    for labels, count in requests.items():
        label = dict(labels)
        if label["operation"] != "NULL":
            device = f"{POINTS[label['protocol']]}:{label['operation']}"
            again = max(0.0, sent[labels] - count)  # the tree has 12 fewer sent than done
            assert mine["nfs.retransmits_total", device] == again


@needs_trees
def test_memory_values_equal_node_exporter(tree: Roots, theirs: dict) -> None:
    mine = ours(MemoryCollector, tree, 10)
    for row in rows("memory"):
        (number,) = list_values(theirs, row.metric).values()
        assert mine[row.signal, ""] == number * row.factor, row


def test_the_comparison_page_names_existing_signals() -> None:
    from clusterprof.signals import BY_NAME

    for section in ("disk", "mounts", "memory"):
        assert all(row.signal in BY_NAME for row in rows(section))
