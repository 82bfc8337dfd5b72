"""The demo's launcher: `python -m clusterprof.demo.workload SCENARIO DATASET TRUTH-FOLDER`.

Starts one process per rank with the variables a launcher sets, as torchrun does, and exits with
the first failure of any of them.
"""

from __future__ import annotations

import os
import subprocess
import sys

from clusterprof.demo.scenarios import scenario_named


def main(arguments: list[str]) -> int:
    """Run every rank to its end; return 0, or the first exit status that was not 0."""
    world = len(scenario_named(arguments[0]).ranks)
    command = [sys.executable, "-m", "clusterprof.demo.rank", *arguments]
    ranks = [
        subprocess.Popen(command, env=os.environ | _launcher_variables(rank))
        for rank in range(world)
    ]
    statuses = [rank.wait() for rank in ranks]
    return next((status for status in statuses if status != 0), 0)


def _launcher_variables(rank: int) -> dict[str, str]:
    # No WORLD_SIZE: each rank trains on its own, so what one of them loses is all there is to win.
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:4]))
