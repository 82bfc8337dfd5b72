"""Functional collectives in real gloo processes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.gloo_ranks import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BLOCKING,
    BROADCAST,
    ISSUE,
    REDUCE_SCATTER,
    WAIT,
    hash_group,
    launch_ranks,
    list_operations,
    record_ranks,
)
from tests.support.job_python import require_torch
from tests.support.probe_jobs import install_probe, select_long_values
from tests.support.warm_jobs import WarmJobs

require_torch("2.3", "its functional collectives are other operators")
pytestmark = pytest.mark.torch

LATE_S = 0.3
BEGIN = "import torch.distributed._functional_collectives as funcol\nworld = dist.group.WORLD\n"

# A tensor `t` of 10 floats is 40 bytes.
EVERYTHING = """
t = torch.arange(10.0)
sum_ = funcol.all_reduce(t, "sum", world)                              # 0
assert type(sum_) is funcol.AsyncCollectiveTensor, type(sum_)
assert (sum_ + 0).tolist() == [2.0 * n for n in range(10)]
assert (sum_ + 1)[0] == 1                                              # waited for already
gathered = funcol.all_gather_single(t, 0, world)                       # 1
assert gathered.wait().tolist() == 2 * t.tolist()
part = funcol.reduce_scatter_single(t, "sum", 0, world)                # 2
assert funcol.wait_tensor(part).tolist() == [2.0 * n for n in range(5 * rank, 5 * rank + 5)]
turned = funcol.all_to_all_single(t, None, None, world)                # 3
print(turned.tolist())
sent = funcol.broadcast(t + rank, 1, world)                            # 4
print(sent.tolist())
two = funcol.all_reduce_coalesced([t, torch.ones(5)], "sum", world)    # 5
print(two[1].tolist(), two[0].tolist())
raw = torch.ops._c10d_functional.all_reduce(t, "sum", world.group_name)  # 6
print(torch.ops._c10d_functional.wait_tensor(raw).tolist())
kept = torch.ones(10)
torch.ops._c10d_functional.all_reduce_(kept, "max", world.group_name)  # 7
torch.ops._c10d_functional.wait_tensor(kept)
dist.barrier()                                                         # 8
"""


def test_each_functional_collective_records_issue_and_wait(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    rings = record_ranks(BEGIN + EVERYTHING, tmp_path, warm_jobs)
    for rank, ring in enumerate(rings):
        matched = list_operations(ring)
        assert {(o.group, o.peer) for o in matched} == {(hash_group("0,1"), None)}
        both = [
            (ALL_REDUCE, 0, 40),
            (ALL_GATHER, 1, 40),
            (REDUCE_SCATTER, 2, 40),
            (ALL_TO_ALL, 3, 40),
            (BROADCAST, 4, 40 if rank == 1 else 0),
            (ALL_REDUCE, 5, 60),
            (ALL_REDUCE, 6, 40),
            (ALL_REDUCE, 7, 40),
        ]
        wanted = [(*value, form) for value in both for form in (ISSUE, WAIT)]
        assert [(o.what, o.number, o.bytes, o.form) for o in matched] == [
            *wanted,
            (BARRIER, 8, 0, BLOCKING),
        ]
        assert all(o.start_ns <= o.end_ns for o in matched)
        assert all(first.end_ns <= two.start_ns for first, two in pairwise(matched))


@pytest.mark.long
def test_the_rank_that_needs_the_result_waits_for_late_ranks(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    code = f"""
t = torch.ones(1)
funcol.all_reduce(t, "sum", world).tolist()  # the first one imports much on its way
dist.barrier()
if rank == 1: time.sleep({LATE_S})
out = funcol.all_reduce(t, "sum", world)
out.tolist()
"""
    rings = record_ranks(BEGIN + code, tmp_path, warm_jobs)
    waits = [list_operations(ring)[4] for ring in rings]
    assert [wait.form for wait in waits] == [WAIT, WAIT]
    assert waits[0].seconds > LATE_S / 2 > waits[1].seconds


# What is done with operators besides calling them, and what their results are, to the last bit.
SAME = """
import copy, pickle
ops = torch.ops._c10d_functional
t = (torch.arange(8.0) * (rank + 1)).requires_grad_()
summed = funcol.all_reduce(t, "sum", world)
chained = funcol.all_gather_single(summed * 2, 0, world)
(chained.sum() * 3).backward()
print(t.grad.tolist(), chained.tolist())
print(funcol.all_reduce(funcol.all_reduce(t.detach(), "sum", world), "sum", world).tolist())
print(ops.all_reduce, ops.wait_tensor.op.__name__, ops.all_reduce.default)
print(copy.deepcopy(ops.all_reduce) is ops.all_reduce, ops.all_reduce.overloads())
print(ops.wait_tensor in torch.fx.node._side_effectful_functions)
print(hash(ops.wait_tensor) == hash(ops.wait_tensor.op), {ops.all_reduce: 1}[ops.all_reduce])

