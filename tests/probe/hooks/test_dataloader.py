"""The hooks in real PyTorch training on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import job_python
from tests.support.job_python import require_torch
from tests.support.probe_jobs import (
    CHECKPOINT,
    DATA_WAIT,
    FETCH,
    HOOK_NOTE,
    LOADER_START,
    OPTIMIZER,
    STEP,
    WAIT,
    WORKER_START,
    Ring,
    RingWatcher,
    Span,
    collect_output,
    install_probe,
    run_python,
    select_long_values,
)

require_torch()
pytestmark = pytest.mark.torch

# 5 batches of 4 items, each item 20 ms of sleep and some CPU; the loss is printed to the last bit.
TRAIN = """
import json, os, struct, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Items(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        time.sleep(0.005)
        began = time.thread_time()
        while time.thread_time() - began < 0.005:
            pass
        return torch.full((3,), float(index))

class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for index in range(12 if info is None else 8 if info.id == 0 else 4):
            yield torch.full((3,), float(index))

def main():
    options = json.loads(sys.argv[1])
    epochs = options.pop("epochs", 1)
    dataset = Stream() if options.pop("iterable", False) else Items()
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(dataset, batch_size=4, **options)
    for _ in range(epochs):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(struct.pack("<f", loss.item()).hex())
    torch.save(model.state_dict(), sys.argv[2])

if __name__ == "__main__":
    main()
"""


def train(tmp_path: Path, code: str = TRAIN, **options: object) -> tuple[Ring, list[Ring]]:
    """Train under the probe; return the ring of the main process and those of the workers."""
    (tmp_path / "train.py").write_text(code)
    run_dir = install_probe(tmp_path / "run")
    arguments = ("train.py", json.dumps(options), "model.pt")
    quiet = {"PYTHONWARNINGS": "ignore:This DataLoader will create"}  # of more workers than CPUs
    with RingWatcher(run_dir) as watcher:
        with_probe = run_python(*arguments, run_dir=run_dir, cwd=tmp_path, **quiet)
    assert (with_probe.returncode, with_probe.stderr) == (0, b""), with_probe.stderr.decode()
    if options.get("num_workers", 0) == 0:
        without = run_python(*arguments, run_dir=None, cwd=tmp_path)
        assert with_probe.stdout == without.stdout  # every loss, bit for bit
    (registered,) = (run_dir / "register").iterdir()
    main = watcher.read_ring(int(registered.stem))
    return main, [ring for ring in watcher.read_rings() if ring.pid != main.pid]


def batch_waits(ring: Ring) -> list[Span]:
    """The waits for a batch, without those for the first tasks of an epoch."""
    return [wait for wait in ring.of(DATA_WAIT) if wait.a >= 0]


def duration(span: Span) -> int:
    return span.end_ns - span.start_ns


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ring, Path]:
    """Two epochs without workers, recorded once for all tests that only look."""
    folder = tmp_path_factory.mktemp("alone")
    main, others = train(folder, num_workers=0, epochs=2)
    assert others == []
    return main, folder


def test_without_workers_the_main_process_records_fetches(alone: tuple[Ring, Path]) -> None:
    main, _ = alone
    waits, fetches = main.of(DATA_WAIT), main.of(FETCH)
    # 20 items in batches of 4, twice: 5 + 5 waits; the calls that end an epoch are none.
    once = [(n, 0, 0, int(n == 0)) for n in range(5)]
    assert [(w.a, w.b, w.c, w.d) for w in waits] == once + once
    assert [f.a for f in fetches] == 10 * [4]
    for wait, fetch in zip(waits, fetches):
        assert wait.start_ns <= fetch.start_ns <= fetch.end_ns <= wait.end_ns
        # 4 items of 5 ms CPU and 5 ms of sleep: at least 20 ms of CPU, at least 40 ms in all.
        assert 19_000_000 <= fetch.b + fetch.c <= duration(fetch) - 19_000_000
    assert [(s.a, s.b, s.c, s.d) for s in main.of(LOADER_START)] == 2 * [(0, 0, 0, 0)]
    assert main.of(WORKER_START) == []


def test_a_step_lasts_from_optimizer_end_to_optimizer_end(alone: tuple[Ring, Path]) -> None:
    main, _ = alone
    steps, optimizers, waits = main.of(STEP), main.of(OPTIMIZER), main.of(DATA_WAIT)
    assert [(s.a, s.b) for s in steps] == [(n, 0) for n in range(10)]
    assert [s.end_ns for s in steps] == [o.end_ns for o in optimizers]
    assert [s.start_ns for s in steps[1:]] == [s.end_ns for s in steps[:-1]]
    assert steps[0].start_ns <= waits[0].start_ns
    for step, optimizer in zip(steps, optimizers):
        assert step.start_ns < optimizer.start_ns < optimizer.end_ns


def test_a_checkpoint_is_recorded_with_its_size(alone: tuple[Ring, Path]) -> None:
    main, folder = alone
    (checkpoint,) = main.of(CHECKPOINT)
    assert checkpoint.a == (folder / "model.pt").stat().st_size
    assert duration(checkpoint) > 0


def test_the_ring_records_the_installed_hooks(alone: tuple[Ring, Path]) -> None:
    main, _ = alone
    # dataloader, optimizer, checkpoint; torch.distributed.checkpoint was never imported, while
    # torch itself imports distributed, ddp and functional collectives, and its optimizers dynamo.
    notes = sorted((note.a, note.b) for note in main.of(HOOK_NOTE))
    # 28: queues, wrapped after torch.
    everything = [(0, 1), (1, 1), (2, 1), (4, 1), (5, 1), (6, 1), (7, 1), (28, 1)]
    if job_python.IS_ANOTHER:  # other versions import more or less of themselves
        no_operators = {(6, 0)} if job_python.get_torch_version() < (2, 3) else set()
        assert {(0, 1), (1, 1), (2, 1)} <= set(notes) <= set(everything) | no_operators
    else:
        assert notes == everything


@pytest.mark.skipif(
    job_python.get_python_version() < (3, 11), reason="Python 3.10 re-raises with our frame"
)
@pytest.mark.parametrize("workers", [*select_long_values(0), 1])
def test_a_job_error_looks_the_same_without_the_probe(tmp_path: Path, workers: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("time.sleep(0.005)", "1 // (7 - index)"))
    arguments = ("train.py", json.dumps({"num_workers": workers}), "model.pt")
    run_dir = install_probe(tmp_path / "run")
    with_probe = run_python(*arguments, run_dir=run_dir, cwd=tmp_path)
    assert collect_output(with_probe) == collect_output(
        run_python(*arguments, run_dir=None, cwd=tmp_path)
    )
    assert b"ZeroDivisionError" in with_probe.stderr
    assert list((run_dir / "rings").iterdir())


COMPILED = """
import sys, torch
if "_clusterprof_probe" in sys.modules:
    from _clusterprof_probe.hooks import h2d
    h2d.install(torch)
torch.manual_seed(1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 3)).sum().backward()
optimizer.step()

