"""The counters of optimizers: the job's own numbers of steps, which go on after a restart."""

from __future__ import annotations

import pytest

from tests.support.job_python import require_torch
from tests.support.probe_jobs import STEP
from tests.support.warm_jobs import WarmJobs

require_torch("2.0", "hooks of all optimizers are new in 2.0")
pytestmark = pytest.mark.torch
STEP_COUNTER = 27

START = """
import torch
net = torch.nn.Linear(7, 1)

def step(optimizer):
    net(torch.ones(1, 7)).sum().backward()
    optimizer.step()
"""
ADAM = """
first = torch.optim.Adam(net.parameters())
for _ in range(3):
    step(first)
"""
RESUMED = """
import io
saved = torch.optim.AdamW(net.parameters())
for parameter in net.parameters():  # what a checkpoint of 100 steps holds
    saved.state[parameter] = {
        "step": torch.tensor(100.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
state = io.BytesIO()
torch.save(saved.state_dict(), state)
state.seek(0)
optimizer = torch.optim.AdamW(net.parameters())
optimizer.load_state_dict(torch.load(state))
for _ in range(3):
    step(optimizer)
"""
SGD = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    step(optimizer)
"""
OWN = """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = "the third"

optimizer = Own(net.parameters(), lr=0.1)
for _ in range(3):
    step(optimizer)
"""
ON_DEVICE = """
optimizer = torch.optim.Adam(net.parameters())
step(optimizer)
class Elsewhere:
    device = torch.device("cuda")
    def __int__(self):
        raise SystemExit("the host waited for the device")
from _clusterprof_probe.hooks import optimizer as hook
optimizer.state = {None: {"step": Elsewhere()}}
assert hook._read_counter(optimizer) == -1
"""


@pytest.mark.parametrize(
    ("code", "counters", "steps"),
    [
        (ADAM, [(1, 0), (2, 1)], 3),
        (RESUMED, [(101, 0), (102, 1)], 3),
        (SGD, [], 3),  # it counts nothing
        (OWN, [], 3),  # a state of the user's own is no error of the job or of the probe
        (ON_DEVICE, [(1, 0)], 1),
    ],
    ids=["Adam", "resumed", "SGD", "own", "on a device"],
)
def test_the_first_two_step_numbers_of_the_optimizer_are_recorded(
    warm_jobs: WarmJobs, code: str, counters: list[tuple[int, int]], steps: int
) -> None:
    (ring,) = warm_jobs.record(START + code)
    assert ring.switched_off == 0
    assert [(span.a, span.b) for span in ring.of(STEP_COUNTER)] == counters
    assert [span.a for span in ring.of(STEP)] == list(range(steps))
