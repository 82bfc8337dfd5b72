"""From a trace with stacks, or stacks of a report, to advice that names the line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from clusterprof.analysis.findings.advice import with_advice
from clusterprof.analysis.pipeline import analyze
from clusterprof.report.code import CodeLocation, CodeProfile, StackTime
from clusterprof.report.model import RunFingerprint
from tests.support.kineto_traces import (
    make_device_event,
    make_event,
    make_runtime_call,
    make_step,
    make_trace,
    write_trace,
)

MS = 1_000


def trace(folder: Path) -> Path:
    """Four steps of 100 ms: a kernel, 70 ms of host work, a kernel.

    Of the host work 42 ms are in a call of `.item()`, 28 ms in the function around it.
    """
    events = []
    for number in range(4):
        at, link = number * 100 * MS, 10 * number
        events += [
            make_step(number + 1, at, 100 * MS),
            make_runtime_call("cudaLaunchKernel", at, 10, link + 1),
            make_device_event("gemm", at, 10 * MS, link + 1),
            make_event("python_function", "train.py(30): main", at, 100 * MS),
            make_event("python_function", "train.py(12): log_metrics", at + 10 * MS, 70 * MS),
            make_event(
                "python_function",
                "<built-in method item of Tensor object at 0x7f00>",
                at + 20 * MS,
                42 * MS,
            ),
            make_runtime_call("cudaLaunchKernel", at + 80 * MS - 10, 10, link + 2),
            make_device_event("gemm", at + 80 * MS, 20 * MS, link + 2),
        ]
    return write_trace(folder, make_trace(events, distributedInfo={"rank": 0, "world_size": 1}))


def test_the_advice_for_the_costliest_line_comes_first(tmp_path: Path) -> None:
    report = analyze(trace(tmp_path))
    (finding,) = (item for item in report.findings if item.cause.id == "eval-host")
    line = finding.lines[0]
    assert (line.place, line.library) == (
        CodeLocation("train.py", 12, "log_metrics"),
        CodeLocation("<built-in>", 0, "Tensor.item"),
    )
    assert finding.advice[0].id == "read-back-rarely"
    assert finding.advice[0].what.startswith(
        "train.py:12 in log_metrics spends 60 % in reading values back from the GPU: "
    )
    assert finding.advice[0].effort == "code" and "metrics-on-gpu" not in [
        advice.id for advice in finding.advice
    ]


def test_built_in_calls_are_recognized_only_from_unchanged_sources(tmp_path: Path) -> None:
    report = analyze(trace(tmp_path))
    file = tmp_path / "job.py"
    file.write_text("def hook(loss):\n    total = loss.item()\n")
    os.utime(file, (1000, 1000))
    places = (CodeLocation(str(file), 2, "hook"),)
    code = CodeProfile(places, (False,), (StackTime("eval-host", 0, (0,), 10**9, 50),), 50)
    for started_s, is_known in ((2000, True), (500, False)):
        fingerprint = RunFingerprint(started_at_ns=started_s * 10**9)
        advised = with_advice(replace(report, code=code, fingerprint=fingerprint), ())
        (finding,) = (item for item in advised.findings if item.cause.id == "eval-host")
        assert ("read-back-rarely" in [advice.id for advice in finding.advice]) == is_known
