"""Every parser of `linux/` on strings: odd kernels, odd files, no file system."""

from __future__ import annotations

import pytest

from clusterprof.agent.linux.cgroup import (
    CpuStat,
    CpuStatParser,
    MemoryEventsParser,
    Pressure,
    parse_memberships,
    parse_pressure,
)
from clusterprof.agent.linux.cpu import (
    CpuTimes,
    Tasks,
    parse_cores,
    parse_tasks,
    parse_total,
    remove_backward_steps,
)
from clusterprof.agent.linux.files import ColumnFinder, NumberFinder, parse_integers
from clusterprof.agent.linux.memory import (
    MeminfoParser,
    Memory,
    NumaMissParser,
    Vmstat,
    VmstatParser,
)
from clusterprof.agent.linux.network.netdev import (
    NetDev,
    NetstatParser,
    SnmpParser,
    TcpSegments,
    parse_interface,
)
from clusterprof.agent.linux.storage.disks import (
    DiskStats,
    Mount,
    find_mount,
    is_partition,
    list_disk_names,
    parse_disk,
    parse_mountinfo,
)
from clusterprof.agent.linux.storage.network_mounts import (
    NfsMount,
    NfsOperation,
    NfsTransport,
    parse_mountstats,
)

TICK_NS = 10_000_000


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"a 1\nb 2\n", [1, 2], id="both"),
        pytest.param(b"b 2\na 1\n", [1, 2], id="any order"),
        pytest.param(b"xa 5\na 1\n", [1, None], id="only at the beginning of a line"),
        pytest.param(b"b 2", [None, 2], id="last line without newline"),
        pytest.param(b"", [None, None], id="empty"),
        pytest.param(b"a -3\nb  7 \n", [-3, 7], id="sign and spaces"),
    ],
)
def test_numbers_are_found_after_their_words(data: bytes, expected: list[int | None]) -> None:
    find = NumberFinder(b"a ", b"b ")
    assert [find(data), find(data)] == [expected, expected]


def test_numbers_are_found_again_in_shifted_text() -> None:
    find = NumberFinder(b"a ", b"b ")
    texts = [
        b"x 9\na 1\nb 2\n",
        b"x 10\na 1\nb 3\n",
        b"b 4\n",
        b"\nxa 7\nb 5\n",
        b"x 9\na 6\nb 8\n",
    ]
    assert [find(text) for text in texts] == [[1, 2], [1, 3], [None, 4], [None, 5], [6, 8]]


def test_a_word_inside_a_line_is_not_matched() -> None:
    find = NumberFinder(b"a ")
    assert find(b"x 9\na 1\n") == [1]
    assert find(b"xyzza 7\na 5\n") == [5]  # the remembered place, and no beginning of a line


def test_columns_are_found_again_when_the_table_changes() -> None:
    find = ColumnFinder(b"T: ", b"B", b"C")
    texts = [
        b"T: A B C\nT: 1 2 3\n",
        b"T: A B C\nT: 4 5 6\n",
        b"S: A\nS: 1\nT: C AB B\nT: 7 8 9\n",
        b"T: A B\nT: 1 2",
        b"",
        b"T: only one line\n",
        b"ST: B C\nST: 1 2\n",
    ]
    assert [find(text) for text in texts] == [
        [2, 3],
        [5, 6],
        [9, 7],
        [2, None],
        [None, None],
        [None, None],
        [None, None],
    ]


def test_proc_stat_is_parsed() -> None:
    data = (
        b"cpu  1 2 3 4 5 6 7 8 9 10\n"
        b"cpu0 1 2 3 4 5 6 7 8 9 10\n"
        b"cpu12 1 1 1 1 1 1 1\n"  # no steal
        b"intr 5 " + b"0 " * 100_000 + b"\nctxt 3\nprocs_running 12\nprocs_blocked 3\nsoftirq 1\n"
    )
    ticks = CpuTimes(3, 16, 4, 5, 8)
    times = CpuTimes(*(tick * TICK_NS for tick in ticks))
    assert parse_total(data) == times
    assert parse_cores(data) == {
        "0": times,
        "12": CpuTimes(2 * TICK_NS, 3 * TICK_NS, TICK_NS, TICK_NS, 0),
    }
    assert parse_tasks(data) == Tasks(12, 3)


