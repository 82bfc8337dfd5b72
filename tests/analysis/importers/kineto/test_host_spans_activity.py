"""What the host did while its device had nothing to do decides the cause: every number by hand.

Each trace has four steps of 100 ms. In each, a kernel runs from 0 to 10 ms and one from 80 to 100
ms; between them the host does what the test is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.advice.registry import list_recommendations
from clusterprof.analysis.importers.kineto import classify
from clusterprof.analysis.importers.kineto.host_functions import find_innermost_functions
from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.report.model import Finding, Report
from tests.support.kineto_traces import (
    make_device_event,
    make_event,
    make_runtime_call,
    make_step,
    make_trace,
    write_trace,
)

MS = 1_000
"""In the trace's microseconds."""
STEPS, GIB = 4, 1 << 30
Events = Iterable[dict[str, Any]]


def function(name: str, at: float, dur: float) -> dict[str, Any]:
    """A call of a Python function."""
    return make_event("python_function", name, at, dur)


def steps(middle: Callable[[int, float], Events]) -> list[dict[str, Any]]:
    """The steps; `middle(number, start)` are the events between the kernels, times in us."""
    events = []
    for number in range(STEPS):
        at, link = number * 100 * MS, 10 * number
        events += [
            make_step(number + 1, at, 100 * MS),
            make_runtime_call("cudaLaunchKernel", at, 10, link + 1),
            make_device_event("gemm", at, 10 * MS, link + 1),
            *middle(number, at),
            make_runtime_call("cudaLaunchKernel", at + 80 * MS - 10, 10, link + 2),
            make_device_event("gemm", at + 80 * MS, 20 * MS, link + 2),
        ]
    return events


def report_of(events: Events, folder: Path, **beside: Any) -> Report:
    """The report on a trace; a rank of a job of one, unless the trace says otherwise."""
    beside = beside or {"distributedInfo": {"rank": 0, "world_size": 1}}
    return analyze(write_trace(folder, make_trace(events, **beside)))


def ms_of(report: Report) -> dict[str, float]:
    """Lost ms by cause of the first rank; less than 0.1 ms are left out."""
    return {id_: round(ns / 1e6, 1) for id_, ns in report.ranks[0].buckets if ns >= 1e5}


def named(report: Report, cause: str) -> Finding:
    """The finding of a cause."""
    return next(finding for finding in report.findings if finding.cause.id == cause)


def notes_of(finding: Finding) -> list[str]:
    """Notes of its evidence."""
    return [item.note for item in finding.evidence]


def test_gaps_without_host_events_are_unattributed(tmp_path: Path) -> None:
    report = report_of(steps(lambda number, at: ()), tmp_path)
    assert ms_of(report) == {"unattributed": 4 * 70.0}
    assert not [f for f in report.findings if not f.outside_steps]


def test_a_constantly_launching_host_is_launch_bound(tmp_path: Path) -> None:
    def launches(number: int, at: float) -> Events:
        for index in range(140):  # every half millisecond, kernels of 1 us
            link = 1000 + 200 * number + index
            begin = at + 10 * MS + 500 * index
            yield make_runtime_call("cudaLaunchKernel", begin, 5, link)
            yield make_device_event("add", begin + 6, 1, link)

    report = report_of(steps(launches), tmp_path)
    # 70 ms less 140 kernels; each gap ends with the call, 1 us before its kernel
    assert ms_of(report)["launch-bound"] == pytest.approx(4 * 69.7, abs=0.6)
    assert ms_of(report).get("unattributed", 0.0) < 4 * 0.6


def test_freeing_memory_in_every_step_is_a_separate_cause(tmp_path: Path) -> None:
    report = report_of(
        steps(lambda number, at: [make_runtime_call("hipFree", at + 15 * MS, 60 * MS)]), tmp_path
    )
    assert ms_of(report) == {"memory-free": 4 * 60.0, "unattributed": 4 * 10.0}
    assert {item.id for item in list_recommendations("memory-free")} == {
        "no-cache-flush",
        "keep-segments",
        "pin-once",
        "allocate-once",
    }


