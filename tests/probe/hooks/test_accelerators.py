"""The hooks of devices in jobs on a real device of PyTorch: its dispatcher, streams and events.

The device is an out-of-tree backend on the CPU (tests/support/accelerators/torch_device.cpp). Times
are compared with what the device cannot undercut: 600 ms of work that are queued before a wait of
200 ms hide it, however busy the machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.accelerators.torch_device import DEVICE
from tests.support.gloo_ranks import COLLECTIVE, GRADIENTS, list_operations
from tests.support.job_python import require_torch
from tests.support.probe_jobs import (
    DATA_WAIT,
    EXPOSED,
    EXPOSED_COLLECTIVE,
    H2D,
    STEP,
    Ring,
    Span,
    install_probe,
    record_code,
)
from tests.support.warm_jobs import WarmJobs

require_torch("2.9", "the device of these tests uses its interfaces for streams and events")
pytestmark = pytest.mark.torch
SYNC = 18
MS = 1_000_000

LOOP = """
step = make_step(net)
for index, batch in enumerate(torch.utils.data.DataLoader(Slow({waits}), batch_size=1)):
    step(batch)
    keep_busy(({queued})[index])  # the operators above have waited for the device
device.synchronize()
step(batch)  # reads the last events
"""


RunJob = Callable[..., Ring]


@pytest.fixture
def run_job(warm_jobs: WarmJobs, torch_device: Path) -> RunJob:
    """Return what runs code on the device and returns the ring of a probe that is still on."""

    def run(code: str, **environ: str) -> Ring:
        (ring,) = warm_jobs.record(DEVICE + code, TORCH_DEVICE=str(torch_device), **environ)
        assert ring.switched_off == 0
        return ring

    return run


def list_lengths(spans: list[Span]) -> list[int]:
    """Return how long each span took, ns."""
    return [span.end_ns - span.start_ns for span in spans]


def test_queued_device_work_hides_a_data_wait(run_job: RunJob) -> None:
    code = LOOP.format(waits="0.2, 0.2, 0.2, 0.4", queued="0, 0.6, 0.2, 0")
    ring = run_job(code)
    waits, exposed = ring.of(DATA_WAIT), ring.of(EXPOSED)
    assert [span.a for span in exposed] == [wait.sequence for wait in waits]
    empty, also_empty, hidden, partly = (span.b for span in exposed)
    assert min(empty, also_empty) >= 150 * MS
    assert hidden < 50 * MS
    assert 50 * MS < partly < list_lengths(waits)[3] - 100 * MS
    assert len(ring.of(STEP)) == 5


COPIES = """
step = make_step(net)
for batch in torch.utils.data.DataLoader(Slow(0)):
    step(batch)  # the probe has seen the device
first = torch.ones(10)
second = torch.ones(20).pin_memory()
done = device.Event()
with torch.no_grad():
    keep_busy(0.6)
    here = first.to("testdevice")
    keep_busy(0.6)
    done.record()
    there = second.to("testdevice", non_blocking=True)
    assert not done.query()  # the device has not even begun with this copy
    device.synchronize()
    third = torch.ones(30).testdevice()
    here.to("testdevice"), here.to("testdevice", copy=True), here.to(torch.float64)
    first.to("cpu"), first.to("cpu", copy=True), first.to(torch.float64)
    assert (there.cpu() == 1).all() and here.sum().item() == 10
"""


def test_only_host_to_device_copies_are_recorded(run_job: RunJob) -> None:
    ring = run_job(COPIES)
    copies = [span for span in ring.of(H2D) if span.a in (40, 80, 120)]
    assert [(span.a, span.b) for span in copies] == [(40, 0), (80, 1), (120, 0)]
    pageable, pinned, _ = list_lengths(copies)
    assert pinned < 200 * MS < 400 * MS < pageable


SYNCS = """
step = make_step(net)
for batch in torch.utils.data.DataLoader(Slow(0)):
    step(batch)
here = torch.ones(1)
there = here.to("testdevice")
target = torch.ones(1).pin_memory()
step(batch)
for wait in (
    there.item, there.tolist, there.cpu, there.__bool__, there.__float__, there.__int__,
    lambda: there.to("cpu"), device.synchronize, torch.accelerator.synchronize,
):
    keep_busy(0.3)
    wait()
keep_busy(0.3)
assert not device.current_stream().query()
there.to("cpu", non_blocking=True)  # to pageable memory, which a GPU may or may not wait for
here.item(), here.tolist(), here.cpu(), here.__bool__(), here.to("cpu", copy=True)
torch.nn.Linear(8, 1)(torch.ones(8))
step(batch)
"""


def test_each_wait_of_the_host_for_the_device_is_recorded(run_job: RunJob) -> None:
    ring = run_job(SYNCS)
    syncs = ring.of(SYNC)
    assert [span.b for span in syncs] == 9 * [1]
    assert min(span.a for span in syncs) >= 200 * MS


def test_an_uninitialized_device_is_not_touched(run_job: RunJob) -> None:
    code = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for batch in torch.utils.data.DataLoader(Slow(0, 0)):
    net(batch).sum().backward()
    optimizer.step()
assert not device.is_initialized()
assert not hasattr(torch.Tensor.to, "_is_clusterprof")
"""
    ring = run_job(code)
    assert (len(ring.of(DATA_WAIT)), len(ring.of(STEP)), ring.of(EXPOSED)) == (2, 2, [])


