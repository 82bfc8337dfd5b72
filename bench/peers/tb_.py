"""torch-tb-profiler on one trace: its overview of a step, as one line of JSON."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path


def main(path: Path) -> None:
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.event_parser import ProfileRole

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "worker0.1623143089861.pt.trace.json.gz"  # as its plugin wants it
        shutil.copy(path, copy)
        data = RunProfileData.parse("worker0", None, str(copy), folder)
    costs = data.avg_costs.costs
    total = costs[ProfileRole.Total]
    print(
        json.dumps(
            {
                "version": version("torch-tb-profiler"),
                "window_ms": total / 1e3,
                "dataloader_pct": 100 * costs[ProfileRole.DataLoader] / total if total else None,
                "comm_ms": costs[ProfileRole.Communication] / 1e3,
                "compute_ms": costs[ProfileRole.Kernel] / 1e3,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
