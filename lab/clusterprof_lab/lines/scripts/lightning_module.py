"""A Lightning module whose training step computes statistics in Python."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from training import (
    FEATURES,
    STEPS,
    Model,
    measure_slow_line,
    open_emulated_device,
    write_truth_at_end,
)

DEVICE = open_emulated_device()
watch = write_truth_at_end(DEVICE)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model(DEVICE, 2_000_000)
        self.history = [i / 7 for i in range(60_000)]

    def training_step(self, batch, index):
        watch(index)
        loss = self.model(batch[0]).square().mean()
        torch.cuda.synchronize()
        with measure_slow_line():
            self.history = [0.99 * value + 0.01 * index for value in self.history]  # guilty
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(torch.rand(STEPS * 8, FEATURES)), 8, num_workers=1)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), loader)
    watch(-1)
