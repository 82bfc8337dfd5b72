"""Sampled stacks of PyTorch's loader workers and of the thread that waits for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.job_python import require_torch
from tests.support.probe_jobs import (
    FETCH,
    STACK_SAMPLE,
    STEP,
    WORKER_START,
    RingWatcher,
    install_probe,
    list_stacks,
    run_python,
    select_long_values,
)

require_torch()
pytestmark = pytest.mark.torch

# 8 batches of 4 items of 50 ms: each of two workers sleeps for 0.8 s in `load_item`.
TRAIN = """
import json, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Items(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return load_item(index)

def load_item(index):
    time.sleep(0.05)
    return torch.full((3,), float(index))

def main():
    options = json.loads(sys.argv[1])
    epochs = options.pop("epochs", 1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(Items(), batch_size=4, **options)
    for _ in range(epochs):
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()

if __name__ == "__main__":
    main()
"""
LOAD_LINE, LOOP_LINE = 13, 23


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "multiprocessing_context": "fork"},
        *select_long_values({"num_workers": 2, "multiprocessing_context": "spawn"}),
        *select_long_values({"num_workers": 2, "multiprocessing_context": "forkserver"}),
        *select_long_values({"num_workers": 2, "persistent_workers": True, "epochs": 2}),
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_workers_and_the_training_thread_are_sampled(
    tmp_path: Path, options: dict[str, object]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run_dir = install_probe(tmp_path / "run", stacks="full")
    quiet = {"PYTHONWARNINGS": "ignore:This DataLoader will create"}  # of more workers than CPUs
    with RingWatcher(run_dir) as watcher:
        done = run_python("train.py", json.dumps(options), run_dir=run_dir, cwd=tmp_path, **quiet)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    rings = watcher.read_rings()
    workers = [ring for ring in rings if ring.of(WORKER_START)]
    assert len(workers) == 2
    for ring in workers:
        named = list_stacks(ring.log)
        samples = ring.of(STACK_SAMPLE)
        assert min(span.end_ns for span in samples) >= ring.of(FETCH)[0].start_ns
        lines = [frame[1:] for span in samples for frame in named[span.a]]
        assert ("load_item", LOAD_LINE - 1, LOAD_LINE) in lines
    (main,) = [ring for ring in rings if ring.of(STEP)]
    named = list_stacks(main.log)
    lines = [frame[1:] for span in main.of(STACK_SAMPLE) for frame in named[span.a]]
    assert ("main", LOOP_LINE - 7, LOOP_LINE) in lines


def test_a_process_without_workers_is_sampled_by_a_single_thread(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run_dir = install_probe(tmp_path / "run", stacks="full")
    with RingWatcher(run_dir) as watcher:
        done = run_python("train.py", '{"num_workers": 0}', run_dir=run_dir, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    (ring,) = watcher.read_rings()
    named = list_stacks(ring.log)
    innermost = [named[span.a][-1][1] for span in ring.of(STACK_SAMPLE) if span.a]
    assert "load_item" in innermost
    sequence = [span.end_ns for span in ring.of(STACK_SAMPLE)]
    assert sequence == sorted(sequence)
