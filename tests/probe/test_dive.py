"""Windows of PyTorch's profiler in a real process: kept, refused, or giving way to the job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.launch.launcher import install_probe
from tests.support.job_python import require_torch
from tests.support.warm_jobs import WarmJobs

require_torch()
pytestmark = pytest.mark.torch

ROOT = str(Path(__file__).parents[2])
# `window` waits for the end of a step. `save` is left to the test: the thread does not look.
HEAD = """
import json, os, sys, time
import torch
import clusterprof
from _clusterprof_probe import annotations, dive, interpreter_lock, ring

folder = os.environ["DIVES"]
rows = torch.randn(50, 50)
interpreter_lock.on_look.remove(dive.look)

def step(operators=3):
    for _ in range(operators):
        torch.cumsum(rows, 0)
    clusterprof.step()

def begin():
    step()  # the first mark only begins
    window = dive._window = dive.Window(folder)
    annotations.after_step_end.append(window.finish_step)
    return window

def run_until(state, window, operators=3):
    end = time.monotonic() + 30
    while window.state != state and time.monotonic() < end:
        step(operators)
    assert window.state == state, (window.state, window.reason)

def is_undone():
    profiler = torch.autograd.profiler
    names = [getattr(profiler, name).__name__ for name in ("_prepare_profiler", "_enable_profiler")]
    return (
        names == ["_prepare_profiler", "_enable_profiler"]
        and ring.emit.__qualname__ == "_make_emit.<locals>.emit"
        and not torch._C._autograd._profiler_enabled()
    )
"""
TAIL = """
assert is_undone()
window.save()
"""


RunProbe = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmJobs]:
    """Jobs under a probe that may ask for windows."""
    folder = tmp_path_factory.mktemp("dive")
    run_dir = folder / "run"
    run_dir.mkdir(mode=0o700)
    install_probe(run_dir, gpu_events=False, strict=False, dive=True)
    with WarmJobs(folder, run_dir, PYTHONPATH=ROOT, KINETO_LOG_LEVEL="6") as warm:
        yield warm


@pytest.fixture
def run_probe(jobs: WarmJobs, tmp_path: Path) -> RunProbe:
    """Return what runs a job and returns its answer, with the trace under `trace`."""

    def run(code: str, **variables: str) -> dict[str, Any]:
        done = jobs.run(HEAD + code + TAIL, DIVES=str(tmp_path), **variables)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
        [answer] = tmp_path.glob("*.done")
        trace = answer.with_suffix(".json")
        content = json.loads(trace.read_text()) if trace.exists() else None
        return {**json.loads(answer.read_text()), "trace": content}

    return run


def test_a_profiling_window_contains_complete_steps(run_probe: RunProbe) -> None:
    answer = run_probe("window = begin()\nrun_until(dive.TAKEN, window)")
    assert answer["reason"] == "" and 1 <= answer["steps"] <= 10
    assert answer["cost_ns"] > 0 and answer["begun_ns"] < answer["ended_ns"]
    names = [event.get("name") for event in answer["trace"]["traceEvents"]]
    assert names.count("aten::cumsum") == 3 * answer["steps"]


def test_a_job_that_profiles_itself_has_no_window(run_probe: RunProbe) -> None:
    code = """
with torch.profiler.profile() as own:
    window = begin()
    run_until(dive.TAKEN, window)
assert any(item.key == "aten::cumsum" for item in own.key_averages())
"""
    answer = run_probe(code)
    assert (answer["reason"], answer["trace"]) == ("another profiler was active", None)


@pytest.mark.parametrize("state", ["CALIBRATING", "RUNNING"])
def test_a_profiler_of_the_job_ends_the_window(run_probe: RunProbe, state: str) -> None:
    code = f"""
dive.CALIBRATION_NS = 10**12
with torch.profiler.profile():  # its modules are imported
    pass
own = torch.profiler.profile()
window = begin()
run_until(dive.{state}, window)
with own:
    step(7)
[count] = [item.count for item in own.key_averages() if item.key == "aten::cumsum"]
assert count == 7, count
"""
    answer = run_probe(code)
    assert answer["reason"] == "the job started a profiler of its own"
    assert answer["trace"] is None


def test_a_fork_restarts_the_profiling_window(run_probe: RunProbe) -> None:
    code = """
window = begin()
run_until(dive.RUNNING, window)
if os.fork() == 0:
    os._exit(torch._C._autograd._profiler_enabled())
assert os.wait()[1] == 0  # the child does not go on profiling
assert window.state == dive.ARMED
run_until(dive.TAKEN, window)
"""
    answer = run_probe(code)
    assert answer["reason"] == "" and answer["trace"] is not None


def test_forks_in_each_window_prevent_a_trace(run_probe: RunProbe) -> None:
    code = """
window = begin()
while window.state != dive.TAKEN:
    step()
    if os.fork() == 0:
        os._exit(0)
    os.wait()
"""
    answer = run_probe(code)
    assert answer["reason"] == "the job started processes within each window"
    assert answer["trace"] is None


def test_steps_with_too_many_events_are_not_profiled(run_probe: RunProbe) -> None:
    code = """
dive.MAX_EVENTS = 50
window = begin()
run_until(dive.TAKEN, window, 100)
"""
    answer = run_probe(code)
    assert answer["reason"].startswith("a step has some ")
    assert answer["reason"].endswith("more than 50 would delay it")
    assert answer["trace"] is None


def test_the_number_of_profiled_steps_depends_on_the_events(run_probe: RunProbe) -> None:
    code = """
dive.AIMED_EVENTS = 13  # two steps of six: a cumsum calls aten::to
window = begin()
run_until(dive.TAKEN, window)
"""
    answer = run_probe(code)
    assert answer["steps"] == 2 and answer["events"] == 12


def test_a_long_step_is_calibrated_at_its_span_marks(run_probe: RunProbe) -> None:
    code = """
window = begin()
step()
assert window.state == dive.CALIBRATING
time.sleep(2 * dive.CALIBRATION_NS / 1e9)
with clusterprof.span("part"):
    pass
assert window.state == dive.ARMED and window.wanted_steps >= 1  # counted in the midst of the step
run_until(dive.TAKEN, window)
"""
    assert run_probe(code)["reason"] == ""


def test_a_much_longer_step_ends_the_window(run_probe: RunProbe) -> None:
    code = """
window = begin()
run_until(dive.RUNNING, window)
time.sleep(1 + 4 * 10 * window.step_ns / 1e9 + 0.1)
with clusterprof.span("part"):
    pass
"""
    answer = run_probe(code)
    assert answer["reason"] == "a step took much longer than the one before it"


def test_a_variable_of_another_profiler_prevents_the_window(run_probe: RunProbe) -> None:
    answer = run_probe(
        "window = begin()\nrun_until(dive.TAKEN, window)", NSYS_PROFILING_SESSION_ID="7"
    )
    assert answer["reason"] == ("another profiler may be active: NSYS_PROFILING_SESSION_ID is set")


def test_the_end_of_the_job_ends_the_window(run_probe: RunProbe) -> None:
    code = """
window = begin()
run_until(dive.RUNNING, window)
def is_undone(): return True
window.save = lambda save=window.save: save() if window.state == dive.TAKEN else None
"""
    answer = run_probe(code)
    assert answer["reason"] == "the job ended within the window"


def test_a_job_that_trains_in_another_thread_is_not_profiled(run_probe: RunProbe) -> None:
    code = """
import threading
window = begin()
thread = threading.Thread(target=run_until, args=(dive.TAKEN, window))
thread.start()
thread.join()
"""
    assert run_probe(code)["reason"] == "another thread than the main one trains"
