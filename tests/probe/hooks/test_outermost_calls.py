"""Evaluations of loops without a framework: between `model.eval()` and `model.train()`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import EVAL
from tests.support.job_python import require_torch
from tests.support.probe_jobs import DATA_WAIT, STEP, install_probe, record_code

require_torch("2.0", "hooks of all optimizers are new in 2.0")
pytestmark = pytest.mark.torch

LOOP = """
import torch
from torch.utils.data import DataLoader
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows = DataLoader(torch.ones(8, 4), batch_size=4)

def step(batch=torch.ones(2, 4)):
    net(batch).sum().backward()
    optimizer.step()

@torch.no_grad()
def validate():
    net.eval()
    return sum(net(batch).sum() for batch in rows)
"""
USUAL = """
for epoch in range(2):
    net.train()
    step()
    step()
    validate()
net.train()
step()
"""
WITHIN_WRAPPER = """
step()
model = torch.nn.Module()
model.module = net
validate()
model.train()
step()
"""
FROZEN = """
for batch in range(3):
    net.train()
    net[1].eval()
    net(torch.ones(2, 4)).sum().backward()  # the gradients of three batches are accumulated
optimizer.step()
net.eval()
step()  # trains in evaluation mode
net.train()
step()
"""
ROLLOUTS = """
step()
for batch in range(4):
    validate()
    net.train()
    step()
"""
LATE = """
step()
validate()
for batch in rows:  # the wait for the first batch is one of training
    net.train()
    step(batch)
"""


@pytest.mark.parametrize(
    "rest, count",
    [
        pytest.param(USUAL, 2, id="usual"),
        pytest.param(WITHIN_WRAPPER, 1, id="within-wrapper"),
        pytest.param(FROZEN, 0, id="frozen"),
        pytest.param(ROLLOUTS, 1, id="in-every-step"),  # the first
    ],
)
def test_evaluation_lasts_from_eval_mode_to_train_mode(
    rest: str, count: int, tmp_path: Path
) -> None:
    (ring,) = record_code(LOOP + rest, install_probe(tmp_path / "run"))
    evaluations, steps = ring.of(EVAL), ring.of(STEP)
    assert len(evaluations) == count
    for evaluation in evaluations:
        waits = [wait for wait in ring.of(DATA_WAIT) if evaluation.start_ns <= wait.start_ns]
        assert len([wait for wait in waits if wait.end_ns <= evaluation.end_ns]) >= 2
        assert any(
            step.start_ns <= evaluation.start_ns and evaluation.end_ns <= step.end_ns
            for step in steps
        )


def test_evaluation_ends_when_the_loop_requests_a_training_batch(tmp_path: Path) -> None:
    (ring,) = record_code(LOOP + LATE, install_probe(tmp_path / "run"))
    (evaluation,) = ring.of(EVAL)
    waits = ring.of(DATA_WAIT)
    assert len(waits) == 4  # two batches each, the end of the data is none
    assert waits[1].end_ns <= evaluation.end_ns <= waits[2].start_ns