@pytest.mark.parametrize(("frees", "is_uncached"), [(60, True), (49, False)])
def test_enabling_caching_is_advised_for_an_uncached_allocator(
    frees: int, is_uncached: bool, tmp_path: Path
) -> None:
    """Each step obtains 60 blocks; growing segments help only an allocator that keeps blocks."""

    def churns(number: int, at: float) -> Events:
        yield from (make_runtime_call("hipMalloc", at + 11 * MS + 10 * n, 10) for n in range(60))
        length = 66 * MS / frees
        yield from (
            make_runtime_call("hipFree", at + 12 * MS + length * n, length) for n in range(frees)
        )

    events = [item for repeat in range(5) for item in _shift(steps(churns), repeat)]
    finding = named(report_of(events, tmp_path), "memory-free")
    ratios = [item.value for item in finding.evidence if item.name == "allocator.returned_ratio"]
    assert ratios == ([pytest.approx(1.0)] if is_uncached else [])
    change = next(item.change for item in finding.advice if item.id == "keep-segments")
    assert ("PYTORCH_NO_HIP_MEMORY_CACHING" in change) == is_uncached
    assert ("expandable_segments" in change) != is_uncached


WARM = {
    "module": [make_runtime_call("cuModuleLoadData", 20 * MS, 40 * MS)],
    "attributes": [
        make_runtime_call("cudaFuncGetAttributes", (20 + 4 * n) * MS, 4 * MS) for n in range(10)
    ],
    "capture": [
        make_runtime_call("cudaStreamBeginCapture", 20 * MS, 10),
        make_runtime_call("cudaLaunchKernel", 30 * MS, 5, 900),  # recorded, not run
        make_runtime_call("cudaStreamEndCapture", 49 * MS, MS),
        make_runtime_call("cudaGraphInstantiate_v12000", 50 * MS, 10 * MS),
    ],
    "first launches": [make_runtime_call("cudaLaunchKernel", 20 * MS, 40 * MS, 901)],
    "context": [make_runtime_call("cuDevicePrimaryCtxRetain", 20 * MS, 40 * MS)],
}


@pytest.mark.parametrize("events", WARM.values(), ids=WARM)
def test_host_work_of_the_first_step_alone_is_warm_up(events: Events, tmp_path: Path) -> None:
    report = report_of(steps(lambda number, at: () if number else events), tmp_path)
    assert ms_of(report)["warm-up"] == pytest.approx(40.0)
    assert "launch-bound" not in ms_of(report) and "memory-free" not in ms_of(report)
    assert {item.id for item in list_recommendations("warm-up")} == {
        "skip-first-steps",
        "keep-kernel-caches",
        "warm-up-first",
    }


MEMORY = {"cudaFree": "memory-free", "cudaHostAlloc": "memory-free", "cudaMalloc": "launch-alloc"}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_calls_of_the_first_step_are_not_warm_up(name: str, tmp_path: Path) -> None:
    """The allocator runs out of memory once: the device has worked before, nothing is loaded."""

    def allocates(number: int, at: float) -> Events:
        yield from (make_runtime_call("cudaLaunchKernel", at + 20 + 10 * n, 5) for n in range(10))
        if not number:
            yield from (make_runtime_call(name, at + (15 + 2 * n) * MS, 2 * MS) for n in range(20))

    lost = ms_of(report_of(steps(allocates), tmp_path))
    assert lost[MEMORY[name]] == pytest.approx(40.0)
    assert "warm-up" not in lost


def test_memory_calls_before_the_first_launches_set_the_device_up(tmp_path: Path) -> None:
    trace = [
        make_step(1, 0, 100 * MS),
        make_runtime_call("cudaFree", 1 * MS, 40 * MS),
        *(make_runtime_call("cudaLaunchKernel", 42 * MS + 10 * n, 5) for n in range(10)),
        make_runtime_call("cudaFree", 45 * MS, 20 * MS),
        make_runtime_call("cudaLaunchKernel", 70 * MS, 10, 1),
        make_device_event("gemm", 70 * MS + 20, 30 * MS - 20, 1),
    ]
    lost = ms_of(report_of(trace, tmp_path))
    assert (lost["warm-up"], lost["memory-free"]) == pytest.approx((40.0, 20.0))


def test_slow_launches_in_every_step_are_not_warm_up(tmp_path: Path) -> None:
    trace = steps(
        lambda number, at: [
            make_runtime_call("cudaGraphLaunch", at + 20 * MS, 40 * MS, 900 + number)
        ]
    )
    assert ms_of(report_of(trace, tmp_path))["launch-bound"] == pytest.approx(4 * 40.0, abs=0.1)


