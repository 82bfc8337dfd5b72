"""What NCCL's log says of the path that data take, and tables of nccl-tests; lines by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.nccl.text_logs import (
    NcclOutput,
    NcclText,
    TableRow,
    build_facts,
    build_notes,
    find_slow_paths,
    read_text,
)
from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.plain import Plain
from clusterprof.probe import layout
from tests.support.import_results import import_folder
from tests.support.nccl_logs import SOCKETS, TABLE


def text(log: str) -> NcclText:
    return read_text(iter(log.encode().splitlines()))


def test_sockets_despite_available_rdma_are_reported() -> None:
    result = text(SOCKETS)
    assert (dict(result.channels), result.rdma) == (
        {"NET/Socket": 2, "P2P": 1},
        {"mlx5_0", "mlx5_1"},
    )
    printed = "go through TCP sockets although NCCL saw mlx5_0, mlx5_1 (on n1, n2)"
    assert build_facts(result) == {"slow_paths": [["nccl.socket_channels_count", 2, printed]]}
    assert build_notes(result) == [
        "NCCL 2.21.5+cuda12.4, 16 ranks on 2 nodes; channels: 2 NET/Socket, 1 P2P",
        f"net-path: 2 channels {printed}. To do: find out why NCCL ignores it: NCCL_NET,"
        " NCCL_IB_HCA, link state (ibv_devinfo)",
        "NCCL warned 1 times: Connect to 10.0.0.5<9> failed : no route",
    ]


def test_disabled_rdma_is_reported_with_its_variable() -> None:
    before = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.5<0>"
    log = SOCKETS.replace(before, "NCCL_IB_DISABLE set by environment to 1.")
    ((name, count, slow_paths, cure),) = find_slow_paths(text(log))
    assert (name, count) == ("nccl.socket_channels_count", 2)
    assert slow_paths == "go through TCP sockets because NCCL_IB_DISABLE=1 is set (on n1, n2)"
    assert cure == "remove NCCL_IB_DISABLE from the job's environment"


def test_a_missing_rdma_device_is_reported_with_a_remedy() -> None:
    log = "\n".join(
        line if "NET/IB" not in line else "n1:10:10 [0] NCCL INFO NET/IB : No device found."
        for line in SOCKETS.splitlines()
    )
    ((_, _, slow_paths, cure),) = find_slow_paths(text(log))
    assert slow_paths == "go through TCP sockets because NCCL found no RDMA device (on n1, n2)"
    assert "/dev/infiniband" in cure


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("NET/IB/0/GDRDMA", []),
        ("NET/IB/0", ["nccl.staged_channels_count"]),
        ("NET/AWS Libfabric/0/GDRDMA", []),
        ("P2P/CUMEM", []),
    ],
)
def test_rdma_without_gpudirect_is_reported(how: str, wrong: list[str]) -> None:
    log = f"n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via {how}\n"
    assert [path[0] for path in find_slow_paths(text(log))] == wrong


def test_channels_through_host_memory_are_reported_if_p2p_is_disabled() -> None:
    log = (
        "n1:1:1 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.\n"
        "n1:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct\n"
    )
    assert [path[:2] for path in find_slow_paths(text(log))] == [
        ("nccl.host_memory_channels_count", 1)
    ]
    assert find_slow_paths(text(log.splitlines()[1])) == []


def test_benchmark_tables_are_read_with_or_without_program_name() -> None:
    rows = [
        TableRow(layout.ALL_REDUCE, 1048576, "float", "sum", 100.0, 10.49, 15.73, 98.0),
        TableRow(layout.ALL_REDUCE, 2097152, "float", "sum", 150.0, 13.98, 20.97, None),
    ]
    bare = text(TABLE)
    # Bus over algorithm bandwidth is 1.5, so it is an all_reduce of 2 / (2 - 1.5) = 4 ranks.
    assert (bare.rows, bare.test_ranks, bare.tables[0].average_gbps) == (rows, 4, 18.4)
    assert build_facts(bare) == {
        "transfer_expected": [
            [layout.ALL_REDUCE, 1048576, 98_000],
            [layout.ALL_REDUCE, 2097152, 150_000],
        ]
    }
    named = text("# nThread 1\n./alltoall_perf -b 1M -e 2M\n" + TABLE)
    assert {row.operation for row in named.rows} == {layout.ALL_TO_ALL}
    prefixed = text("\n".join(f"0: {line}" for line in TABLE.splitlines()))
    assert prefixed.rows == rows


def test_nccl_files_are_recognized_by_content(tmp_path: Path) -> None:
    nccl_output = NcclOutput()
    assert nccl_output.recognizes(SOCKETS.encode(), tmp_path / "x")
    assert nccl_output.recognizes(TABLE.encode(), tmp_path / "x")
    for other in (b"", b"{}", b"loss 3.1\n" * 99, b'{"a": "NCCL INFO "}', b"\x00NCCL INFO "):
        assert not nccl_output.recognizes(other, tmp_path / "x")
    log = tmp_path / "job.log"
    log.write_bytes(b"\xff\xfe epoch 1\n" + SOCKETS.encode() + b"\x1b[0m NCCL INFO \x00\n")
    nodes, (account,), why = import_folder(nccl_output, log)
    assert (nodes, why) == ([], "")
    assert account.notes == build_notes(text(SOCKETS))
    silent = tmp_path / "silent.log"
    silent.write_text("n1:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n")
    assert import_folder(nccl_output, silent)[2] == "the file names no transport and has no table"


def test_table_rows_split_by_log_messages_are_joined() -> None:
    log = """\
