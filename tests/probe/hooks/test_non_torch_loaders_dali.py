"""DALI: waits of its iterators for PyTorch and for JAX over a pipeline on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import both_ways, hooked, needs, steps_of, trainer_of
from tests.support.job_python import is_there
from tests.support.probing import DATA_WAIT

needs("nvidia.dali")

CODE = """
import numpy, torch
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator

def row(info):
    return numpy.full(3, info.idx_in_epoch, numpy.float32)

@pipeline_def(batch_size=4, num_threads=1, device_id=None)
def rows():
    return fn.external_source(row, batch=False)

torch.manual_seed(1)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for (batch,) in DALIGenericIterator(rows(), ["x"], size=12):
    optimizer.zero_grad()
    net(batch["x"]).square().mean().backward()
    optimizer.step()
print(net.weight.tolist())
"""


def test_pytorch_iterator(tmp_path: Path) -> None:
    ring = trainer_of(both_ways(CODE, tmp_path))
    assert "nvidia.dali.plugin.pytorch" in hooked(ring)
    # The first batch is taken when the iterator is made, and handed over once.
    assert steps_of(ring) == 3 * [(0, 4, -1)]
    assert len(ring.of(DATA_WAIT)) == 4


JAX = """
import numpy
import clusterprof
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.jax import DALIGenericIterator

def row(info):
    return numpy.full(3, info.idx_in_epoch, numpy.float32)

@pipeline_def(batch_size=4, num_threads=1, device_id=None)
def rows():
    return fn.external_source(row, batch=False)

for batch in DALIGenericIterator(rows(), ["x"], size=12):
    print(batch["x"].sum())
    clusterprof.step()
"""


@pytest.mark.skipif(not is_there("jax"), reason="needs jax: make test-frameworks")
def test_jax_iterator(tmp_path: Path) -> None:
    ring = trainer_of(both_ways(JAX, tmp_path, JAX_PLATFORMS="cpu"))
    assert "nvidia.dali.plugin.jax.iterator" in hooked(ring)
    # How much an array of JAX holds is not asked for.
    assert steps_of(ring) == 3 * [(1, -1, -1)]
    assert len(ring.of(DATA_WAIT)) == 4
