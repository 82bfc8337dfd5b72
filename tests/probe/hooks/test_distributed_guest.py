"""The hooks of torch.distributed harm nothing: errors, theirs and ours, and compiled code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import job_python
from tests.support.gloo_ranks import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BLOCKING,
    BROADCAST,
    ISSUE,
    WAIT,
    launch_ranks,
    list_operations,
)
from tests.support.job_python import require_torch
from tests.support.probe_jobs import install_probe, select_long_values
from tests.support.warm_jobs import WarmJobs

require_torch()
pytestmark = pytest.mark.torch


@pytest.mark.skipif(
    job_python.get_python_version() < (3, 11), reason="Python 3.10 re-raises with our frame"
)
def test_a_job_error_looks_the_same_without_the_probe(
    tmp_path: Path, warm_jobs: WarmJobs, bare_jobs: WarmJobs
) -> None:
    wrong = [
        "dist.all_reduce('no tensor')",
        "dist.broadcast(1, src=0)",
        "dist.send(torch.ones(1), dst=0)",
        "dist.all_to_all([1], 'ab')",
        "dist.monitored_barrier(timeout='never')",
        "dist.barrier(1, 2, 3, 4, 5)",
    ]
    code = "import traceback\n" + "".join(
        f"""
try:
    {line}
except Exception: traceback.print_exc(file=sys.stdout)
dist.all_reduce(torch.ones(1))
"""
        for line in wrong
    )
    with_probe = launch_ranks(code, tmp_path, warm_jobs, size=1)
    without = launch_ranks(code, tmp_path, bare_jobs, size=1)
    assert without.stdout[0].count(b"Traceback") == len(wrong)
    assert (with_probe.returncodes, with_probe.stdout) == ([0], without.stdout)
    # The calls that failed have taken a number and left no span; the next ones are recorded.
    rows = [(operation.what, operation.form) for operation in list_operations(with_probe.rings[0])]
    assert rows == [(ALL_REDUCE, BLOCKING)] * len(wrong)


BROKEN = """
from _clusterprof_probe.hooks import other_calls, process_groups, pending_work, wrap
pending_work.ring.enter(0, 0, 0, 0)  # opens the ring, which sets `emit`
def broken(*arguments, **keywords):
    raise SystemExit("ours")
{where} = broken
t = torch.ones(1)
dist.all_reduce(t)
work = dist.all_reduce(t, async_op=True)
work.wait()
dist.all_reduce(t)
print(t.tolist())
import _clusterprof_probe
print(_clusterprof_probe.on, other_calls.active_threads)
"""


@pytest.mark.parametrize(
    "where",
    [
        "pending_work.ring.emit",
        *select_long_values(
            "process_groups.compute_group_number",
            "process_groups.Group.__init__",
            "pending_work.register_work",
        ),
    ],
)
def test_a_hook_error_disables_the_probe_without_affecting_the_job(
    tmp_path: Path, warm_jobs: WarmJobs, where: str
) -> None:
    job = launch_ranks(BROKEN.format(where=where), tmp_path, warm_jobs)
    assert (job.returncodes, job.stderr) == ([0, 0], [b"", b""])
    # 1 + 1 = 2, then 4, then 8: the job's sums are right.
    for output in job.stdout:
        sums, state = output.split(b"\n", 1)
        assert sums == b"[8.0]"
        assert state.startswith(b"False ")


COMPILED = """
t = torch.ones(4)

@torch.compile(backend="eager", fullgraph=True)
def rewritten(x):
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.ones(4 * size), x)
    return x + 1

@torch.compile(backend="eager")
def broken_up(x):
    x = x * 2
    dist.barrier()
    dist.broadcast(x, 0)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1

print(rewritten(t), broken_up(t))
# How often, and into how many graphs: how a break is worded tells what was met on the way.
counters = torch._dynamo.utils.counters
print(sum(counters["graph_break"].values()), counters["stats"])
"""


@pytest.mark.long
def test_compiled_code_is_traced_the_same_without_the_probe(tmp_path: Path) -> None:
    with_probe = launch_ranks(COMPILED, tmp_path, install_probe(tmp_path / "run"), size=1)
    without = launch_ranks(COMPILED, tmp_path, None, size=1)
    assert without.returncodes == [0], without.stderr
    assert (with_probe.returncodes, with_probe.stdout) == ([0], without.stdout)
    # What is not compiled into a graph runs as it is written, and is seen; so is a graph that is
    # run operator by operator, as this back end does.
    rows = [(o.what, o.form) for o in list_operations(with_probe.rings[0])]
    assert rows[:6] == [
        (ALL_REDUCE, ISSUE),
        (ALL_REDUCE, WAIT),
        (ALL_GATHER, ISSUE),
        (ALL_GATHER, WAIT),
        (BARRIER, BLOCKING),
        (BROADCAST, BLOCKING),
    ]