@torch.compile(backend="eager")
def step():
    optimizer.step()

@torch.compile(backend="eager", fullgraph=True)
def copy(batch):
    return batch.to(torch.float64) + 1

step()
print(copy(torch.ones(2)), model.weight)
breaks = torch._dynamo.utils.counters["graph_break"]
print({reason.splitlines()[0]: count for reason, count in breaks.items()})
"""


def test_compiled_code_is_traced_the_same_without_the_probe(tmp_path: Path) -> None:
    run_dir = install_probe(tmp_path / "run")
    with RingWatcher(run_dir) as watcher:
        with_probe = run_python("-c", COMPILED + WAIT, run_dir=run_dir)
    without = run_python("-c", COMPILED + WAIT, run_dir=None)
    values = [with_probe.stdout, without.stdout]
    if job_python.IS_ANOTHER:  # 2.6 and 2.15 count one break less with any hook of PyTorch's own
        values = [re.sub(rb"(?<=['\"]): \d+", b"", each) for each in values]
    # stderr holds a warning of torch with the time of day.
    assert (with_probe.returncode, values[0]) == (0, values[1]), with_probe.stderr
    (ring,) = watcher.read_rings()
    # The step in the open; what is compiled is not seen, but that 2.15 leaves the hooks uncompiled.
    assert len(ring.of(OPTIMIZER)) in ((1, 2) if job_python.IS_ANOTHER else (1,))
    assert ring.switched_off == 0


@pytest.mark.parametrize("context", ["fork", *select_long_values("spawn", "forkserver")])
def test_workers_record_fetches_and_waits_name_the_worker(tmp_path: Path, context: str) -> None:
    main, workers = train(tmp_path, num_workers=2, multiprocessing_context=context)
    pids = {ring.of(WORKER_START)[0].a: ring.pid for ring in workers}
    assert sorted(pids) == [0, 1]
    waits = batch_waits(main)
    # Batches go to workers 0, 1, 0, 1, 0 in turn.
    assert [(w.a, w.b, w.c, w.d) for w in waits] == [
        (n, pids[n % 2], 2, int(n == 0)) for n in range(5)
    ]
    assert main.of(FETCH) == []
    (start,) = main.of(LOADER_START)
    assert (start.a, start.b, start.c, start.d) == (2, 0, 2, 0)
    for ring in workers:
        (begun,) = ring.of(WORKER_START)
        assert (begun.b, begun.c) == (2, main.pid)
        assert begun.start_ns == begun.end_ns > start.start_ns
        fetches = ring.of(FETCH)
        assert [f.a for f in fetches] == (3 if begun.a == 0 else 2) * [4]
        for fetch in fetches:
            assert begun.end_ns <= fetch.start_ns
            assert 19_000_000 <= fetch.b + fetch.c <= duration(fetch) - 19_000_000
        assert ring.of(STEP) == ring.of(DATA_WAIT) == []


@pytest.mark.long
def test_persistent_workers_keep_their_processes_across_epochs(tmp_path: Path) -> None:
    main, workers = train(tmp_path, num_workers=2, persistent_workers=True, epochs=2)
    assert len(workers) == 2
    pids = {ring.of(WORKER_START)[0].a: ring.pid for ring in workers}
    once = [(n, pids[n % 2], 2, int(n == 0)) for n in range(5)]
    assert [(w.a, w.b, w.c, w.d) for w in batch_waits(main)] == once + once
    assert [s.d for s in main.of(LOADER_START)] == [1]
    assert sum(len(ring.of(FETCH)) for ring in workers) == 10


def test_an_epoch_begins_with_a_wait_for_the_sampler(tmp_path: Path) -> None:
    sampler = """
