"""DeepSpeed: steps of the engine, and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import (
    CHECKPOINT,
    find_trainer_ring,
    list_hooked_modules,
    list_steps,
    make_one_rank_environment,
    measure_folder_bytes,
    require_modules,
    run_with_and_without_probe,
    run_without_probe,
)

require_modules("deepspeed")

CODE = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import deepspeed, torch

torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
groups = [{"params": layer.parameters()} for layer in net]
config = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": STAGE}, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, _, loader, _ = deepspeed.initialize(
    model=net, optimizer=torch.optim.SGD(groups, lr=0.01), config=config,
    training_data=list(torch.ones(24, 3)),
)
for batch in loader:
    engine.backward(engine(batch).square().mean())
    engine.step()
engine.save_checkpoint(sys.argv[1] + "/saved")
print([list(map(float, p.flatten())) for p in net.parameters()])
"""


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let DeepSpeed build its extension first: what the compiler says is not the job's output."""
    folder = tmp_path_factory.mktemp("built")
    run_without_probe(
        CODE.replace("STAGE", "0"), folder, DS_ACCELERATOR="cpu", **make_one_rank_environment()
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_a_deepspeed_engine_records_steps_and_checkpoints(tmp_path: Path, stage: int) -> None:
    ring = find_trainer_ring(
        run_with_and_without_probe(
            CODE.replace("STAGE", str(stage)),
            tmp_path,
            DS_ACCELERATOR="cpu",
            **make_one_rank_environment(),
        )
    )
    assert "deepspeed.runtime.engine" in list_hooked_modules(ring)
    # Six batches of 4 rows, two to a step; the optimizer has two groups of parameters.
    assert list_steps(ring) == 3 * [(2, 8, -1)]
    (save,) = ring.of(CHECKPOINT)
    texts = (tmp_path / "with/saved/latest").stat().st_size
    scripts = sum(path.stat().st_size for path in (tmp_path / "with/saved").glob("*.py"))
    assert save.a == measure_folder_bytes(tmp_path / "with/saved") - texts - scripts