# Collective test starting: all_reduce_perf
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1n1:10:10 [1] NCCL INFO AllReduce: opCount 0 count 262144
n1:10:10 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}
    100.0   10.49   10.49      0n1:10:10 [1] NCCL INFO AllReduce: opCount 0 count 262144
n1:10:10 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read
     98.0   10.70   10.70      0
     2097152        524288     float     sum      -1n1:10:10 [1] NCCL INFO AllReduce: opCount 0 count 524288
    150.0   13.98   13.98      0
n1:10:10 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 - Destroy COMPLETE
    149.0   14.07   14.07    N/A
# Avg bus bandwidth    : 12.31
"""  # noqa: E501 - as the program writes it
    result = text(log)
    assert result.rows == [
        TableRow(layout.ALL_REDUCE, 1048576, "float", "sum", 100.0, 10.49, 10.49, 98.0),
        TableRow(layout.ALL_REDUCE, 2097152, "float", "sum", 150.0, 13.98, 13.98, 149.0),
    ]
    assert result.tables[0].average_gbps == 12.31
    assert (dict(result.channels), result.hosts) == ({"P2P": 1}, {"n1"})


def test_tables_in_a_log_are_read_separately() -> None:
    devices = (
        "#  Rank  0 Group  0 Pid 1 on n1 device  0\n#  Rank  1 Group  0 Pid 2 on n2 device  0\n"
    )
    head = "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
    log = (
        f"# Collective test starting: alltoall_perf\n{devices}{head}"
        "     1048576        131072    double    none      -1  100.0   10.49    5.24       0\n"
        "     2097152        262144    double    none      -1  150.0   13.98    6.99       0\n"
        "# Avg bus bandwidth    : 6.12\n"
        f"# Collective test starting: sendrecv_perf\n{devices}{head}"
        "     1048576        131072    double     sum      -1  200.0    5.24    5.24       0\n"
        "# Avg bus bandwidth    : 5.24\n"
    )
    result = text(log)
    assert [[row.operation for row in table.rows] for table in result.tables] == [
        [layout.ALL_TO_ALL, layout.ALL_TO_ALL],
        [layout.SEND],
    ]
    assert (result.test_ranks, [table.average_gbps for table in result.tables]) == (2, [6.12, 5.24])
    used = "; used as the expected transfer time where the link rate is unknown"
    assert build_notes(result) == [
        "nccl-tests alltoall of 2 ranks, 2 sizes up to 2,097,152 bytes: 150.0 us, 13.98 GB/s, bus"
        f" 6.99 GB/s, 6.12 GB/s on average{used}",
        "nccl-tests sendrecv of 2 ranks, 1 sizes up to 1,048,576 bytes: 200.0 us, 5.24 GB/s, bus"
        f" 5.24 GB/s, 5.24 GB/s on average{used}",
    ]


def test_launcher_tags_within_rows_are_removed() -> None:
    tag = "[1,0]<stdout>:"
    log = (
        f"{tag}#       size         count      type   redop    root     time   algbw   busbw #wrong"
        "     time   algbw   busbw #wrong\n"
        f"{tag}     1048576        262144     float     sum      -1{tag}   100.0   10.49   15.73"
        f"      0{tag}    98.0   10.70   16.05      0\n"
    )
    assert text(log).rows == [
        TableRow(layout.ALL_REDUCE, 1048576, "float", "sum", 100.0, 10.49, 15.73, 98.0)
    ]


_SOCKET = "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"


@pytest.mark.parametrize(
    ("before", "problem", "action"),
    [
        ("", "go through TCP sockets, and no RDMA (on n1)", "ibv_devinfo, fi_info"),
        (
            "n1:1:1 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.0.0.5<0> [1]hsn1:10.0.0.6<0>\n",
            "go through TCP sockets on hsn0, hsn1, and no RDMA (on n1)",
            "aws-ofi-nccl",
        ),
        (
            "n1:1:1 [0] NCCL INFO NCCL_NET set by environment to Socket.\n",
            "go through TCP sockets because NCCL_NET=Socket is set (on n1)",
            "remove NCCL_NET",
        ),
    ],
)
def test_socket_channels_are_never_reported_as_rdma(before: str, problem: str, action: str) -> None:
    log = before + "n1:1:1 [0] NCCL INFO NET/Plugin: Using internal network plugin.\n" + _SOCKET
    ((name, count, stated, advised),) = find_slow_paths(text(log))
    assert (name, count, stated) == ("nccl.socket_channels_count", 1, problem)
    assert action in advised
    assert "normal" not in " ".join(build_notes(text(log)))


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("NET/IB : Using [0]hfi1_0:1/IB [1]hfi1_1:1/IB ; OOB ib0:10.0.0.5<0>", "psm2-nccl"),
        ("NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:10.0.0.5<0>", "load nvidia-peermem"),
    ],
)
def test_gpudirect_advice_depends_on_the_cards(line: str, action: str) -> None:
    channel = "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n"
    ((_, _, _, advised),) = find_slow_paths(text(f"n1:1:1 [0] NCCL INFO {line}\n{channel}"))
    assert action in advised and (action == "load nvidia-peermem" or "peermem" not in advised)
    rank = "#  Rank  0 Group  0 Pid 1 on n1 device  0 [0000:07:00] NVIDIA GeForce RTX 3090\n"
    ((_, _, _, advised),) = find_slow_paths(text(rank + channel))
    assert advised == "nothing: NVIDIA GeForce RTX 3090 has no GPUDirect RDMA"


def pair_table(first: str, second: str, program: str, average: float) -> str:
    return (
        f"# Collective test starting: {program}_perf\n"
        f"#  Rank  0 Group  0 Pid 1 on {first} device  0 [0000:1b:00] NVIDIA H100 80GB HBM3\n"
        f"#  Rank  1 Group  0 Pid 2 on {second} device  0 [0000:1b:00] NVIDIA H100 80GB HBM3\n"
        "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
        f"     1048576        131072    double    none      -1  100.0   {average}   {average}   0\n"
        f"# Avg bus bandwidth    : {average}\n"
    )


def test_the_slow_host_is_named_across_many_tables(tmp_path: Path) -> None:
    """Pairs of 5 hosts at 40 GB/s; those with n4 at 36 (all-to-all) and 30 (send and receive)."""
    hosts = ["n1", "n2", "n3", "n4", "n5"]
    for place, first in enumerate(hosts):
        for second in hosts[place + 1 :]:
            slow = "n4" in (first, second)
            text_ = pair_table(first, second, "alltoall", 36.0 if slow else 40.0)
            text_ += pair_table(first, second, "sendrecv", 30.0 if slow else 40.0)
            (tmp_path / f"{first}-{second}.log").write_text(text_)
    answers = analyze(tmp_path).answers
    assert answers == (
        "Of the 6 slowest tables of 2 nccl-tests, 6 are of n4",
        "10 nccl-tests sendrecv of 2 ranks up to 1,048,576 bytes: median bus bandwidth 40 GB/s,"
        " slowest n1 and n4 30 (25.0 % below), n2 and n4 30 (25.0 % below), n3 and n4 30 (25.0 %"
        " below)",
        "10 nccl-tests alltoall of 2 ranks up to 1,048,576 bytes: median bus bandwidth 40 GB/s,"
        " slowest n1 and n4 36 (10.0 % below), n2 and n4 36 (10.0 % below), n3 and n4 36 (10.0 %"
        " below)",
    )


def test_the_slowest_table_of_a_log_is_listed_first(tmp_path: Path) -> None:
    log = "".join(
        pair_table("n1", "n2", name, speed)
        for name, speed in (
            ("all_reduce", 265.6),
            ("all_gather", 218.7),
            ("reduce_scatter", 216.7),
            ("alltoall", 47.1),
            ("sendrecv", 15.2),
        )
    )
    path = tmp_path / "table.log"
    path.write_text(log)
    report = analyze(path)
    assert report.answers[0] == (
        "Mean bus bandwidth, GB/s: sendrecv 15.2, alltoall 47.1, reduce_scatter 216.7, all_gather"
        " 218.7, all_reduce 265.6"
    )
    assert "2 more answers: --full." in Plain(full=False).render(report)
    assert "more answers" not in Plain(full=True).render(report)


def test_a_useless_log_leaves_the_other_files_readable(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("n1:10:10 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n")
    (tmp_path / "b.log").write_text(TABLE)
    assert analyze(tmp_path, leave_unknown=True).answers


def test_slow_tables_of_different_hosts_name_no_host(tmp_path: Path) -> None:
    """Each of the four slowest pairs has other hosts, in both tests."""
    hosts = [f"n{number}" for number in range(1, 9)]
    for place, first in enumerate(hosts):
        for other, second in enumerate(hosts[place + 1 :], place + 1):
            speed = 30.0 if place % 2 == 0 and other == place + 1 else 40.0
            text_ = pair_table(first, second, "alltoall", speed)
            text_ += pair_table(first, second, "sendrecv", speed)
            (tmp_path / f"{first}-{second}.log").write_text(text_)
    answers = analyze(tmp_path).answers
    assert len(answers) == 2 and not any("are of" in answer for answer in answers)


def test_repeated_versions_on_a_line_are_counted_as_equal() -> None:
    line = "NCCL version 2.7.8+cuda10.2"
    result = text(f"{line}{line}{line}\n{line}\n")
    assert result.versions == {"2.7.8+cuda10.2": 4}
    both = text(f"{line}NCCL version 2.19.3\n")
    assert both.versions == {"2.7.8+cuda10.2": 1, "2.19.3": 1}


def test_a_table_below_the_list_of_a_large_job_is_recognized(tmp_path: Path) -> None:
    """2,160 lines of ranks stand before the head of the table: more than is looked at first."""
    ranks = "".join(
        f"#  Rank {rank} Group  0 Pid  70823 on n{rank // 4} device  {rank % 4} [0x07] A100\n"
        for rank in range(2160)
    )
    test = "# nThread 1 nGpus 1 minBytes 4 maxBytes 1073741824 step: 2(factor) warmup iters: 5\n"
    log = f"{test}#\n# Using devices\n{ranks}#\n{TABLE}"
    path = tmp_path / "all_reduce_output.dat.5"
    path.write_text(log)
    report = analyze([path])
    assert "Nccl-tests of 2160 ranks, 2 sizes" in " ".join(report.answers)
