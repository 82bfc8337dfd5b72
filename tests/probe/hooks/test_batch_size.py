"""What batches hold, by step, and what counts as one save: on real PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.job_python import require_torch
from tests.support.probe_jobs import CHECKPOINT, STEP, WAIT, RingWatcher, install_probe, run_python

require_torch("2.3", "torch.distributed.checkpoint saves otherwise, and not beside the training")
pytestmark = pytest.mark.torch

CODE = """
import json, os, sys, threading, warnings
from collections import UserDict
warnings.simplefilter("ignore")
import numpy, torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

net = torch.nn.Linear(7, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def step():
    net(torch.ones(1, 7)).sum().backward()
    optimizer.step()

def texts():
    rows = [{"input_ids": torch.ones(7, dtype=torch.int64), "label": 1} for _ in range(10)]
    return DataLoader(rows, batch_size=4)

step()  # before any batch
for batch in texts():
    step()
with torch.no_grad():
    for batch in texts():
        pass
step()  # without a batch
batches = iter(texts())
next(batches), next(batches)
step()  # two batches for one step
for batch in DataLoader(["a", "b"], batch_size=2):
    step()
for batch in DataLoader(torch.ones(3, 5), batch_size=3):
    step()

from _clusterprof_probe.hooks import batch_size as batches_hook

asked = []

class Special(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, *arguments, **keywords):
        asked.append(str(function))
        return super().__torch_function__(function, *arguments, **keywords)

class Trap:
    def __getattribute__(self, name):
        asked.append(name)
        raise OSError(name)

ids = torch.ones(2, 3, dtype=torch.int64)
ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
special = torch.ones(4).as_subclass(Special)
odd = [torch.tensor(1.0), numpy.zeros((2, 3)), {"x": [torch.ones(5, 2)]}, special, ragged, Trap()]
odd += [UserDict(input_ids=ids), [{"input_ids": ids}], [[[[torch.ones(6)]]]], 3, None, [], {}]
odd += [[special, torch.ones(8)], {"input_ids": [1, 2, 3]}, {"tokens": numpy.zeros((4, 5), int)}]
asked.clear()
print(json.dumps([batches_hook.measure_batch(data) for data in odd]))
print(asked)

folder = sys.argv[1]
try:
    torch.save([1], folder + "/nowhere/x")
except RuntimeError:
    pass
torch.save([1], folder + "/file")
weights = {"one": torch.ones(9), "two": torch.ones(9), "rest": [1]}
dcp.save(weights, checkpoint_id=folder + "/at-once")
dcp.async_save(weights, checkpoint_id=folder + "/later").result()
beside = threading.Thread(target=torch.save, args=([1], folder + "/beside"))
beside.start()
beside.join()

class Trainer:
    def checkpoint(self):
        self.save_model()
        torch.save([2] * 9, folder + "/rest")
    def save_model(self):
        torch.save([1], folder + "/model")

from _clusterprof_probe.hooks import outermost_calls
for name in ("checkpoint", "save_model"):
    outermost_calls.wrap_outermost(Trainer, name, 5, lambda *arguments: -1)
Trainer().checkpoint()
print(os.path.getsize(folder + "/model") + os.path.getsize(folder + "/rest"))
print(os.path.getsize(folder + "/file"), len(os.listdir(folder + "/later")))
"""


def test_steps_record_batch_sizes_and_nested_saves_count_once(tmp_path: Path) -> None:
    run_dir = install_probe(tmp_path / "run")
    with RingWatcher(run_dir) as watcher:
        job = run_python("-c", CODE + WAIT, str(tmp_path), run_dir=run_dir)
    assert (job.returncode, job.stderr) == (0, b""), job.stderr.decode()
    (ring,) = watcher.read_rings()
    assert ring.switched_off == 0
    # (samples, tokens): 10 rows of 7 tokens in batches of 4; -1 is not known, 0 is none.
    assert [(span.c, span.d) for span in ring.of(STEP)] == [
        (-1, -1),
        (4, 28),
        (4, 28),
        (2, 14),
        (0, 0),
        (8, 56),
        (-1, -1),
        (3, -1),
    ]
    sizes, asked, whole, files = job.stdout.decode().splitlines()
    assert json.loads(sizes) == [
        [-1, -1],
        [2, -1],
        [5, -1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
        [2, 6],
        [2, 6],
        [-1, -1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
        [8, -1],
        [-1, -1],
        [4, 20],
    ]
    assert asked == "[]"  # no code of the job was run to find that out
    # torch.save to a file, dcp.save, dcp.async_save: not the parts of the latter two, not the save
    # that failed, nor what other threads write beside the training.
    size, parts = map(int, files.split())
    # A checkpoint that is a save of the model and one more has the bytes of both.
    assert [span.a for span in ring.of(CHECKPOINT)] == [size, -1, -1, int(whole)]
    assert parts == 2  # .metadata and one file
