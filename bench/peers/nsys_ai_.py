"""nsys-ai on one profile: bubbles (copies are activity) and overlap (kernels only), as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    bubbles = _skill("pipeline_bubble_metrics", path)
    overlap = _skill("overlap_breakdown", path)
    print(
        json.dumps(
            {
                "version": version("nsys-ai"),
                "window_ms": sum(bubble["total_span_ms"] for bubble in bubbles),
                "idle_ms": sum(bubble["bubble_ms"] for bubble in bubbles),
                "exposed_comm_ms": sum(row.get("nccl_only_ms", 0.0) for row in overlap),
                "idle_of_kernels_only_ms": sum(row.get("idle_ms", 0.0) for row in overlap),
            }
        )
    )


def _skill(name: str, path: str) -> list[dict[str, Any]]:
    tool = Path(sys.executable).parent / "nsys-ai"
    made = subprocess.run(
        [str(tool), "skill", "run", name, path, "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(made.stdout[made.stdout.index("[") :])
    return rows


if __name__ == "__main__":
    main(sys.argv[1])
