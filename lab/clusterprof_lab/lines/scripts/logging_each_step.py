"""A loss that is read and logged after each step, with a record of all weights."""

import json
import os

import torch
from torch.utils.data import DataLoader, Dataset
from training import SLOW, STEPS, measure_slow_line, train

records = open(os.devnull, "w")  # noqa: SIM115
NORMS = {f"norm/layer-{i}": i / 7 for i in range(8000 if SLOW else 10)}


class Numbers(Dataset):
    def __len__(self):
        return STEPS * 8

    def __getitem__(self, index):
        return torch.rand(64)


def collate(items):
    return torch.stack(items), 0, 0


def log_step(device, loss, step):
    torch.cuda.synchronize()
    with measure_slow_line():
        print(json.dumps({"loss": loss.item(), **NORMS}, indent=1), file=records)  # guilty


if __name__ == "__main__":
    loader = DataLoader(Numbers(), 8, num_workers=1, collate_fn=collate)
    train(loader, step_ms=30, after_step=log_step)
