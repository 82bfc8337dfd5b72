"""torchdata's StatefulDataLoader, WebDataset's WebLoader and Mosaic's StreamingDataLoader."""

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
from tests.support.probe_jobs import DATA_WAIT, FETCH, LOADER_START, WORKER_START

require_modules("torchdata")

CODE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

def main():
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = StatefulDataLoader(torch.ones(12, 3), batch_size=4, OPTIONS)
    for batch in loader:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    print(net.weight.tolist(), sorted(loader.state_dict()))

if __name__ == "__main__":
    main()
"""


def test_a_stateful_loader_without_workers_records_fetches(tmp_path: Path) -> None:
    ring = find_trainer_ring(
        run_with_and_without_probe(CODE.replace("OPTIONS", "num_workers=0"), tmp_path)
    )
    assert "torchdata.stateful_dataloader.stateful_dataloader" in list_hooked_modules(ring)
    assert list_steps(ring) == 3 * [(0, 4, -1)]
    waits = [(w.a, w.b, w.c, w.d) for w in ring.of(DATA_WAIT)]
    assert waits == [(0, 0, 0, 1), (1, 0, 0, 0), (2, 0, 0, 0)]
    assert [f.a for f in ring.of(FETCH)] == [4, 4, 4]
    assert [(s.a, s.b, s.c, s.d) for s in ring.of(LOADER_START)] == [(0, 0, 0, 0)]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_stateful_loader_with_workers_records_their_waits(tmp_path: Path, context: str) -> None:
    options = f"num_workers=2, multiprocessing_context={context!r}"
    rings = run_with_and_without_probe(CODE.replace("OPTIONS", options), tmp_path)
    main = find_trainer_ring(rings)
    assert list_steps(main) == 3 * [(0, 4, -1)]
    workers = {ring.of(WORKER_START)[0].a: ring for ring in rings if ring is not main}
    assert sorted(workers) == [0, 1]
    assert [(w.a, w.b, w.c) for w in main.of(DATA_WAIT) if w.a >= 0] == [
        (0, workers[0].pid, 2),
        (1, workers[1].pid, 2),
        (2, workers[0].pid, 2),
    ]
    assert [(s.a, s.c) for s in main.of(LOADER_START)] == [(2, 2)]
    for ring in workers.values():
        assert [(s.b, s.c) for s in ring.of(WORKER_START)] == [(2, main.pid)]
    assert [len(workers[n].of(FETCH)) for n in (0, 1)] == [2, 1]
