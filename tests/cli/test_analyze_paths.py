"""`analyze A/ B/ …`: nodes that were kept apart, through the real command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.recordings import make_training, write_recording

JOB = [(0.2, 0.3)] * 30


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Two nodes on their own disks."""
    for name in ("node-1", "node-2"):
        write_recording(make_training(JOB), tmp_path / f"host{name[-1]}" / name)
    return tmp_path


def test_separate_node_folders_give_a_single_report(hosts: Path) -> None:
    done = run_command("analyze", "host1", "host2", "--json", cwd=hosts)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["title"] == "host[1-2]"
    assert [node["key"] for node in document["nodes"]] == ["node-1", "node-2"]
    together = hosts / "together"
    for name in ("host1", "host2"):
        shutil.copytree(hosts / name, together, dirs_exist_ok=True)
    whole = json.loads(run_command("analyze", "together", "--json", cwd=hosts).stdout)
    assert whole | {"title": ""} == document | {"title": ""}


def test_a_copied_node_is_counted_once_and_named(hosts: Path) -> None:
    shutil.copytree(hosts / "host1", hosts / "backup")
    done = run_command("analyze", "host1", "host2", "backup", "--json", "--strict", cwd=hosts)
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert len(document["nodes"]) == len(document["ranks"]) == 2
    why = "a copy of the recording in host1/node-1, which was used instead"
    assert f"backup/node-1 was left out: {why}" in document["notes"]


def test_an_unreadable_folder_is_reported_and_strict_fails(hosts: Path) -> None:
    (hosts / "host3").mkdir()
    done = run_command(
        "analyze", "host1", "host2", "host3", "--format", "plain", "--full", cwd=hosts
    )
    assert done.returncode == 0
    assert "  host3, lost: left out: no recording in this folder (no .cpf files)." in done.stdout
    strict = run_command("analyze", "host1", "host3", "host2", "--strict", cwd=hosts)
    assert strict.returncode == 6
    assert "1 thing lost" in strict.stderr


def test_a_missing_path_is_an_error(hosts: Path) -> None:
    for name in ("analyze", "gate", "dump"):
        rules = ["--assert", "gpu.busy_ratio >= 1%"] if name == "gate" else []
        done = run_command(name, "host1", "host9", *rules, cwd=hosts)
        assert done.returncode == 5 and "Traceback" not in done.stderr
        assert done.stderr.startswith("clusterprof: host9: no such file or directory")
        assert "give the folder that `clusterprof record` wrote" in done.stderr
    assert run_command("analyze", "rack*", cwd=hosts).stderr.endswith(
        "  no file matches this pattern; give the folders of the nodes\n"
    )


def test_gate_and_dump_accept_several_paths(hosts: Path) -> None:
    rule = ("--assert", "step.count == 60")
    assert run_command("gate", "host1", "host2", *rule, cwd=hosts).returncode == 0
    assert run_command("gate", "host1", *rule, cwd=hosts).returncode == 3
    last = run_command("dump", "host1", "host2", cwd=hosts).stdout.splitlines()[-1]
    assert json.loads(last)["nodes"] == 2
