"""Traces of the vendors' profilers, built by hand: XSpace, Ascend, rocprofv3, Chakra."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ASCEND_US = 1_723_545_784_434_032
"""Microseconds since 1970 at which the Ascend trace begins: no float holds its nanoseconds."""
HARDWARE, COMMUNICATION, CANN, PYTHON, OVERLAP = 4, 5, 2, 1, 6


def encode_varint(value: int) -> bytes:
    """Encode an unsigned integer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encode_message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Encode a message: numbers as varints, text and bytes with their length."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += encode_varint(number << 3) + encode_varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += encode_varint(number << 3 | 2) + encode_varint(len(data)) + data
    return bytes(out)


Lines = Mapping[str, Sequence[tuple[str, int, int, Mapping[str, int]]]]
"""Events by the name of their line: name, start and duration in ns, statistics."""


def encode_xspace(
    planes: Mapping[str, Lines], hostname: str = "host-a", begin_ns: int = 1_000
) -> bytes:
    """Encode an XSpace; its lines begin at `begin_ns`."""
    out = []
    for plane, lines in planes.items():
        names: dict[str, int] = {}
        stats: dict[str, int] = {}
        fields: list[tuple[int, int | str | bytes]] = [(2, plane)]
        for number, (line, events) in enumerate(lines.items(), 1):
            encoded: list[tuple[int, int | str | bytes]] = [(1, number), (2, line), (3, begin_ns)]
            for name, start_ns, duration_ns, values in events:
                id_ = names.setdefault(name, len(names) + 1)
                event: list[tuple[int, int | str | bytes]] = [
                    (1, id_),
                    (2, start_ns * 1000),
                    (3, duration_ns * 1000),
                ]
                for key, value in values.items():
                    stat = stats.setdefault(key, len(stats) + 1)
                    event.append((4, encode_message((1, stat), (3, value))))
                encoded.append((4, encode_message(*event)))
            fields.append((3, encode_message(*encoded)))
        for number, table in ((4, names), (5, stats)):
            for name, id_ in table.items():
                entry = encode_message((1, id_), (2, encode_message((1, id_), (2, name))))
                fields.append((number, entry))
        out.append((1, encode_message(*fields)))
    return encode_message(*out, (4, hostname))


