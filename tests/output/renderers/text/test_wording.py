"""What the verdict says of small losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.text import wording
from clusterprof.output.renderers.text.first_screen import build_first_screen
from tests.support.kineto_traces import (
    make_device_event,
    make_runtime_call,
    make_step,
    make_trace,
    write_trace,
)

MS = 1_000


@pytest.mark.parametrize(
    ("idle_ms", "verdict"),
    [
        (0.5, "Nothing to fix: the accelerators were kept busy."),
        (2, "The accelerators were kept busy; 2.0 % was lost, mostly without a known cause."),
        (
            4,
            "No main cause: the loss is small and spread out. The largest part, 4.0 %, has no known"
            " cause",
        ),
        (6, "Not known: 100.0 % of the loss has no known cause"),
    ],
)
def test_a_small_loss_without_a_cause_is_not_the_verdict(
    idle_ms: float, verdict: str, tmp_path: Path
) -> None:
    events = []
    for number in range(10):  # steps of 100 ms; the launch follows the gap, nothing else is seen
        at = number * 100 * MS + idle_ms * MS
        events += [
            make_step(number, number * 100 * MS, 100 * MS),
            make_runtime_call("cudaLaunchKernel", at - 1, 1, number + 1),
            make_device_event("gemm", at, (100 - idle_ms) * MS, number + 1),
        ]
    facts = {"distributedInfo": {"rank": 0, "world_size": 1}}
    report = analyze(write_trace(tmp_path, make_trace(events, **facts)))
    assert report.unattributed_ns > 0.9 * report.lost_ns
    text = (
        wording.describe_unknown_cause(report)
        if wording.has_significant_loss(report)
        else wording.describe_no_loss(report)
    )
    assert text.startswith(verdict)
    labels = [row.label for row in build_first_screen(report).rows]
    assert ("Try next" in labels) == (idle_ms == 6)  # little in small parts needs no advice


def test_the_host_function_is_named_without_control_characters() -> None:
    named = wording.describe_unattributed_reason("on-host:aten::mul\x1b[31m")
    assert named.startswith("the host was in aten::mul")
    assert named.endswith(", which launched nothing") and "\x1b" not in named
    assert wording.describe_unattributed_reason("on-host") == (
        "the host computed in functions or operators that launched nothing"
    )
