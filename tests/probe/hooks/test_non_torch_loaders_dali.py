"""DALI: waits of its iterators for PyTorch and for JAX over a pipeline on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks import (
    find_trainer_ring,
    list_hooked_modules,
    list_steps,
    require_modules,
    run_with_and_without_probe,
)
from tests.support.job_python import has_module
from tests.support.probe_jobs import DATA_WAIT

require_modules("nvidia.dali")

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


def test_the_dali_pytorch_iterator_records_waits_and_batches(tmp_path: Path) -> None:
    ring = find_trainer_ring(run_with_and_without_probe(CODE, tmp_path))
    assert "nvidia.dali.plugin.pytorch" in list_hooked_modules(ring)
    # The first batch is taken when the iterator is made, and handed over once.
    assert list_steps(ring) == 3 * [(0, 4, -1)]
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


@pytest.mark.skipif(not has_module("jax"), reason="needs jax: make test-frameworks")
def test_the_dali_jax_iterator_records_waits_and_steps(tmp_path: Path) -> None:
    ring = find_trainer_ring(run_with_and_without_probe(JAX, tmp_path, JAX_PLATFORMS="cpu"))
    assert "nvidia.dali.plugin.jax.iterator" in list_hooked_modules(ring)
    # How much an array of JAX holds is not asked for.
    assert list_steps(ring) == 3 * [(1, -1, -1)]
    assert len(ring.of(DATA_WAIT)) == 4
