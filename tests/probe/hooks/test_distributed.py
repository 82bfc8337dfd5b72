"""The hooks of torch.distributed in real gloo processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.probe import layout
from tests.support.gloo_ranks import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BLOCKING,
    BROADCAST,
    GATHER,
    ISSUE,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
    WAIT,
    hash_group,
    launch_ranks,
    list_operations,
    record_ranks,
)
from tests.support.job_python import require_torch
from tests.support.probe_jobs import Ring, install_probe, run_python
from tests.support.warm_jobs import WarmJobs

require_torch()
pytestmark = pytest.mark.torch

LATE_S = 0.3

# A tensor `t` of 10 floats is 40 bytes; each line is one operation unless a comment says otherwise.
EVERYTHING = """
from torch.distributed import all_reduce  # the name under which many import it
t = torch.ones(10)
pair = torch.ones(20)
all_reduce(t)                                                          # 0
dist.distributed_c10d.all_reduce(tensor=t, group=dist.group.WORLD)     # 1
dist.all_gather([torch.ones(10), torch.ones(10)], t)                   # 2
dist.reduce_scatter(torch.ones(10), [t, t])                            # 3
dist.broadcast(t, src=1)                                               # 4
dist.reduce(t, 0)                                                      # 5
dist.gather(t, [torch.ones(10), torch.ones(10)] if rank == 0 else None, dst=0)  # 6
dist.scatter(t, [torch.ones(10), torch.ones(10)] if rank == 1 else None, src=1) # 7
dist.all_to_all([torch.ones(10), torch.ones(10)], [t, t])              # 8
dist.all_to_all_single(torch.ones(20), pair)                           # 9
dist.barrier()                                                         # 10
dist.monitored_barrier()                                               # 11
objects = [None, None]
dist.all_gather_object(objects, rank)  # 12 sizes: 8 bytes, 13 as many bytes as the longest pickle
assert objects == [0, 1]
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Ring], Path]:
    """Every blocking operation once, recorded once for all tests that only look."""
    folder = tmp_path_factory.mktemp("everything")
    run_dir = install_probe(folder / "run")
    return record_ranks(EVERYTHING, folder, run_dir), run_dir


def test_each_collective_has_a_number_group_bytes_and_name(
    everything: tuple[list[Ring], Path],
) -> None:
    rings, _ = everything
    for rank, ring in enumerate(rings):
        matched = list_operations(ring)
        assert {(o.group, o.form, o.peer) for o in matched} == {(hash_group("0,1"), BLOCKING, None)}
        assert [o.number for o in matched] == list(range(14))
        assert [(o.what, o.bytes) for o in matched[:13]] == [
            (ALL_REDUCE, 40),
            (ALL_REDUCE, 40),
            (ALL_GATHER, 40),
            (REDUCE_SCATTER, 80),
            (BROADCAST, 40 if rank == 1 else 0),  # what it brought: the others only receive
            (REDUCE, 40),
            (GATHER, 40),
            (SCATTER, 80 if rank == 1 else 0),
            (ALL_TO_ALL, 80),
            (ALL_TO_ALL, 80),
            (BARRIER, 0),
            (BARRIER, 0),
            (ALL_GATHER, 8),
        ]
        assert matched[13].what == ALL_GATHER
        assert all(o.start_ns < o.end_ns for o in matched)


def test_each_rank_announces_its_group_once(everything: tuple[list[Ring], Path]) -> None:
    rings, run_dir = everything
    group = hash_group("0,1")
    by_key = {path.name: json.loads(path.read_text()) for path in (run_dir / "groups").iterdir()}
    assert by_key == {
        f"{ring.pid}.{group}.json": {"pid": ring.pid, "group": group, "ranks": [0, 1]}
        for ring in rings
    }


def test_the_other_ranks_wait_for_a_late_rank(tmp_path: Path, warm_jobs: WarmJobs) -> None:
    code = f"""
t = torch.ones(1)
dist.all_reduce(t)
if rank == 1: time.sleep({LATE_S})
dist.all_reduce(t)
if rank == 0: time.sleep({LATE_S})
dist.barrier()
"""
    rings = record_ranks(code, tmp_path, warm_jobs)
    zero, rank_one = (list_operations(ring) for ring in rings)
    # Rank 1 came late to operation 1, rank 0 to operation 2.
    assert zero[1].seconds > LATE_S / 2 > rank_one[1].seconds
    assert rank_one[2].seconds > LATE_S / 2 > zero[2].seconds


