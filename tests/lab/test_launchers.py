"""Launchers of clusters, on one machine: one recorder, every rank once, the job's name.

`make test-launchers` says of each that is not installed how to get it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recorder.recording_runs import RECORD, environment, records_of, wait_for_end

from clusterprof.trace.schema import Event, Header

# name -> its commands, what they say of themselves, options for two ranks, Debian's package
LAUNCHERS = {
    "Open MPI": (
        ("mpirun.openmpi", "mpirun"), ("OpenRTE", "Open MPI"),
        ("--allow-run-as-root", "--oversubscribe", "-n", "2"), "openmpi-bin",
    ),
    "MPICH": (("mpiexec.hydra", "mpiexec"), ("HYDRA",), ("-n", "2"), "mpich"),
    "Slurm": (("srun",), ("slurm",), ("--ntasks=2", "--overcommit"), "slurm-wlm; start slurmd"),
    "Flux": (("flux",), ("flux-core",), ("run", "-n", "2"), "- has none: build flux-core"),
}  # fmt: skip
SCRIPT = """
import time
import clusterprof
with clusterprof.span("work"):
    time.sleep(0.5)
print("done", flush=True)
"""


def found(name: str) -> list[str]:
    """Return the launcher's command with its options, or skip."""
    commands, says, options, package = LAUNCHERS[name]
    for command in commands:
        if shutil.which(command) is None:
            continue
        version = ["version"] if command == "flux" else ["--version"]
        done = subprocess.run([command, *version], capture_output=True, text=True, timeout=30)
        if any(word in done.stdout + done.stderr for word in says):
            return [command, *options]
    pytest.skip(f"no {name} here; Debian: apt-get install {package}")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_one_recorder_sees_every_rank_once(name: str, tmp_path: Path) -> None:
    launcher = found(name)
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])  # the script finds the package as an installed one
    done = subprocess.run(
        [*launcher, *RECORD, "-o", str(out), "--", sys.executable, str(script)],
        capture_output=True, text=True, timeout=120, env=environment(PYTHONPATH=root),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr
    wait_for_end(out)
    records = records_of(out)  # of the one folder there is
    places = [
        (one.attributes["rank"], one.attributes["world_size"], one.attributes["node_local_rank"])
        for one in records
        if isinstance(one, Event)
        and one.kind == "process-registered"
        and one.attributes["role"] == "python"
    ]
    assert sorted(places) == [(0, 2, 0), (1, 2, 1)]
    header = next(one for one in records if isinstance(one, Header))
    if name == "Open MPI":  # the same on all nodes
        assert header.launcher["job"] == header.launcher["variables"]["PMIX_NAMESPACE"]
