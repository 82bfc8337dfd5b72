"""A Hugging Face Trainer with a callback that sleeps at the end of each step."""

import tempfile
import time

import torch
from torch.utils.data import Dataset
from training import (
    FEATURES,
    STEPS,
    Model,
    measure_slow_line,
    open_emulated_device,
    write_truth_at_end,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

DEVICE = open_emulated_device()
watch = write_truth_at_end(DEVICE)


class Numbers(Dataset):
    def __len__(self):
        return STEPS * 8

    def __getitem__(self, index):
        return {"x": torch.rand(FEATURES)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model(DEVICE, 2_000_000)

    def forward(self, x):
        loss = self.model(x).square().mean()
        return {"loss": loss}


class Limit(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        watch(state.global_step)
        with measure_slow_line():
            time.sleep(0.05)  # guilty


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=STEPS,
        dataloader_num_workers=1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(Net(), arguments, train_dataset=Numbers(), callbacks=[Limit()]).train()
    watch(-1)