def test_the_function_that_prepares_data_is_named(tmp_path: Path) -> None:
    def prepares(number: int, at: float) -> Events:
        yield function("train.py(40): train", at, 100 * MS)
        yield make_runtime_call(
            "cudaStreamSynchronize", at + 1 * MS, 9 * MS + 20
        )  # 20 us into the gap
        yield function("src/app/video/data.py(12): preprocess", at + 12 * MS, 60 * MS)
        yield function("numpy/lib/stride.py(7): tile", at + 20 * MS, 20 * MS)
        yield function("<built-in method contiguous of Tensor>", at + 41 * MS, 10 * MS)

    report = report_of(steps(prepares), tmp_path)
    assert ms_of(report)["cpu-preprocess"] == pytest.approx(4 * 60.0)
    assert "h2d-sync" not in ms_of(report)  # 20 us of waiting explain 20 us, not 70 ms
    notes = notes_of(named(report, "cpu-preprocess"))
    assert notes[0] == "of that time the host was in video/data.py(12): preprocess"
    assert notes[1] == "of that time the host was in lib/stride.py(7): tile"
    # Before and after it the loop itself: 2 ms and 8 ms, less what is near the launches.
    assert ms_of(report)["eval-host"] == pytest.approx(4 * 10.0, abs=0.2)


@pytest.mark.parametrize(
    ("inner", "cause"),
    [
        ("<built-in function sleep>", "host-asleep"),
        ("<method 'acquire' of '_thread.lock' objects>", "host-asleep"),
        ("logging/__init__.py(1478): info", "eval-host"),
        ("train.py(9): validate", "eval-host"),
        ("torch/utils/data/_utils/collate.py(5): default_collate", "cpu-preprocess"),
    ],
)
def test_the_innermost_function_determines_the_cause(
    inner: str, cause: str, tmp_path: Path
) -> None:
    def runs(number: int, at: float) -> Events:
        return [
            function("torch/nn/modules/module.py(1): _call_impl", at, 100 * MS),
            function(inner, at + 20 * MS, 50 * MS),
        ]

    report = report_of(steps(runs), tmp_path)
    # Before and after it the host was in Python of the model, which launched nothing yet.
    assert ms_of(report) == {cause: 4 * 50.0, "launch-bound": 4 * 20.0}


def test_reading_inside_of_loading_data_is_a_wait_for_data(tmp_path: Path) -> None:
    def reads(number: int, at: float) -> Events:
        return [
            function("data.py(3): load_batch", at + 20 * MS, 50 * MS),
            function("<method 'read' of '_io.BufferedReader' objects>", at + 20 * MS, 40 * MS),
        ]

    report = report_of(steps(reads), tmp_path)
    assert ms_of(report) == {
        "input-wait": 4 * 40.0,
        "cpu-preprocess": 4 * 10.0,
        "unattributed": 4 * 20.0,
    }


def test_a_blocking_copy_call_counts_as_device_sync(tmp_path: Path) -> None:
    def copies(number: int, at: float) -> Events:  # 60 bytes, and a call of 60 ms around them
        link = 500 + number
        yield make_runtime_call("hipMemcpyWithStream", at + 12 * MS, 60 * MS, link)
        yield make_device_event(
            "Memcpy HtoD (Pageable -> Device)", at + 72 * MS - 10, 5, link, "gpu_memcpy", bytes=60
        )

    report = report_of(steps(copies), tmp_path)
    lost = ms_of(report)
    assert lost.get("h2d-copy", 0.0) <= 4 * 0.2
    assert lost["h2d-sync"] == pytest.approx(4 * 60.0, rel=0.01)  # a wait in a blocking call


def test_exposed_copies_count_as_lost_time(tmp_path: Path) -> None:
    def copies(
        number: int, at: float
    ) -> Events:  # from 20 to 70 ms, the last 10 ms from the device
        link = 500 + 2 * number
        yield make_runtime_call("cudaMemcpyAsync", at + 9 * MS, 10, link)
        yield make_device_event(
            "Memcpy HtoD (Pinned -> Device)",
            at + 5 * MS,
            55 * MS,
            link,
            "gpu_memcpy",
            bytes=1 << 30,
        )
        yield make_runtime_call("cudaMemcpyAsync", at + 9 * MS + 20, 10, link + 1)
        yield make_device_event(
            "Memcpy DtoH (Device -> Pinned)", at + 60 * MS, 20 * MS, link + 1, "gpu_memcpy", bytes=8
        )

    report = report_of(steps(copies), tmp_path)
    assert ms_of(report) == {"h2d-copy-bound": 4 * 70.0}  # 10 to 80 ms; a kernel hid it before
    finding = named(report, "h2d-copy-bound")
    evidence = {item.name: item.value for item in finding.evidence}
    assert evidence["copy.to_device_ratio"] == pytest.approx(50 / 70, abs=1e-3)
    # 50 of 55 ms of 1 GiB, and 8 bytes, in 70 ms
    assert evidence["copy.bytes_per_second"] == pytest.approx(GIB * 50 / 55 / 0.070, rel=1e-3)
    assert {item.id for item in list_recommendations("h2d-copy-bound")} == {
        "pin-copied-memory",
        "copy-ahead",
        "copy-less",
        "copy-asynchronously",
    }


