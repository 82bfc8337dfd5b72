"""Operations gathered by a coalescing manager, in real gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_ranks import (
    ALL_REDUCE,
    BARRIER,
    BLOCKING,
    ISSUE,
    RECV,
    SEND,
    WAIT,
    hash_group,
    launch_ranks,
    list_operations,
)
from tests.support.job_python import require_torch
from tests.support.warm_jobs import WarmJobs

require_torch()
pytestmark = pytest.mark.torch

BATCHES = """
from torch.distributed import _coalescing_manager
a, b, other = torch.ones(10), torch.full((5,), 2.0), torch.ones(3)
half = dist.new_group([0, 1])
alone = [dist.new_group([n]) for n in range(size)][rank]
with _coalescing_manager() as manager:                 # 0: 40 + 20 bytes
    dist.all_reduce(a)
    dist.all_reduce(b)
with _coalescing_manager(async_ops=True) as manager:   # 1
    dist.all_reduce(a)
    dist.all_reduce(other, group=alone)                # an operation of another group
manager.wait()
with _coalescing_manager(): pass                       # nothing
try:
    with _coalescing_manager(): raise KeyError("the job's")
except KeyError as error: print(error)
dist.distributed_c10d._world.pg_coalesce_state.clear() # as a job would have to, after such an error
dist.barrier()                                         # 2
try:
    with _coalescing_manager():
        dist.all_reduce(a); dist.all_reduce(b, op=dist.ReduceOp.MAX)
        dist.all_gather_single(torch.ones(10 * size), a)
except Exception as error: print(type(error).__name__)  # its text names a set
print(a.tolist(), b.tolist(), other.tolist())
"""


def test_coalesced_collectives_are_a_single_operation(
    tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    with_probe = launch_ranks(BATCHES, tmp_path, warm_jobs)
    without = launch_ranks(BATCHES, tmp_path, bare_jobs)
    assert without.returncodes == [0, 0], without.stderr
    assert (with_probe.returncodes, with_probe.stdout) == ([0, 0], without.stdout)
    for rank, ring in enumerate(with_probe.rings):
        rows = [(o.group, o.what, o.number, o.form, o.bytes) for o in list_operations(ring)]
        both, own = hash_group("0,1"), hash_group(str(rank))
        assert rows == [
            (both, ALL_REDUCE, 0, BLOCKING, 60),
            (own, ALL_REDUCE, 0, BLOCKING, 12),
            (both, ALL_REDUCE, 1, ISSUE, 40),
            (both, ALL_REDUCE, 1, WAIT, 40),
            (both, BARRIER, 2, BLOCKING, 0),
        ]


# A backend that makes one work of a batch, as NCCL does: gloo with that put on top.
ONE_WORK = """
from torch.distributed import _coalescing_manager
peer = 1 - rank
got = torch.zeros(10)
with _coalescing_manager(async_ops=True) as manager:
    sent = dist.isend(torch.full((10,), rank + 1.0), peer)
    received = dist.irecv(got, peer)
    manager.append(received)
if rank == 1: time.sleep(0.3)
manager.wait()
sent.wait()
print(got.tolist())
"""


def test_a_shared_work_of_batched_messages_records_each_wait(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    job = launch_ranks(ONE_WORK, tmp_path, warm_jobs)
    assert job.returncodes == [0, 0], job.stderr
    assert job.stdout[0] == b"%s\n" % str(10 * [2.0]).encode()
    for ring in job.rings:
        rows = [(o.what, o.number, o.form, o.bytes) for o in list_operations(ring)]
        assert rows == [
            (SEND, 0, ISSUE, 40),
            (RECV, 0, ISSUE, 0),
            (RECV, 0, WAIT, 0),
            (SEND, 0, WAIT, 40),
            (SEND, 0, WAIT, 40),  # gloo's send has a work of its own too
        ]
