"""What does one refresh of `clusterprof top` cost for a job of many nodes? CPU and memory by size.

8 to 1,024 ranks, 160 metrics a node at 10 Hz and 200 spans a second of each rank: the recordings of
`_cluster_recording.py`, 75 s of them, on synchronous clocks. The first refresh reads all data and
analyzes the last minute, as `--once` does; every further one analyzes it again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cluster_recording import RANKS, remove, write_job, write_node

SECONDS = 75
TARGET_RANKS, TARGET_CPU_S = 1024, 3.0
LOOK = """
import json, resource, sys, time
from pathlib import Path
from clusterprof.analysis.detectors.registry import list_limit_classes
from clusterprof.analysis.live import LiveJob
from clusterprof.config import build_limits
from clusterprof.cli import common
from clusterprof.output.renderers.live import View, draw_screen
job = LiveJob([Path(sys.argv[1])], build_limits(common.load_profile(None), list_limit_classes()))
spent = []
for _ in range(2):
    began = time.process_time()
    job._report_and_error = None  # as if all nodes had grown
    live = job.update(int(sys.argv[2]))
    lines = draw_screen(live, View(100, 40), False)
    spent.append(time.process_time() - began)
assert not live.trouble and len(live.ranks) == int(sys.argv[3]), (live.trouble, len(live.ranks))
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
print(json.dumps({"spent": spent, "bytes": peak_bytes, "lines": lines[1:4]}))
"""


def main() -> None:
    """Print one line per size."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--ranks", type=int, nargs="*", default=[8, 128, 1024])
    sizes = asked.parse_args().ranks
    with tempfile.TemporaryDirectory() as folder:
        plain, late = Path(folder) / "plain", Path(folder) / "late"
        write_node(plain, SECONDS, late=False)
        write_node(late, SECONDS, late=True)
        for ranks in sizes:
            job = Path(folder) / "job"
            job.mkdir()
            size = write_job(job, ranks // RANKS, plain, late, apart_ns=0)
            command = [sys.executable, "-c", LOOK, str(job), str((SECONDS + 1) * 10**9), str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            measured = json.loads(done.stdout)
            remove(job)
            first, again = measured["spent"]
            target = f" (target {TARGET_CPU_S:g})" if ranks == TARGET_RANKS else ""
            print(
                f"{ranks:5} ranks, {size / 1e6:3.0f} MB: first look {first:5.2f} CPU-s{target}, "
                f"{first / ranks * 1e3:.1f} ms a rank; then {again:5.2f} CPU-s a look; "
                f"{measured['bytes'] / 2**20:.0f} MiB"
            )
        print("\n".join(f"      {line.strip()}" for line in measured["lines"]))


if __name__ == "__main__":
    main()
