"""What do live metrics cost? CPU of settling per 8 GPUs, a scrape, and `collect` of many nodes.

8 ranks, 160 metrics a node at 10 Hz and 200 spans a second of each rank: the recordings of
`_cluster_recording.py`, which are shown to the settling process as they would grow.

    a node      reading, settling, saving and publishing a part of each period, without starting
    a scrape    over loopback, of that node
    collect     a part of a job of many nodes, with the comparison of all ranks
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cluster_recording import RANKS, remove_job, write_job, write_node

SECONDS = 150
TARGET_CORE_RATIO, TARGET_SCRAPE_MS, TARGET_BYTES = 0.005, 5.0, 64 << 10
NODE = """
import json, os, resource, sys, time, urllib.request
from pathlib import Path
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.incremental import JobParts
from clusterprof.output.exporters.live_metrics import LiveExporter, SavedState
source, folder = Path(sys.argv[1]), Path(sys.argv[2])
period_s, seconds = int(sys.argv[3]), int(sys.argv[4])
folder.mkdir()
files = sorted(source.glob("*.cpf"))
sizes = [path.stat().st_size for path in files]

def grow(share):
    left = round(share * sum(sizes))
    for path, size in zip(files, sizes):
        with open(folder / path.name, "ab") as out, open(path, "rb") as file:
            file.seek(out.tell())
            out.write(file.read(max(min(left, size) - out.tell(), 0)))
        left -= size
        if left <= 0:
            return

state = SavedState(folder)
parts = JobParts([folder], build_limits({}), False, {folder.name: state.cursor})
exporter = LiveExporter(parts, "node", ["19640"], {}, print, state, period_s)
grow(0.1)
exporter.export_part()  # starting is not repeated
spent = []
for second in range(period_s, seconds, period_s):
    grow(second / seconds)
    began = time.process_time()
    exporter.export_part()
    spent.append(time.process_time() - began)
scrapes, sizes = [], set()
for _ in range(50):
    began = time.perf_counter()
    with urllib.request.urlopen("http://127.0.0.1:19640/metrics") as answer:
        sizes.add(len(answer.read()))
    scrapes.append(time.perf_counter() - began)
exporter.close()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
print(json.dumps({"spent": sorted(spent)[len(spent) // 2], "parts": len(spent), "peak": peak,
                  "scrape": sorted(scrapes)[25], "bytes": max(sizes)}))
"""
JOB = """
import json, resource, sys, time
from pathlib import Path
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.incremental import Cursor, JobParts
from clusterprof.output.renderers.live_counters import LiveSeries
from clusterprof.output.renderers.openmetrics import render_families
parts = JobParts([Path(sys.argv[1])], build_limits({}), True)
parts.poll()
for node in parts.nodes:
    node.skip_to(node.tail.latest_ns - 18_000_000_000)
began = time.process_time()
part = parts.settle()
spent = time.process_time() - began
assert not part.trouble and len(part.ranks) == int(sys.argv[2]), (part.trouble, len(part.ranks))
series = LiveSeries("job", 1)
series.add(part)
size = len(render_families(series.build_families()).encode())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
print(json.dumps({"spent": spent, "bytes": size, "peak": peak}))
"""


def main() -> None:
    """Print one line per question."""
    with tempfile.TemporaryDirectory() as folder:
        plain, late = Path(folder) / "plain", Path(folder) / "late"
        write_node(plain, SECONDS, late=False)
        write_node(late, 75, late=True)
        for period_s in (15, 30):
            grown = Path(folder) / f"grown-{period_s}"
            node = _run(NODE, str(plain), str(grown), str(period_s), str(SECONDS))
            ratio = node["spent"] / period_s
            target = f" (target {TARGET_CORE_RATIO:.1%})" if period_s == 30 else ""
            print(
                f"a node, every {period_s} s   {node['spent'] * 1e3:4.0f} CPU-ms a part,"
                f" {ratio:.2%} of a core{target}, {node['peak'] / 2**20:.0f} MiB"
            )
        print(
            f"a scrape             {node['scrape'] * 1e3:4.1f} ms (target {TARGET_SCRAPE_MS:g}),"
            f" {node['bytes'] / 1024:.1f} KiB (target {TARGET_BYTES >> 10})"
        )
        write_node(short := Path(folder) / "short", 75, late=False)
        for ranks in (16, 128, 1024):
            job = Path(folder) / "job"
            job.mkdir()
            write_job(job, ranks // RANKS, short, late, apart_ns=0)
            part = _run(JOB, str(job), str(ranks))
            remove_job(job)
            print(
                f"collect, {ranks:5} ranks {part['spent']:5.2f} CPU-s a part of 15 s,"
                f" {part['bytes'] / 1024:.1f} KiB, {part['peak'] / 2**20:.0f} MiB"
            )


def _run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


if __name__ == "__main__":
    main()
