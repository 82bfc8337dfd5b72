"""Mosaic Streaming: its StreamingDataLoader is torch's loader, whose hooks see it."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import (
    find_trainer_ring,
    list_steps,
    require_modules,
    run_with_and_without_probe,
)
from tests.support.probe_jobs import DATA_WAIT, FETCH, WORKER_START

require_modules("streaming", "torchvision")

CODE = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy, torch
try:
    import torchvision
except RuntimeError:  # built for another PyTorch: lacks its operators, which nobody uses here
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

remote, local = sys.argv[1] + "/remote", sys.argv[1] + "/local"
with MDSWriter(out=remote, columns={"x": "ndarray:float32:3"}, size_limit=256) as out:
    for row in range(16):
        out.write({"x": numpy.full(3, row, numpy.float32)})
dataset = StreamingDataset(remote=remote, local=local, batch_size=4, shuffle=False)
torch.manual_seed(1)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for batch in StreamingDataLoader(dataset, batch_size=4, num_workers=2):
    optimizer.zero_grad()
    net(batch["x"]).square().mean().backward()
    optimizer.step()
print(net.weight.tolist())
"""


def test_a_streaming_data_loader_records_steps_waits_and_fetches(tmp_path: Path) -> None:
    rings = run_with_and_without_probe(CODE, tmp_path)
    main = find_trainer_ring(rings)
    assert list_steps(main) == 4 * [(0, 4, -1)]
    workers = {ring.of(WORKER_START)[0].a: ring for ring in rings if ring.of(WORKER_START)}
    assert sorted(workers) == [0, 1]
    pids = [workers[number].pid for number in (0, 1)]
    assert [wait.b for wait in main.of(DATA_WAIT) if wait.a >= 0] == pids + pids
    assert [len(workers[number].of(FETCH)) for number in (0, 1)] == [2, 2]
