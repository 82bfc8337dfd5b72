"""Sequences of unequal length that a collate function pads element by element."""

import time

import torch
from torch.utils.data import DataLoader, Dataset
from training import FEATURES, SLOW, STEPS, measure_slow_line_in_worker, train

ITEMS = 8
LENGTH = 24000 if SLOW else 100


class Sequences(Dataset):
    def __len__(self):
        return STEPS * ITEMS

    def __getitem__(self, index):
        return torch.rand(LENGTH - index % 50).tolist()


def pad_batch(items):
    spent_ns = []
    rows = []
    for values in items:
        size = len(values)
        places = range(LENGTH)
        with measure_slow_line_in_worker(spent_ns):
            row = [min(values[i] * 2 if i < size else 0.0, 1.0) for i in places]  # guilty
        rows.append(row)
    return torch.tensor([row[:FEATURES] for row in rows]), sum(spent_ns), time.thread_time_ns()


if __name__ == "__main__":
    loader = DataLoader(Sequences(), ITEMS, num_workers=1, collate_fn=pad_batch)
    train(loader, step_ms=15)
