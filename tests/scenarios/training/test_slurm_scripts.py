"""The scripts of deploy/slurm in a Slurm of our own: jobs are recorded without `record`.

Two nodes made of namespaces, with two GPUs each (files), a controller and real prologs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Event, Header, Spans
from clusterprof_lab.real.cable import Cable, build_cable
from clusterprof_lab.real.node import Node, why_not_here
from clusterprof_lab.real.slurm import check_slurm, find_program, run_slurm
from tests.support.recording_runs import list_files, make_environment, wait_until

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "deploy/slurm"
TRAIN = """
import os, pathlib, time
import clusterprof
run_dir = pathlib.Path(os.environ.get("CLUSTERPROF_RUN_DIR", "/nowhere"))
end = time.monotonic() + 20
while run_dir.exists() and not (run_dir / "agent.pid").exists() and time.monotonic() < end:
    time.sleep(0.05)  # on a busy machine the recorder starts late
with clusterprof.span("work"):
    time.sleep(0.5)
print(os.environ.get("SLURM_PROCID"), "PYTHONPATH" in os.environ, flush=True)
"""


class Cluster:
    """Two nodes under Slurm, with the scripts and their settings in a folder."""

    def __init__(self, folder: Path, nodes: list[Node], own: dict[str, str]) -> None:
        self.folder, self.nodes = folder, nodes
        self.runs, self.state = folder / "runs", folder / "state"
        self._own = own

    def run(self, name: str, *arguments: str, **variables: str) -> str:
        """Run a program of Slurm on the first node; returns its stdout."""
        process = self.nodes[0].start(
            str(find_program(name)),
            *arguments,
            folder=self.folder,
            env=make_environment(**self._own, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return output

    def set(self, **settings: str) -> None:
        """Change settings in clusterprof.conf."""
        with (self.folder / "slurm/clusterprof.conf").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())

    def wait_for_end(self, job: str) -> None:
        """Wait until a job has ended and its epilogs, too."""

        def has_ended() -> bool:
            state = self.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T")
            idle = self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip()
            return state.strip() in ("COMPLETED", "FAILED") and idle == "2"

        wait_until(has_ended, 40)

    def report(self, *arguments: str) -> None:
        """Run report.sh as an operator would, on the node of the controller."""
        process = self.nodes[0].start(
            str(self.folder / "slurm/report.sh"), *arguments, env=make_environment(**self._own)
        )
        assert process.wait(60) == 0

    def read(self, job: str) -> dict[str, list[tuple[str, str, int | None]]]:
        """Return for each node folder (job, role, rank) of its processes, sorted."""
        out = {}
        for folder in list_node_folders(self.runs / job):
            records = list(NodeReader(folder))
            header = next(record for record in records if isinstance(record, Header))
            assert any(
                isinstance(record, Event) and record.kind == "recorder-stopped"
                for record in records
            )
            name = f"{header.node['display']} {header.launcher['job']}"
            out[name] = sorted(
                (record.attributes["job"], record.attributes["role"], record.attributes["rank"])
                for record in records
                if isinstance(record, Event) and record.kind == "process-registered"
            )
            spans = {
                text for item in records if isinstance(item, Spans) for text in item.names.values()
            }
            out[name] += [("span", text, None) for text in sorted(spans)]
        return out


TRACKING = pytest.mark.parametrize(
    "cluster", ["proctrack/pgid", "proctrack/cgroup"], indirect=True, ids=["pgid", "cgroup"]
)
"""How Slurm finds the processes of a step: with control groups it kills the recorder at its end."""


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    tracking = getattr(request, "param", "proctrack/pgid")
    reason = check_slurm() or why_not_here()
    if tracking.endswith("cgroup") and not Path("/sys/fs/cgroup/freezer").is_dir():
        reason = reason or "no control groups of version 1 here"
    if reason:
        pytest.skip(reason)
    (tmp_path / "cgroup.conf").write_text(
        "CgroupAutomount=no\nCgroupMountpoint=/sys/fs/cgroup\nCgroupPlugin=cgroup/v1\n"
        "IgnoreSystemd=yes\n"
    )
    for part in (tmp_path, *tmp_path.parents[:2]):
        part.chmod(0o755)  # the job's user reaches its folder
    folder = tmp_path / "slurm"
    shutil.copytree(SCRIPTS, folder)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "runs").mkdir(mode=0o755)
    settings = {
        "ProctrackType": tracking,
        "PrologFlags": "Alloc",
        "Prolog": f"{folder}/prolog.sh",
        "TaskProlog": f"{folder}/task-prolog.sh",
        "TaskEpilog": f"{folder}/task-epilog.sh",
        "Epilog": f"{folder}/epilog.sh",
    }
    names = ("gpu-1", "gpu-2")
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(number, names)) for number in range(2)]
        stack.enter_context(Cable(build_cable(tmp_path), nodes))
        own = stack.enter_context(run_slurm(nodes, tmp_path, 2, settings))
        made = Cluster(tmp_path, nodes, {**own, "PYTHONPATH": str(ROOT)})
        made.set(python=str(python), runs=str(made.runs), state=str(made.state), min_gpus="4")
        yield made


@TRACKING
def test_a_slurm_step_on_two_nodes_is_recorded_automatically(cluster: Cluster) -> None:
    output = cluster.run("srun", "-N2", "-n4", "--gpus-per-node=2", sys.executable, "train.py")
    assert sorted(output.splitlines()) == [f"{rank} True" for rank in range(4)]
    cluster.wait_for_end("1")
    span = ("span", "work", None)
    assert cluster.read("1") == {
        f"gpu-{node + 1} 1.0": [
            *(("1.0", "command", 2 * node + local) for local in range(2)),
            *(("1.0", "python", 2 * node + local) for local in range(2)),
            span,
        ]
        for node in range(2)
    }
    for node in cluster.nodes:
        assert list((node.root / "dev/shm").glob("clusterprof-*")) == []


@TRACKING
def test_batch_script_and_steps_share_a_recorder_per_node(cluster: Cluster) -> None:
    script = cluster.folder / "job.sh"
    srun = f"{find_program('srun')} -N2 -n2"
    script.write_text(f"#!/bin/sh\n{sys.executable} train.py\n{srun} {sys.executable} train.py\n")
    cluster.run("sbatch", "-N2", "-n2", "--gpus-per-node=2", str(script))
    cluster.wait_for_end("1")
    span = ("span", "work", None)
    assert cluster.read("1") == {
        "gpu-1 1": [
            ("1", "command", 0),
            ("1", "python", 0),
            ("1.0", "command", 0),
            ("1.0", "python", 0),
            span,
        ],
        "gpu-2 1.0": [("1.0", "command", 1), ("1.0", "python", 1), span],
    }


def test_small_jobs_and_jobs_that_opt_out_are_not_recorded(cluster: Cluster) -> None:
    python = [sys.executable, "train.py"]
    assert "0 True" in cluster.run("srun", "-N1", "-n1", "--gpus-per-node=2", *python)
    refused = {"CLUSTERPROF_DISABLE": "1"}
    cluster.run("srun", "-N2", "-n2", "--gpus-per-node=2", *python, **refused)
    assert list_files(cluster.runs, ".cpf") == []
    cluster.set(min_gpus="0")
    cluster.run("srun", "-N1", "-n1", *python)
    cluster.wait_for_end("3")
    assert list(cluster.read("3")) == ["gpu-1 3.0"]


FAULTS = {
    "no Python": {"python": "/nowhere/python"},
    "a Python that fails": {"python": "/bin/false"},
    "a Python that is something else": {"python": "/bin/echo"},
    "no folder for recordings": {"runs": "/proc/nowhere"},
    "settings that are no number": {"min_gpus": "many"},
    "an option that does not exist": {"options": "--no-such-option"},
    "a mode that is none": {"mode": "1"},
    "settings that are no settings": {"min_gpus": "4; exit 9"},
    "settings that cannot be parsed": {"min_gpus": "'"},
}


def test_script_errors_never_fail_a_job_or_drain_a_node(cluster: Cluster) -> None:
    conf = cluster.folder / "slurm/clusterprof.conf"
    good = conf.read_text()
    step = ("-N2", "-n2", "--gpus-per-node=2", sys.executable, "train.py")
    for fault, settings in FAULTS.items():
        conf.write_text(good)
        cluster.set(**settings)
        output = cluster.run("srun", *step)
        assert sorted(output.splitlines()) == ["0 True", "1 True"], fault
    conf.unlink()
    assert len(cluster.run("srun", *step).splitlines()) == 2
    assert cluster.run("sinfo", "-h", "-t", "drain,drained,draining,down", "-o", "%D").strip() == ""
    assert list_files(cluster.runs, ".cpf") == []


def test_files_of_a_killed_recorder_are_removed_from_the_node(cluster: Cluster) -> None:
    script = "import os, re, pathlib, signal, time; time.sleep(1)\n"
    script += "run = pathlib.Path(os.environ['CLUSTERPROF_RUN_DIR'])\n"
    script += "os.kill(int((run / 'agent.pid').read_text().split()[0]), signal.SIGKILL)\n"
    cluster.run("srun", "-N2", "-n2", "--gpus-per-node=2", sys.executable, "-c", script)
    cluster.wait_for_end("1")
    for node in cluster.nodes:
        assert list((node.root / "dev/shm").glob("clusterprof-*")) == []
    assert len(list(cluster.runs.glob("1/*/*.cpf"))) == 2


def test_the_owner_gets_a_summary_and_old_recordings_are_removed(cluster: Cluster) -> None:
    step = ("-N2", "-n2", "--gpus-per-node=2", sys.executable, "train.py")
    for job in ("1", "2"):
        cluster.run("srun", *step)
        cluster.wait_for_end(job)
    cluster.report("1", "2")
    lines = (cluster.state / "1").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("clusterprof: Lost: ") and lines[1].startswith("Try next: ")
    summary = cluster.runs / "1/summary.txt"
    assert summary.read_text().splitlines() == lines
    summary.unlink()
    cluster.report()  # what was reported is not reported again
    assert not summary.exists()

    keep = cluster.runs / "2/keep"
    keep.touch()
    long_ago = time.time() - 31 * 86400
    for path in (*cluster.runs.rglob("*"), keep):
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    (cluster.runs / "notes").mkdir()
    (cluster.runs / "3").mkdir()
    cluster.report()
    assert sorted(path.name for path in cluster.runs.iterdir()) == ["2", "3", "notes"]
    assert not (cluster.state / "1").exists()
