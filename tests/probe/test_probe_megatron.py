"""Megatron-Core: distributed checkpoints. Its training loop is not in the package (docs)."""

from __future__ import annotations

from pathlib import Path

from frameworks import CHECKPOINT, both_ways, hooked, needs, one_rank

needs("megatron.core")

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


def test_distributed_checkpoint(tmp_path: Path) -> None:
    rings = both_ways(CODE, tmp_path, **one_rank())
    (ring,) = [ring for ring in rings if ring.of(CHECKPOINT)]
    assert "megatron.core.dist_checkpointing.serialization" in hooked(ring)
    assert [save.a for save in ring.of(CHECKPOINT)] == [-1]  # what its processes wrote is not known
