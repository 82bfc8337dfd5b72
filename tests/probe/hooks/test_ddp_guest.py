"""The hook of DistributedDataParallel as a guest: nothing of the job is other than without us."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_ranks import launch_ranks
from tests.support.job_python import require_torch
from tests.support.probe_jobs import install_probe, select_long_values
from tests.support.warm_jobs import WarmJobs

require_torch()
pytestmark = pytest.mark.torch

MODEL = """
from torch.nn.parallel import DistributedDataParallel as DDP
import contextlib
torch.manual_seed(0)
def model(**options):
    layers = torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    return DDP(torch.nn.Sequential(*layers), **options)
def batch():
    return torch.full((4, 8), rank + 1.0)
"""

COMPILED = """
ddp = model()
def step(net, x): return net(x).sum()
for compiled in (torch.compile(ddp, backend="eager"), ddp):
    for _ in range(2): step(compiled, batch()).backward()
whole = torch.compile(step, backend="eager")
for _ in range(2): whole(ddp, batch()).backward()
print([p.grad.tolist() for p in ddp.parameters()])
breaks = torch._dynamo.utils.counters["graph_break"]
print({reason.splitlines()[0]: count for reason, count in breaks.items()})
print(torch._dynamo.utils.counters["stats"])
"""


@pytest.mark.long
def test_compiled_models_are_traced_the_same_without_the_probe(tmp_path: Path) -> None:
    with_probe = launch_ranks(MODEL + COMPILED, tmp_path, install_probe(tmp_path / "run"), size=1)
    without = launch_ranks(MODEL + COMPILED, tmp_path, None, size=1)
    assert without.returncodes == [0], without.stderr
    assert (with_probe.returncodes, with_probe.stdout) == ([0], without.stdout)
    assert with_probe.rings[0].switched_off == 0


@pytest.mark.parametrize(
    "where",
    [
        "ddp._get_graph_id",
        *select_long_values("process_groups.find_group", "ddp._DdpModel", "ddp._append_callback"),
    ],
)
def test_a_hook_error_disables_the_probe_without_affecting_the_job(
    tmp_path: Path, warm_jobs: WarmJobs, where: str
) -> None:
    code = f"""
from _clusterprof_probe.hooks import ddp as ddp, process_groups
def broken(*arguments): raise SystemExit("ours")
{where} = broken
net = model()
for _ in range(3): net(batch()).sum().backward()
import _clusterprof_probe
print(_clusterprof_probe.on)
"""
    job = launch_ranks(MODEL + code, tmp_path, warm_jobs)
    assert (job.returncodes, job.stderr) == ([0, 0], [b"", b""])
    assert job.stdout == [b"False\n", b"False\n"]