GROUP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Group(dist.ProcessGroup):
    '''One rank, whose reductions take 0.3 s on a stream of their own.'''
    work_beside = 0.0
    def __init__(self):
        super().__init__(0, 1)
        self.stream = torch.Stream(device="testdevice")
    def getBackendName(self):
        return "slow"
    def finish(self, tensors, seconds=0.0):
        self.stream.wait_stream(device.current_stream())
        future = torch.futures.Future(devices=["testdevice:0"])
        with self.stream:
            if seconds:
                keep_busy(seconds)
            future.set_result(tensors)  # a stream that waits for it waits for this one
        return torch._C._distributed_c10d._create_work_from_future(future)
    def allreduce(self, tensors, options):
        work = self.finish(tensors, 0.3)
        if Group.work_beside:
            keep_busy(Group.work_beside)  # as if the backward pass went on
        return work
    def broadcast(self, tensors, options):
        return self.finish(tensors)
    def allgather(self, outputs, inputs, options):
        for output, tensor in zip(outputs, inputs):
            output[0].copy_(tensor)
        return self.finish(outputs)

dist.Backend.register_backend("slow", lambda *arguments: Group(), devices=["testdevice"])
dist.init_process_group("slow", rank=0, world_size=1, store=dist.HashStore())
"""
PASSES = """
net.to("testdevice")
step = make_step(DistributedDataParallel(net))
batch = torch.ones(1, 8)
for work in (0, 0, 0, 0.6, 0):
    Group.work_beside = work
    step(batch)  # its optimizer waits for the device, and then the events are read
"""


def test_the_ddp_gradient_wait_is_measured_on_the_stream(
    tmp_path: Path, torch_device: Path
) -> None:
    # DDP warns in C++ that it has no timer for such a device.
    environ = {"TORCH_DEVICE": str(torch_device), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    (ring,) = record_code(DEVICE + GROUP + PASSES, install_probe(tmp_path / "run"), **environ)
    gradients = [
        span
        for span, operation in zip(ring.of(COLLECTIVE), list_operations(ring))
        if operation.what == GRADIENTS
    ]
    assert len(gradients) == 5
    assert max(list_lengths(gradients)) < 150 * MS  # the host does not wait
    exposed = ring.of(EXPOSED_COLLECTIVE)
    assert [span.a for span in exposed] == [span.sequence for span in gradients]
    *before, hidden, after = (span.b for span in exposed)
    assert min(*before, after) >= 150 * MS  # of 300 ms
    assert hidden < 50 * MS


COLLECTIVES = """
step = make_step(net)
batch = torch.ones(1, 8)
step(batch)
there = torch.ones(3, device="testdevice")
for _ in torch.utils.data.DataLoader(Slow(0)):
    dist.all_reduce(there)
with torch.Stream(device="testdevice"):
    dist.all_reduce(there)  # delays nothing but that stream
work = dist.all_reduce(there, async_op=True)
work.wait()
device.synchronize()
step(batch)
"""


def test_collectives_are_measured_on_the_training_stream(run_job: RunJob) -> None:
    ring = run_job(GROUP + COLLECTIVES)
    first, beside, issue, wait = ring.of(COLLECTIVE)
    assert max(list_lengths([first, beside, issue, wait])) < 100 * MS
    exposed = ring.of(EXPOSED_COLLECTIVE)
    assert [span.a for span in exposed] == [first.sequence, wait.sequence]
    assert min(span.b for span in exposed) >= 150 * MS


FAILING_EVENT = """
class Failing:
    def __init__(self, enable_timing): self.event = torch.Event("testdevice", enable_timing=True)
    def record(self, stream): self.event.record(stream)
    def query(self): return self.event.query()
    def elapsed_time(self, other): raise NotImplementedError("no clock")
device.Event = Failing
"""


@pytest.mark.parametrize(
    ("lack", "measured"),
    [
        ("del device.Event", 0),
        ("del device.current_stream", 0),
        ("device.Event = lambda: None", 0),
        (FAILING_EVENT, 0),
        ("device.is_current_stream_capturing = lambda: True", 0),
        ("del torch.Tensor.is_testdevice, torch.Tensor.testdevice", 3),
    ],
    ids=["events", "streams", "timing", "clock", "capturing", "methods"],
)
def test_missing_device_features_leave_the_other_measurements(
    run_job: RunJob, lack: str, measured: int
) -> None:
    ring = run_job(lack + LOOP.format(waits="0, 0, 0", queued="0, 0, 0"))
    assert len(ring.of(EXPOSED)) == measured
    # Each step copies its batch of 8 numbers; the last of the four has no batch of its own.
    assert [span.a for span in ring.of(H2D)].count(32) >= 3
    assert (len(ring.of(DATA_WAIT)), len(ring.of(STEP)), len(ring.of(SYNC))) == (3, 4, 1)


def test_allocator_retries_of_a_custom_device_are_recorded(run_job: RunJob) -> None:
    code = """
counts = {"num_alloc_retries": 2, "num_ooms": 0}
device.memory_stats_as_nested_dict = lambda: counts
step = make_step(net)
step(torch.ones(1, 8))
counts["num_alloc_retries"] = 5
time.sleep(1.1)  # it is read once a second
step(torch.ones(1, 8))
"""
    ring = run_job(code)
    assert [(span.a, span.b, span.c, span.d) for span in ring.of(19)] == [(3, -1, -1, 0)]


def test_gpu_events_can_be_disabled_for_a_custom_device(tmp_path: Path, torch_device: Path) -> None:
    code = LOOP.format(waits="0, 0", queued="0, 0")
    run_dir = install_probe(tmp_path / "run", gpu_events=False)
    (ring,) = record_code(DEVICE + code, run_dir, TORCH_DEVICE=str(torch_device))
    assert ring.switched_off == 0
    assert (len(ring.of(DATA_WAIT)), ring.of(EXPOSED)) == (2, [])
