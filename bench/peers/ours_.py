"""clusterprof on one trace: the totals of its ledger, as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from clusterprof import __version__
from clusterprof.analysis.pipeline import analyze_with_details

_INPUT = ("input", "storage", "cpu")


def main(path: Path) -> None:
    made = analyze_with_details([path])
    ranks = made.report.ranks
    results = [rank for node in made.across.nodes for rank in node.ranks]
    window_ns = sum(rank.in_step_ns for rank in ranks)
    lost_ns = sum(rank.lost_ns for rank in ranks)
    busy = [result.accumulator.totals.get("busy") for result in results]
    measured = any(rank.device for rank in ranks)
    idle_ns = window_ns - sum(ns or 0 for ns in busy) if measured else None
    data_ns = sum(
        ns for rank in ranks for cause, ns in rank.buckets if cause.split("-")[0] in _INPUT
    )
    waits = [rank.accumulator.totals.get("wait", 0) for rank in results]
    print(
        json.dumps(
            {
                "version": __version__,
                "window_ms": window_ns / 1e6,
                "idle_ms": None if idle_ns is None else idle_ns / 1e6,
                "exposed_comm_ms": None if idle_ns is None else (lost_ns - idle_ns) / 1e6,
                "dataloader_pct": 100 * sum(waits) / window_ns if window_ns else None,
                "lost_to_data_pct": 100 * data_ns / window_ns if window_ns else None,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
