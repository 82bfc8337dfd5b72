"""Logs of the NCCL Inspector plugin: how long each collective operation ran, by communicator.

One JSON object per operation, one per line (`NCCL_INSPECTOR_DUMP_DIR`):

    {"header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1},
     "metadata": {"inspector_output_format_version": "v4.0", "dump_timestamp_us": …, "pid": …},
     "coll_perf": {"coll": "AllReduce", "coll_sn": 1407, "coll_msg_size_bytes": 17179869184,
                   "coll_exec_time_us": 61974, "coll_timing_source": "kernel_gpu"}}

`rank` counts in the communicator, which need not be the whole job. Lines of another kind
(messages, statistics) and a last line that is cut off are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective operation of one rank."""

    communicator: str
    rank: int
    """In the communicator."""
    ranks: int
    """Size of the communicator."""
    pid: int | None
    number: int
    """Of the operation in its communicator."""
    name: str
    """`AllReduce`, as NCCL calls it."""
    bytes: int
    duration_ns: int
    on_device: bool
    """True when the device took the time; else it is the host's."""


def operations(lines: Iterable[bytes]) -> Iterator[Operation]:
    """Yield the collective operations of a log, in its order."""
    for line in lines:
        try:
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("coll_perf"), dict):
                yield operation_of_line(found)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


def operation_of_line(found: Mapping[str, Any]) -> Operation:
    """Return the operation of one line.

    Raises ValueError, KeyError, TypeError, AttributeError or OverflowError.
    """
    header, performance = found["header"], found["coll_perf"]
    pid = (found.get("metadata") or {}).get("pid")
    return Operation(
        str(header["id"]),
        int(header["rank"]),
        int(header["n_ranks"]),
        None if pid is None else int(pid),
        int(performance["coll_sn"]),
        str(performance["coll"]),
        int(performance["coll_msg_size_bytes"]),
        round(float(performance["coll_exec_time_us"]) * 1000),
        performance.get("coll_timing_source", "kernel_gpu") == "kernel_gpu",
    )
