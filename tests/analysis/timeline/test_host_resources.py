"""Bytes that a volume and the disks under it both count are counted once."""

from __future__ import annotations

import pytest

from clusterprof.analysis.timeline.data_wait.blocked import get_read_context
from clusterprof.analysis.timeline.host_resources import (
    find_bottom_disks,
    find_disks_below,
    measure_disk_bins,
)
from tests.support.builders import (
    make_chunk,
    make_counter,
    make_header,
    make_io_samples,
    make_process,
    make_rank,
)

RAID = [
    {"name": "nvme0n1"},
    {"name": "nvme0n1p3", "partition_of": "nvme0n1"},
    {"name": "nvme1n1"},
    {"name": "md0", "on": ["nvme0n1p3", "nvme1n1"]},
    {"name": "dm-0", "on": ["md0"]},
]


def disks(*names: str) -> dict:
    """Each of these disks read 100 bytes in [0, 1)."""
    return {("disk.read_bytes_total", name): make_counter([0, 1], [0, 100]) for name in names}


@pytest.mark.parametrize(
    ("known", "recorded", "counted"),
    [
        ([], ("vda", "dm-0"), {"vda", "dm-0"}),  # an older recording: nothing is known
        (RAID, ("nvme0n1", "nvme1n1", "md0", "dm-0", "sda"), {"nvme0n1", "nvme1n1", "sda"}),
        (RAID, ("md0", "dm-0"), {"md0"}),  # a container that sees no disks
        ([], ("nvme2n1", "nvme2c0n1", "nvme2c1n1"), {"nvme2c0n1", "nvme2c1n1"}),
        ([], ("nvme2n1",), {"nvme2n1"}),
        ([{"name": "a", "on": ["b"]}, {"name": "b", "on": ["a"]}, {}], ("a", "b", "c"), {"c"}),
        (["not a table", {"name": "a", "on": "b"}], ("a", "b"), {"a", "b"}),
    ],
)
def test_only_the_bottom_disks_are_counted(
    known: list, recorded: tuple[str, ...], counted: set[str]
) -> None:
    timeline = make_chunk(1, series=disks(*recorded), node=make_header(disks=known))
    assert find_bottom_disks(timeline) == counted


def test_a_volume_is_named_with_its_disks() -> None:
    timeline = make_chunk(
        1, series=disks("nvme0n1", "nvme1n1", "md0", "dm-0"), node=make_header(disks=RAID)
    )
    assert (
        find_disks_below(timeline, "dm-0")
        == find_disks_below(timeline, "md0")
        == ("nvme0n1", "nvme1n1")
    )
    assert find_disks_below(timeline, "nvme0n1") == find_disks_below(timeline, "unheard-of") == ()


def test_bytes_of_the_node_are_those_of_its_disks() -> None:
    series = disks("nvme0n1", "nvme1n1", "md0", "dm-0")
    assert (
        get_read_context(make_chunk(1, series=series, node=make_header(disks=RAID))).disk_bytes
        == 200
    )
    assert get_read_context(make_chunk(1, series=series)).disk_bytes == 400  # nothing known: all


def test_bytes_of_file_servers_of_every_kind_add_up() -> None:
    series = {
        ("nfs.read_bytes_total", "/a"): make_counter([0, 1], [0, 1]),
        ("lustre.fetched_bytes_total", "/b"): make_counter([0, 1], [0, 20]),
        ("lustre.read_bytes_total", "/b"): make_counter([0, 1], [0, 9000]),  # cache included: no
        ("cifs.read_bytes_total", "/c"): make_counter([0, 1], [0, 300]),
    }
    assert get_read_context(make_chunk(1, series=series)).remote_bytes == 321
    lustre = make_header(mounts=[{"type": "lustre", "point": "/b"}])
    del series["lustre.fetched_bytes_total", "/b"]  # for root only
    unknown = get_read_context(make_chunk(1, series=series, node=lustre)).remote_bytes
    assert unknown != unknown  # NaN


def test_a_volume_and_its_disk_are_counted_once() -> None:
    # The job requests 80 bytes and reads 40 of them from devices; the disk read 20, through dm-0.
    known = [{"name": "vda"}, {"name": "dm-0", "on": ["vda"]}]
    series = {
        ("disk.read_bytes_total", name): make_counter([0, 10], [0, 20]) for name in ("vda", "dm-0")
    }
    main = make_process(100, io=make_io_samples([0, 10], read_chars=[0, 80], read_bytes=[0, 40]))
    timeline = make_rank(10, main, series=series, node=make_header(disks=known)).chunk
    assert measure_disk_bins(timeline, has_mounts=True)[1].tolist() == [0.25]
