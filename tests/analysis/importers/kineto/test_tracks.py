"""Named tracks: Ascend, JAX and others; every figure by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.kineto import tracks
from clusterprof.analysis.importers.kineto.tracks import (
    classify_track,
    convert_time,
    flatten_nested,
)
from clusterprof.analysis.inputs.foreign import import_inputs
from clusterprof.errors import NoRecording
from clusterprof.probe import layout
from tests.support.kineto_traces import list_busy_ns, list_spans
from tests.support.trace_imports import import_files, list_ranks
from tests.support.vendor_traces import ASCEND_US, make_ascend_names, make_ascend_trace

US = 1_000


def write(folder: Path, events: object, name: str = "trace_view.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(events))
    return path


def test_the_device_of_an_ascend_trace_is_its_hardware_tracks(tmp_path: Path) -> None:
    (node,), (account,) = import_files([write(tmp_path, make_ascend_trace())])
    assert list_ranks(node) == [(1, None, None, "npu0")]
    assert node.wall_minus_own_ns == ASCEND_US * US
    assert [span[:3] for span in list_spans(node, layout.STEP, 1)] == [
        (0, 1000 * US, 5),
        (1000 * US, 2000 * US, 6),
        (2000 * US, 3000 * US, 7),
    ]
    # 100.5 to 280.25 us of each step, exact although the times are microseconds since 1970
    assert list_busy_ns(node, "npu0")[-1] == (3000 * US, 3 * 179_750)
    # of the all-reduce 220.5 to 280.25 is exposed
    assert [span[3] for span in list_spans(node, layout.EXPOSED_COLLECTIVE, 1)] == [59_750] * 3
    # the launch had returned at 50; before that nothing was queued, after 280.25 until the next
    assert [span[:2] for span in list_spans(node, layout.STARVED, 1)] == [
        (0, 50 * US),
        (280_250, 1050 * US),
        (1280_250, 2050 * US),
        (2280_250, 3000 * US),
    ]
    assert account.format_line() == (
        "trace_view.json: PyTorch profiler (Kineto) trace: 6 kernels, 3 operators, 3 runtime calls,"
        " 3 steps, 4 gaps with a late host, 3 communication operations; left out: 3 tasks in which"
        " the device waits"
    )


def test_event_order_and_container_leave_the_result_unchanged(tmp_path: Path) -> None:
    events = make_ascend_trace()
    device_first = sorted(events, key=lambda event: "Task Type" not in event["args"])
    for number, content in enumerate((events[::-1], device_first, {"traceEvents": events})):
        (node,), _ = import_files([write(tmp_path, content, f"{number}.json")])
        assert list_busy_ns(node, "npu0")[-1][1] == 3 * 179_750


JAX_NAMES = {1: "/device:TPU:0", 2: "/host:CPU"}
JAX_LINES = {(1, 1): "XLA Ops", (1, 2): "XLA Modules", (1, 3): "Steps", (2, 1): "python"}


def x(name: str, pid: int, tid: int, start: float, length: float, **args: Any) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length}
    return {**event, "args": args}


def jax_trace() -> dict[str, Any]:
    """Return two runs of a loop of 100 us at 0 and at 300; the body holds an all-reduce of 30."""
    events = make_ascend_names(JAX_NAMES, JAX_LINES)
    for at in (0, 300):
        events += [
            x("while.1", 1, 1, at, 100),
            x("fusion.2", 1, 1, at + 10, 40),
            x("all-reduce.3", 1, 1, at + 60, 30),
            x("infeed.4", 1, 1, at + 100, 50),
            x("jit_step(7)", 1, 2, at, 100),
        ]
    return {"displayTimeUnit": "ns", "metadata": {}, "traceEvents": events}


def test_nested_loop_operations_count_once_and_hide_no_communication(tmp_path: Path) -> None:
    content = jax_trace()
    content["traceEvents"] += [x("0", 1, 3, 0, 100), x("1", 1, 3, 300, 100)]
    (node,), (account,) = import_files([write(tmp_path, content, "host.trace.json")])
    assert list_ranks(node) == [(1, None, None, "tpu0")]
    assert list_busy_ns(node, "tpu0")[-1] == (400 * US, 200 * US)
    assert [span[3] for span in list_spans(node, layout.EXPOSED_COLLECTIVE, 1)] == [
        30 * US,
        30 * US,
    ]
    # a step lasts until the next begins: the time between the programs is not outside
    assert [span[:3] for span in list_spans(node, layout.STEP, 1)] == [
        (0, 300 * US, 0),
        (300 * US, 400 * US, 1),
    ]
    assert account.skipped["operations that wait for the host"] == 2
    assert "steps are the profile's steps; each lasts until the next begins" in (account.notes)


def test_program_runs_become_steps_without_step_marks(tmp_path: Path) -> None:
    content = jax_trace()
    content["traceEvents"] += [x("jit_step(8)", 1, 2, 600, 10), x("fusion", 1, 1, 600, 10)]
    (node,), _ = import_files([write(tmp_path, content, "a.trace.json")])
    assert [span[:3] for span in list_spans(node, layout.STEP, 1)] == [
        (0, 300 * US, 1),
        (300 * US, 600 * US, 2),
        (600 * US, 610 * US, 3),
    ]


@pytest.mark.parametrize(
    ("names", "threads", "category"),
    [({9: "NPU 0 engine view"}, {(9, 1): "MME"}, ""), ({9: "whatever"}, {}, "npu_kernels")],
)
def test_unknown_accelerator_tracks_are_refused(
    tmp_path: Path, names: dict[int, str], threads: dict[tuple[int, int], str], category: str
) -> None:
    step = {**x("ProfilerStep#1", 1, 1, 0, 100), "cat": "user_annotation"}
    work = {**x("gemm", 9, 1, 10, 5), **({"cat": category} if category else {})}
    path = write(
        tmp_path, {"traceEvents": [step, work, *make_ascend_names(names, threads)]}, "t.json"
    )
    with pytest.raises(CannotImportError) as caught:
        import_files([path])
    named = f"category {category}" if category else "NPU 0 engine view / MME"
    assert str(caught.value.message) == (
        "the trace has 1 events of an accelerator on tracks that are not understood"
        f" ('{named}'): how busy it was is unknown"
    )
    assert caught.value.remedy == (
        "export a trace in which its work has the category kernel, or is on threads named"
        " 'stream …'"
    )


def test_device_streams_of_other_vendors_are_read(tmp_path: Path) -> None:
    step = {**x("ProfilerStep#1", 1, 1, 0, 100), "cat": "user_annotation"}
    names = make_ascend_names({9: "HPU 0"}, {(9, 1): "Stream 2", (9, 2): "queue 7"})
    work = [x("gemm", 9, 1, 10, 5), x("memcpy HtoD", 9, 2, 12, 8)]
    (node,), _ = import_files([write(tmp_path, {"traceEvents": [step, *work, *names]}, "t.json")])
    assert list_busy_ns(node, "HPU 0")[-1] == (100 * US, 10 * US)


def test_a_trace_without_accelerator_tracks_is_read(tmp_path: Path) -> None:
    step = {**x("ProfilerStep#1", 1, 1, 0, 100), "cat": "user_annotation"}
    names = make_ascend_names({1: "python"}, {(1, 1): "thread 1"})
    odd = {**x("thing", 1, 1, 10, 5), "cat": "my_own"}
    (node,), (account,) = import_files(
        [write(tmp_path, {"traceEvents": [step, odd, *names]}, "t.json")]
    )
    assert account.skipped == {"of category 'my_own'": 1}
    assert list_ranks(node)[0][3] == ""


def test_tracks_are_classified_by_name() -> None:
    assert classify_track("/device:GPU:3", "Stream #17(Kernel)") == tracks.DEVICE
    assert classify_track("/device:GPU:3", "XLA Ops") == tracks.OPERATIONS
    assert classify_track("/device:GPU:3", "Source code") == tracks.DERIVED
    assert classify_track("2 GPU1", "") == tracks.DEVICE
    assert classify_track("0 CPU HIP API", "4711") == tracks.CALLS
    assert classify_track("python3", "thread 7") is None
    assert classify_track("computer", "stream 7") is None


def test_timestamps_are_converted_exactly() -> None:
    assert convert_time("1723545784434032.646") == 1_723_545_784_434_032_646
    assert convert_time(1723545784434032) == 1_723_545_784_434_032_000
    assert convert_time(12.5) == 12_500
    assert convert_time("7.6", 1) == 8
    for rubbish in ("", "x", "1e9", "-", None, True, float("nan"), float("inf"), 1 << 70, "9" * 40):
        assert convert_time(rubbish) is None


def test_nested_events_are_flattened_into_own_time() -> None:
    start, end, name = (np.array(column) for column in zip((0, 100, 1), (10, 50, 2), (60, 90, 3)))
    assert list(flatten_nested(start, end, name)) == [
        (0, 10, 1),
        (10, 50, 2),
        (50, 60, 1),
        (60, 90, 3),
        (90, 100, 1),
    ]
    # overlapping without containing: each instant counts once
    start, end, name = np.array([0, 5, 20]), np.array([10, 15, 30]), np.array([1, 2, 3])
    assert list(flatten_nested(start, end, name)) == [(0, 5, 1), (5, 15, 2), (20, 30, 3)]


def test_a_jax_trace_without_a_device_is_refused(tmp_path: Path) -> None:
    events = [x("PjitFunction(step)", 2, 1, 0, 10), *make_ascend_names({2: "/host:CPU"}, {})]
    with pytest.raises(CannotImportError) as caught:
        import_files([write(tmp_path, {"traceEvents": events}, "cpu.trace.json")])
    assert caught.value.message == (
        "the trace has no work of a TPU or GPU; profile on the device, until after"
        " block_until_ready"
    )


def halve(event: dict[str, Any], letters: str, **more: Any) -> list[dict[str, Any]]:
    """Return a complete event as its beginning and its end."""
    rest = {key: value for key, value in event.items() if key not in ("ph", "dur", "args")}
    end = {"ph": letters[1], "ts": event["ts"] + event["dur"], "args": event["args"]}
    return [{**rest, "ph": letters[0], "args": event["args"], **more}, {**rest, **end, **more}]


@pytest.mark.parametrize("letters", ["BE", "be"])
@pytest.mark.parametrize("name", ["bare list", "object"])
def test_begin_and_end_pairs_equal_complete_events(tmp_path: Path, letters: str, name: str) -> None:
    """Two streams of one device: 10 to 70 and 90 to 100 busy, an operation nested in another."""
    whole = [x("a", 3, 1, 10, 60), x("b", 3, 1, 20, 10), x("c", 3, 2, 50, 20), x("d", 3, 2, 90, 10)]
    halves = [
        half
        for number, event in enumerate(whole)
        for half in halve(event, letters, **({"id": number, "cat": "x"} if letters == "be" else {}))
    ]
    halves.sort(key=lambda half: half["ts"])
    names = make_ascend_names({3: "GPU 0"}, {})
    stray = [{"ph": letters[1], "cat": "x", "id": 9, "pid": 3, "tid": 5, "ts": 1, "name": "y"}]
    nodes = []
    for number, events in enumerate((whole, halves + stray)):
        content: Any = [*events, *names]
        if name == "object":
            content = {"traceEvents": content}
        (node,), (account,) = import_files([write(tmp_path, content, f"{number}.json")])
        nodes.append((list_busy_ns(node, "gpu0"), account.read["kernels"]))
    assert nodes[0] == nodes[1]
    assert nodes[1][0][-1] == (90 * US, 70 * US) and nodes[1][1] == 4
    assert account.skipped == {f"end without a begin event ({letters[1]})": 1}


def test_a_trace_without_process_names_is_refused_with_advice(tmp_path: Path) -> None:
    events = halve(x("Cmpt Exec", 4, 1, 10, 60), "BE") + halve(x("Cmpt Exec", 5, 1, 0, 9), "BE")
    path = write(tmp_path, events, "allreduce.json")
    with pytest.raises(CannotImportError) as caught:
        import_files([path])
    assert caught.value.message == (
        "a Chrome trace of 2 events without a known category, and no process is named after an"
        " accelerator: 4, 5"
    )
    line = '{"ph": "M", "pid": 4, "name": "process_name", "args": {"name": "GPU 0"}}'
    assert caught.value.remedy == (
        f"name the process of each device: add {line} to the events; or give its kernels"
        ' "cat": "kernel"'
    )
    with pytest.raises(NoRecording) as refused, import_inputs([path]):
        pass
    assert refused.value.remedy == caught.value.remedy
    # what the advice asks for suffices
    (node,), _ = import_files([write(tmp_path, [*events, json.loads(line)], "named.json")])
    assert list_busy_ns(node, "gpu0")[-1] == (60 * US, 60 * US)


def rocprof_event(pid: str, name: str, start_ns: int, end_ns: int, **more: str) -> dict[str, Any]:
    args = {"BeginNs": str(start_ns), "EndNs": str(end_ns), **more}
    times = {"ts": str(start_ns // US), "dur": str((end_ns - start_ns) // US)}
    return {"ph": "X", "name": name, "pid": pid, "tid": "7", **times, "args": args}


def rocprof_names(*processes: tuple[int, str]) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in processes
    ]


def test_rocprof_text_ids_and_copy_devices_are_read(tmp_path: Path) -> None:
    names = rocprof_names((2, "CPU HIP API"), (1, "COPY"), (6, "GPU0"), (8, "GPU2"))
    events = [
        rocprof_event("1", "CopyHostToDevice", 1_000_000, 1_020_500, **{"dev-id": "2"}),
        rocprof_event("8", "gemm", 1_050_000, 1_090_000, **{"dev-id": "2"}),
        rocprof_event("2", "hipLaunchKernel", 1_030_000, 1_048_000),
    ]
    (node,), _ = import_files(
        [write(tmp_path, {"traceEvents": [{}, *names, *events]}, "results.json")]
    )
    assert list_ranks(node) == [(1, None, None, "gpu2")]
    # the copy took 20.5 us and the kernel 40 us, both on the third device
    assert list_busy_ns(node, "gpu2")[-1] == (90_000, 60_500)


def test_a_slow_first_launch_counts_as_warm_up(tmp_path: Path) -> None:
    names = rocprof_names((2, "CPU HIP API"), (1, "COPY"), (6, "GPU0"))
    events = [
        rocprof_event("1", "CopyHostToDevice", 1_000_000, 1_020_000, **{"dev-id": "0"}),
        rocprof_event("2", "__hipPushCallConfiguration", 1_021_000, 1_022_000),
        rocprof_event("2", "hipLaunchKernel", 1_030_000, 9_030_000),
        rocprof_event("6", "gemm", 9_040_000, 9_140_000, **{"dev-id": "0"}),
    ]
    (node,), _ = import_files([write(tmp_path, {"traceEvents": [*names, *events]}, "results.json")])
    # of the gap from 20 us to 9.04 ms the host loaded for 8 ms
    assert [span[:2] for span in list_spans(node, layout.STARVED, 1)] == [(20_000, 8_040_000)]
    work = [span for span in list_spans(node, layout.HOST_WORK, 1) if span[2] == layout.WARMING_UP]
    assert [span[:2] for span in work] == [(30_000, 8_030_000)]


def test_legacy_pytorch_profiler_traces_are_read(tmp_path: Path) -> None:
    def function(place: str, name: str, at_us: float, length_us: float, thread: int) -> Any:
        times = {"ts": at_us, "dur": length_us}
        return {"ph": "X", "name": name, "pid": place, "tid": thread, **times, "args": {}}

    events = [
        function("CPU functions", "aten::zeros", 0, 90, 1),
        function("CUDA functions", "aten::zeros", 10, 80, 0),
        function("CUDA functions", "aten::zero_", 40, 30, 0),  # within the first
        function("CUDA functions", "aten::mul", 100, 20, 0),
    ]
    (node,), (account,) = import_files([write(tmp_path, events, "trace.json")])
    assert list_ranks(node) == [(1, None, None, "gpu0")]
    assert list_busy_ns(node)[-1][1] == 100 * US
    assert any("idle time within an operator counts as busy" in note for note in account.notes)
