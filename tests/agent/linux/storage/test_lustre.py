"""Files of Lustre and CIFS clients as other versions write them, and as nobody should."""

from __future__ import annotations

import pytest

from clusterprof.agent.linux.storage import network_mounts
from clusterprof.agent.linux.storage.lustre import (
    LustreCounter,
    ReadRpcStats,
    count_rpcs_at_limit,
    get_time_ns,
    parse_import,
    parse_rpc_stats,
    parse_stats,
    sum_waited_rpcs,
)
from clusterprof.errors import Unavailable


def test_lines_of_a_lustre_stats_file_are_parsed() -> None:
    data = (
        b"snapshot_time             1700000000.5 secs.nsecs\n"
        b"read_bytes                2 samples [bytes] 4096 8192 12288\n"  # before 2.7: no squares
        b"ost_read                  3 samples [usec] 5 9 21 -187\n"  # squares overflow
        b"open                      4 samples [regs]\n"
        b"close                     5 samples [usecs] 1 2 7 9\n"
        b"broken                    many samples [usec] 1 2 3 4\n"
        b"cut                       9 sam\n"
    )
    assert parse_stats(data) == {
        "read_bytes": LustreCounter(2, "bytes", 12288),
        "ost_read": LustreCounter(3, "usec", 21),
        "open": LustreCounter(4, "regs", None),
        "close": LustreCounter(5, "usecs", 7),
    }
    assert (
        get_time_ns(LustreCounter(3, "usec", 21))
        == get_time_ns(LustreCounter(3, "usecs", 21))
        == 21_000
    )
    assert get_time_ns(LustreCounter(4, "regs", None)) is None
    assert get_time_ns(None) == 0  # a line is only there once it counted something


def test_pings_are_not_counted_as_waits() -> None:
    stats = {
        "req_waittime": LustreCounter(100, "usec", 5000),
        "obd_ping": LustreCounter(10, "usec", 400),
        "ldlm_cancel": LustreCounter(5, "usec", 100),
        "ost_read": LustreCounter(20, "usec", 3000),
    }
    assert sum_waited_rpcs(stats) == (100 - 15, (5000 - 500) * 1000)
    assert sum_waited_rpcs(stats, "ost_read") == (65, 1_500_000)
    assert sum_waited_rpcs({}) == (0, 0)
    assert sum_waited_rpcs({"req_waittime": LustreCounter(7, "reqs", None)}) is None
    # The file is not written at one instant: what ends in between must not go below zero.
    late = {"req_waittime": LustreCounter(1, "usec", 5), "obd_ping": LustreCounter(2, "usec", 9)}
    assert sum_waited_rpcs(late) == (0, 0)


def test_read_queues_and_the_in_flight_histogram_are_parsed() -> None:
    data = (
        b"snapshot_time:         1.2 (secs.nsecs)\nread RPCs in flight:  3\n"
        b"write RPCs in flight: 1\npending write pages:  9\npending read pages:   256\n"
        b"\n\t\t\tread\t\t\twrite\npages per rpc         rpcs   % cum % |       rpcs   % cum %\n"
        b"1:\t\t       500  50  50   |          0   0   0\n"
        b"\n\t\t\tread\t\t\twrite\nrpcs in flight        rpcs   % cum % |       rpcs   % cum %\n"
        b"1:\t\t       40  40  40   |          7 100 100\n"
        b"8:\t\t       60  60 100   |          0   0 100\n"
        b"\n\t\t\tread\t\t\twrite\noffset                rpcs   % cum % |       rpcs   % cum %\n"
        b"8:\t\t       99 100 100   |          0   0   0\n"
    )
    assert parse_rpc_stats(data) == ReadRpcStats(3, 256, {1: 40, 8: 60})
    with pytest.raises(ValueError, match="queues"):
        parse_rpc_stats(b"read RPCs in flight:  3\n")


@pytest.mark.parametrize(("most", "count"), [(1, 100), (8, 60), (9, 0), (31, 0)])
def test_rpcs_at_the_limit_are_counted_from_the_histogram(most: int, count: int) -> None:
    assert count_rpcs_at_limit({1: 40, 8: 60}, most) == count


def test_rpcs_at_a_limit_beyond_the_histogram_are_unknown() -> None:
    message = "64 RPCs may be in flight; the histogram cannot distinguish more than 30"
    assert count_rpcs_at_limit({31: 5}, 64) == Unavailable("absent", message, "")


@pytest.mark.parametrize(
    ("state", "connected"), [("FULL", True), ("IDLE", True), ("DISCONN", False), ("EVICTED", False)]
)
def test_the_connection_state_of_an_import_is_parsed(state: str, connected: bool) -> None:
    data = f"import:\n    name: a\n    state: {state}\n    rpcs:\n       timeouts: 4\n"
    assert parse_import(data.encode()) == (connected, 4)
    with pytest.raises(ValueError, match="import"):
        parse_import(b"import:\n    state: FULL\n")


OLD = b"""Resources in use
CIFS Session: 1
Total vfs operations: 9 maximum at one time: 2

1) \\\\old\\home\tDISCONNECTED\x20
SMBs: 30 Oplock Breaks: 0
Reads:  12 Bytes: 49152
Writes: 3 Bytes: 600
Flushes: 1
Opens: 5 Closes: 4 Deletes: 0
"""


def test_smb1_shares_without_operation_times_are_parsed() -> None:
    (server,) = network_mounts.parse_stats(OLD)
    assert (server.time_ns, server.keeps_time) == ({}, False)
    assert server.shares == [
        network_mounts.CifsShare(
            "//old/home", 49152, 600, {"READ": 12, "WRITE": 3, "FLUSH": 1, "CREATE": 5}
        )
    ]


def test_a_negative_cifs_count_is_an_unsigned_32_bit_number() -> None:
    (server,) = network_mounts.parse_stats(
        b"Max requests in flight: 1\n1) \\\\s\\x\nReads: -2 total 0 failed\n"
    )
    assert server.shares[0].operations == {"READ": (1 << 32) - 2}


def test_empty_and_malformed_cifs_files_list_no_servers() -> None:
    assert network_mounts.parse_stats(b"Resources in use\nCIFS Session: 0\n") == []
    assert network_mounts.parse_stats(b"\xff\x00 Reads: 3\n") == []
    assert network_mounts.parse_debug(b"Servers: <NONE>\n") == []
