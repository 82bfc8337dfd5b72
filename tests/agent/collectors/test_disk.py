from __future__ import annotations

import pytest

from clusterprof.agent.collectors.disk import DiskCollector
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.opened_collector import OpenedCollector

MS = 1_000_000
SECTOR = 512
NAMES = [
    "disk.read_bytes_total",
    "disk.reads_total",
    "disk.read_ns_total",
    "disk.write_bytes_total",
    "disk.writes_total",
    "disk.write_ns_total",
    "disk.busy_ns_total",
    "disk.queue_ns_total",
]


def rows(*disks: tuple[str, list[int]]) -> list[tuple[str, str, int]]:
    return [(name, disk, value) for disk, row in disks for name, value in zip(NAMES, row)]


def test_disks_and_volumes_are_read_without_partitions_and_idle_loops(host) -> None:
    assert OpenedCollector(DiskCollector, host("h100-node")).read_all() == rows(
        (
            "nvme0n1",
            [
                80_000 * SECTOR,
                1_000,
                700 * MS,
                40_000 * SECTOR,
                500,
                900 * MS,
                1_100 * MS,
                1_600 * MS,
            ],
        ),
        (
            "nvme1n1",
            [
                512_000_000 * SECTOR,
                4_000_000,
                2_000_000 * MS,
                56 * SECTOR,
                7,
                1 * MS,
                900_000 * MS,
                2_000_001 * MS,
            ],
        ),
        (
            "dm-0",
            [
                512_000_100 * SECTOR,
                4_000_100,
                2_100_000 * MS,
                56 * SECTOR,
                7,
                2 * MS,
                910_000 * MS,
                2_100_002 * MS,
            ],
        ),
    )


def test_diskstats_lines_of_14_fields_are_parsed(host) -> None:
    assert OpenedCollector(DiskCollector, host("no-psi")).read_all() == rows(
        (
            "sda",
            [
                1_003_346_126 * SECTOR,
                25_354_637,
                18_492_372 * MS,
                505_697_032 * SECTOR,
                28_444_756,
                63_877_960 * MS,
                9_653_880 * MS,
                82_621_804 * MS,
            ],
        )
    )


def test_disk_values_equal_a_captured_diskstats_line(host) -> None:
    roots = host("vm-two-cores")
    line = next(
        line
        for line in (roots.proc / "diskstats").read_text().splitlines()
        if line.split()[2] == "vda"
    )
    f = [int(word) for word in line.split()[3:]]
    assert OpenedCollector(DiskCollector, roots).read_all() == rows(
        (
            "vda",
            [f[2] * SECTOR, f[0], f[3] * MS, f[6] * SECTOR, f[4], f[7] * MS, f[9] * MS, f[10] * MS],
        )
    )


def test_without_diskstats_the_collector_is_absent(host) -> None:
    roots = host("container-no-sys")
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(DiskCollector, roots)
    assert caught.value.kind == "absent"


def test_forbidden_diskstats_are_denied(host_copy, as_nobody) -> None:
    roots = host_copy("h100-node")
    (roots.proc / "diskstats").chmod(0)
    with as_nobody(), pytest.raises(Unavailable) as caught:
        OpenedCollector(DiskCollector, roots)
    assert caught.value.kind == "denied"


def write(roots, *lines: str) -> None:
    (roots.proc / "diskstats").write_text("".join(line + "\n" for line in lines))


def test_disk_times_of_32_bits_continue_after_wrapping(host_copy) -> None:
    roots = host_copy("no-psi")
    top = (1 << 32) - 10
    write(roots, f"   8       0 sda 5 0 80 {top} 6 0 16 {top} 0 {top} {top}")
    disk = OpenedCollector(DiskCollector, roots)
    write(roots, "   8       0 sda 6 0 88 15 7 0 24 4 0 7 290")
    expected = rows(
        (
            "sda",
            # read 15 + 2^32 ms: 25 ms after 2^32 - 10
            [
                88 * SECTOR,
                6,
                (15 + (1 << 32)) * MS,
                24 * SECTOR,
                7,
                (4 + (1 << 32)) * MS,
                (7 + (1 << 32)) * MS,
                (290 + (1 << 32)) * MS,
            ],
        )
    )
    assert disk.read_all() == expected
    assert disk.read_all() == expected  # the wrap is not counted twice
    write(roots, "   8       0 sda 7 0 96 3 8 0 32 9 0 8 291")
    assert disk.read_value("disk.read_ns_total", "sda") == (3 + 2 * (1 << 32)) * MS
    assert disk.read_value("disk.write_ns_total", "sda") == (9 + (1 << 32)) * MS


def test_a_replugged_disk_restarts_without_a_wrap(host_copy) -> None:
    roots = host_copy("no-psi")
    write(roots, "   8       0 sda 500 0 80 900 600 0 16 900 0 900 900")
    disk = OpenedCollector(DiskCollector, roots)
    write(roots, "   8       0 sda 1 0 8 2 0 0 0 0 0 2 2")
    assert disk.read_all() == rows(("sda", [8 * SECTOR, 1, 2 * MS, 0, 0, 0, 2 * MS, 2 * MS]))


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["   8       0 sda 1 0 8 2 0 0 0 0 0 2 2", ""], id="a disk went"),
        pytest.param(
            [
                "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0",
                "   8       0 sda 1 0 8 2 0 0 0 0 0 2 2",
                "   8      16 sdb 1 0 8 2 0 0 0 0 0 2 2",
            ],
            id="a disk came",
        ),
        pytest.param(
            ["   7       0 loop0 1 0 2 1 0 0 0 0 0 1 1", "   8       0 sda 1 0 8 2 0 0 0 0 0 2 2"],
            id="an idle device woke up",
        ),
        pytest.param(
            ["   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0", "   8      16 sdb 1 0 8 2 0 0 0 0 0 2 2"],
            id="another disk in its place",
        ),
    ],
)
def test_a_changed_set_of_disks_changes_the_columns(host_copy, lines: list[str]) -> None:
    roots = host_copy("no-psi")
    write(
        roots, "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0", "   8       0 sda 1 0 8 2 0 0 0 0 0 2 2"
    )
    disk = OpenedCollector(DiskCollector, roots)
    assert [name for _, name in disk.columns] == ["sda"] * 8
    write(roots, *lines)
    with pytest.raises(DevicesChanged):
        disk.read_all()
    disk.close()


def test_a_long_diskstats_file_is_read_completely(host_copy) -> None:
    roots = host_copy("no-psi")
    lines = [f"   8 {n:7} sd{n}x {n} 0 8 2 0 0 0 0 0 2 {n}" for n in range(1000)]  # 40 KB
    write(roots, *lines)
    disk = OpenedCollector(DiskCollector, roots)
    for _ in range(2):
        assert disk.read_value("disk.queue_ns_total", "sd999x") == 999 * MS
    assert len(disk.columns) == 8 * 1000
