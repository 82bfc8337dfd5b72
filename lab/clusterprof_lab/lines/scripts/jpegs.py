"""JPEGs that are decoded, resized and flipped by transforms of PIL."""

import io
import random
import time

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from training import FEATURES, SLOW, STEPS, measure_slow_line_in_worker, train

ITEMS = 4


class Resize:
    def __call__(self, image):
        return image.resize((800, 800), Image.LANCZOS)  # guilty


class Flip:
    def __call__(self, image):
        return image.transpose(Image.FLIP_LEFT_RIGHT)


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, image):
        spent_ns = []
        for transform in self.transforms:
            with measure_slow_line_in_worker(spent_ns):
                image = transform(image)
        return image, spent_ns[0]


def make_photo(side):
    noise = random.Random(side).randbytes(3 * 64 * 64)
    photo = Image.frombytes("RGB", (64, 64), noise).resize((side, side))
    file = io.BytesIO()
    photo.save(file, "JPEG")
    return file.getvalue()


class Photos(Dataset):
    def __init__(self):
        self.photo = make_photo(1600 if SLOW else 64)
        self.transform = Compose(Resize(), Flip())

    def __len__(self):
        return STEPS * ITEMS

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.photo))
        image.draft("RGB", (400, 400))
        image.load()
        image, line_ns = self.transform(image)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels[:FEATURES] / 255.0, line_ns


def collate(items):
    images, line_ns = zip(*items)
    return torch.stack(images), sum(line_ns), time.thread_time_ns()


if __name__ == "__main__":
    loader = DataLoader(Photos(), ITEMS, num_workers=1, collate_fn=collate)
    train(loader, step_ms=20)
