"""FSDP, ZeroRedundancyOptimizer and uneven inputs, in real gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_ranks import (
    ALL_GATHER,
    BROADCAST,
    GRADIENTS,
    REDUCE_SCATTER,
    WAIT,
    Job,
    Operation,
    launch_ranks,
    list_operations,
)
from tests.support.job_python import require_torch
from tests.support.warm_jobs import WarmJobs

require_torch()
pytestmark = pytest.mark.torch


def both_ways(code: str, tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs) -> Job:
    """Run with us and without: nothing may differ."""
    with_probe = launch_ranks(code, tmp_path, warm_jobs)
    without = launch_ranks(code, tmp_path, bare_jobs)
    assert without.returncodes == [0, 0], b"".join(without.stderr).decode()
    assert (with_probe.returncodes, with_probe.stdout) == ([0, 0], without.stdout)
    return with_probe


def begun(rows: list[Operation]) -> list[tuple[int, int]]:
    """What was begun, in order: the number of each operation and what it is."""
    return [(o.number, o.what) for o in rows if o.form != WAIT]


FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
torch.manual_seed(0)
net = FSDP(torch.nn.Linear(8, 7), device_id=torch.device("cpu"))  # 63 numbers: two halves of 32
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    loss = net(torch.full((2, 8), rank + 1.0)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""


def test_fsdp1_all_gathers_and_reduce_scatters_are_recorded(
    tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    job = both_ways(FSDP1, tmp_path, warm_jobs, bare_jobs)
    for ring in job.rings:
        result = [o for o in list_operations(ring) if o.what in (ALL_GATHER, REDUCE_SCATTER)]
        assert [(o.what, o.bytes) for o in result][-4:] == 2 * [
            (ALL_GATHER, 128),
            (REDUCE_SCATTER, 256),
        ]
        numbers = [number for number, _ in begun(list_operations(ring))]
        assert numbers == list(range(len(numbers)))
    assert begun(list_operations(job.rings[0])) == begun(list_operations(job.rings[1]))


ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
for _ in range(2):
    loss = net(torch.full((2, 8), rank + 1.0)).square().sum()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


@pytest.mark.long
def test_broadcasts_of_a_sharded_optimizer_are_recorded(
    tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    job = both_ways(ZERO, tmp_path, warm_jobs, bare_jobs)
    for ring in job.rings:
        result = begun(list_operations(ring))
        numbers = [number for number, _ in result]
        assert numbers == list(range(len(numbers)))
        assert [what for _, what in result].count(GRADIENTS) == 2
        assert BROADCAST in [what for _, what in result]
    assert begun(list_operations(job.rings[0])) == begun(list_operations(job.rings[1]))


JOIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = DDP(torch.nn.Linear(8, 8))
with net.join():
    for step in range(2 + 2 * rank):  # rank 1 has two more batches
        net(torch.full((2, 8), rank + 1.0)).sum().backward()
        print(step, net.module.weight.grad.sum().item().hex())
dist.barrier()
"""


@pytest.mark.long
def test_ranks_that_finish_early_under_join_keep_counting(
    tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    job = both_ways(JOIN, tmp_path, warm_jobs, bare_jobs)
    zero, rank_one = (begun(list_operations(ring)) for ring in job.rings)
    # Four reductions of gradients: rank 0 has two of its own and reduces zeros in the other two.
    assert [what for _, what in rank_one].count(GRADIENTS) == 4
    assert zero == rank_one
