"""A forward hook that sleeps, as a rate limit left in a callback."""

import time

import torch
from torch.utils.data import DataLoader, Dataset
from training import SLOW, STEPS, measure_slow_line, train


class Numbers(Dataset):
    def __len__(self):
        return STEPS * 8

    def __getitem__(self, index):
        return torch.rand(64)


def collate(items):
    return torch.stack(items), 0, 0


def limit_rate(module, args, output):
    with measure_slow_line():
        time.sleep(0.03)  # guilty


def add_hook(model):
    if SLOW:
        model.layers[-1].register_forward_hook(limit_rate)


if __name__ == "__main__":
    loader = DataLoader(Numbers(), 8, num_workers=1, collate_fn=collate)
    train(loader, step_ms=20, prepare=add_hook)
