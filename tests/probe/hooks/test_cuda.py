"""What only CUDA has, against a small torch.cuda with a stream clock: graphs, devices, their names.

test_accelerators.py runs the hooks on a device of PyTorch. The stand-in keeps the rules of CUDA
and ends the job when they are broken: no query and no event while a graph is captured, an event
belongs to one device, no time between events that have not completed, no synchronization ever. Its
clock is the probe's clock.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.fake_cuda import FAKE
from tests.support.probe_jobs import (
    DATA_WAIT,
    EXPOSED,
    EXPOSED_COLLECTIVE,
    Ring,
    install_probe,
    record_code,
)


def exposed(tmp_path: Path, code: str) -> Ring:
    """Run the stand-in and `code`; return the ring of a probe that is still on."""
    (ring,) = record_code(FAKE + code, install_probe(tmp_path / "run"))
    assert ring.switched_off == 0
    return ring


def test_a_pending_cuda_event_is_not_read(tmp_path: Path) -> None:
    code = """
clock[0] = 1_000
cuda.current_stream().work(1_000_000)
wait(10)
events.collect_finished_waits(); wait(10); events.collect_finished_waits()
"""
    assert exposed(tmp_path, code).of(EXPOSED) == []


@pytest.mark.parametrize(
    "setting",
    ["cuda.capturing = True", "cuda.initialized = False", "del sys.modules['torch.cuda']"],
)
def test_waits_during_graph_capture_or_before_cuda_are_not_measured(
    tmp_path: Path, setting: str
) -> None:
    ring = exposed(
        tmp_path,
        f"clock[0] = 1_000\n{setting}\nwait(10); wait(10); events.collect_finished_waits()",
    )
    assert len(ring.of(DATA_WAIT)) == 2
    assert ring.of(EXPOSED) == []


def test_a_graph_capture_beginning_inside_a_wait_is_not_disturbed(tmp_path: Path) -> None:
    code = """
clock[0] = 1_000
cuda.current_stream().work(20)
wait(10)                           # 1,000 … 1,010: hidden, and not yet read
mark = events.begin_wait()
cuda.capturing = True
events.finish_wait(mark, 1, 1_000, 2_000)
clock[0] = 5_000
events.collect_finished_waits()  # could read the first wait, but for the capture
assert probe.on
cuda.capturing = False
wait(10_000); clock[0] += 1; events.collect_finished_waits()
assert len(events._pool[0]) == 2   # both pairs were given back
"""
    assert [e.b for e in exposed(tmp_path, code).of(EXPOSED)] == [0, 10_000]


def test_each_cuda_device_uses_separate_events(tmp_path: Path) -> None:
    code = """
clock[0] = 1_000
for turn in range(4):
    cuda.device = turn % 2
    wait(1_000)
    clock[0] += 500
events.collect_finished_waits()
"""
    assert [e.b for e in exposed(tmp_path, code).of(EXPOSED)] == 4 * [1_000]


def test_waits_beyond_the_pool_are_not_measured(tmp_path: Path) -> None:
    code = """
clock[0] = 1_000
cuda.current_stream().work(10_000_000)
for _ in range(100): wait(1_000)
clock[0] = 20_000_000
events.collect_finished_waits()
assert Event.made == 2 * events.MAX_PENDING, Event.made
"""
    assert len(exposed(tmp_path, code).of(EXPOSED)) == 64


def test_collectives_on_the_default_stream_leave_events_for_data_waits(tmp_path: Path) -> None:
    code = """
def collective(ns, number):
    mark = events.begin_wait(events.MAX_PENDING_COLLECTIVES, default_stream=True)
    start = clock[0]
    cuda.current_stream().work(ns)  # the stream waits for the others, the host does not
    clock[0] += 5
    events.finish_wait(mark, number, start, clock[0], probe.load().layout.EXPOSED_COLLECTIVE)
clock[0] = 1_000
collective(7_000, 1)                      # the device stood still from 1,000 to 8,000
cuda.current_stream().cuda_stream = 99    # a stream of a framework's own
collective(7_000, 2)
cuda.current_stream().cuda_stream = 0
for number in range(3, 100): collective(100, number)
assert len(events._pending) == events.MAX_PENDING_COLLECTIVES, len(events._pending)
wait(10)                                  # a data wait still finds room
clock[0] = 1_000_000
events.collect_finished_waits()
"""
    ring = exposed(tmp_path, code)
    measured = ring.of(EXPOSED_COLLECTIVE)
    assert (measured[0].start_ns, measured[0].end_ns) == (1_000, 1_005)
    assert [(e.a, e.b) for e in measured[:2]] == [(1, 7_000), (3, 100)]
    assert len(measured) == 32
    assert len(ring.of(EXPOSED)) == 1


def test_a_forked_child_does_not_use_the_parents_cuda_events(tmp_path: Path) -> None:
    code = """
import os
clock[0] = 1_000
wait(10)
pid = os.fork()
if not pid:
    cuda.initialized = False  # as torch says in a forked child
    wait(10); events.collect_finished_waits()
    assert not events._pending and not events._pool and probe.on
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    run_dir = install_probe(tmp_path / "run")
    assert len(record_code(FAKE + code, run_dir)) >= 1


def test_the_process_registers_again_once_its_device_is_known(tmp_path: Path) -> None:
    code = """
cuda.initialized = False
clock[0] = 1_000; wait(10)
import json, os
path = probe.run_dir + "/register/%d.json" % os.getpid()
assert json.load(open(path))["device"] == ""
cuda.initialized, cuda.device = True, 1
wait(10)
"""
    exposed(tmp_path, code)
    (path,) = (tmp_path / "run/register").iterdir()
    assert json.loads(path.read_text())["device"] == "GPU-c0ffee01"
