"""Modes for debugging that are on in a job, read at the end of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.probe import layout
from tests.support.job_python import require_torch
from tests.support.probe_jobs import install_probe, record_code

require_torch("2.0", "hooks of all optimizers are new in 2.0")
pytestmark = pytest.mark.torch

START = """
import sys
import torch
state = sys.modules["_clusterprof_probe.hooks.torch_state"]
state.READ_INTERVAL_NS = 0
weight = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)

def step():
    weight.sum().backward()
    optimizer.step()

step()
step()
"""


def read_modes(tmp_path: Path, code: str, **variables: str) -> list[int]:
    variables |= {"KINETO_LOG_LEVEL": "6"}  # PyTorch's profiler prints when it starts
    tmp_path.mkdir(exist_ok=True)
    (ring,) = record_code(START + code, install_probe(tmp_path / "run"), **variables)
    assert ring.switched_off == 0
    return [record.a for record in ring.of(layout.DEBUG_MODES)]


def test_a_job_without_debug_modes_has_no_mode_records(tmp_path: Path) -> None:
    assert read_modes(tmp_path, "step()") == []


def test_debug_modes_of_pytorch_and_python_are_recorded_while_active(tmp_path: Path) -> None:
    code = """
with torch.autograd.set_detect_anomaly(True):
    step()
sys.settrace(lambda frame, event, argument: None)
step()
sys.settrace(None)
sys.setprofile(lambda frame, event, argument: None)
step()
sys.setprofile(None)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
    step()
step()
"""
    assert read_modes(tmp_path, code) == [
        layout.ANOMALY_DETECTION,
        layout.LINE_TRACING,
        layout.PYTHON_PROFILER,
        layout.TORCH_PROFILER,
    ]


def test_modes_set_by_environment_variables_apply_to_all_steps(tmp_path: Path) -> None:
    modes = layout.BLOCKING_LAUNCHES | layout.COLLECTIVE_CHECKS
    variables = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "detail"}
    assert read_modes(tmp_path, "step()", **variables) == [modes, modes]
    off = {"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert read_modes(tmp_path / "off", "step()", **off) == []


def test_the_profiler_window_of_clusterprof_is_not_a_debug_mode(tmp_path: Path) -> None:
    code = """
import types
dive = types.ModuleType("_clusterprof_probe.dive")
dive.is_profiling = lambda: True
sys.modules["_clusterprof_probe.dive"] = dive
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    step()
"""
    assert read_modes(tmp_path, code) == []
