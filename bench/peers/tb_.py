"""torch-tb-profiler on one trace: its overview of a step, as one line of JSON."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path


def main(path: Path) -> None:
    from torch_tb_profiler.profiler import RunLoader

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / "worker0.1623143089861.pt.trace.json.gz")
        run = RunLoader("run", folder, None).load()
    (profile,) = run.profiles.values()
    step = {name: cost for name, cost in zip(_NAMES, profile.avg_costs.costs)}
    total = step["Total"]
    print(json.dumps({
        "version": version("torch-tb-profiler"),
        "window_ms": total / 1e3,
        "dataloader_pct": 100 * step["DataLoader"] / total if total else None,
        "comm_ms": step["Communication"] / 1e3,
        "compute_ms": step["Kernel"] / 1e3,
    }))  # fmt: skip


_NAMES = (
    "Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CpuOp", "Other",
    "Total",
)  # fmt: skip

if __name__ == "__main__":
    main(Path(sys.argv[1]))