@pytest.mark.parametrize(
    ("now_ns", "expected_ns"),
    [
        (7_000, 7_000),
        (10_000_000_000, 10_000_000_000),
        (9_999_999_999, 10_000_000_000),
        (7_000_000_000, 10_000_000_000),
        (6_999_999_999, 6_999_999_999),
    ],
)
def test_backward_steps_up_to_3_seconds_are_suppressed(now_ns: int, expected_ns: int) -> None:
    before = CpuTimes(1, 2, 10_000_000_000, 10_000_000_000, 5)
    now = CpuTimes(2, 3, now_ns, now_ns, 6)
    assert remove_backward_steps(now, before) == CpuTimes(2, 3, expected_ns, expected_ns, 6)
    assert remove_backward_steps(now, None) == now


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            b"some avg10=0.06 avg60=0.21 avg300=0.99 total=8537362\n"
            b"full avg10=0.00 avg60=0.13 avg300=0.96 total=8183134\n",
            Pressure(8_537_362_000, 8_183_134_000),
        ),
        (b"some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", Pressure(0, None)),
        (b"some avg10=0.00 avg60=0.00 avg300=0.00 total=17", Pressure(17_000, None)),
    ],
)
def test_pressure_lines_are_parsed(data: bytes, expected: Pressure) -> None:
    assert parse_pressure(data) == expected


@pytest.mark.parametrize("data", [b"", b"full avg10=0.00 avg60=0.00 avg300=0.00 total=8494\n"])
def test_a_malformed_pressure_file_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="does not begin with 'some'"):
        parse_pressure(data)


def test_meminfo_vmstat_and_numastat_are_parsed() -> None:
    meminfo = b"MemTotal: 9 kB\nSwapCached:  7 kB\nCached:   2 kB\nWritebackTmp: 5 kB\n"
    assert MeminfoParser()(meminfo) == Memory(None, 2048, None, None, None)
    vmstat = b"pswpin 1\npswpout 2\nworkingset_refault_anon 3\nworkingset_refault_file 4\n"
    assert VmstatParser()(vmstat) == Vmstat(None, 1, 2, None, 4, None)
    assert NumaMissParser()(b"numa_hit 5\nnuma_miss 6\nnuma_foreign 7\n") == 6


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("sda", False),
        ("sda1", True),
        ("nvme0n1", False),
        ("nvme0n1p1", True),
        ("dm-1", False),
        ("dm-10", False),
        ("mmcblk0p2", True),
        ("sdb1", False),
        ("md127", False),
        ("md127p1", True),
        ("loop0p1", False),
        ("p1", False),
        ("sdap1", False),
    ],
)
def test_partitions_are_recognized_by_kernel_naming_rules(name: str, partition: bool) -> None:
    names = {"sda", "sda1", "nvme0n1", "nvme0n1p1", "dm-1", "dm-10", "mmcblk0", "md127"}
    assert is_partition(name, names) is partition


def test_diskstats_lines_are_parsed() -> None:
    line = b" 254       0 vda 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17"
    assert parse_disk(line) == DiskStats(1, 3 * 512, 4, 5, 7 * 512, 8, 10, 11)
    assert list_disk_names([line, b""]) == ["vda", ""]


@pytest.mark.parametrize("colon", [b":", b":  "])
def test_net_dev_lines_are_parsed(colon: bytes) -> None:
    line = b"  eth0.7" + colon + b"1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"
    assert parse_interface(line) == ("eth0.7", NetDev(1, 9, 4, 12, 3 + 11))


def test_snmp_and_netstat_tables_are_parsed() -> None:
    snmp = SnmpParser()
    assert snmp(b"Tcp: OutSegs RetransSegs\nTcp: 10 3\n") == TcpSegments(13, 3)
    assert snmp(b"Tcp: OutSegs\nTcp: 10\n") == TcpSegments(None, None)
    assert NetstatParser()(b"IpExt: A\nIpExt: 1\n") is None


def test_mountinfo_is_parsed_and_searched_by_path() -> None:
    data = (
        b"27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"
        b"36 27 0:42 /sub /data\\040a rw shared:1 master:2 - nfs4 server:/x\\134y rw,vers=4.1\n"
        b"37 27 0:43 / /data\\040a rw - tmpfs tmpfs rw\n"
        b"not a mount\n"
    )
    root = Mount("254:0", "/", "/", "ext4", "/dev/vda", ("rw", "discard"))
    nfs = Mount("0:42", "/sub", "/data a", "nfs4", "server:/x\\y", ("rw", "vers=4.1"))
    tmp = Mount("0:43", "/", "/data a", "tmpfs", "tmpfs", ("rw",))
    mounts = parse_mountinfo(data)
    assert mounts == [root, nfs, tmp]
    assert find_mount(mounts, "/data a/train/0.tar") == tmp  # mounted last, hides the other
    assert find_mount(mounts[:2], "/data a") == nfs
    assert find_mount(mounts, "/data also") == root
    assert find_mount([], "/data") is None


