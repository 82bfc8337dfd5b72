"""Eight workers bound to one CPU beside a file system that looks slow: who is blamed?

Everything is real but the accelerator: the launcher binds `record` and with it the job, as Slurm
does; the workers are torch's; what they read comes from a disk. A read seems slow because its
reader is not given the CPU, which the kernel counts; the script prints that count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.util.ranges import parse_cpulist

pytestmark = [
    pytest.mark.torch,
    pytest.mark.accept,
    pytest.mark.skipif(  # not imported here: that costs more than the job itself
        find_spec("torch") is None, reason="torch is not installed (pip install torch==2.13.0)"
    ),
]

SCRIPT = Path(__file__).parent / "scripts" / "bound.py"
BIND = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"  # noqa: E501
STEPS = 96


def test_cpu_affinity_is_the_cause_and_not_the_disk(tmp_path: Path) -> None:
    online = parse_cpulist(Path("/sys/devices/system/cpu/online").read_text())
    if len(online) < 2:
        pytest.skip("one CPU only: there is nothing to take away")
    cpu = max(os.sched_getaffinity(0))
    data, run = tmp_path / "records.bin", tmp_path / "run"
    with data.open("wb") as file:
        file.write(os.urandom(16 << 20))
        file.flush()
        os.fsync(file.fileno())
    job = [sys.executable, str(SCRIPT), "--data", str(data), "--steps", str(STEPS)]
    record = [sys.executable, "-m", "clusterprof", "record", "-o", str(run), "--"]
    done = subprocess.run(
        [sys.executable, "-c", BIND, str(cpu), *record, *job],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    document = json.loads(done.stdout)
    # The truth: reads took long, and for most of it their reader was ready to run.
    assert document["read_delay_ns"] > 0.5 * document["read_ns"]
    assert document["delay_ns"] > 0.5 * document["work_ns"]

    report = analyze(run)
    (ledger,) = report.ranks
    assert sum(ns for _, ns in ledger.buckets) == ledger.lost_ns > 0.5 * ledger.in_step_ns
    inside = [finding for finding in report.findings if not finding.outside_steps]
    assert inside[0].cause.id == "cpu-contention"
    storage = [finding for finding in inside if finding.cause.family == "storage"]
    assert sum(item.share_ratio for item in storage) < 0.03  # no false cause, as the corpus has it
    assert inside[0].culprits[0].resource == f"affinity: 8 workers on 1 of {len(online)} CPUs"
    evidence = {evidence_row.name: evidence_row.value for evidence_row in inside[0].evidence}
    assert evidence["job.cpus_allowed_count"] == 1
    assert evidence["job.cpus_needed_count"] > 2  # eight and the main process, less their sleep
    (note,) = [note for note in report.notes if "dataloader workers" in note]
    assert f"may run on 1 of {len(online)} CPUs only (CPU {cpu})" in note
