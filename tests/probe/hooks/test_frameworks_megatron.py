"""Megatron-Core: distributed checkpoints; and Megatron-LM's loop, of which there is no package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.frameworks import (
    CHECKPOINT,
    EVAL,
    find_trainer_ring,
    list_hooked_modules,
    make_one_rank_environment,
    require_modules,
    run_with_and_without_probe,
)
from tests.support.probe_jobs import STEP

require_modules("megatron.core")

CODE = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

# A save asks for these on a machine without CUDA too.
torch.cuda.synchronize = lambda: None
torch.cuda.current_device = lambda: torch.device("cpu")

def main():  # its writer spawns processes
    dist.init_process_group("gloo")
    os.mkdir(sys.argv[1] + "/saved")
    weights = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8), replica_id=0)}
    dist_checkpointing.save(weights, sys.argv[1] + "/saved")
    dist.destroy_process_group()
    print(torch.ones(1))

if __name__ == "__main__":
    main()
"""


def test_a_megatron_distributed_checkpoint_is_recorded(tmp_path: Path) -> None:
    rings = run_with_and_without_probe(CODE, tmp_path, **make_one_rank_environment())
    (ring,) = [ring for ring in rings if ring.of(CHECKPOINT)]
    assert "megatron.core.dist_checkpointing.serialization" in list_hooked_modules(ring)
    assert [save.a for save in ring.of(CHECKPOINT)] == [-1]  # what its processes wrote is not known


# Megatron-LM's own loop: its real functions, and stand-ins for what they would ask of a GPU.
TRAINING = """
import sys, warnings
warnings.simplefilter("ignore")
from unittest.mock import MagicMock
import torch
from megatron.training import checkpointing, training

class Arguments:  # whatever is asked for: off
    eval_iters, micro_batch_size, data_parallel_size, global_batch_size = 2, 1, 1, 1
    def __getattr__(self, name):
        return 0

for name in ("get_timers", "get_num_microbatches", "mpu", "get_rerun_state_machine"):
    setattr(training, name, MagicMock())
training.get_args = Arguments
training.get_num_microbatches.return_value = 1
training.mpu.is_pipeline_last_stage.return_value = False
training.print_rank_0 = training.is_last_rank = lambda *unused: False
training.get_forward_backward_func = lambda *unused, **named: lambda **more: [{}]
rerun = training.get_rerun_state_machine.return_value
rerun.should_run_forward_backward.side_effect = 9 * [True, False]
rerun.should_checkpoint_and_exit.return_value = (False, False, 0)
optimizer = MagicMock()
optimizer.step.return_value = (True, 1.0, 0)
model, config = [MagicMock()], MagicMock()
for number in range(3):
    training.train_step(None, None, model, optimizer, MagicMock(), config)
training.evaluate(None, None, model, None, config)
print(optimizer.step.call_count, torch.ones(1))
"""
CHECKOUT = os.environ.get("CLUSTERPROF_MEGATRON_LM", "")  # the folder that holds `megatron`


@pytest.mark.skipif(not CHECKOUT, reason="needs Megatron-LM: CLUSTERPROF_MEGATRON_LM=its checkout")
def test_megatron_training_records_steps_and_evaluation(tmp_path: Path) -> None:
    code = f"import sys\nsys.path.insert(0, {CHECKOUT!r})\n" + TRAINING
    ring = find_trainer_ring(run_with_and_without_probe(code, tmp_path))
    expected = {"megatron.training.training", "megatron.training.checkpointing"}
    assert expected <= list_hooked_modules(ring)
    assert [step.b for step in ring.of(STEP)] == [2, 2, 2]
    assert len(ring.of(EVAL)) == 1