@pytest.mark.parametrize(
    ("transport", "connections", "numbers"),
    [
        # connects, sends, bad XIDs, slots, backlog, most, sending, pending
        (b"tcp 1 2 3 4 5 6 7 8 9 10 11 12 13", 1, (3, 6, 8, 9, 10, 11, 12, 13)),
        (b"tcp 1 2 3 4 5 6 7 8 9 10", 1, (3, 6, 8, 9, 10, None, None, None)),  # statvers=1.0
        (
            b"rdma 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21",
            1,
            (3, 6, 8, 9, 10, None, None, None),
        ),
        (b"udp 1 2 3 4 5 6 7 8 9 10", 1, (None, 3, 5, 6, 7, 8, 9, 10)),
        (b"local 1 2 3 4 5 6 7 8 9 10 11 12", 1, (2, 5, 7, 8, 9, 10, 11, 12)),
        (b"quic 1 2 3 4 5 6 7 8 9 10", 0, (None,) * 8),
        (b"tcp 1 2 3", 1, (3, *(None,) * 7)),
        (b"tcp 1 2 x 4 5 6 y 8 9 10 11 12 13", 1, (None, 6, 8, 9, 10, 11, 12, 13)),
        (
            b"tcp 1 2 3 4 5 6 7 8 9 10 11 12 13\n\txprt:\ttcp 1 0 1 0 5 60 7 80 90 100 5 120 130",
            2,
            (4, 66, 88, 99, 110, 11, 132, 143),  # the most slots are the larger, all else is a sum
        ),
    ],
)
def test_nfs_transport_counters_are_parsed_for_each_protocol(
    transport: bytes, connections: int, numbers: tuple[int | None, ...]
) -> None:
    data = (
        b"device a:/b mounted on /c with fstype nfs4 statvers=1.1\n"
        b"\tbytes:\t1 2 3 4 5 6 7 8\n\txprt:\t" + transport + b"\n\tper-op statistics\n"
        b"\t        READ: 1 2 3 4 5 6 7 8\n"
    )
    assert parse_mountstats(data) == [
        NfsMount(
            "/c",
            5,
            6,
            connections,
            NfsTransport(*numbers),
            {"READ": NfsOperation(1, 1, 6, 7, 8, 3)},
        )
    ]


def test_mounts_without_statistics_and_hidden_mounts_are_parsed() -> None:
    data = (
        b"device proc mounted on /proc with fstype proc\n"
        b"device a:/b mounted on /c with fstype nfs statvers=1.1\n\tbytes:\t1 2 3 4 5 6 7 8\n"
        b"device a:/d mounted on /c with fstype nfs4\n"
        b"device nfsd mounted on /proc/fs/nfsd with fstype nfsd\n"
    )
    assert parse_mountstats(data) == [NfsMount("/c", None, None, 0, NfsTransport(*[None] * 8), {})]


def test_a_malformed_line_invalidates_only_itself() -> None:
    (mount,) = parse_mountstats(
        b"device a:/b mounted on /c with fstype nfs4 statvers=1.1\n"
        b"\tbytes:\t1 2 3 4 x 6 7 8\n\tper-op statistics\n"
        b"\t READ: 1 2 3 4 5 6 7 -8\n\t WRITE: 1 2 3\n\t LOOKUP: 1 2 3 4 5 6 7 8\n"
    )
    assert (mount.read_bytes, mount.write_bytes) == (None, 6)
    assert mount.operations == {"LOOKUP": NfsOperation(1, 1, 6, 7, 8, 3)}


def test_cgroup_memberships_are_parsed() -> None:
    data = b"4:cpu,cpuacct:/a\n2:memory:/a/b:c\n1:name=systemd:/s\n0::/u (deleted)\n"
    assert parse_memberships(data) == {
        "cpu": "/a",
        "cpuacct": "/a",
        "memory": "/a/b:c",
        "name=systemd": "/s",
        "": "/u",
    }


def test_cgroup_counters_of_both_versions_are_parsed() -> None:
    version_2 = b"usage_usec 5\nnr_periods 1\nnr_throttled 2\nthrottled_usec 3\n"
    version_1 = b"nr_periods 1\nnr_throttled 2\nthrottled_time 3\n"
    assert CpuStatParser(2)(version_2) == CpuStat(5_000, 1, 2, 3_000)
    assert CpuStatParser(1)(version_1) == CpuStat(None, 1, 2, 3)
    assert CpuStatParser(2)(b"usage_usec 5\n") == CpuStat(5_000, None, None, None)
    assert MemoryEventsParser()(b"low 0\nhigh 7\noom 1\noom_kill 2\noom_group_kill 3\n") == (7, 2)
    assert MemoryEventsParser()(b"oom_kill_disable 0\nunder_oom 0\noom_kill 4\n") == (None, 4)


def test_integers_separated_by_spaces_or_lines_are_parsed() -> None:
    text = b"4731093441 92034419 812\n0 -5 18446744073709551615\n"
    assert parse_integers(text) == [4731093441, 92034419, 812, 0, -5, 18446744073709551615]


@pytest.mark.parametrize("text", [b"1  2\n", b"1 a\n", b"01 2\n", b"1.5 2\n", b" 1\n"])
def test_other_texts_are_not_parsed_as_integers(text: bytes) -> None:
    with pytest.raises(ValueError, match="expected integers"):
        parse_integers(text)
