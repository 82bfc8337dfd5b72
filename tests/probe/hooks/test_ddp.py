"""The hook of DistributedDataParallel in real gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_ranks import (
    ALL_GATHER,
    ALL_REDUCE,
    BLOCKING,
    BROADCAST,
    GRADIENTS,
    ISSUE,
    REDUCE_SCATTER,
    Operation,
    hash_group,
    launch_ranks,
    list_operations,
    record_ranks,
)
from tests.support.job_python import require_torch
from tests.support.probe_jobs import OPTIMIZER, Ring, select_long_values
from tests.support.warm_jobs import WarmJobs

require_torch()
pytestmark = pytest.mark.torch

LATE_S = 0.3

# 8 * 8 + 8 + 8 * 1 + 1 = 81 parameters of 4 bytes.
BYTES = 324
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


def gradients(ring: Ring) -> list[Operation]:
    return [each for each in list_operations(ring) if each.what == GRADIENTS]


@pytest.mark.parametrize(
    "options", ["static_graph=True", *select_long_values("", "find_unused_parameters=True")]
)
def test_the_other_ranks_record_the_wait_for_a_slow_rank(
    tmp_path: Path, warm_jobs: WarmJobs, options: str
) -> None:
    code = f"""
ddp = model({options})
for step in range(4):
    out = ddp(batch())
    if step == 2 + rank: time.sleep({LATE_S})
    out.sum().backward()
    assert out._backward_hooks is None
assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in ddp.parameters())
"""
    job = launch_ranks(MODEL + code, tmp_path, warm_jobs)
    assert job.returncodes == [0, 0], job.stderr  # DDP warns when it finds no unused parameters
    zero, rank_one = (gradients(ring) for ring in job.rings)
    for result in (zero, rank_one):
        assert [(o.group, o.number, o.bytes, o.form) for o in result] == [
            (hash_group("0,1"), number, BYTES, BLOCKING) for number in range(4)
        ]
    # Rank 0 was late in step 2, rank 1 in step 3.
    assert rank_one[2].seconds > LATE_S / 2 > zero[2].seconds
    assert zero[3].seconds > LATE_S / 2 > rank_one[3].seconds


@pytest.mark.long
def test_backward_computation_is_not_a_gradient_wait(tmp_path: Path, warm_jobs: WarmJobs) -> None:
    code = f"""
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep({LATE_S})
        return gradient
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    def forward(self, x): return self.two(Slow.apply(self.one(x)))
ddp = DDP(Net())
for _ in range(3): ddp(batch()).sum().backward(); dist.barrier()
"""
    for ring in record_ranks(MODEL + code, tmp_path, warm_jobs):
        # The second layer's gradients come before the 0.3 s, the first layer's after them. In the
        # first pass one rank may load what the other had loaded already: that is a wait.
        _, second, third = gradients(ring)
        assert max(second.seconds, third.seconds) < LATE_S / 2


@pytest.mark.long
def test_only_backward_passes_that_reduce_gradients_count(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    code = """
ddp = model()
for step in range(6):  # accumulation: every third pass reduces
    with ddp.no_sync() if step % 3 < 2 else contextlib.nullcontext():
        ddp(batch()).sum().backward()
dist.all_reduce(torch.ones(1))                     # 2
with torch.no_grad(): ddp(batch())
ddp(batch())                                       # no backward pass follows
x = batch().requires_grad_()
out = ddp(x)
torch.autograd.grad(out.sum(), x, create_graph=True)  # reduces nothing
out.sum().backward()                               # 3
(ddp(batch()).sum() + ddp(batch()).sum()).backward()  # 4: two forward passes, one reduction
dist.all_reduce(torch.ones(1))                     # 5
"""
    for ring in record_ranks(MODEL + code, tmp_path, warm_jobs):
        rows = [(o.what, o.number) for o in list_operations(ring)]
        assert rows == [
            (GRADIENTS, 0),
            (GRADIENTS, 1),
            (ALL_REDUCE, 2),
            (GRADIENTS, 3),
            (GRADIENTS, 4),
            (ALL_REDUCE, 5),
        ]


@pytest.mark.long
def test_ranks_that_use_different_parameters_number_operations_alike(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    code = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(3))
    def forward(self, x, which):
        return {"out": [self.parts[which](x)]}
ddp = DDP(Net(), find_unused_parameters=True)
for step in range(6):
    ddp(batch(), (step * (rank + 1)) % 3)["out"][0].sum().backward()
"""
    for ring in record_ranks(MODEL + code, tmp_path, warm_jobs):
        assert [each.number for each in gradients(ring)] == list(range(6))


