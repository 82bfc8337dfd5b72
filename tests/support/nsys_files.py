"""Small Nsight Systems databases, made of the tables that a test names."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KERNELS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "start end deviceId streamId correlationId globalPid shortName",
)
COPIES = (
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "start end deviceId streamId correlationId globalPid bytes copyKind",
)
FILLS = (
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "start end deviceId streamId correlationId globalPid value bytes",
)
CALLS = ("CUPTI_ACTIVITY_KIND_RUNTIME", "start end globalTid correlationId nameId")
NVTX = ("NVTX_EVENTS", "start end eventType globalTid text textId domainId")
SYSTEM = ("OSRT_API", "start end globalTid nameId")
SAMPLES = ("COMPOSITE_EVENTS", "id start cpu threadState globalTid cpuCycles")
STACKS = ("SAMPLING_CALLCHAINS", "id symbol module unresolved stackDepth")
STRINGS = ("StringIds", "id value")

NAMES = [
    (1, "gemm"),
    (2, "ncclDevKernel_AllReduce_Sum_f32"),
    (3, "cudaLaunchKernel_v7000"),
    (4, "cudaStreamSynchronize_v3020"),
    (5, "cudaMalloc_v3020"),
    (6, "cudaMemcpyAsync_v3020"),
    (7, "read"),
    (8, "poll"),
]
GEMM, ALL_REDUCE, LAUNCH, SYNC, MALLOC, COPY, READ, POLL = range(1, 9)


def encode_process_id(pid: int) -> int:
    """Encode a process as Nsight Systems does (`globalPid`)."""
    return 0x0100_0000_0000_0000 | pid << 24


def encode_thread_id(pid: int, tid: int) -> int:
    """Encode a thread as Nsight Systems does (`globalTid`)."""
    return encode_process_id(pid) | tid


def write_database(
    path: Path, *tables: tuple[tuple[str, str], Sequence[Sequence[Any]]], names: Any = NAMES
) -> Path:
    """Write a database with these tables and rows, and the strings that are named above."""
    db = sqlite3.connect(path)
    for (table, columns), rows in ((STRINGS, names), *tables):
        listed = columns.split()
        db.execute(f"CREATE TABLE {table} ({', '.join(f'[{entry}]' for entry in listed)})")
        marks = ", ".join("?" * len(listed))
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    db.commit()
    db.close()
    return path
