"""What does the hook of a collective operation cost the host?

An all_reduce of one element in a gloo group of one rank: no data is sent and no rank is late, so
the time is that of the call itself. Two jobs take turns, with the probe and without it. In
addition the hook around a function that does nothing: its whole cost is the hook's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from clusterprof.agent.launch import launcher

TURNS = 60
CALLS = 300

JOB = f"""
import sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
one, all_reduce, now, cpu = torch.ones(1), dist.all_reduce, time.monotonic_ns, time.thread_time_ns

def nothing(tensor, op=None, group=None, async_op=False):
    pass

hooked = nothing
if "_clusterprof_probe" in sys.modules:
    from _clusterprof_probe.hooks import distributed
    module = dist.distributed_c10d
    hooked = distributed.wrap_collective(module, nothing, 1, 0)

def each(work, calls):
    began, used = now(), cpu()
    for _ in range(calls):
        work(one)
    return (now() - began) / calls, (cpu() - used) / calls

each(all_reduce, 200), each(hooked, 200)
for line in sys.stdin:
    print(*each(all_reduce, {CALLS}), *each(hooked, 10 * {CALLS}), flush=True)
"""


def main() -> None:
    """Measure two jobs in turns, one under the probe."""
    try:
        import torch  # noqa: F401
    except ImportError:
        print("not measured: torch is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        launcher.install_probe(Path(folder), gpu_events=True, strict=False)
        bare = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTERPROF_")}
        bare.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        jobs = [
            start_job(f"{folder}/store{number}", environ)
            for number, environ in enumerate((bare, launcher.with_probe_path(Path(folder), bare)))
        ]
        turns = [[measure_turn(job) for job in jobs] for _ in range(TURNS)]
        for job in jobs:
            job.communicate()
    without = [bare_job for bare_job, _ in turns]
    base = statistics.fmean(turn[0] for turn in without)
    more = statistics.median(b[0] - a[0] for a, b in turns)
    ratio = statistics.median(b[0] / a[0] for a, b in turns)
    print(f"all_reduce of 1 element    {base / 1e3:7.1f} µs without the probe, mean")
    print(f"with the probe             {ratio:7.3f} ×  ({more / 1e3:+.1f} µs, median of {TURNS})")
    own = [b[3] - a[3] for a, b in turns]
    print(
        f"the hook alone, CPU        {statistics.fmean(own) / 1e3:7.2f} µs mean, "
        f"{statistics.median(own) / 1e3:.2f} median  (target 3)"
    )
    whole = statistics.median(b[3] / a[3] for a, b in turns)
    print(f"                           {whole:7.0f} × a call of a function that does nothing")


def start_job(store: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    """Start a job that measures one turn for each line it is given."""
    command = [sys.executable, "-c", JOB, store]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True)


def measure_turn(job: subprocess.Popen[str]) -> list[float]:
    """Let a job measure, and return what it says."""
    assert job.stdin is not None and job.stdout is not None
    job.stdin.write("\n")
    job.stdin.flush()
    return [float(word) for word in job.stdout.readline().split()]


if __name__ == "__main__":
    main()
