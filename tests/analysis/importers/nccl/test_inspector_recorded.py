"""What NCCL's Inspector wrote into a recording: waiting and transfer, and damaged files.

Lines have the form that inspector_json.cc of NCCL 2.28 writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.importers.nccl import inspector
from clusterprof.analysis.importers.nccl.inspector import (
    InspectorSummary,
    describe_inspector_logs,
    summarize_operations,
)


def line(rank: int, number: int, duration_us: int, size: int = 1 << 20, **more: object) -> str:
    return json.dumps(
        {
            "header": {"id": "0x7f8c", "rank": rank, "n_ranks": 3, "nnodes": 1},
            "metadata": {
                "inspector_output_format_version": "v4.0",
                "dump_timestamp_us": 1748030377748202,
                "hostname": "gpu-a01",
                "pid": 4700 + rank,
            },
            "coll_perf": {
                "coll": "AllReduce",
                "coll_sn": number,
                "coll_msg_size_bytes": size,
                "coll_exec_time_us": duration_us,
                "coll_timing_source": "kernel_gpu",
                "coll_algobw_gbs": 10.0 * (rank + 1),
                "coll_busbw_gbs": 20.0 * (rank + 1),
                **more,
            },
        }
    )


def write(tmp_path: Path, *texts: str | bytes) -> list[Path]:
    folder = tmp_path / "node" / "nccl"
    folder.mkdir(parents=True)
    paths = []
    for rank, text in enumerate(texts):
        paths.append(folder / f"gpu-a01-pid{4700 + rank}.log")
        paths[-1].write_bytes(text.encode() if isinstance(text, str) else text)
    return paths


def test_time_beyond_the_shortest_duration_counts_as_waiting(tmp_path: Path) -> None:
    # Operation 7: 61, 61 and 20 us. Transfer 3 x 20 = 60, waiting 41 + 41 + 0 = 82.
    # Operation 8: 30 us on all: transfer 90. Of operation 9 a member is missing.
    write(
        tmp_path,
        "\n".join([line(0, 7, 61), line(0, 8, 30), line(0, 9, 500), ""]),
        "\n".join([line(1, 7, 61), line(1, 8, 30), ""]),
        "\n".join([line(2, 7, 20), line(2, 8, 30), line(2, 9, 500), ""]),
    )
    files = sorted((tmp_path / "node" / "nccl").iterdir())
    assert summarize_operations(files) == InspectorSummary(2, 3, 82_000, 150_000, 1 << 20, 40.0, 0)
    # 82 / 232 = 35.3 %
    assert describe_inspector_logs([tmp_path / "node"]) == (
        "NCCL Inspector, 2 operations of 3 ranks: 35.3 % of the time in them was waiting for a"
        " peer, 64.7 % was transfer; bus bandwidth up to 1.0 MiB: 40 GB/s",
    )


def test_missing_inspector_logs_give_no_note(tmp_path: Path) -> None:
    assert describe_inspector_logs([tmp_path]) == ()


def test_empty_inspector_logs_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "", "")
    assert describe_inspector_logs([tmp_path / "node"]) == (
        "NCCL Inspector: no operation of which all members were logged",
    )


def test_torn_lines_and_holes_are_skipped(tmp_path: Path) -> None:
    whole = line(0, 7, 61)
    begun = bytes(8192) + whole.encode()[40:] + b"\n" + line(0, 8, 30).encode() + b"\n"
    torn = line(1, 8, 30) + "\n" + line(1, 9, 30)[:50]
    paths = write(tmp_path, begun, torn, line(2, 8, 30) + "\nnoise\n[1]\n3\n")
    summary = summarize_operations(paths)
    assert (summary.operations, summary.transfer_ns, summary.waiting_ns) == (1, 90_000, 0)
    assert summary.unread_lines == 4  # the torn last line, noise, a list, a number


def test_a_sparse_terabyte_file_is_read_quickly(tmp_path: Path) -> None:
    paths = write(tmp_path, "", line(1, 8, 30), line(2, 8, 30))
    with paths[0].open("wb") as file:
        file.seek(1 << 40)
        file.write(b"\n" + line(0, 8, 30).encode() + b"\n")
    assert summarize_operations(paths).operations == 1


@pytest.mark.parametrize(
    "more",
    [{"coll_algo": "RING", "coll_proto": "LL128"}, {"event_trace_ts": {"kernel_events": []}}],
)
def test_a_newer_schema_with_more_fields_is_read(tmp_path: Path, more: dict[str, object]) -> None:
    paths = write(tmp_path, *(line(rank, 8, 30, **more) for rank in range(3)))
    assert summarize_operations(paths).operations == 1


def test_point_to_point_lines_do_not_count_as_unread(tmp_path: Path) -> None:
    message = json.dumps({"header": {}, "metadata": {}, "p2p_perf": {"p2p": "Send"}})
    paths = write(tmp_path, *(f"{message}\n{line(rank, 8, 30)}\n" for rank in range(3)))
    summary = summarize_operations(paths)
    assert (summary.operations, summary.unread_lines) == (1, 0)


@pytest.mark.parametrize("bad", [{"coll_exec_time_us": 0}, {"coll_sn": "x"}, {"coll_sn": None}])
def test_impossible_values_are_left_out(tmp_path: Path, bad: dict[str, object]) -> None:
    paths = write(tmp_path, *(line(rank, 8, 30, **bad) for rank in range(3)))
    summary = summarize_operations(paths)
    assert (summary.operations, summary.unread_lines) == (0, 3)


def test_the_importer_reads_the_same_lines() -> None:
    assert inspector.parse_operation(json.loads(line(2, 7, 20))).duration_ns == 20_000