class Slow(torch.utils.data.Sampler):
    def __len__(self):
        return 20
    def __iter__(self):
        time.sleep(0.03)  # as if it sorted
        return iter(range(20))

def main():
"""
    code = TRAIN.replace("\ndef main():\n", sampler)
    code = code.replace("batch_size=4,", "batch_size=4, sampler=Slow(),")
    main, _ = train(tmp_path, code, num_workers=2, persistent_workers=True, epochs=2)
    waits = main.of(DATA_WAIT)
    begins = [wait for wait in waits if wait.a < 0]
    # The training process draws the indices itself: it waits for no worker.
    assert [(wait.b, wait.c, wait.d) for wait in begins] == 2 * [(0, 2, 0)]
    assert all(duration(wait) >= 30_000_000 for wait in begins)
    assert [waits.index(wait) for wait in begins] == [0, 6]  # each before five batches


@pytest.mark.long
def test_iterable_workers_that_end_early_cause_no_waits(tmp_path: Path) -> None:
    main, workers = train(tmp_path, num_workers=2, iterable=True)
    pids = {ring.of(WORKER_START)[0].a: ring.pid for ring in workers}
    # Worker 0 has 8 items, worker 1 has 4: batches of workers 0, 1, 0.
    assert [w.b for w in batch_waits(main)] == [pids[0], pids[1], pids[0]]
    # The fetch that finds the end is none.
    assert {ring.pid: len(ring.of(FETCH)) for ring in workers} == {pids[0]: 2, pids[1]: 1}
