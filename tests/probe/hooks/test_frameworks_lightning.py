"""Lightning: evaluation, checkpoints and steps of the real Trainer, under both of its names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import (
    CHECKPOINT,
    EVAL,
    count_waits_inside,
    find_trainer_ring,
    list_hooked_modules,
    list_steps,
    require_modules,
    run_with_and_without_probe,
)

require_modules("lightning", "pytorch_lightning")

CODE = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.INFO)
import torch
from torch.utils.data import DataLoader
import NAME as lightning

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def validation_step(self, batch, index):
        self.log("loss", self.layer(batch).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(1)
net = Net()
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", num_sanity_val_steps=0, default_root_dir=sys.argv[1], **quiet
)
validation = DataLoader(torch.ones(8, 3), batch_size=4)
trainer.fit(net, DataLoader(torch.ones(12, 3), batch_size=4), validation)
trainer.save_checkpoint(sys.argv[1] + "/last.ckpt")
print(trainer.validate(net, validation, verbose=False), net.layer.weight.tolist())
"""


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_lightning_trainer_records_steps_evaluations_and_checkpoints(
    tmp_path: Path, name: str
) -> None:
    ring = find_trainer_ring(run_with_and_without_probe(CODE.replace("NAME", name), tmp_path))
    package = "lightning.pytorch" if name == "lightning" else name
    assert {
        f"{package}.loops.evaluation_loop",
        f"{package}.trainer.trainer",
    } <= list_hooked_modules(ring)
    # 12 rows in batches of 4, twice; the rows of validation are no step's.
    assert list_steps(ring) == 6 * [(0, 4, -1)]
    assert count_waits_inside(ring, EVAL) == [2, 2, 2]  # after both epochs, and validate()
    saves = ring.of(CHECKPOINT)
    assert len(saves) == 3  # ModelCheckpoint after both epochs, and ours
    assert saves[-1].a == (tmp_path / "with/last.ckpt").stat().st_size
    assert all(save.a > 0 for save in saves)


FABRIC = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader
from lightning.fabric import Fabric

torch.manual_seed(1)
fabric = Fabric(accelerator="cpu", devices=1)
net = torch.nn.Linear(3, 1)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
for batch in fabric.setup_dataloaders(DataLoader(torch.ones(12, 3), batch_size=4)):
    optimizer.zero_grad()
    fabric.backward(net(batch).square().mean())
    optimizer.step()
fabric.save(sys.argv[1] + "/last.ckpt", {"net": net, "optimizer": optimizer})
print(net.weight.tolist())
"""


def test_lightning_fabric_records_steps_and_checkpoints(tmp_path: Path) -> None:
    ring = find_trainer_ring(run_with_and_without_probe(FABRIC, tmp_path))
    assert "lightning.fabric.fabric" in list_hooked_modules(ring)
    assert list_steps(ring) == 3 * [(0, 4, -1)]
    (save,) = ring.of(CHECKPOINT)
    assert save.a == (tmp_path / "with/last.ckpt").stat().st_size
