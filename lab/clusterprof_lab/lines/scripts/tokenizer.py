"""Text that is split into tokens when it is needed, with a library."""

import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset
from training import FEATURES, SLOW, STEPS, measure_slow_line_in_worker, train

ITEMS = 4
WORDS = 1600 if SLOW else 40
TEXT = " ".join(f"word{i * 31 % 977} and, part-{i % 13}." for i in range(WORDS))


def make_tokenizer():
    letters = sorted(set(TEXT))
    pairs = [(a, b) for a in "wordpart" for b in "wordpart"]
    vocabulary = {
        token: number for number, token in enumerate([*letters, *(a + b for a, b in pairs)])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


class Texts(Dataset):
    def __init__(self):
        self.tokenizer = make_tokenizer()

    def __len__(self):
        return STEPS * ITEMS

    def __getitem__(self, index):
        spent_ns = []
        text = TEXT.lower().replace("word", f"wor{index % 10}d")
        with measure_slow_line_in_worker(spent_ns):
            tokens = self.tokenizer.encode(text).ids  # guilty
        return torch.tensor(tokens[:FEATURES]) / len(TEXT), spent_ns[0]


def collate(items):
    values, line_ns = zip(*items)
    return torch.stack(values), sum(line_ns), time.thread_time_ns()


if __name__ == "__main__":
    loader = DataLoader(Texts(), ITEMS, num_workers=1, collate_fn=collate)
    train(loader, step_ms=15)