def test_collectives_of_a_rank_without_peers_are_not_lost(tmp_path: Path) -> None:
    def reduces(number: int, at: float) -> Events:
        yield make_device_event(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", at + 10 * MS, 70 * MS, 700
        )

    report = report_of(steps(reduces), tmp_path)
    assert ms_of(report) == {}  # the kernel works for this rank alone


def test_steps_of_a_host_running_ahead_last_like_device_work(tmp_path: Path) -> None:
    events = []
    for number in range(4):  # 2 ms of launching each, 100 ms of work each
        events += [
            make_step(number, number * 2 * MS, 2 * MS),
            make_runtime_call("cudaLaunchKernel", number * 2 * MS, 10, number + 1),
            make_device_event("gemm", MS + number * 100 * MS, 100 * MS, number + 1),
        ]
    report = report_of(events, tmp_path)
    assert report.in_step_ns == 401_000_000 and report.outside_ns == 0
    assert report.lost_ns == 1_000_000


def test_steps_of_a_host_running_ahead_end_with_their_work(tmp_path: Path) -> None:
    events = []
    for number, work in enumerate((50, 100, 300)):  # 2 ms of launching, then work of 50, 100, 300
        events += [
            make_step(number, number * 2 * MS, 2 * MS),
            make_runtime_call("cudaLaunchKernel", number * 2 * MS, 10, number + 1),
            make_device_event("gemm", MS + (0, 50, 150)[number] * MS, work * MS, number + 1),
        ]
    report = report_of(events, tmp_path)
    assert report.in_step_ns == 451_000_000
    # From 0 to 51, to 151, to 451 ms
    assert {m.name: m.value for m in report.metrics}["step.p50_ns"] == 100_000_000


def test_data_waits_before_the_first_step_are_excluded(tmp_path: Path) -> None:
    def loads(number: int, at: float) -> Events:
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        return [make_event("user_annotation", name, at + 20 * MS, 10 * MS)]

    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    before = [make_event("user_annotation", name, -80 * MS, 85 * MS)]  # until 5 ms after it
    report = report_of([*before, *steps(loads)], tmp_path)
    ratio = {metric.name: metric.value for metric in report.metrics}["data_wait.ratio"]
    assert ratio == pytest.approx((4 * 10 + 5) / 400)


def test_launching_and_host_computing_operators_are_separated(tmp_path: Path) -> None:
    def runs(number: int, at: float) -> Events:
        link = 700 + number
        yield make_event("cpu_op", "aten::mul", at + 10 * MS, 30 * MS)
        yield make_runtime_call("cudaLaunchKernel", at + 40 * MS - 10, 5, link)
        yield make_device_event("mul", at + 40 * MS, 1, link)
        yield make_event(
            "cpu_op", "aten::sort", at + 45 * MS, 25 * MS
        )  # on the CPU: launches nothing

    report = report_of(steps(runs), tmp_path)
    lost = ms_of(report)
    assert lost["launch-bound"] == pytest.approx(4 * 30.0, abs=0.1)
    assert lost["unattributed"] == pytest.approx(4 * (15.0 + 25.0), abs=0.1)
    assert dict(report.unattributed_reasons)["on-host:aten::sort"] == pytest.approx(100e6)
    finding = named(report, "launch-bound")
    assert not [note for note in notes_of(finding) if "aten::sort" in note]


