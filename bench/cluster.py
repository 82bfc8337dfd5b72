"""What does it cost to analyze a job of many nodes? CPU, wall and memory by size and by part.

Clusters of the lab's simulator (`clusterprof_lab.cluster`), each with a fault: 16 to 128 ranks of
ten minutes; `--ranks`, `--minutes` and `--topology` for others. Of each: CPU seconds per rank-hour;
the serial part, that is the CPU of the process that calls `analyze`, by its parts; the memory of
that process and of all together; and whether the report names the fault and every sum is exact.

    python -m bench cluster
    python bench/cluster.py --ranks 16 64 128 256 512 1024 --minutes 10 --store bench/results
    python bench/cluster.py --ranks 10000 --minutes 2 --store bench/results
    python bench/cluster.py --draw bench/results    # the table, and docs/scale-cost.svg

With `--store` a run is kept in DIR/cluster.json; one of the same cluster replaces it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cluster_page import draw_curve, format_parts, format_table

FOLDER = Path(__file__).resolve().parent
PICTURE = FOLDER.parent / "docs" / "scale-cost.svg"
FAULT = "slow-storage:1,share=0.15"
TARGET_S = 0.25
"""CPU seconds per rank-hour."""


def main() -> None:
    """Print a table, and the parts of each run."""
    options = parse_options()
    rows = []
    for ranks in [] if options.draw else options.ranks:
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            row = measure(Path(folder) / "run", ranks, options)
        rows.append(row)
        print(format_parts(row), flush=True)
        if options.store:
            store_row(options.store, row)
    if options.draw:
        rows = json.loads((options.draw / "cluster.json").read_text())
        PICTURE.write_text(draw_curve(rows, TARGET_S), encoding="utf-8")
    print(format_table(rows))
    if not options.draw and not all(row["check"]["right"] for row in rows):
        sys.exit(1)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64, 128])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--topology", default="data-parallel")
    parser.add_argument("--fault", default=FAULT)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--store", type=Path, metavar="DIR")
    parser.add_argument("--draw", type=Path, metavar="DIR")
    parser.add_argument("--scratch", type=Path, help="where recordings go meanwhile")
    return parser.parse_args()


def measure(run: Path, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Simulate a cluster, analyze it in a fresh process and return its row."""
    seconds = round(options.minutes * 60)
    began = time.perf_counter()
    command = [sys.executable, "-m", "clusterprof_lab", "cluster", "--out", str(run)]
    command += ["--topology", options.topology, "--ranks", str(ranks), "--seconds", str(seconds)]
    command += ["--fault", options.fault, "--processes", str(options.jobs)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    simulated_s = time.perf_counter() - began
    size = sum(path.stat().st_size for path in run.rglob("*.cpf"))
    result, most = run_analysis(run, options.jobs)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "topology": options.topology,
        "ranks": ranks,
        "seconds": seconds,
        "fault": options.fault,
        "bytes": size,
        "simulated_s": simulated_s,
        "most_bytes": most,
        **result,
    }


def run_analysis(run: Path, processes: int) -> tuple[dict[str, Any], int]:
    """Analyze in a fresh process; return its answer and the most memory of it and its workers."""
    command = [sys.executable, str(FOLDER / "_cluster_analysis.py"), str(run), str(processes)]
    most = 0
    with tempfile.TemporaryFile("w+") as answer:
        running = subprocess.Popen(command, stdout=answer, text=True)
        while running.poll() is None:
            most = max(most, sum(map(read_own_bytes, list_family(running.pid))))
            time.sleep(0.5)  # reading the pages of a gigabyte takes milliseconds
        if running.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {running.returncode}")
        answer.seek(0)
        return json.loads(answer.read()), most


def list_family(pid: int) -> list[int]:
    """List a process and all that it has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(descendant for child in children for descendant in list_family(int(child)))]


def read_own_bytes(pid: int) -> int:
    """Read the memory of a process; what processes share counts in none but its mapped file."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(rollup.split("\nPss:")[1].split()[0]) << 10
    except (OSError, IndexError):
        return 0


def store_row(folder: Path, row: dict[str, Any]) -> None:
    """Keep a row; it replaces that of an equal cluster."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cluster.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    same = [(r["topology"], r["ranks"], r["seconds"]) for r in rows]
    key = row["topology"], row["ranks"], row["seconds"]
    if key in same:
        rows[same.index(key)] = row
    else:
        rows.append(row)
    rows.sort(key=lambda r: (r["topology"], r["ranks"], r["seconds"]))
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
