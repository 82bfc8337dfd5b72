"""WebDataset: its WebLoader stands on torch's loader, whose hooks see it."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import (
    find_trainer_ring,
    list_steps,
    require_modules,
    run_with_and_without_probe,
)
from tests.support.probe_jobs import DATA_WAIT, FETCH, LOADER_START, WORKER_START

require_modules("webdataset")

CODE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, webdataset

for shard in range(2):
    with webdataset.TarWriter(f"{sys.argv[1]}/shard-{shard}.tar") as tar:
        for row in range(8):
            tar.write({"__key__": f"{shard}-{row}", "x.pth": torch.full((3,), float(row))})
shards = [f"{sys.argv[1]}/shard-{shard}.tar" for shard in range(2)]
dataset = webdataset.WebDataset(shards, shardshuffle=False).decode().to_tuple("x.pth").batched(4)
torch.manual_seed(1)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for (batch,) in webdataset.WebLoader(dataset, batch_size=None, num_workers=2):
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()
print(net.weight.tolist())
"""


def test_a_webdataset_loader_records_steps_waits_and_fetches(tmp_path: Path) -> None:
    rings = run_with_and_without_probe(CODE, tmp_path)
    main = find_trainer_ring(rings)
    # Two shards of 8 rows, one to each worker, in batches of 4 that the workers make.
    assert list_steps(main) == 4 * [(0, 4, -1)]
    workers = {ring.of(WORKER_START)[0].a: ring for ring in rings if ring is not main}
    pids = [workers[number].pid for number in (0, 1)]
    assert [wait.b for wait in main.of(DATA_WAIT) if wait.a >= 0] == pids + pids
    assert [start.a for start in main.of(LOADER_START)] == [2]
    assert [len(workers[number].of(FETCH)) for number in (0, 1)] == [2, 2]
