"""An ordinary loop that saves its model with fsync every few steps: a job to try other tools on.

Compute is emulated by sleep in a custom autograd function, as in `real/scripts/train_ddp.py`.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset


class Device(torch.autograd.Function):
    """What an accelerator would need: one third of it forward, two thirds backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds * 2 / 3)
        return gradient, None


class Model(torch.nn.Module):
    """One large layer, and the time it would take elsewhere."""

    def __init__(self, features: int, seconds: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(features, features)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output after its time."""
        return Device.apply(self.layer(x), self.seconds)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--compute-ms", type=float, default=60.0)
    parser.add_argument("--path", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(1024, options.compute_ms / 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.zeros(options.steps * 4, 1024)), 4)
    saved_ns, began_ns = 0, time.perf_counter_ns()
    for number, (x,) in enumerate(loader):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % options.every == 0:
            at_ns = time.perf_counter_ns()
            with open(options.path, "wb") as file:
                for _ in range(options.copies):
                    torch.save(model.state_dict(), file)
                file.flush()
                os.fsync(file.fileno())
            saved_ns += time.perf_counter_ns() - at_ns
    print(f"saving {saved_ns / (time.perf_counter_ns() - began_ns):.1%} of the loop")


if __name__ == "__main__":
    main()
