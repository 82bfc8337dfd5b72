"""What traces of PyTorch's profiler say, and what is made of it: every figure by hand."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.node_tables import compute_group_number
from clusterprof.analysis.importers.kineto.importer import Kineto
from clusterprof.probe import layout
from tests.support.kineto_traces import (
    START_US,
    import_trace,
    list_busy_ns,
    list_ranks,
    list_spans,
    make_device_event,
    make_event,
    make_runtime_call,
    make_step,
    make_trace,
    measure_idle_ns,
    write_trace,
)

US = 1_000
LATE = [
    make_step(4, 0, 100),
    make_runtime_call("cudaLaunchKernel", 5, 5, 1),  # while the device has nothing: late until 10
    make_device_event("gemm", 12, 18, 1),
    make_event("cpu_op", "aten::add", 40, 12),
    make_runtime_call("cudaLaunchKernel", 45, 6, 2),  # begun 15 after the gap began: late until 51
    make_runtime_call("cudaLaunchKernel", 52, 2, 3),  # the third lies ready when the second ends
    make_device_event("gemm", 53, 7, 2),
    make_device_event("gemm", 66, 4, 3),
    make_device_event("Memset (Device)", 68, 12, 9, "gpu_memset"),  # another stream, from 68 to 80
]


def test_busy_time_merges_streams_and_late_launches_are_found(tmp_path: Path) -> None:
    (node,), account = import_trace(
        write_trace(tmp_path, make_trace(LATE, distributedInfo={"rank": 3}))
    )
    assert list_busy_ns(node) == [
        (0, 0),
        (12 * US, 0),
        (30 * US, 18 * US),
        (53 * US, 18 * US),
        (60 * US, 25 * US),
        (66 * US, 25 * US),
        (80 * US, 39 * US),
        (100 * US, 39 * US),
    ]
    assert list_spans(node, layout.STEP) == [(0, 100 * US, 4, 2, -1, -1)]
    assert list_spans(node, layout.STARVED) == [
        (0, 10 * US, 5 * US, 0, 0, 0),
        (30 * US, 51 * US, 21 * US, 0, 0, 0),  # between two launches, 34 apart, and in the second
        (80 * US, 100 * US, 0, 0, 0, 0),  # nothing more was launched
    ]
    assert [(r["rank"], r["pid"], r["device"]) for r in list_ranks(node)] == [(3, 100, "gpu0")]
    assert account.format_line() == (
        "rank0.json: PyTorch profiler (Kineto) trace: 3 kernels, 1 copies, 1 operators,"
        " 3 runtime calls, 1 steps, 3 gaps with a late host"
    )


OLD = {
    "user_annotation": "Operator",
    "cpu_op": "Operator",
    "cuda_runtime": "Runtime",
    "kernel": "Kernel",
    "gpu_memset": "Memset",
}


def test_old_category_names_and_bare_lists_are_read(tmp_path: Path) -> None:
    old = [{**entry, "cat": OLD[entry["cat"]], "tid": str(entry["tid"])} for entry in LATE]
    new = import_trace(write_trace(tmp_path, make_trace(LATE)))[0][0]
    listed = import_trace(
        write_trace(tmp_path, "[\n" + ",\n".join(map(json.dumps, old)) + "\n]", "b.json")
    )[0]
    assert list_busy_ns(listed[0]) == list_busy_ns(new)
    for kind in (layout.STEP, layout.STARVED):
        assert list_spans(listed[0], kind) == list_spans(new, kind)


def test_compressed_traces_give_the_same_result(tmp_path: Path) -> None:
    text = make_trace(LATE)
    plain = import_trace(write_trace(tmp_path, text))[0][0]
    packed = import_trace(write_trace(tmp_path, gzip.compress(text.encode()), "rank0.json.gz"))[0][
        0
    ]
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("traces/rank0.json", text)
    zipped = import_trace(tmp_path / "all.zip")[0][0]
    assert list_busy_ns(plain) == list_busy_ns(packed) == list_busy_ns(zipped)


def test_data_waits_are_read_with_their_computation(tmp_path: Path) -> None:
    name = "enumerate(DataLoader)#_{}DataLoaderIter.__next__"
    trace = [
        make_step(1, 0, 1000),
        make_event("user_annotation", name.format("SingleProcess"), 10, 200),
        make_event("cpu_op", "aten::stack", 20, 50),
        make_event("cpu_op", "aten::cat", 30, 20),  # within the one before
        make_event("cpu_op", "aten::div", 200, 40),  # ends 30 after the wait
        make_event("cpu_op", name.format("MultiProcessing"), 500, 100),
        make_event("cpu_op", name.format("SingleProcess"), 700, 10, tid=101),
        make_runtime_call("cudaLaunchKernel", 900, 5, 1),
        make_device_event("gemm", 910, 10, 1),
    ]
    (node,), account = import_trace(write_trace(tmp_path, make_trace(trace)))
    assert list_spans(node, layout.DATA_WAIT) == [
        (10 * US, 210 * US, -1, 0, 0, -1),
        (500 * US, 600 * US, -1, -1, -1, -1),
    ]
    assert list_spans(node, layout.LOADING) == [(10 * US, 210 * US, 0, 60 * US, 0, 0)]
    assert account.skipped["waits for data outside the training thread"] == 1


def test_device_waits_copies_and_memory_calls_are_read(tmp_path: Path) -> None:
    trace = [
        make_step(1, 0, 20_000),
        make_runtime_call("cudaMemcpyAsync", 100, 400, 1),
        make_device_event(
            "Memcpy HtoD (Pageable -> Device)", 120, 370, 1, "gpu_memcpy", bytes=4096
        ),
        make_runtime_call("cudaMemcpyAsync", 600, 10, 2),  # returns long before the copy is done
        make_device_event("Memcpy HtoD (Pinned -> Device)", 620, 300, 2, "gpu_memcpy", bytes=64),
        make_runtime_call("cudaDeviceSynchronize", 1000, 50),
        make_runtime_call("cudaMemcpyAsync", 1100, 80, 3),
        make_device_event("Memcpy DtoH (Device -> Pageable)", 1150, 5, 3, "gpu_memcpy", bytes=8),
        make_runtime_call("hipStreamSynchronize", 8000, 30),
        make_runtime_call("cudaMalloc", 9000, 100),
        make_runtime_call("cudaFree", 9200, 20),
        make_runtime_call("cudaMalloc", 9300, 100),
        make_event("user_annotation", "Optimizer.step#SGD.step", 10_000, 500),
        make_event("cpu_op", "inner (dynamo_timed)", 11_000, 300),
        make_event("cpu_op", "inner (dynamo_timed)", 11_050, 100),
    ]
    (node,), _ = import_trace(write_trace(tmp_path, make_trace(trace)))
    assert list_spans(node, layout.H2D) == [(100 * US, 500 * US, 4096, 0, 0, 0)]
    assert list_spans(node, layout.SYNC) == [
        (1000 * US, 1180 * US, 130 * US, 2, 0, 0),
        (8000 * US, 8030 * US, 30 * US, 1, 0, 0),
    ]
    assert list_spans(node, layout.ALLOCATOR) == [
        (9100 * US, 9400 * US, -1, 2, 1, 0)
    ]  # first to last
    assert list_spans(node, layout.OPTIMIZER) == [(10_000 * US, 10_500 * US, 0, 0, 0, 0)]
    assert list_spans(node, layout.COMPILE) == [(11_000 * US, 11_300 * US, -1, 0, 0, 0)]
    last = list_spans(node, layout.STARVED)[
        -1
    ]  # from 1155 to the end: a wait, 220 in the allocator
    assert last == (1155 * US, 20_000 * US, 0, 55 * US, 220 * US, 0)


SAYS = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "dtype": "Float",
    "Process Group Ranks": "[0, 1]",
    "In msg nelems": 10,
}


def test_collectives_are_read_with_their_exposed_time(tmp_path: Path) -> None:
    trace = [
        make_step(1, 0, 100),
        make_device_event("gemm", 0, 30, 1),
        make_device_event(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 20, 30, 2, **SAYS
        ),
        make_device_event(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 45, 15, 3, **SAYS
        ),
        make_device_event("Memcpy DtoD (Device -> Device)", 55, 20, 4, "gpu_memcpy"),
        make_device_event("gemm", 80, 20, 5),
        make_device_event(
            "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)",
            85,
            10,
            6,
            **{**SAYS, "Collective name": "_allgather_base"},
        ),
    ]
    beside = {"distributedInfo": {"rank": 1, "world_size": 2}}
    (node,), account = import_trace(write_trace(tmp_path, make_trace(trace, **beside)))
    group = compute_group_number([0, 1])
    assert list_spans(node, layout.COLLECTIVE) == [
        (20 * US, 50 * US, group, 0, 40, layout.ALL_REDUCE),
        (45 * US, 60 * US, group, 1, 40, layout.ALL_REDUCE),
        (85 * US, 95 * US, group, 2, 40, layout.ALL_GATHER),
    ]
    exposed = [(row[0], row[1], row[3]) for row in list_spans(node, layout.EXPOSED_COLLECTIVE)]
    assert exposed == [
        (30 * US, 50 * US, 20 * US),
        (50 * US, 60 * US, 10 * US),
        (95 * US, 95 * US, 0),
    ]
    assert account.read["communication operations"] == 3 and account.notes == []
    assert measure_idle_ns(node, 0, 100 * US) == 5 * US


def test_collectives_without_sequence_numbers_are_numbered_by_kind(tmp_path: Path) -> None:
    trace = [
        make_step(1, 0, 100),
        make_device_event("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 10, 10, 1),
        make_device_event("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 30, 10, 2),
        make_device_event("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 50, 10, 3),
    ]
    reported = {"distributedInfo": {"rank": 1, "world_size": 8}}
    (node,), account = import_trace(write_trace(tmp_path, make_trace(trace, **reported)))
    other = import_trace(
        write_trace(tmp_path, make_trace(trace[:1] + trace[2:], **reported), "b.json")
    )[0][0]
    first, second, third = list_spans(node, layout.COLLECTIVE)
    assert [row[3] for row in (first, second, third)] == [0, 0, 1]
    assert [row[5] for row in (first, second, third)] == [
        layout.ALL_TO_ALL,
        layout.ALL_REDUCE,
        layout.ALL_TO_ALL,
    ]
    assert first[2] == third[2] != second[2] == list_spans(other, layout.COLLECTIVE)[0][2]
    assert "across ranks by their order" in account.notes[0]


def test_sequence_numbers_are_kept_if_all_operations_have_numbers(tmp_path: Path) -> None:
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
    trace = [make_step(1, 0, 100)] + [
        make_device_event(name, 10 * n, 5, n, **SAYS, Seq=70 + n) for n in (1, 2, 3)
    ]
    (node,), _ = import_trace(write_trace(tmp_path, make_trace(trace)))
    assert [row[3] for row in list_spans(node, layout.COLLECTIVE)] == [71, 72, 73]


@pytest.mark.parametrize(
    ("name", "beside", "rank"),
    [
        ("rank7.pt.trace.json", {}, 7),
        ("rank-3.Apr_03.1102.pt.trace.json", {}, 3),
        ("x_rank_12_step.json", {"distributedInfo": {"rank": 2, "world_size": 4}}, 2),
        ("trace.json", {}, None),
    ],
)
def test_the_rank_comes_from_the_trace_or_the_file_name(
    tmp_path: Path, name: str, beside: dict, rank: int | None
) -> None:
    (node,), account = import_trace(write_trace(tmp_path, make_trace(LATE, **beside), name))
    assert [rank["rank"] for rank in list_ranks(node)] == [rank]
    is_noted = any("file name" in note for note in account.notes)
    assert is_noted == ("distributedInfo" not in beside)


def test_host_names_are_taken_from_tensorboard_file_names(tmp_path: Path) -> None:
    named = write_trace(tmp_path, make_trace(LATE), "node-07_100.1712170298379.pt.trace.json")
    other = write_trace(tmp_path, make_trace(LATE), "node-07_101.1712170298379.pt.trace.json")
    assert [import_trace(path)[0][0].name for path in (named, other)] == ["node-07", ""]


def test_the_wall_clock_offset_is_known_or_missing(tmp_path: Path) -> None:
    base = make_trace(LATE, baseTimeNanoseconds=1_700_000_000_000_000_000)
    since = make_trace([{**entry, "ts": entry["ts"] + 1.7e15} for entry in LATE])
    wall = [
        import_trace(write_trace(tmp_path, text))[0][0].wall_minus_own_ns
        for text in (base, since, make_trace(LATE))
    ]
    first = 1_700_000_000_000_000_000 + START_US * 1000
    assert wall == [first, first, None]


def test_fractions_of_a_microsecond_are_kept(tmp_path: Path) -> None:
    trace = [
        make_step(1, 0, 10),
        make_device_event("gemm", 1.001, 2.002, 1),
        make_device_event("gemm", 4.5, 0.768, 2),
    ]
    (node,), _ = import_trace(write_trace(tmp_path, make_trace(trace)))
    assert list_busy_ns(node)[1:5] == [(1001, 0), (3003, 2002), (4500, 2002), (5268, 2770)]


def test_missing_steps_are_inferred_from_optimizer_steps(tmp_path: Path) -> None:
    work = [make_device_event("gemm", at, 50, at) for at in (10, 110, 210, 310)]
    ends = [
        make_event("user_annotation", "Optimizer.step#Adam.step", at, 10) for at in (90, 190, 290)
    ]
    (readings,), printed = import_trace(write_trace(tmp_path, make_trace(work)))
    (three,), also = import_trace(write_trace(tmp_path, make_trace(work + ends)))
    assert list_spans(readings, layout.STEP, 1) == [(0, 350 * US, 1, 2, -1, -1)]
    assert [row[:3] for row in list_spans(three, layout.STEP)] == [
        (0, 90 * US, 1),
        (90 * US, 190 * US, 2),
        (190 * US, 350 * US, 3),
    ]
    assert "one step" in printed.notes[0] and "end with the optim" in also.notes[0]


def test_each_device_of_a_trace_is_a_separate_process(tmp_path: Path) -> None:
    trace = [
        make_step(1, 0, 100),
        make_runtime_call("cudaLaunchKernel", 5, 2, 1),
        make_device_event("gemm", 10, 10, 1),
        make_runtime_call("cudaLaunchKernel", 8, 2, 2),
        make_device_event("gemm", 20, 30, 2, device=1),
        make_runtime_call("cudaLaunchKernel", 55, 2, 3),
        make_device_event("gemm", 60, 10, 3),
    ]
    properties = [{"id": 0, "name": "NVIDIA H100"}, {"id": 1, "name": "AMD Instinct MI300X"}]
    (node,), account = import_trace(
        write_trace(tmp_path, make_trace(trace, deviceProperties=properties))
    )
    assert [(r["rank"], r["device"]) for r in list_ranks(node)] == [(0, "gpu0"), (None, "gpu1")]
    assert [(d["vendor"], d["name"]) for d in node.header().devices] == [
        ("nvidia", "NVIDIA H100"),
        ("amd", "AMD Instinct MI300X"),
    ]
    assert list_busy_ns(node, "gpu1")[-1] == (100 * US, 30 * US)
    assert account.notes[0].startswith("2 devices in the trace")


def test_a_trace_without_a_device_keeps_steps_and_waits(tmp_path: Path) -> None:
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    trace = [
        make_step(551, 0, 100),
        make_event("user_annotation", name, 10, 20),
        make_event("user_annotation", "gloo:all_reduce", 5, 90, tid=300),
    ]
    (node,), account = import_trace(write_trace(tmp_path, make_trace(trace), "rank-34.json"))
    assert [(r["rank"], r["device"]) for r in list_ranks(node)] == [(34, "")]
    assert list_spans(node, layout.STEP) == [(0, 100 * US, 551, 2, -1, -1)]
    assert list_spans(node, layout.DATA_WAIT) == [(10 * US, 30 * US, -1, -1, -1, -1)]
    assert account.skipped["communication operations outside the training thread"] == 1


def test_launches_without_kernels_report_an_unrecorded_device(tmp_path: Path) -> None:
    host = [make_step(1, 0, 100), make_event("cpu_op", "aten::mul", 0, 50)]
    launches = [
        make_runtime_call("cudaLaunchKernel", 10, 5, 1),
        make_runtime_call("cudaLaunchKernel", 20, 5, 2),
    ]
    waits = [make_runtime_call("cudaDeviceSynchronize", 60, 30, 3)]
    _, account = import_trace(write_trace(tmp_path, make_trace([*host, *launches, *waits])))
    assert [answer[:30] for answer in account.answers] == ["2 launches and not one kernel:"]
    assert account.answers[0] in account.notes
    _, account = import_trace(write_trace(tmp_path, make_trace([*host, *waits]), "rank1.json"))
    assert account.answers == []


@pytest.mark.parametrize(
    ("head", "is_one"),
    [
        (b'{"schemaVersion": 1, "traceEvents": [', True),
        (b'[\n {"ph": "X", "cat": "Operator", "name": "aten::empty"', True),
        (b'[\n{"id":1,"name":"HH","cat":"dftracer","pid":1,"ph":"M"', False),
        (b'[{"name": "iteration begin", "ph": "i", "ts": 0}', False),
        (b'{"a": 1}', False),
        (b"\x00\x01", False),
    ],
)
def test_traces_are_recognised_by_their_content(head: bytes, is_one: bool) -> None:
    assert Kineto().recognizes(head, Path("x")) is is_one
