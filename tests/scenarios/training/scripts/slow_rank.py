"""A data-parallel job on gloo with a rank that is late in every step.

Arguments: number of steps, seconds for which rank 1 is late, seconds of a step of all ranks (0).
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SLOW_RANK = 1


def train(steps: int, late_s: float, work_s: float) -> None:
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counted = torch.zeros(1)
    for _ in range(steps):
        time.sleep(work_s + late_s * (dist.get_rank() == SLOW_RANK))
        model(torch.randn(16, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(counted)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(int(sys.argv[1]), float(sys.argv[2]), float((*sys.argv, 0)[3]))
    print(f"rank {dist.get_rank()} of {os.getpid()} is done", flush=True)
    dist.destroy_process_group()
