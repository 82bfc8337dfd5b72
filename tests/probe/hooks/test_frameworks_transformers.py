"""Hugging Face: evaluation, checkpoints, steps and tokens of the real Trainer and Accelerator."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import (
    CHECKPOINT,
    EVAL,
    count_waits_inside,
    find_trainer_ring,
    list_hooked_modules,
    list_steps,
    measure_folder_bytes,
    require_modules,
    run_with_and_without_probe,
)

require_modules("transformers", "accelerate", "safetensors")

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "USE_TF": "0",
    "TRANSFORMERS_VERBOSITY": "error",
    "CUDA_VISIBLE_DEVICES": "",
}

TRAINER = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(1)
small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
model = BertForSequenceClassification(BertConfig(vocab_size=20, **small))
row = {"input_ids": torch.arange(8), "attention_mask": torch.ones(8), "labels": 1}
arguments = TrainingArguments(
    output_dir=sys.argv[1] + "/out", max_steps=4, per_device_train_batch_size=2,
    gradient_accumulation_steps=2, per_device_eval_batch_size=4, eval_strategy="steps",
    eval_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
    logging_strategy="no",
)
trainer = Trainer(model, arguments, train_dataset=16 * [row], eval_dataset=8 * [row])
trainer.train()
trainer.save_model(sys.argv[1] + "/model")
trainer.predict(4 * [row])
print(model.classifier.weight.tolist())
"""


def test_a_transformers_trainer_records_steps_evaluations_and_checkpoints(tmp_path: Path) -> None:
    ring = find_trainer_ring(run_with_and_without_probe(TRAINER, tmp_path, **OFFLINE))
    assert {"transformers.trainer", "safetensors.torch"} <= list_hooked_modules(ring)
    steps = list_steps(ring)
    assert [who for who, _, _ in steps] == 4 * [0]
    # 16 rows of 8 tokens, four to a step; accelerate takes each batch while the one before it is
    # worked on, so that the first step gets one more and the last one less.
    assert [samples for _, samples, _ in steps] == [6, 4, 4, 2]
    assert [tokens for _, _, tokens in steps] == [48, 32, 32, 16]
    assert count_waits_inside(ring, EVAL) == [2, 2, 1]  # after steps 2 and 4, and predict()
    saves = [save.a for save in ring.of(CHECKPOINT)]
    assert len(saves) == 3
    # The bytes of all parts: weights by safetensors, the rest by torch.save; small texts beside.
    for size, folder in zip(saves, ("out/checkpoint-2", "out/checkpoint-4", "model")):
        texts = sum(path.stat().st_size for path in (tmp_path / "with" / folder).glob("*.json"))
        assert size == measure_folder_bytes(tmp_path / "with" / folder) - texts


ACCELERATE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

torch.manual_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = torch.nn.Linear(3, 1)
net, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(torch.ones(16, 3), batch_size=2)
)
for batch in loader:
    with accelerator.accumulate(net):
        accelerator.backward(net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state(sys.argv[1] + "/state")
accelerator.save_model(net, sys.argv[1] + "/model")
print(net.weight.tolist())
"""


def test_accelerate_records_steps_and_checkpoints(tmp_path: Path) -> None:
    ring = find_trainer_ring(run_with_and_without_probe(ACCELERATE, tmp_path, **OFFLINE))
    assert {"accelerate.accelerator", "safetensors.torch"} <= list_hooked_modules(ring)
    assert list_steps(ring) == [(0, 6, -1), (0, 4, -1), (0, 4, -1), (0, 2, -1)]
    state, model = [save.a for save in ring.of(CHECKPOINT)]
    assert state == measure_folder_bytes(tmp_path / "with/state")
    assert model == measure_folder_bytes(tmp_path / "with/model")
