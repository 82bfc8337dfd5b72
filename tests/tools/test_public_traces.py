"""The plain arithmetic that our numbers are compared with, on files written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench._trace_truths import (
    add_lengths,
    compute_kineto,
    compute_mllog,
    compute_nccl,
    compute_step_times,
    intersect,
    merge,
)
from bench.public_traces import is_right


def test_intervals_merge_and_intersect() -> None:
    merged = merge([(5, 7), (0, 2), (2, 3), (6, 9), (20, 21)])
    assert merged == [(0, 3), (5, 9), (20, 21)]
    assert intersect(merged, [(1, 6), (8, 20)]) == [(1, 3), (5, 6), (8, 9)]
    assert add_lengths(merged) == 8


@pytest.mark.parametrize(
    ("truth", "unit", "ours", "right"),
    [
        (100.0, "", 101.0, True),
        (100.0, "", 101.1, False),
        (0.001, "ratio", 0.002, True),
        (0.001, "ratio", 0.0021, False),
        (5.0, "ns", None, False),
    ],
)
def test_a_value_is_right_within_a_percent_or_last_digit(
    truth: float, unit: str, ours: float | None, right: bool
) -> None:
    assert is_right(truth, unit, ours) is right


def test_kineto_counts_overlapping_work_once_and_hidden_communication_not_at_all(
    tmp_path: Path,
) -> None:
    def span(category: str, name: str, start: int, length: int, pid: int = 7) -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": name, "pid": pid, "ts": start, "dur": length}

    path = tmp_path / "trace.json"
    events = [
        span("user_annotation", "ProfilerStep#1", 0, 100),
        span("user_annotation", "ProfilerStep#2", 100, 60),
        span("user_annotation", "ProfilerStep#9", 0, 9_000, pid=8),  # of no process with operators
        span("cpu_op", "enumerate(DataLoader)#_Iter.__next__", 0, 16),
        span("kernel", "gemm", 20, 30, 0),
        span("kernel", "ncclDevKernel_AllReduce", 40, 20, 0),
        span("gpu_memcpy", "Memcpy HtoD", 70, 10, 0),
        span("kernel", "gemm", 150, 50, 0),  # 40 of it after the steps
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert compute_kineto([path]) == {
        "kernels in the note": (3, ""),
        "copies in the note": (1, ""),
        "operators in the note": (1, ""),
        "time in steps": (160_000, "ns"),
        "steps": (2, ""),
        "median step": (60_000, "ns"),
        "busy ratio": (60 / 160, "ratio"),
        "lost time": (120_000, "ns"),  # 100 idle, 10 of communication and 10 of a copy alone
        "data wait ratio": (0.1, "ratio"),
    }


def test_steps_end_when_their_device_work_ends(tmp_path: Path) -> None:
    def span(category: str, name: str, start: int, length: int, call: int = 0) -> dict[str, object]:
        times = {"ph": "X", "ts": start, "dur": length, "args": {"correlation": call}}
        return {"cat": category, "name": name, "pid": 7, **times}

    path = tmp_path / "trace.json"
    events = [
        span("user_annotation", "ProfilerStep#1", 0, 20),
        span("gpu_user_annotation", "ProfilerStep#1", 10, 90),
        span("cpu_op", "aten::mm", 2, 3),
        span("cuda_runtime", "cudaLaunchKernel", 3, 1, 1),
        span("kernel", "gemm", 10, 90, 1),
        span("kernel", "gemm", 120, 50, 2),  # launched by nobody within the step
    ]
    path.write_text(json.dumps(events))
    truth = compute_kineto([path])
    assert truth["time in steps"] == (100_000, "ns")
    assert truth["median step"] == (100_000, "ns")  # until the work launched in it has ended
    assert truth["busy ratio"] == (0.9, "ratio")


def test_an_mlperf_log_gives_epochs_and_startup_time(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    keys = ["init_start", "run_start", "epoch_start", "eval_start", "eval_stop", "epoch_stop"]
    path.write_text(
        "".join(
            f'x :::MLLOG {{"time_ms": {5_000 + 1_000 * at}, "key": "{key}"}}\n'
            for at, key in enumerate([*keys, "run_stop"])
        )
    )
    assert compute_mllog([path]) == {
        "steps": (1, ""),
        "median step": (3e9, "ns"),
        "start-up": (2e9, "ns"),
        "recorded": (6e9, "ns"),
        "evaluations in the note": (1, ""),
        "time of the run stated": (5, ""),
    }


def test_an_nccl_tests_table_is_read_despite_interleaved_messages(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(
        "  1024  256  float  sum  -1n1:10:10 [0] NCCL INFO AllReduce: opCount 0\n"
        "  10.5  1.00  1.50  0n1:10:10 [0] NCCL INFO AllReduce: opCount 0\n"
        "  10.0  1.05  1.57  0\n"
        "# Avg bus bandwidth    : 1.53\n"
    )
    assert compute_nccl([path]) == {
        "average bus bandwidth stated": (1.53, ""),
        "rows in the note": (1, ""),
        "largest size stated": (1024, ""),
        "its time stated": (10.5, ""),
        "its bus bandwidth stated": (1.5, ""),
    }


def test_ranks_wait_for_the_slowest_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(
        "worker,time,batch_time_norm\n0,1,100\n1,1,200\n2,1,150\n0,2,120\n1,2,100\n2,2,110\n"
        "0,3,500\n"  # other ranks have no step 3
    )
    assert compute_step_times([path]) == {
        "steps": (7, ""),
        "ranks": (3, ""),
        "lost ratio": ((100 + 50 + 20 + 10) / (3 * 320), "ratio"),
        "straggler slowdown": (320 / (150 + 110), ""),
        "slowest rank": (1, ""),
    }
