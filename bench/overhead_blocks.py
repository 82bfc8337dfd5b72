"""What does recording cost a training loop? One recorded job that switches it on and off in turns.

    python bench/overhead_blocks.py [--blocks N] [--ranks N] [--device-ms MS] [--store FILE]

Two runs of a job differ by several percent on most machines; blocks of steps that follow each other
differ by far less. The job runs below `clusterprof record`. After each block it switches: *off*
stops the recorder's processes (SIGSTOP) and ends the probe's thread, *on* lets both go on. The
hooks on the job's functions stay in: `span_cost.py` and `collective_cost.py` measure them. Printed
are the mean of the pairs' ratios and its 95 % bootstrap interval.

With `--device-ms`, each step also sleeps that long, as a rank does that waits for its accelerator:
many ranks then share a few CPUs without using all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.overhead import DRAWS, read_busy_s

JOB = r"""
import atexit, json, os, random, signal, sys, time
import psutil, torch
import torch.distributed as dist

BLOCK_S = 0.1
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
blocks, out, device_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]) / 1000
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
if WORLD > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, target = torch.randn(256, 256), torch.randint(0, 10, (256,))

def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(data), target).backward()
    optimizer.step()
    if device_s:
        time.sleep(device_s)

from _clusterprof_probe import interpreter_lock as watch  # of the recorder above this job
recorders = [
    process for process in psutil.process_iter()
    if "--run-dir=" + os.environ["CLUSTERPROF_RUN_DIR"] in process.cmdline()
]
stopped = [process for main in recorders for process in [main, *main.children(recursive=True)]]
assert stopped, "no recorder"

def switch(is_on):
    if RANK == 0:
        for process in stopped:
            process.send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)
    (watch.start if is_on else watch.stop)()

def measure_block(steps):
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - begun

atexit.register(switch, True)
warm_up = 20 if device_s else 100
measure_block(warm_up // 2)
count = torch.tensor([max(1, int(BLOCK_S / (measure_block(warm_up) / warm_up)))])
if WORLD > 1:
    dist.broadcast(count, 0)
steps, draw, pairs = int(count), random.Random(1), []
for _ in range(blocks):
    pair = {}
    for is_on in draw.sample((True, False), 2):
        if WORLD > 1:
            dist.barrier()
        switch(is_on)
        pair[is_on] = measure_block(steps)
    pairs.append((pair[True], pair[False]))
switch(True)
if RANK == 0:
    with open(out, "w") as file:
        json.dump({"steps": steps, "pairs": pairs}, file)
if WORLD > 1:
    dist.destroy_process_group()
"""


def run_job(
    blocks: int, ranks: int, device_ms: float, folder: Path
) -> tuple[list[tuple[float, float]], int]:
    """Run the job below the recorder; return time of blocks with and without it, s, and steps.

    device_ms: sleep of each step. Raises: subprocess.CalledProcessError when it fails.
    """
    script, out = folder / "job.py", folder / "pairs.json"
    script.write_text(JOB)
    job = [sys.executable, str(script), str(blocks), str(out), str(device_ms)]
    if ranks > 1:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        job = [sys.executable, "-m", *torchrun, *job[1:]]
    record = [sys.executable, "-m", "clusterprof", "record", "-o", str(folder / "recording"), "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*record, *job], env=environment, check=True, stderr=subprocess.DEVNULL)
    document = json.loads(out.read_text())
    return [(on, off) for on, off in document["pairs"]], document["steps"]


def compare_blocks(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return by how much a block with recording takes longer, %, and the 95 % interval.

    The tenth of the pairs that differ most on either side is left out: something else ran then.
    """
    logs = [math.log(on / off) for on, off in pairs]
    draw = random.Random(1)
    means = sorted(_trim_mean(draw.choices(logs, k=len(logs))) for _ in range(DRAWS))
    middle, low, high = _trim_mean(logs), means[DRAWS // 40], means[-DRAWS // 40]
    return tuple(100 * math.expm1(value) for value in (middle, low, high))  # type: ignore[return-value]


def _trim_mean(values: list[float]) -> float:
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def main() -> int:
    """Run the job and print the interval."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=400, help="pairs of blocks")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device-ms", type=float, default=0.0, help="sleep of each step")
    parser.add_argument("--store", type=Path)
    asked = parser.parse_args()
    busy_s, began_s = read_busy_s(), time.monotonic()
    # The recorder may write its last frame while the folder is removed.
    with tempfile.TemporaryDirectory(
        prefix="clusterprof-overhead-", ignore_cleanup_errors=True
    ) as name:
        pairs, steps = run_job(asked.blocks, asked.ranks, asked.device_ms, Path(name))
    cpus = os.cpu_count() or 1
    busy_ratio = (read_busy_s() - busy_s) / (time.monotonic() - began_s) / cpus
    middle, low, high = compare_blocks(pairs)
    print(
        f"{asked.ranks} ranks, {len(pairs)} pairs of blocks of {steps} steps, "
        f"{cpus} CPUs {busy_ratio:.0%} busy: {middle:+.3f} % ({low:+.3f} to {high:+.3f})"
    )
    if asked.store:
        known = json.loads(asked.store.read_text()) if asked.store.exists() else {}
        known[f"{asked.ranks} ranks, {asked.device_ms:g} ms"] = {
            "date": datetime.date.today().isoformat(),
            "ranks": asked.ranks,
            "device_ms": asked.device_ms,
            "cpus": cpus,
            "busy_ratio": round(busy_ratio, 2),
            "pairs": len(pairs),
            "percent": [round(value, 3) for value in (middle, low, high)],
        }
        asked.store.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
