"""What does it cost to analyze a job of many nodes, blame included? Wall, CPU and memory by size.

16, 32, 64 and 128 ranks of one hour (`--hours`), 200 spans a second each and 160 metrics a node at
10 Hz, in two processes. 16 of the spans a second are operations with other ranks; in every step
rank 3 keeps all others waiting. The recordings are those of `_cluster_recording.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cluster_recording import OPERATIONS_A_STEP, RANKS, STEPS, remove, write_job, write_node

TARGET_S, TARGET_BYTES = 25, 1 << 30
ANALYSE = """
import json, resource, sys, time
from pathlib import Path
from clusterprof.analysis.pipeline import analyze
began = time.perf_counter()
if __name__ == "__main__":
    report = analyze(Path(sys.argv[1]), jobs=int(sys.argv[2]))
    wall_s = time.perf_counter() - began
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({
        "wall_s": wall_s, "cpu_s": [usage.ru_utime + usage.ru_stime for usage in used],
        "lost_ns": report.lost_ns, "in_step_ns": report.in_step_ns,
        "causes": [(f.cause.id, f.lost_ns, [c.rank for c in f.culprits][:3])
                  for f in report.findings],
        "reasons": report.unattributed_reasons,
    }))
"""


def main() -> None:
    """Print one line per size."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--hours", type=float, default=1.0)
    asked.add_argument("--ranks", type=int, nargs="*", default=[16, 32, 64, 128])
    asked.add_argument("--jobs", type=int, default=2)
    options = asked.parse_args()
    seconds = round(options.hours * 3600)
    with tempfile.TemporaryDirectory() as folder:
        plain, late = Path(folder) / "plain", Path(folder) / "late"
        write_node(plain, seconds, late=False)
        write_node(late, seconds, late=True)
        for ranks in options.ranks:
            job = Path(folder) / "job"
            job.mkdir()
            size = write_job(job, ranks // RANKS, plain, late)
            result = analyzed(job, options.jobs)
            remove(job)
            _print(ranks, seconds, size, result)


def _print(ranks: int, seconds: int, size: int, result: dict) -> None:
    operations = ranks * seconds * STEPS * OPERATIONS_A_STEP
    target = f" (target {TARGET_S})" if ranks == 128 and seconds == 3600 else ""
    hours = ranks * seconds / 3600
    print(
        f"{ranks:4} ranks, {hours:5.1f} rank-hours: {size / 1e6:5.0f} MB, "
        f"{result['wall_s']:5.1f} s{target}, {sum(result['cpu_s']):5.1f} CPU-s "
        f"({result['cpu_s'][0]:.1f} in the process that blames), "
        f"{result['bytes'] / 2**20:4.0f} MiB; "
        f"{operations / 1e6:.1f} M operations, {sum(result['cpu_s']) / hours * 1000:.0f} CPU-ms "
        "per rank-hour"
    )
    first = "; ".join(
        f"{id_} {ns / result['lost_ns']:.0%} by {who}" for id_, ns, who in result["causes"]
    )
    print(f"     {first}; {result['reasons'][:2]}", flush=True)


def analyzed(job: Path, processes: int) -> dict:
    """Analyze in a fresh process; note the most memory that it and its workers had together."""
    script = job.parent / "analyze.py"
    script.write_text(ANALYSE)
    running = subprocess.Popen(
        [sys.executable, str(script), str(job), str(processes)], stdout=subprocess.PIPE, text=True
    )
    most = 0
    while running.poll() is None:
        most = max(most, sum(map(resident_bytes, family(running.pid))))
        time.sleep(0.1)
    assert running.stdout is not None and running.returncode == 0
    return {**json.loads(running.stdout.read()), "bytes": most}


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(descendant for child in children for descendant in family(int(child)))]


def resident_bytes(pid: int) -> int:
    """Return the memory of a process; what several share counts for each."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    main()
