"""Launchers of clusters, real ones: one recorder per node, every rank once, the job's name.

`make test-launchers` says of each that is not installed how to get it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Event, Header, Record
from clusterprof_lab.real.cable import Cable, build_cable
from clusterprof_lab.real.job import wait_for_recorder
from clusterprof_lab.real.node import Node, why_not_here
from clusterprof_lab.real.slurm import check_slurm, find_program, run_slurm
from tests.support.recording_runs import RECORD, make_environment, read_records, wait_for_end

# name -> its commands, what they say of themselves, options for two ranks, Debian's package
LAUNCHERS = {
    "Open MPI": (
        ("mpirun.openmpi", "mpirun"),
        ("OpenRTE", "Open MPI"),
        ("--allow-run-as-root", "--oversubscribe", "-n", "2"),
        "openmpi-bin",
    ),
    "MPICH": (("mpiexec.hydra", "mpiexec"), ("HYDRA",), ("-n", "2"), "mpich"),
    "Flux": (("flux",), ("flux-core",), ("run", "-n", "2"), "(has none: build flux-core)"),
}
SCRIPT = """
import time
import clusterprof
with clusterprof.span("work"):
    time.sleep(0.5)
print("done", flush=True)
"""


def launcher_command(name: str) -> list[str]:
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


def places(records: list[Record]) -> list[tuple]:
    """Return rank, world, local rank and node of each Python process that registered."""
    names = ("rank", "world_size", "node_local_rank", "node_number")
    return sorted(
        tuple(record.attributes[name] for name in names)
        for record in records
        if isinstance(record, Event)
        and record.kind == "process-registered"
        and record.attributes["role"] == "python"
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_single_recorder_registers_every_rank_once(name: str, tmp_path: Path) -> None:
    launcher = launcher_command(name)
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[3])  # the script finds the package as an installed one
    done = subprocess.run(
        [*launcher, *RECORD, "-o", str(out), "--", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=make_environment(PYTHONPATH=root),
    )
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr
    wait_for_end(out)
    records = read_records(out)  # of the one folder there is
    assert places(records) == [(0, 2, 0, None), (1, 2, 1, None)]
    header = next(record for record in records if isinstance(record, Header))
    if name == "Open MPI":  # the same on all nodes
        assert header.launcher["job"] == header.launcher["variables"]["PMIX_NAMESPACE"]


# One task per node, which starts the ranks of its node as torchrun does.
PER_NODE = """
for local in 0 1; do
    RANK=$((2 * SLURM_NODEID + local)) LOCAL_RANK=$local WORLD_SIZE=4 "$0" "$1" &
done
wait
"""


@pytest.mark.parametrize("tasks", [4, 2], ids=["per rank", "per node"])
def test_srun_over_two_nodes_writes_two_folders_per_job(tmp_path: Path, tasks: int) -> None:
    """A Slurm of our own over two nodes made of namespaces."""
    reason = check_slurm() or why_not_here()
    if reason:
        pytest.skip(reason)
    script, out, names = tmp_path / "train.py", tmp_path / "run", ("gpu-1", "gpu-2")
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[3])
    with (
        Node(0, names) as first,
        Node(1, names) as second,
        Cable(build_cable(tmp_path), [first, second]),
        run_slurm([first, second], tmp_path) as own,
    ):
        command = [sys.executable, str(script)]
        if tasks == 2:
            command = ["sh", "-c", PER_NODE, *command]
        done = first.start(
            str(find_program("srun")),
            "-N2",
            f"-n{tasks}",
            *RECORD,
            "-o",
            str(out),
            "--",
            *command,
            folder=tmp_path,
            env=make_environment(PYTHONPATH=root, **own),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert done.communicate(timeout=60)[0].count("done") == 4  # lines may mix
        for node in (first, second):
            wait_for_recorder(node)
    collected = {}
    for folder in list_node_folders(out):
        records = list(NodeReader(folder))
        header = next(record for record in records if isinstance(record, Header))
        assert header.launcher["job"] == "1.0"
        assert header.launcher["variables"]["SLURM_CLUSTER_NAME"] == "lab"
        collected[header.node["display"]] = places(records)
    assert collected == {
        "gpu-1": [(0, 4, 0, 0), (1, 4, 1, 0)],
        "gpu-2": [(2, 4, 0, 1), (3, 4, 1, 1)],
    }