def make_ascend_event(
    name: str, pid: int, tid: int, start_us: float, duration_us: float, **args: Any
) -> dict[str, Any]:
    """Return an event as torch_npu writes it: its start is text."""
    whole, part = divmod(round(start_us * 1000), 1000)
    start = f"{ASCEND_US + whole}.{part:03d}"
    event = {"name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration_us, "ph": "X"}
    category = args.pop("cat", None)
    return {**event, "args": args, **({"cat": category} if category else {})}


def make_ascend_names(
    processes: Mapping[int, str], threads: Mapping[tuple[int, int], str]
) -> list[Any]:
    """Return the metadata events that name processes and threads."""
    named = [("process_name", pid, 0, name) for pid, name in processes.items()]
    named += [("thread_name", *key, name) for key, name in threads.items()]
    return [
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
        for kind, pid, tid, name in named
    ]


def make_ascend_trace() -> list[Any]:
    """Return three steps of 1,000 us; the names of the tracks come last, as in real files.

    Each: a call from 20 to 50, a kernel from 100.5 to 220.5, an all-reduce from 200 to 280.25 and
    a wait of the stream from 300 to 700.
    """
    events: list[Any] = []
    for step in range(3):
        at = 1000 * step
        work = {"Task Type": "AI_CORE", "connection_id": 100 + step}
        wait = {"Task Type": "EVENT_WAIT"}
        events += [
            make_ascend_event(
                f"ProfilerStep#{step + 5}", PYTHON, 7, at, 1000, cat="user_annotation"
            ),
            make_ascend_event("aten::mm", PYTHON, 7, at + 10, 50, cat="cpu_op"),
            make_ascend_event("AscendCL@aclnnMm", CANN, 7, at + 20, 30, connection_id=100 + step),
            make_ascend_event("MatMulV2", HARDWARE, 3, at + 100.5, 120, **work),
            make_ascend_event("EVENT_WAIT", HARDWARE, 3, at + 300, 400, **wait),
            make_ascend_event(f"hcom_allReduce__496_{step}_1", COMMUNICATION, 9, at + 200, 80.25),
            make_ascend_event("Notify_Wait", COMMUNICATION, 10, at + 200, 70),
            make_ascend_event("Computing", OVERLAP, 1, at, 1000),
        ]
    processes = {
        PYTHON: "Python",
        CANN: "CANN",
        HARDWARE: "Ascend Hardware",
        COMMUNICATION: "Communication",
        OVERLAP: "Overlap Analysis",
    }
    threads = {(5, 9): "Group 0 Communication", (5, 10): "Plane 0", (4, 3): "Stream 3"}
    return events + make_ascend_names(processes, threads)


def make_rocprof_document() -> dict[str, Any]:
    """Return rocprofv3's JSON of one process: two kernels, a copy, a call and two markers.

    In us after 1 s: step 1 from 0 to 100 and step 2 from 100 to 200; hipLaunchKernel from 5 to 10;
    kernels from 20 to 50 and from 40 to 60 on another queue; a copy to the device, 70 to 80.
    """

    def record(start_us: int, end_us: int, link: int, **more: Any) -> dict[str, Any]:
        base = 1_000_000_000
        times = {"start_timestamp": base + start_us * 1000, "end_timestamp": base + end_us * 1000}
        return {**times, "thread_id": 70, "correlation_id": {"internal": link}, **more}

    def dispatch(queue: int, kernel: int) -> dict[str, Any]:
        return {"agent_id": {"handle": 8}, "queue_id": {"handle": queue}, "kernel_id": kernel}

    copy = {"kind": 2, "operation": 1, "src_agent_id": {"handle": 7}, "dst_agent_id": {"handle": 8}}
    process = {
        "metadata": {"pid": 70, "node": {"hostname": "amd-1"}},
        "agents": [
            {"id": {"handle": 7}, "type": 1, "name": "cpu"},
            {"id": {"handle": 8}, "type": 2, "product_name": "AMD Instinct MI300X"},
        ],
        "strings": {
            "buffer_records": [
                {"kind": "NONE", "operations": []},
                {"kind": "HIP_RUNTIME_API", "operations": ["hipLaunchKernel"]},
                {"kind": "MEMORY_COPY", "operations": ["NONE", "MEMORY_COPY_HOST_TO_DEVICE"]},
            ],
            "marker_api": [{"key": 31, "value": "step 1"}, {"key": 32, "value": "step 2"}],
        },
        "kernel_symbols": [
            {"kernel_id": 1, "formatted_kernel_name": "gemm"},
            {"kernel_id": 2, "formatted_kernel_name": "ncclDevKernel_AllReduce_Sum_f32"},
        ],
        "buffer_records": {
            "kernel_dispatch": [
                record(20, 50, 11, dispatch_info=dispatch(1, 1)),
                record(40, 60, 12, dispatch_info=dispatch(2, 2)),
            ],
            "memory_copy": [record(70, 80, 13, bytes=4096, **copy)],
            "hip_api": [record(5, 10, 11, kind=1, operation=0)],
            "marker_api": [record(0, 100, 31), record(100, 200, 32)],
        },
    }
    return {"rocprofiler-sdk-tool": [process]}


def write_rocpd(path: Path) -> Path:
    """Write the same events as `make_rocprof_document` as a rocpd database."""
    suffix, base = "_0000abcd", 1_000_000_000
    tables = {
        "rocpd_string": (
            "id, string",
            [
                (1, "HIP_RUNTIME_API_EXT"),
                (2, "MARKER_CORE_RANGE_API"),
                (3, "hipLaunchKernel"),
                (4, "roctxRangePush"),
                (5, "MEMORY_COPY_HOST_TO_DEVICE"),
                (6, "HSA_CORE_API"),
            ],
        ),
        "rocpd_info_node": ("id, hostname", [(1, "amd-1")]),
        "rocpd_info_agent": (
            "id, type, product_name",
            [(1, "CPU", "EPYC"), (2, "GPU", "AMD Instinct MI300X")],
        ),
        "rocpd_info_kernel_symbol": (
            "id, display_name, kernel_name",
            [(1, "gemm", "gemm.kd"), (2, None, "ncclDevKernel_AllReduce_Sum_f32")],
        ),
        "rocpd_event": (
            "id, category_id, stack_id",
            [(1, 1, 11), (2, 9, 11), (3, 9, 12), (4, 9, 13), (5, 2, 31), (6, 2, 32), (7, 6, 99)],
        ),
        "rocpd_kernel_dispatch": (
            'start, "end", agent_id, queue_id, kernel_id, event_id',
            [
                (base + 20_000, base + 50_000, 2, 1, 1, 2),
                (base + 40_000, base + 60_000, 2, 2, 2, 3),
            ],
        ),
        "rocpd_memory_copy": (
            'start, "end", src_agent_id, dst_agent_id, name_id, event_id, size',
            [(base + 70_000, base + 80_000, 1, 2, 5, 4, 4096)],
        ),
        "rocpd_region": (
            'start, "end", tid, name_id, event_id, extdata',
            [
                (base + 5_000, base + 10_000, 70, 3, 1, "{}"),
                (base, base + 100_000, 70, 4, 5, json.dumps({"message": "step 1"})),
                (base + 100_000, base + 200_000, 70, 4, 6, json.dumps({"message": "step 2"})),
                (base + 1_000, base + 2_000, 70, 3, 7, "{}"),
            ],
        ),
    }
    with sqlite3.connect(path) as db:
        for name, (columns, rows) in tables.items():
            db.execute(f'CREATE TABLE "{name}{suffix}" ({columns})')
            marks = ", ".join("?" * len(rows[0]))
            db.executemany(f'INSERT INTO "{name}{suffix}" VALUES ({marks})', rows)
    db.close()
    return path


def encode_chakra_node(
    name: str, start_us: int, duration_us: int, is_cpu: bool, lane: int
) -> bytes:
    """Encode a node of a Chakra graph with its length; a start of 0 is left out, as in protobuf."""
    flags = encode_message((1, "is_cpu_op"), (27, int(is_cpu)))
    times = [(6, start_us)] if start_us else []
    fields = [(1, 1), (2, name), (3, 4), *times, (7, duration_us), (10, flags)]
    body = encode_message(*fields, (10, encode_message((1, "tid"), (15, lane))))
    return encode_varint(len(body)) + body
