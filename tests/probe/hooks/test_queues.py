"""Waits for batches that threads and processes of the job's own make."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import job_python
from tests.support.job_python import require_torch
from tests.support.probe_jobs import (
    DATA_WAIT,
    STEP,
    Ring,
    Span,
    collect_output,
    install_probe,
    run_python,
)
from tests.support.warm_jobs import WarmJobs

require_torch()
pytestmark = pytest.mark.torch

# Ten steps. Each batch takes 20 ms to make, and each step hardly any time: the loop waits.
CODE = """
import multiprocessing, queue, sys, threading, time
import torch
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader, Dataset

STEPS = 10
torch.manual_seed(1)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def make(number):
    time.sleep(0.02)
    return torch.full((4, 3), float(number))

def fill(target):
    for number in range(STEPS):
        target.put(make(number))

def step(batch):
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()

class Items(Dataset):
    def __len__(self):
        return STEPS
    def __getitem__(self, number):
        return make(number)[0]

def start(target, *arguments):
    threading.Thread(target=target, args=arguments, daemon=True).start()

"""
QUEUE = """
source = queue.Queue(2)
start(fill, source)
for _ in range(STEPS):
    step(source.get())
"""
TIMEOUTS = """
source = queue.Queue(2)
start(fill, source)
taken = 0
while taken < STEPS:
    try:
        batch = source.get(timeout=0.005)
    except queue.Empty:
        continue
    taken += 1
    step(batch)
"""
FUTURES = """
with ThreadPoolExecutor(1) as pool:
    for future in [pool.submit(make, number) for number in range(STEPS)]:
        step(future.result())
"""
PROCESS = """
context = multiprocessing.get_context("fork")
source = context.Queue(2)
def send():
    for number in range(STEPS):
        source.put(make(number).tolist())
maker = context.Process(target=send)
maker.start()
for _ in range(STEPS):
    step(torch.tensor(source.get()))
maker.join()
"""
BUFFERED = """
def load(target):
    for batch in DataLoader(Items(), batch_size=1):
        target.put(batch)

source = queue.Queue(2)
start(load, source)
for _ in range(STEPS):
    step(source.get())
"""
PINNED = """
# A loader's own queue, inside its wait.
class Waiting(Dataset):
    def __len__(self):
        return STEPS
    def __getitem__(self, number):
        answer = queue.Queue()
        start(lambda: answer.put(make(number)[0]))
        return answer.get()

for batch in DataLoader(Waiting(), batch_size=1):
    step(batch)
"""
SAVES = """
done = queue.Queue()
for number in range(STEPS):
    step(torch.ones(4, 3))
    if number in (2, 5, 8):
        start(lambda: done.put(make(number)))
        done.get()
"""
FOREIGN = """
# A function of the loader's own module takes from a queue outside its wait, as between epochs.
space = {"__name__": "torch.utils.data.dataloader"}
exec("def take(source): return source.get()", space)
source = queue.Queue(2)
start(fill, source)
for _ in range(STEPS):
    step(space["take"](source))
"""
SERVER = """
for _ in DataLoader(torch.utils.data.Subset(Items(), range(3)), batch_size=1):
    pass
source = queue.Queue(2)
start(fill, source)
for _ in range(STEPS):
    source.get()
"""


Train = Callable[[str], Ring]


@pytest.fixture
def train(warm_jobs: WarmJobs, bare_jobs: WarmJobs) -> Train:
    """Return what trains by a code, with the probe and without, and returns the trainer's ring."""
    return functools.partial(train_both_ways, warm_jobs, bare_jobs)


def train_both_ways(jobs: WarmJobs, bare: WarmJobs, code: str) -> Ring:
    rings = jobs.record_both_ways(bare, CODE + code + "print(net.weight.tolist())\n")
    (ring,) = (ring for ring in rings if ring.of(STEP))
    assert len(ring.of(STEP)) == 10
    return ring


def sum_ms(waits: list[Span]) -> float:
    return sum(wait.end_ns - wait.start_ns for wait in waits) / 1e6


@pytest.mark.parametrize(
    "code", [QUEUE, TIMEOUTS, FUTURES, PROCESS], ids=("queue", "timeouts", "futures", "process")
)
def test_waits_of_the_loop_for_queued_batches_are_recorded(train: Train, code: str) -> None:
    waits = train(code).of(DATA_WAIT)
    assert {(wait.a, wait.b, wait.c, wait.d) for wait in waits} == {(-1, -1, -1, -1)}
    # Batches 3 to 10: that it is a source of batches shows when the second one is taken.
    assert len(waits) >= 6
    assert 80 < sum_ms(waits) < 10 * 20 + 1000


def test_a_buffered_loader_is_awaited_at_the_buffer(train: Train) -> None:
    ring = train(BUFFERED)
    first_step_ns = ring.of(STEP)[0].end_ns
    # Until the first step ends it is not known which thread trains.
    waits = [wait for wait in ring.of(DATA_WAIT) if wait.start_ns > first_step_ns]
    assert {wait.b for wait in waits} == {-1}
    # Every batch has one sample; it is counted where the loader delivers it, not once more.
    assert sum(step.c for step in ring.of(STEP)) == 10


def test_a_queue_wait_inside_a_loader_belongs_to_the_loader(train: Train) -> None:
    waits = train(PINNED).of(DATA_WAIT)
    assert [(wait.a, wait.b) for wait in waits] == [(number, 0) for number in range(10)]


def test_a_queue_unused_in_most_steps_records_no_waits(train: Train) -> None:
    assert train(SAVES).of(DATA_WAIT) == []


def test_queues_inside_a_foreign_loader_record_no_waits(train: Train) -> None:
    assert train(FOREIGN).of(DATA_WAIT) == []


def test_a_process_without_steps_records_no_queue_waits(
    warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    (ring,) = warm_jobs.record_both_ways(bare_jobs, CODE + SERVER)
    assert [wait.a for wait in ring.of(DATA_WAIT)] == [0, 1, 2]  # of its loader


@pytest.mark.skipif(
    job_python.get_python_version() < (3, 11), reason="Python 3.10 re-raises with our frame"
)
def test_a_queue_error_looks_the_same_without_the_probe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE + QUEUE + "source.get(timeout=0.01)\n")
    run_dir = install_probe(tmp_path / "run")
    with_probe = run_python("train.py", run_dir=run_dir, cwd=tmp_path)
    assert collect_output(with_probe) == collect_output(
        run_python("train.py", run_dir=None, cwd=tmp_path)
    )
    assert with_probe.stderr.count(b"File ") == 2  # the script, and queue.py


def test_a_probe_error_does_not_replace_a_job_error(warm_jobs: WarmJobs) -> None:
    break_probe = """
source.put(1); source.get(); source.put(1); source.get()
if "_clusterprof_probe" in sys.modules:
    import _clusterprof_probe.hooks.cuda as events
    def fail(*arguments):
        raise RuntimeError("the device is lost")
    events.finish_wait = fail
try:
    source.get(timeout=0.01)
except queue.Empty:
    print("empty")
"""
    done = warm_jobs.run(CODE + QUEUE + break_probe)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"empty\n", b"")
