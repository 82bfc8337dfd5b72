"""Do our waits between ranks agree with PyTorch's flight recorder?

A data-parallel gloo job of two real processes, one of which is late in every step, is recorded; the
dumps that its ranks leave say when each operation was issued. Printed is what the report says of
the comparison, for a rank that is late by nothing, by a third of a step, and by most of it: the
difference of the waits is at most 3 points of a rank's time. Steps are as long as those of small
jobs: on a busy machine a rank wakes up milliseconds after an operation has ended, and both sources
divide such a delay in their own way.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests/scenarios/training/scripts/slow_rank.py"
STEPS = 200
WORK_S = 0.05
"""Asleep, so that two CPUs are enough."""
LATE_S = (0.0, 0.02, 0.1)
MAX_POINTS = 3.0
PATIENCE_S = 20.0


def record(out: Path, late_s: float) -> None:
    """Record the job, and wait until the recorder has ended too."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = [*torchrun, "--nproc-per-node", "2", str(SCRIPT), str(STEPS), str(late_s), str(WORK_S)]
    command = [sys.executable, "-m", "clusterprof", "record", "-o", str(out), "--", *job]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=300)
    end = time.monotonic() + PATIENCE_S
    while len(list(out.glob("*/nccl/exit_rank_*.json"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.0)  # its last records


def main() -> int:
    """Record and analyze a job for each lateness; return 1 if a difference is too large."""
    sys.path.insert(0, str(ROOT))
    from clusterprof.analysis.pipeline import analyze

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        for late_s in LATE_S:
            out = Path(folder) / f"late-{late_s}"
            record(out, late_s)
            notes = [note for note in analyze(out).notes if "flight recorder" in note]
            points = [
                float(value) for note in notes for value in re.findall(r"difference ([\d.]+)", note)
            ]
            failed |= not points or max(points) > MAX_POINTS
            print(f"late by {1000 * late_s:3.0f} ms a step: {'; '.join(notes) or 'not compared'}")
    print(f"target: at most {MAX_POINTS:g} points of a rank's time apart")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