@torch.jit.script
def scripted(x: torch.Tensor, name: str) -> torch.Tensor:
    out = torch.ops._c10d_functional.all_reduce(x, "sum", name)
    return torch.ops._c10d_functional.wait_tensor(out)
print(scripted(torch.ones(2), world.group_name).tolist())

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
mesh = init_device_mesh("cpu", (size,))
d = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
print(d.redistribute(mesh, [Replicate()]).to_local().tolist(), d.sum().full_tensor().item())
try: ops.all_reduce("no tensor", "sum", world.group_name)
except Exception as error: print(type(error), str(error).splitlines()[0])
try: funcol.all_reduce(t, "none of these", world)
except Exception as error: print(type(error), str(error).splitlines()[0])
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode() as mode:
    print(ops.wait_tensor(ops.all_reduce(torch.ones(3), "sum", world.group_name)).shape)
print(torch.vmap(lambda x: x + 1)(torch.ones(2)).tolist())
"""


def test_functional_collectives_give_the_same_output_without_the_probe(
    tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    with_probe = launch_ranks(BEGIN + SAME, tmp_path, warm_jobs)
    without = launch_ranks(BEGIN + SAME, tmp_path, bare_jobs)
    assert without.returncodes == [0, 0], without.stderr
    assert with_probe.returncodes == [0, 0], with_probe.stderr
    assert with_probe.stdout == without.stdout
    assert with_probe.stderr == without.stderr
    for ring in with_probe.rings:
        matched = list_operations(ring)
        # Numbers agree between ranks and none is left out; autograd and DTensor are seen too.
        issued = [o.number for o in matched if o.form != WAIT]
        assert issued == list(range(len(issued)))
        assert [o.what for o in matched if o.form == ISSUE][:5] == [
            ALL_REDUCE,
            ALL_GATHER,
            REDUCE_SCATTER,  # of the backward pass
            ALL_REDUCE,
            ALL_REDUCE,
        ]


COMPILED = """
@torch.compile(backend="BACKEND", fullgraph=True)
def step(x):
    out = funcol.all_reduce(x * 2, "sum", world)
    return out + 1
for _ in range(2): print(step(torch.ones(4)).tolist())
print(torch._dynamo.utils.counters["graph_break"], torch._dynamo.utils.counters["stats"])
dist.barrier()
"""


@pytest.mark.parametrize("backend", select_long_values("aot_eager", "eager"))
def test_compiled_code_is_traced_the_same_without_the_probe(tmp_path: Path, backend: str) -> None:
    code = BEGIN + COMPILED.replace("BACKEND", backend)
    with_probe = launch_ranks(code, tmp_path, install_probe(tmp_path / "run"))
    without = launch_ranks(code, tmp_path, None)
    assert without.returncodes == [0, 0], without.stderr
    assert (with_probe.returncodes, with_probe.stdout) == ([0, 0], without.stdout)
    for ring in with_probe.rings:
        assert ring.switched_off == 0


@pytest.mark.parametrize(
    "where",
    [
        "functional_collectives._record_wait",
        *select_long_values(
            "process_groups.find_group",
            "functional_collectives._get_data_address",
            "functional_collectives.ring.emit",
        ),
    ],
)
def test_a_hook_error_disables_the_probe_without_affecting_the_job(
    tmp_path: Path, warm_jobs: WarmJobs, where: str
) -> None:
    code = f"""
from _clusterprof_probe.hooks import functional_collectives, process_groups
functional_collectives.ring.enter(0, 0, 0, 0)  # opens the ring, which sets `emit`
def broken(*arguments, **keywords): raise SystemExit("ours")
{where} = broken
for _ in range(3): out = funcol.all_reduce(torch.ones(1), "sum", world).tolist()
import _clusterprof_probe
print(out, _clusterprof_probe.on)
"""
    job = launch_ranks(BEGIN + code, tmp_path, warm_jobs)
    assert (job.returncodes, job.stderr) == ([0, 0], [b"", b""])
    assert job.stdout == 2 * [b"[2.0] False\n"]
