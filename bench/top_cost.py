"""What does one look of `clusterprof top` cost for a job of many nodes? CPU and memory by size.

8 to 1,024 ranks, 160 metrics a node at 10 Hz and 200 spans a second of each rank: the recordings of
`_cluster_recording.py`, 75 s of them, on synchronous clocks. Each look is that of `--once`: reading
all nodes and comparing all ranks, without the start of Python.

    settled     the nodes have settled their last minute, as their helpers do; the look merges
    directly    the look reads the recordings, as for small jobs and where no node settles
    a node      what the helper spends on one window, and the size of the file
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cluster_recording import RANKS, remove_job, write_job, write_node

SECONDS = 75
TARGET_RANKS, TARGET_CPU_S, TARGET_BYTES = 1024, 1.0, 200 << 20
LOOK = """
import json, resource, sys, time
from pathlib import Path
from clusterprof.analysis.detectors.registry import list_limit_classes
from clusterprof.analysis.live.job import LiveJob
from clusterprof.config import build_limits
from clusterprof.cli import common
from clusterprof.output.renderers.top_screen import View, draw_screen
limits = build_limits(common.load_profile(None), list_limit_classes())
job = LiveJob([Path(sys.argv[1])], limits, min_settled_nodes=int(sys.argv[4]))
began = time.process_time()
live = job.update(int(sys.argv[2]))
lines = draw_screen(live, View(100, 40), False)
spent = time.process_time() - began
assert not live.trouble and len(live.ranks) == int(sys.argv[3]), (live.trouble, len(live.ranks))
assert not live.reading, live.reading
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
print(json.dumps({"spent": spent, "bytes": peak_bytes, "lines": lines[1:4]}))
"""
SETTLE = """
import json, sys, time
from pathlib import Path
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.settler import Settler
spent = []
for folder in sorted(Path(sys.argv[1]).iterdir()):
    settler = Settler(folder, build_limits({}))
    settler.poll()
    began = time.process_time()
    settler.settle()
    spent.append(time.process_time() - began)
size = max(path.stat().st_size for path in Path(sys.argv[1]).glob("*/live-0.settled"))
print(json.dumps({"spent": sorted(spent)[len(spent) // 2], "bytes": size}))
"""


def main() -> None:
    """Print one block per size."""
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
            direct = _measure_look(job, ranks, settled=False)
            node = _run(SETTLE, str(job))
            settled = _measure_look(job, ranks, settled=True)
            remove_job(job)
            _print_size(ranks, size, settled, direct, node)
        print("\n".join(f"      {line.strip()}" for line in settled["lines"]))


def _measure_look(job: Path, ranks: int, settled: bool) -> dict[str, Any]:
    min_settled_nodes = 1 if settled else sys.maxsize
    now_ns = (SECONDS + 1) * 10**9
    return _run(LOOK, str(job), str(now_ns), str(ranks), str(min_settled_nodes))


def _run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _print_size(ranks: int, size: int, settled: Any, direct: Any, node: Any) -> None:
    is_target = ranks == TARGET_RANKS
    target = f" (target {TARGET_CPU_S:g})" if is_target else ""
    target_bytes = f" (target {TARGET_BYTES >> 20})" if is_target else ""
    print(
        f"{ranks:5} ranks, {size / 1e6:3.0f} MB\n"
        f"      settled   {settled['spent']:6.2f} CPU-s{target}, "
        f"{settled['bytes'] / 2**20:.0f} MiB{target_bytes}\n"
        f"      directly  {direct['spent']:6.2f} CPU-s, {direct['bytes'] / 2**20:.0f} MiB; "
        f"{direct['spent'] / settled['spent']:.1f} x\n"
        f"      a node    {node['spent'] * 1e3:6.0f} CPU-ms a window, {node['bytes'] / 1e3:.0f} kB"
    )


if __name__ == "__main__":
    main()
