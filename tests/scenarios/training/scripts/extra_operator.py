"""A job of two ranks in which rank 1 runs an operator more than rank 0: torch.cumsum.

`extra_operator.py profiled` holds a profiler of its own open all the time; `... dies` kills rank 1
by SIGKILL as soon as the file `die` exists.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import clusterprof

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
weights, rows = torch.randn(200, 200), torch.randn(400, 400)
end = time.monotonic() + float(os.environ["JOB_SECONDS"])
stop = torch.zeros(1)
profiler = torch.profiler.profile() if FAULT == "profiled" else None
if profiler is not None:
    profiler.start()
steps = 0
while not stop:
    for _ in range(4):
        torch.mm(weights, weights)
    if rank == 1:
        for _ in range(20):
            torch.cumsum(rows, 0)
    if rank == 1 and FAULT == "dies" and os.path.exists(os.environ["JOB_DIE"]):
        os.kill(os.getpid(), signal.SIGKILL)
    stop.fill_(float(time.monotonic() > end or os.path.exists(os.environ["JOB_STOP"])))
    dist.all_reduce(stop)
    steps += 1
    clusterprof.step()
if profiler is not None:
    profiler.stop()
print(f"rank {rank}: {steps} steps", flush=True)
dist.destroy_process_group()
