"""Lines of NCCL logs, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_line(rank: int, number: int, took_us: float, written_us: int = 10_000, **more: Any) -> str:
    collected: dict[str, Any] = {
        "header": {"id": "0xabc", "rank": rank, "n_ranks": 2, "nnodes": 2},
        "metadata": {
            "inspector_output_format_version": "v5.0",
            "dump_timestamp_us": written_us,
            "hostname": f"node{rank}",
            "pid": 40 + rank,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": number,
            "coll_msg_size_bytes": 4096,
            "coll_exec_time_us": took_us,
            "coll_timing_source": "kernel_gpu",
        },
    }
    collected.update(more)
    return json.dumps({key: value for key, value in collected.items() if value is not None}) + "\n"


def write_log(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


SOCKETS = """\
NCCL version 2.21.5+cuda12.4
n1:10:10 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.5<0>
n1:10:10 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
n1:10:10 [0] NCCL INFO Using network Socket
n1:10:10 [0] NCCL INFO comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
n1:10:10 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/Socket/0
n1:10:10 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read
n2:11:11 [0] NCCL INFO Channel 00/0 : 0[0] -> 9[1] [send] via NET/Socket/1
n2:11:11 [0] misc/socket.cc:537 NCCL WARN Connect to 10.0.0.5<9> failed : no route
"""
TABLE = """\
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    100.0   10.49   15.73      0    98.0    10.70   16.05      0
     2097152        524288     float     sum      -1    150.0   13.98   20.97      0    N/A     N/A     N/A      N/A
# Avg bus bandwidth    : 18.4
"""  # noqa: E501 - as the program writes it
