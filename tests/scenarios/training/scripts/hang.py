"""A small data-parallel job on gloo that stands still in a way that is known.

Prints a JSON object per rank: its pid, and once the fault has begun, the line where it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

STEP_OF_FAULT = 20
FAULTY_RANK = 1


class Samples(Dataset):
    def __init__(self, stuck_at: int) -> None:
        self.stuck_at = stuck_at

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.stuck_at:
            read_forever()
        return torch.ones(8)


def read_forever() -> None:
    time.sleep(3600)


def compute_for_long() -> None:
    end = time.monotonic() + 3600
    values = torch.ones(64, 64)
    while time.monotonic() < end:
        values = torch.tanh(values @ values)


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def reduce_gradients(fault: str, is_faulty: bool, step: int) -> None:
    gradients = torch.ones(1000)
    if is_faulty and step >= STEP_OF_FAULT:
        if fault == "other-collective":
            dist.broadcast(gradients, src=0)
        elif fault == "diverged":
            time.sleep(0.02)
            return
    dist.all_reduce(gradients)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    fault = parser.parse_args().fault
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_faulty = rank == FAULTY_RANK
    say(rank=rank, pid=os.getpid())
    stuck_at = STEP_OF_FAULT if fault == "loader" and is_faulty else 1 << 40
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(DataLoader(Samples(stuck_at), num_workers=1)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        if is_faulty and step == STEP_OF_FAULT:
            say(begun=step)
            if fault in ("killed", "stopped"):
                compute_for_long()
        reduce_gradients(fault, is_faulty, step)
        optimizer.step()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
