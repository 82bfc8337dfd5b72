"""What does recording cost a job? Pairs of the same command, with and without the recorder.

    python bench/overhead.py [--pairs N] [--pattern REGEX] [--store FILE] [-- CMD…]

Each pair runs CMD once below `clusterprof record` and once alone, in random order. Printed are the
median of the ratios and its 95 % bootstrap interval: of the wall time, of the CPU time of CMD and
its children, and of the number that --pattern finds in its output (seconds of the training loop,
for example, which leaves out the start). The first pair warms up and does not count. Default CMD: a
small training with torch on the CPU, or with NumPy where there is no torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DRAWS = 4000
STORE = Path(__file__).parent / "results" / "overhead.json"
PATTERN = r"trained in ([0-9.]+) s"
TRAINING = """
import time
try:
    import torch
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512,
    10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, target = torch.randn(256, 256), torch.randint(0, 10, (256,))
    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()
except ImportError:
    import numpy
    data, weights = numpy.ones((256, 256)), numpy.ones((256, 256))
    def step():
        for _ in range(8):
            numpy.tanh(data @ weights)
for _ in range(50):
    step()
began = time.perf_counter()
for _ in range(1500):
    step()
print(f"trained in {time.perf_counter() - began:.6f} s")
"""
Run = dict[str, float]


def main() -> int:
    """Run the pairs and print the three intervals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--pattern", default=PATTERN)
    parser.add_argument("--store", type=Path, help="write the result for docs/overhead.md")
    parser.add_argument("command", nargs="*")
    asked = parser.parse_args()
    command = asked.command or [sys.executable, "-c", TRAINING]
    if len(command) == 1 and " " in command[0]:
        command = shlex.split(command[0])
    draw = random.Random(1)
    pairs: list[tuple[Run, Run]] = []
    busy = read_busy_s()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="clusterprof-overhead-") as name:
        for number in range(asked.pairs + 1):
            order = draw.sample((True, False), 2)
            runs = {
                recorded: run_once(command, Path(name) / str(number), recorded, asked.pattern)
                for recorded in order
            }
            if number:
                pairs.append((runs[True], runs[False]))
    own = sum(run["cpu"] for pair in pairs for run in pair) * (1 + 1 / asked.pairs)
    others = max(0.0, read_busy_s() - busy - own) / (time.monotonic() - began)
    results = {name: compare_runs(pairs, name) for name in pairs[0][0]}
    print(f"{asked.pairs} pairs; others used {others:.2f} of {os.cpu_count()} CPUs meanwhile")
    for name, (median, low, high) in results.items():
        print(f"{TITLES[name]:28} {median:+.2f} % ({low:+.2f} to {high:+.2f})")
    if asked.store:
        values = {
            "date": datetime.date.today().isoformat(),
            "pairs": asked.pairs,
            "cpus": os.cpu_count(),
            "others_cpus": round(others, 2),
            "percent": {name: [round(value, 3) for value in row] for name, row in results.items()},
        }
        asked.store.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 0


TITLES = {
    "wall": "wall time, start included",
    "cpu": "CPU time, start included",
    "number": "the training loop",
}


def run_once(command: list[str], out: Path, recorded: bool, pattern: str) -> Run:
    """Run the command once; return wall time, CPU time and the number in its output, s."""
    prefix = [sys.executable, "-m", "clusterprof", "record", "-o", str(out), "--"]
    variables = {"SLURM_JOB_ID": f"overhead-{os.getpid()}-{out.name}"} if recorded else {}
    began = time.monotonic()
    process = subprocess.Popen(
        [*prefix, *command] if recorded else command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)[:80]} ended with {process.returncode}")
    run = {"wall": wall_s, "cpu": usage.ru_utime + usage.ru_stime}
    match = re.search(pattern, output)
    return {**run, "number": float(match[1])} if match else run


def compare_runs(pairs: list[tuple[Run, Run]], name: str) -> tuple[float, float, float]:
    """Return the median of what recording adds, %, and its 95 % bootstrap interval."""
    added = [100 * (recorded[name] / alone[name] - 1) for recorded, alone in pairs]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(added, k=len(added))) for _ in range(DRAWS))
    return statistics.median(added), medians[DRAWS // 40], medians[-DRAWS // 40]


def read_busy_s() -> float:
    """Return the CPU time that all processes of the machine have used, s."""
    words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