def test_an_asynchronous_operation_records_issue_and_wait(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    code = f"""
t = torch.ones(10)
if rank == 1: time.sleep({LATE_S})
work = dist.all_reduce(t, async_op=True)
assert type(work) is dist.Work, type(work)
other = dist.broadcast(torch.ones(5), 0, async_op=True)
assert work.wait() is True and work.is_completed()
work.wait()       # nothing left to wait for: no span
dist.barrier()    # waits for its own work inside: no span of its own
other.wait()
lost = dist.all_reduce(t, async_op=True)
lost.get_future().wait()  # a wait that no span shows
assert t.tolist() == 10 * [4.0]
"""
    rings = record_ranks(code, tmp_path, warm_jobs)
    for rank, ring in enumerate(rings):
        matched = list_operations(ring)
        sent = 20 if rank == 0 else 0
        assert [(o.what, o.number, o.form, o.bytes) for o in matched] == [
            (ALL_REDUCE, 0, ISSUE, 40),
            (BROADCAST, 1, ISSUE, sent),
            (ALL_REDUCE, 0, WAIT, 40),
            (BARRIER, 2, BLOCKING, 0),
            (BROADCAST, 1, WAIT, sent),
            (ALL_REDUCE, 3, ISSUE, 40),
        ]
    waits = [list_operations(ring)[2].seconds for ring in rings]
    assert waits[0] > LATE_S / 2 > waits[1]


def test_messages_name_their_peer_and_are_numbered_by_pair(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    code = """
t = torch.ones(10)
half = dist.new_group([0, 2])
if rank == 0:
    dist.send(t, 1); dist.send(t, 2); dist.isend(t, 1).wait(); dist.send(t, 2, group=half)
elif rank == 1:
    dist.recv(t, 0); dist.irecv(t, src=0).wait()
else:
    dist.recv(t, src=0); dist.recv(t, group=half, group_src=0)
    dist.all_reduce(t, group=dist.new_group([2], use_local_synchronization=True))
peer = (rank + 1) % 3
works = dist.batch_isend_irecv([
    dist.P2POp(dist.isend, t, peer), dist.P2POp(dist.irecv, torch.ones(10), (rank + 2) % 3),
])
for work in works: work.wait()
dist.barrier()
if rank < 2: dist.send(t, 2)
else: dist.recv(t); dist.recv(t)
"""
    rings = record_ranks(code, tmp_path, warm_jobs, size=3)
    assert hash_group("0,1,2") == 0x4E62965EF8BA1C61  # printf 0,1,2 | b2sum; its first 8 bytes
    everybody, half, own = hash_group("0,1,2"), hash_group("0,2"), hash_group("2")

    def messages(ring: Ring) -> list[tuple[int, int, int, int, int | None, int]]:
        result = [o for o in list_operations(ring) if o.what in (SEND, RECV)]
        return [(o.group, o.what, o.number, o.form, o.peer, o.bytes) for o in result]

    assert messages(rings[0])[:5] == [
        (everybody, SEND, 0, BLOCKING, 1, 40),
        (everybody, SEND, 0, BLOCKING, 2, 40),
        (everybody, SEND, 1, ISSUE, 1, 40),
        (everybody, SEND, 1, WAIT, 1, 40),
        (half, SEND, 0, BLOCKING, 2, 40),
    ]
    assert messages(rings[1])[:3] == [
        (everybody, RECV, 0, BLOCKING, 0, 0),
        (everybody, RECV, 1, ISSUE, 0, 0),
        (everybody, RECV, 1, WAIT, 0, 0),
    ]
    assert messages(rings[2])[:2] == [
        (everybody, RECV, 0, BLOCKING, 0, 0),
        (half, RECV, 0, BLOCKING, 0, 0),
    ]
    # The ring of three: each issues a send and a receive, then waits for both.
    assert messages(rings[2])[2:6] == [
        (everybody, SEND, 0, ISSUE, 0, 40),
        (everybody, RECV, 0, ISSUE, 1, 0),
        (everybody, SEND, 0, WAIT, 0, 40),
        (everybody, RECV, 0, WAIT, 1, 0),
    ]
    # From any rank: the sender is not known beforehand, so neither is its number.
    assert messages(rings[2])[6:] == 2 * [(everybody, RECV, -1, BLOCKING, None, 0)]
    # Messages are no steps of the whole group: the barrier is its first operation everywhere.
    for ring in rings:
        (barrier,) = [o for o in list_operations(ring) if o.what == BARRIER]
        assert (barrier.group, barrier.number) == (everybody, 0)
    (alone,) = [o for o in list_operations(rings[2]) if o.what == ALL_REDUCE]
    assert (alone.group, alone.number) == (own, 0)


def test_ranks_outside_a_group_count_no_operations(tmp_path: Path, warm_jobs: WarmJobs) -> None:
    code = """
t = torch.ones(1)
again, first = dist.new_group([0, 1]), dist.new_group([0])
dist.all_reduce(t)
dist.all_reduce(t, group=again)
dist.all_reduce(t, group=first)  # rank 1 is refused and does nothing
dist.destroy_process_group(again)
dist.barrier()
"""
    job = launch_ranks(code, tmp_path, warm_jobs)
    assert job.returncodes == [0, 0]
    zero, rank_one = (list_operations(ring) for ring in job.rings)
    named = rank_one[1].group  # equal members, and created later
    both = [(hash_group("0,1"), 0), (named, 0), (hash_group("0,1"), 1)]
    assert named != hash_group("0,1")
    assert [(o.group, o.number) for o in rank_one] == both
    assert [(o.group, o.number) for o in zero] == [*both[:2], (hash_group("0"), 0), both[2]]


def test_an_operation_of_another_thread_is_marked(tmp_path: Path, warm_jobs: WarmJobs) -> None:
    code = """
import threading
t = torch.ones(10)
def call(*arguments, **keywords):
    thread = threading.Thread(target=dist.all_reduce, args=arguments, kwargs=keywords)
    thread.start()
    thread.join()
dist.all_reduce(t)
call(t)
call(tensor=t, op=dist.ReduceOp.MAX)
dist.broadcast(t, src=0)
"""
    for ring in record_ranks(code, tmp_path, warm_jobs):
        by_other = [bool(span.d & layout.OTHER_THREAD) for span in ring.of(layout.COLLECTIVE)]
        assert by_other == [False, True, True, False]
        # all else is as if the main thread had called it
        matched = [(o.what, o.number, o.form, o.peer) for o in list_operations(ring)]
        assert matched == [
            (ALL_REDUCE, 0, BLOCKING, None),
            (ALL_REDUCE, 1, BLOCKING, None),
            (ALL_REDUCE, 2, BLOCKING, None),
            (BROADCAST, 3, BLOCKING, None),
        ]


def test_process_groups_with_equal_members_number_operations_separately(
    tmp_path: Path, warm_jobs: WarmJobs
) -> None:
    """Two threads use a group each: their operations have no order between them."""
    code = """
import threading, time
second = dist.new_group()
t, u = torch.ones(1), torch.ones(10)
dist.all_reduce(t)  # opens the ring: what a thread records while another one opens it is dropped
def reduce_in_second():
    for _ in range(3):
        dist.all_reduce(u, group=second)
        time.sleep(0.05 * rank)  # the threads of the ranks take turns differently
thread = threading.Thread(target=reduce_in_second)
thread.start()
for _ in range(3):
    dist.all_reduce(t)
thread.join()
"""
    for ring in record_ranks(code, tmp_path, warm_jobs):
        by_group: dict[int, list[tuple[int, int]]] = {}
        for operation in list_operations(ring):
            if operation.what == ALL_REDUCE:
                by_group.setdefault(operation.group, []).append((operation.number, operation.bytes))
        assert sorted(by_group.pop(hash_group("0,1"))) == [(n, 4) for n in range(4)]
        (second,) = by_group.values()
        assert sorted(second) == [(n, 40) for n in range(3)]


@pytest.mark.parametrize(
    ("version", "old_names"),
    [("2.8.0+cu126", "2000 /run/x"), ("2.9.0", "- -"), ("2.13.0+cpu", "- -"), ("nightly", "- -")],
)
def test_only_an_old_pytorch_uses_the_old_variable_names(
    tmp_path: Path, version: str, old_names: str
) -> None:
    code = f"""
import os, _clusterprof_probe.hooks.distributed as hooks
hooks.set_old_names({version!r})
names = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
print(*(os.environ.get(name, "-") for name in names))
"""
    variables = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/run/x"}
    result = run_python("-c", code, run_dir=install_probe(tmp_path / "run"), **variables)
    assert result.stdout.decode().strip() == old_names, result.stderr.decode()
