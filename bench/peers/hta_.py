"""Holistic Trace Analysis on one trace: its temporal breakdown and overlap, as one line of JSON."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path


def main(path: Path) -> None:
    from hta.trace_analysis import TraceAnalysis

    with tempfile.TemporaryDirectory() as folder:
        # It takes a folder of traces, one per rank; the rank is that of the file.
        copy = Path(folder) / "rank0.json.gz"
        shutil.copy(path, copy)
        with gzip.open(copy) as file:
            trace = json.load(file)
        rank = (trace.get("distributedInfo") or {}).get("rank", 0) if isinstance(trace, dict) else 0
        analyzer = TraceAnalysis(trace_files={rank: str(copy)})
        table = analyzer.get_temporal_breakdown(visualize=False)
        if not len(table):
            sys.exit("its temporal breakdown is empty: no kernel was found")
        times = table.iloc[0]
        overlap = analyzer.get_comm_comp_overlap(visualize=False).iloc[0]
    window_us = float(times["kernel_time(us)"])
    idle_us, compute_us = float(times["idle_time(us)"]), float(times["compute_time(us)"])
    print(
        json.dumps(
            {
                "version": version("HolisticTraceAnalysis"),
                "window_ms": window_us / 1e3,
                "idle_ms": idle_us / 1e3,
                "compute_ms": compute_us / 1e3,
                "overlap_pct": float(overlap["comp_comm_overlap_pctg"]),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
