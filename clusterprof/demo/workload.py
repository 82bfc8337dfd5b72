"""The demo's launcher: `python -m clusterprof.demo.workload SCENARIO STEPS DATASET FOLDER`.

Starts one process per rank with the variables a launcher sets, as torchrun does, and exits with
the first failure of any of them.
"""

from __future__ import annotations

import os
import subprocess
import sys

from clusterprof.demo import allreduce
from clusterprof.demo.scenarios import Scenario, scenario_named


def main(arguments: list[str]) -> int:
    """Run every rank to its end; return 0, or the first exit status that was not 0."""
    scenario = scenario_named(arguments[0])
    command = [sys.executable, "-m", "clusterprof.demo.rank", *arguments]
    sockets = allreduce.listeners(len(scenario.ranks)) if scenario.gradient_bytes else []
    ranks = []
    for rank in range(len(scenario.ranks)):
        variables = os.environ | _launcher_variables(scenario, rank)
        inherited: tuple[int, ...] = ()
        if sockets:
            variables |= allreduce.variables(sockets, rank)
            inherited = (sockets[rank].fileno(),)
        ranks.append(subprocess.Popen(command, env=variables, pass_fds=inherited))
    for one in sockets:
        one.close()  # the ranks have their own; a rank that ends must be seen by its neighbours
    statuses = [rank.wait() for rank in ranks]
    return next((status for status in statuses if status != 0), 0)


def _launcher_variables(scenario: Scenario, rank: int) -> dict[str, str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if not scenario.gradient_bytes:
        return own  # no WORLD_SIZE: of ranks on their own, what one loses is all there is to win
    return own | {"WORLD_SIZE": str(len(scenario.ranks))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:5]))
