"""SPDL: waits for the items of a real pipeline, made by threads of the job's own process."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import (
    find_trainer_ring,
    list_hooked_modules,
    list_steps,
    require_modules,
    run_with_and_without_probe,
)
from tests.support.probe_jobs import DATA_WAIT

require_modules("spdl")

CODE = """
import sys, time, warnings
warnings.simplefilter("ignore")
import torch
from spdl.pipeline import PipelineBuilder

def load(row):
    time.sleep(0.02)
    return torch.full((4, 3), float(row))

pipeline = PipelineBuilder().add_source(range(5)).pipe(load).add_sink(1).build(num_threads=1)
torch.manual_seed(1)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
with pipeline.auto_stop():
    for batch in pipeline.get_iterator(timeout=60):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
print(net.weight.tolist())
"""


def test_an_spdl_pipeline_records_data_waits(tmp_path: Path) -> None:
    ring = find_trainer_ring(run_with_and_without_probe(CODE, tmp_path))
    assert "spdl.pipeline._pipeline" in list_hooked_modules(ring)
    assert list_steps(ring) == 5 * [(0, 4, -1)]
    waits = ring.of(DATA_WAIT)
    # Which thread made a batch, and how many work at it, is not known.
    assert [(wait.a, wait.b, wait.c, wait.d) for wait in waits] == 5 * [(-1, -1, -1, -1)]
    # One thread sleeps 20 ms for each of them: 100 ms, less what passed before the first wait.
    assert sum(wait.end_ns - wait.start_ns for wait in waits) > 60_000_000
