"""Sequences of unequal length that a collate function pads element by element."""

import time

import torch
from torch.utils.data import DataLoader, Dataset
from training import FEATURES, SLOW, STEPS, train

ITEMS = 8
LENGTH = 12000 if SLOW else 100


class Sequences(Dataset):
    def __len__(self):
        return STEPS * ITEMS

    def __getitem__(self, index):
        begin_ns = time.monotonic_ns()
        values = torch.rand(LENGTH - index % 50).tolist()
        return values, time.monotonic_ns() - begin_ns


def pad_batch(items):
    begin_ns = time.monotonic_ns()
    rows = []
    for values, _ in items:
        size = len(values)
        places = range(LENGTH)
        rows.append([min(values[i] * 2 if i < size else 0.0, 1.0) for i in places])  # guilty
    line_ns = time.monotonic_ns() - begin_ns
    batch = torch.tensor([row[:FEATURES] for row in rows])
    whole_ns = time.monotonic_ns() - begin_ns + sum(spent_ns for _, spent_ns in items)
    return batch, line_ns, whole_ns


if __name__ == "__main__":
    loader = DataLoader(Sequences(), ITEMS, num_workers=1, collate_fn=pad_batch)
    train(loader, step_ms=15)
