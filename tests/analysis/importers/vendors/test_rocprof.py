"""rocprof: one process as JSON, SQLite and CSV says the same; every figure by hand."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.probe import layout
from tests.support.kineto_traces import list_busy_ns, list_spans
from tests.support.trace_imports import import_files, list_ranks
from tests.support.vendor_traces import make_rocprof_document, write_rocpd

US = 1_000
TABLES = {
    "70_kernel_trace.csv": (
        '"Kind","Agent_Id","Queue_Id","Thread_Id","Kernel_Name","Correlation_Id",'
        '"Start_Timestamp","End_Timestamp"\n'
        '"KERNEL_DISPATCH","Agent 0",1,70,"gemm",11,1000020000,1000050000\n'
        '"KERNEL_DISPATCH","Agent 0",2,70,"ncclDevKernel_AllReduce_Sum_f32",12,1000040000,'
        "1000060000\n"
    ),
    "70_memory_copy_trace.csv": (
        '"Kind","Direction","Source_Agent_Id","Destination_Agent_Id","Correlation_Id",'
        '"Start_Timestamp","End_Timestamp"\n'
        '"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE",9,0,13,1000070000,1000080000\n'
    ),
    "70_hip_api_trace.csv": (
        '"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp",'
        '"End_Timestamp"\n'
        '"HIP_RUNTIME_API","hipLaunchKernel",70,70,11,1000005000,1000010000\n'
    ),
    "70_marker_api_trace.csv": (
        '"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp",'
        '"End_Timestamp"\n'
        '"MARKER_CORE_API","step 1",70,70,31,1000000000,1000100000\n'
        '"MARKER_CORE_API","step 2",70,70,32,1000100000,1000200000\n'
    ),
}


def write_tables(folder: Path) -> list[Path]:
    for name, text in TABLES.items():
        (folder / name).write_text(text)
    return sorted(folder.iterdir())


def write_json(folder: Path) -> list[Path]:
    path = folder / "70_results.json"
    path.write_text(json.dumps(make_rocprof_document()))
    return [path]


def read(kind: str, folder: Path) -> tuple[list[NodeTables], list[Account]]:
    if kind == "csv":
        return import_files(write_tables(folder))
    return import_files(write_json(folder) if kind == "json" else [write_rocpd(folder / "70.db")])


@pytest.mark.parametrize("kind", ["json", "sqlite", "csv"])
def test_every_rocprofv3_output_gives_the_same_result(kind: str, tmp_path: Path) -> None:
    (node,), accounts = read(kind, tmp_path)
    assert list_ranks(node) == [(1, None, None, "gpu0")]
    assert node.name == ("" if kind == "csv" else "amd-1")
    assert node.wall_minus_own_ns is None
    device = node.header().devices[0]
    assert device["vendor"] == "amd"
    assert kind == "csv" or device["name"] == "AMD Instinct MI300X"
    assert [span[:3] for span in list_spans(node, layout.STEP, 1)] == [
        (0, 100 * US, 1),
        (100 * US, 200 * US, 2),
    ]
    assert list_busy_ns(node)[-1] == (200 * US, 50 * US)  # 20 to 60 and 70 to 80
    assert [span[3] for span in list_spans(node, layout.EXPOSED_COLLECTIVE, 1)] == [10 * US]
    # until 10 the launch had not returned; a copy whose call is unknown is never late
    assert [span[:2] for span in list_spans(node, layout.STARVED, 1)] == [
        (0, 10 * US),
        (80 * US, 200 * US),
    ]
    assert {name: accounts[0].read[name] for name in ("kernels", "copies", "runtime calls")} == {
        "kernels": 2,
        "copies": 1,
        "runtime calls": 1,
    }


def test_older_rocprof_tables_are_read(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text(
        '"Index","KernelName","gpu-id","queue-id","pid","tid","DispatchNs","BeginNs","EndNs"\n'
        '0,"gemm",3,0,70,70,90,100,150\n1,"gemm",3,0,70,70,190,200,220\n2,"x",3,0,70,70,1,0,0\n'
    )
    (node,), (account,) = import_files([path])
    assert list_ranks(node) == [(1, None, None, "gpu3")]
    assert list_busy_ns(node, "gpu3")[-1] == (120, 70)
    assert account.skipped == {"without a usable time": 1}
    assert account.notes[0] == (
        "the trace has no markers of steps: everything from the first to the last work is treated"
        " as one step; name roctx ranges 'step 1', 'step 2', … and add --marker-trace to see steps"
    )


def test_a_trace_without_kernels_is_refused_with_an_option_hint(tmp_path: Path) -> None:
    document = make_rocprof_document()
    document["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"] = []
    document["rocprofiler-sdk-tool"][0]["buffer_records"]["memory_copy"] = []
    path = tmp_path / "a_results.json"
    path.write_text(json.dumps(document))
    with pytest.raises(CannotImportError) as caught:
        import_files([path])
    assert caught.value.message == (
        "a_results.json: no kernel is in the trace: add --kernel-trace, rocprofv3 --kernel-trace --"
        " CMD"
    )


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a_results.json"
    path.write_text(json.dumps(make_rocprof_document())[:-30])
    with pytest.raises(
        CannotImportError, match=r"not readable as rocprofv3's JSON .*copy it again"
    ):
        import_files([path])


def test_the_chrome_trace_of_rocprof_is_read_by_its_tracks(tmp_path: Path) -> None:
    names = {2: "0 CPU HIP API", 6: "1 GPU0", 8: "2 COPY"}
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in names.items()
    ]
    work = [("hipLaunchKernel", 2, 5, 5), ("gemm", 6, 20, 30), ("CopyHostToDevice", 8, 60, 10)]
    events += [
        {
            "ph": "X",
            "name": name,
            "pid": pid,
            "tid": 1,
            "ts": ts,
            "dur": dur,
            "args": {"BeginNs": str(ts * 1000), "EndNs": str((ts + dur) * 1000)},
        }
        for name, pid, ts, dur in work
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"traceEvents": [{}, *events]}))
    (node,), (account,) = import_files([path])
    assert (account.read["kernels"], account.read["copies"]) == (1, 1)
    assert list_ranks(node) == [(1, None, None, "gpu0")]
    assert list_busy_ns(node)[-1] == (65 * US, 40 * US)  # from the call at 5


def test_rocprof_database_kernels_and_calls_are_joined_by_index(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute('CREATE TABLE HIP ("BeginNs", "EndNs", "pid", "tid", "Name", "Index")')
        for table in ("OPS", "COPY"):
            db.execute(
                f'CREATE TABLE {table} ("BeginNs" INTEGER, "EndNs" INTEGER, "dev-id" INTEGER,'
                ' "queue-id" INTEGER, "Name" TEXT, "pid" INTEGER, "tid" INTEGER, "Index" INTEGER)'
            )
        db.execute("INSERT INTO HIP VALUES (1005000, 1010000, 70, 70, 'hipLaunchKernel', 11)")
        db.execute("INSERT INTO OPS VALUES (1020000, 1050000, 2, 0, 'gemm', 70, 70, 11)")
        row = "(1060000, 1070000, 2, 0, 'CopyDeviceToHost', 70, 70, 12)"
        db.execute(f"INSERT INTO COPY VALUES {row}")
        db.commit()
    (node,), (account,) = import_files([path])
    assert list_ranks(node) == [(1, None, None, "gpu2")]
    # 1070 us is 65 us after the call; the kernel ran for 30 us and the copy for 10 us
    assert list_busy_ns(node, "gpu2")[-1] == (65 * US, 40 * US)
    assert [account.read[kind] for kind in ("kernels", "copies", "runtime calls")] == [1, 1, 1]