@pytest.mark.parametrize(
    ("grain", "launch_bound_ms", "on_host_ms"),
    [
        (20, 136 * 0.4, 0.0),  # launches 10 ms apart
        (100, 37 * 0.4, 99 * 0.4),  # the second launch comes 50 ms after the first
    ],
)
def test_operators_that_launch_nothing_are_overhead_near_launches_only(
    tmp_path: Path, grain: int, launch_bound_ms: float, on_host_ms: float
) -> None:
    """136 operators of 0.4 ms in each step, one every 0.5 ms; one of `grain` launches."""

    def runs(number: int, at: float) -> Events:
        for index in range(136):
            begin, link = at + 11 * MS + index * MS / 2, 1000 * (number + 1) + index
            yield make_event("cpu_op", f"aten::op{index % 3}", begin, 0.4 * MS)
            if index % grain == 0:
                yield make_runtime_call("cudaLaunchKernel", begin, 5, link)
                yield make_device_event("add", begin + 6, 1, link)

    report = report_of(steps(runs), tmp_path)
    reasons = [ns / 1e6 for name, ns in report.unattributed_reasons if name.startswith("on-host")]
    assert ms_of(report)["launch-bound"] == pytest.approx(4 * launch_bound_ms, abs=0.2)
    assert sum(reasons) == pytest.approx(4 * on_host_ms, abs=0.2)


def test_operators_during_data_preparation_count_as_preprocessing(tmp_path: Path) -> None:
    def prepares(number: int, at: float) -> Events:
        yield function("app/data.py(3): load_batch", at + 20 * MS, 50 * MS)
        yield make_event("cpu_op", "aten::index", at + 30 * MS, 30 * MS)

    report = report_of(steps(prepares), tmp_path)
    assert ms_of(report) == {"cpu-preprocess": 4 * 50.0, "unattributed": 4 * 20.0}


def test_gaps_before_uncorrelated_kernels_go_to_operators(tmp_path: Path) -> None:
    def runs(number: int, at: float) -> Events:  # the kernel at 60 ms has no correlation
        yield make_event("cpu_op", "aten::add", at + 5 * MS, 54 * MS)
        yield make_runtime_call("cudaLaunchKernel", at + 50 * MS, 10, 900 + number)
        yield make_device_event("add", at + 60 * MS, 20 * MS, 0)

    lost = ms_of(report_of(steps(runs), tmp_path))
    assert lost == {"launch-bound": pytest.approx(4 * 49.0, abs=0.1), "unattributed": 4 * 1.0}


@pytest.mark.parametrize("launches_near", [True, False])
def test_model_python_between_launches_counts_as_launching(
    tmp_path: Path, launches_near: bool
) -> None:
    """With launches every 15 ms the hooks are overhead; with none for 70 ms they are work."""

    def runs(number: int, at: float) -> Events:
        for index in range(4 if launches_near else 0):
            link = 700 + 10 * number + index
            yield make_runtime_call("cudaLaunchKernel", at + (20 + 15 * index) * MS, 5, link)
            yield make_device_event("add", at + (20 + 15 * index) * MS + 6, 1, link)
        yield function("app/run.py(7): run", at, 100 * MS)
        yield function("torch/utils/_contextlib.py(9): decorate_context", at + 1, 99 * MS)
        yield function("diffusers/hooks/hooks.py(248): reset_hooks", at + 15 * MS, 60 * MS)

    report = report_of(steps(runs), tmp_path)
    hooks = "hooks/hooks.py(248): reset_hooks"
    if launches_near:
        assert ms_of(report) == {"launch-bound": pytest.approx(4 * 70.0, abs=0.1)}
        notes = notes_of(named(report, "launch-bound"))
        assert f"of that time the host was in {hooks}" in notes
    else:
        assert ms_of(report) == {"unattributed": 4 * 70.0}
        assert dict(report.unattributed_reasons)[f"on-host:{hooks}"] == pytest.approx(240e6)


@pytest.mark.parametrize(
    ("name", "cause", "note"),
    [
        ("cudaHostRegister", "memory-free", "of that time, the host pinned memory of the host"),
        (
            "cudaMalloc",
            "launch-alloc",
            "of that time, the host was in calls that allocate memory of the device",
        ),
    ],
)
def test_memory_calls_of_every_step_are_a_cause(
    name: str, cause: str, note: str, tmp_path: Path
) -> None:
    report = report_of(
        steps(lambda number, at: [make_runtime_call(name, at + 15 * MS, 60 * MS)]), tmp_path
    )
    assert ms_of(report) == {cause: 4 * 60.0, "unattributed": 4 * 10.0}
    assert notes_of(named(report, cause)) == [note]


def test_pinning_before_the_first_launches_is_warm_up(tmp_path: Path) -> None:
    pins = [make_runtime_call("cudaHostRegister", 20 * MS, 40 * MS)]
    report = report_of(steps(lambda number, at: () if number else pins), tmp_path)
    assert ms_of(report) == {"warm-up": 40.0, "unattributed": 240.0}


