"""Launch the demo's ranks: `python -m clusterprof.demo.workload SCENARIO STEPS DATASET
FOLDER`.

Starts one process per rank with a launcher's variables, like torchrun, and exits with
the first failure.
"""

from __future__ import annotations

import os
import subprocess
import sys

from clusterprof.demo import allreduce
from clusterprof.demo.scenarios import Scenario, find_scenario


def main(arguments: list[str]) -> int:
    """Run every rank to its end; return 0, or the first nonzero exit status."""
    scenario = find_scenario(arguments[0])
    command = [sys.executable, "-m", "clusterprof.demo.rank", *arguments]
    sockets = allreduce.open_listeners(len(scenario.ranks)) if scenario.gradient_bytes else []
    ranks = []
    for rank in range(len(scenario.ranks)):
        variables = os.environ | _build_launcher_variables(scenario, rank)
        inherited: tuple[int, ...] = ()
        if sockets:
            variables |= allreduce.build_ring_variables(sockets, rank)
            inherited = (sockets[rank].fileno(),)
        ranks.append(subprocess.Popen(command, env=variables, pass_fds=inherited))
    for listener in sockets:
        # the ranks have copies; if a rank exits, its neighbors must notice
        listener.close()
    statuses = [rank.wait() for rank in ranks]
    return next((status for status in statuses if status != 0), 0)


def _build_launcher_variables(scenario: Scenario, rank: int) -> dict[str, str]:
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if not scenario.gradient_bytes:
        return variables  # no WORLD_SIZE: independent ranks recover only their own losses
    return variables | {"WORLD_SIZE": str(len(scenario.ranks))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:5]))