@pytest.mark.long
def test_a_communication_hook_of_the_job_is_kept_and_counted(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    code = """
ddp = model()
def hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / size)
ddp.register_comm_hook(None, hook)
for _ in range(2): ddp(batch()).sum().backward()
"""
    for ring in record_ranks(MODEL + code, tmp_path, warm_jobs):
        rows = [(o.what, o.form, o.number) for o in list_operations(ring)]
        # One bucket: its reduction is issued while the pass computes, then the pass waits.
        assert rows == [
            (ALL_REDUCE, ISSUE, 0),
            (GRADIENTS, BLOCKING, 1),
            (ALL_REDUCE, ISSUE, 2),
            (GRADIENTS, BLOCKING, 3),
        ]


@pytest.mark.long
def test_buffer_broadcasts_of_the_forward_pass_are_recorded(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    code = """
ddp = DDP(torch.nn.BatchNorm1d(8))
for _ in range(2): ddp(batch()).sum().backward()
"""
    for rank, ring in enumerate(record_ranks(MODEL + code, tmp_path, warm_jobs)):
        # Mean and variance of 8 floats and a counter of 8 bytes; rank 0 has the word.
        sent = 72 if rank == 0 else 0
        assert [(o.what, o.number, o.bytes) for o in list_operations(ring)] == [
            (BROADCAST, 0, sent),
            (GRADIENTS, 1, 64),
            (BROADCAST, 2, sent),
            (GRADIENTS, 3, 64),
        ]


@pytest.mark.parametrize(
    ("last", "seen"), [pytest.param("layer", 0, marks=pytest.mark.long), ("first", 3)]
)
def test_a_wait_inside_a_reentrant_checkpoint_is_not_recorded(
    tmp_path: Path, warm_jobs: WarmJobs, last: str, seen: int
) -> None:
    code = f"""
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        if "{last}" == "layer": self.first.requires_grad_(False)
    def forward(self, x):
        return checkpoint(self.layer, self.first(x).requires_grad_(), use_reentrant=True)
ddp = DDP(Net())
for _ in range(3): ddp(batch()).sum().backward()
dist.barrier()
"""
    for ring in record_ranks(MODEL + code, tmp_path, warm_jobs):
        assert len(gradients(ring)) == seen


TRAIN = """
import copy, pickle, io
ddp = model()
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    out = ddp(batch() * step)
    loss = (out - rank).square().mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), [p.grad.sum().item().hex() for p in ddp.parameters()])
print(copy.deepcopy(ddp), sorted(vars(pickle.loads(pickle.dumps(ddp)))))
buffer = io.BytesIO()
torch.save(ddp(batch()), buffer)
print(len(buffer.getvalue()), ddp.forward.__name__, type(ddp), type(dist.group.WORLD))
try: ddp(torch.ones(1, 3))
except RuntimeError as error: print(error)
"""


def test_training_results_are_bitwise_identical_with_the_probe(
    tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    with_probe = launch_ranks(MODEL + TRAIN, tmp_path, warm_jobs)
    without = launch_ranks(MODEL + TRAIN, tmp_path, bare_jobs)
    assert without.returncodes == [0, 0], without.stderr
    assert with_probe.returncodes == without.returncodes
    assert (with_probe.stdout, with_probe.stderr) == (without.stdout, without.stderr)
    for ring in with_probe.rings:
        assert (len(gradients(ring)), len(ring.of(OPTIMIZER))) == (5, 5)


SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
net = torch.nn.Linear(8, 7)  # 4 and 3 rows of 8: padded to 4 rows of 32 bytes each; 7 in bias
mesh = init_device_mesh("cpu", (size,))
fully_shard(net, mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    loss = net(torch.full((2, 8), rank + 1.0)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""


@pytest.mark.long
def test_sharded_training_is_unchanged_and_its_collectives_are_recorded(
    tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    with_probe = launch_ranks(SHARDED, tmp_path, warm_jobs)
    without = launch_ranks(SHARDED, tmp_path, bare_jobs)
    assert without.returncodes == [0, 0], without.stderr
    assert with_probe.returncodes == [0, 0]
    assert (with_probe.stdout, with_probe.stderr) == (without.stdout, without.stderr)
    # A shard is 4 rows of 8 floats and 4 of bias: 144 bytes. Its gradients go out as two of them.
    once = [(ALL_GATHER, 144), (REDUCE_SCATTER, 288)]
    for ring in with_probe.rings:
        matched = list_operations(ring)
        assert [(o.what, o.bytes) for o in matched] == 2 * once
        assert [o.number for o in matched] == [0, 1, 2, 3]
