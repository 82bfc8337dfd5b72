"""A job with one expert on each rank, on gloo: tokens are sent to experts, and their results back.

Arguments: number of steps, tokens that each rank sends to each of the experts (20,10: twice as
many to the first), seconds of CPU time that each of the experts works on a token (0.002,0.002).
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

WIDTH = 64
"""Numbers of a token, 4 bytes each."""


def exchange(tokens: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    out = torch.empty(sum(received), WIDTH)
    dist.all_to_all_single(out, tokens, received, sent)
    return out


def compute(seconds: float) -> None:
    """Work for so much time of a CPU, however long the thread has none."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def train(steps: int, by_expert: list[int], token_s: list[float]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [by_expert[rank]] * size  # each rank sends so many tokens to the expert of this one
    router = torch.nn.Linear(WIDTH, size)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.01)
    for _ in range(steps):
        router(torch.ones(1, WIDTH)).sum().backward()
        tokens = exchange(torch.ones(sum(by_expert), WIDTH), by_expert, mine)
        compute(token_s[rank] * len(tokens))
        exchange(tokens, mine, by_expert)
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens, seconds = (argument.split(",") for argument in sys.argv[2:4])
    train(int(sys.argv[1]), [int(word) for word in tokens], [float(word) for word in seconds])
    print(f"rank {dist.get_rank()} of {os.getpid()} is done", flush=True)
    dist.destroy_process_group()