def test_communication_that_outlasts_the_steps_counts_until_their_end(tmp_path: Path) -> None:
    events = [  # of 40 ms of communication 5 lie in the step, and a kernel hides 3 of them
        make_step(1, 0, 100 * MS),
        make_runtime_call("cudaLaunchKernel", 0, 10, 1),
        make_device_event("gemm", 0, 98 * MS, 1),
        make_runtime_call("cudaLaunchKernel", 20, 10, 2),
        make_device_event("dpsk::ep::internode::combine<false>(int)", 95 * MS, 40 * MS, 2),
    ]
    report = report_of(events, tmp_path, distributedInfo={"rank": 0, "world_size": 2})
    assert report.lost_ns == 2_000_000


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void (anonymous namespace)::multimem_all_reduce_kernel<float>(float*)", classify.COMM),
        ("void dpsk::ep::internode::dispatch<false, 8>(int4*)", classify.COMM),
        ("void dpsk::ep::cuda::get_dispatch_layout<256, 32>(long const*)", classify.KERNEL),
        ("void deep_ep::layout::get_dispatch_layout<256>(int)", classify.KERNEL),
        ("void gemm<nccl_like(int)>(ncclComm)", classify.COMM),
        ("void gemm(ncclComm*)", classify.KERNEL),
    ],
)
def test_communication_kernels_are_recognized_by_name(name: str, kind: int) -> None:
    assert classify.Kinds()["kernel"][name] == kind


def test_host_time_goes_to_the_innermost_function() -> None:
    # main 0..100: preprocess 10..60 (in it read 20..30, helper 40..50), torch 70..90 (sleep 75..80)
    rows = (
        (0, 100, classify.FUNCTION, 0),
        (10, 60, classify.DATA_FUNCTION, 1),
        (20, 30, classify.READ_FUNCTION, 2),
        (40, 50, classify.FUNCTION, 3),
        (70, 90, classify.TORCH_FUNCTION, 4),
        (75, 80, classify.SLEEP_FUNCTION, 5),
    )
    start, end, kind, name = (np.array(column) for column in zip(*rows[::-1]))
    work = find_innermost_functions(start, end, kind, name)
    assert list(zip(work.start, work.end, work.activity, work.name)) == [
        (0, 10, layout.OTHER_WORK, 0),
        (10, 20, layout.PREPARING_DATA, 1),
        (20, 30, layout.READING_DATA, 1),  # a built-in function: its caller is the better name
        (30, 40, layout.PREPARING_DATA, 1),
        (40, 50, layout.PREPARING_DATA, 3),
        (50, 60, layout.PREPARING_DATA, 1),
        (60, 70, layout.OTHER_WORK, 0),
        (70, 75, layout.RUNNING_MODEL, 0),  # of PyTorch: its caller is the better name
        (75, 80, layout.SLEEPING, 0),
        (80, 90, layout.RUNNING_MODEL, 0),
        (90, 100, layout.OTHER_WORK, 0),
    ]


@pytest.mark.parametrize("trains", [True, False])
def test_a_fused_optimizer_is_advised_only_for_training(tmp_path: Path, trains: bool) -> None:
    """A window of a few steps: of training with optimizer steps, and of inference."""

    def launches(number: int, at: float) -> Events:
        for index in range(140):
            link = 1000 + 200 * number + index
            begin = at + 10 * MS + 500 * index
            yield make_runtime_call("cudaLaunchKernel", begin, 5, link)
            yield make_device_event("add", begin + 6, 1, link)
        if trains:
            yield make_event("user_annotation", "Optimizer.step#SGD.step", at + 60 * MS, 5 * MS)

    events = [item for repeat in range(5) for item in _shift(steps(launches), repeat)]
    finding = named(report_of(events, tmp_path), "launch-bound")
    (advice,) = [item for item in finding.advice if item.id == "fewer-launches"]
    assert ("optimizer" in advice.change) == trains


def _shift(events: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the four steps once more, 400 ms later each time."""
    shifted = []
    for item in events:
        moved = {**item, "ts": item["ts"] + number * 400 * MS, "args": dict(item["args"])}
        if "correlation" in moved["args"]:
            moved["args"]["correlation"] += 10_000 * number
        if item["name"].startswith("ProfilerStep#"):
            moved["name"] = f"ProfilerStep#{int(item['name'].partition('#')[2]) + 4 * number}"
        shifted.append(moved)
    return shifted
