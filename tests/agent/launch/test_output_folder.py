"""Recordings of unrelated jobs never share a folder; nodes and restarts of one job do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.agent.launch import identity
from clusterprof.agent.launch.output_folder import (
    LIVE_S,
    JobIdentity,
    choose_output_folder,
    strip_restart,
)
from clusterprof.trace.encoder import write_node
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Event, Header
from tests.support.commands import make_environment
from tests.support.small_run import _make_header

PATIENCE_S = 30
HERE, THERE = ("vm", "boot-1"), ("other", "boot-2")
MEETING = {"MASTER_ADDR": "vm", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}


def record(
    out: Path,
    job: str,
    machine: tuple[str, str] = HERE,
    variables: dict[str, str] | None = None,
    age_s: float = 0,
) -> None:
    """Write the recording of one node of a job, last written `age_s` ago."""
    folder = out / f"{machine[0]}-{job}-{len(list(out.glob('*')))}"
    header: Header = replace(
        _make_header("a", "a"),
        node={"key": folder.name, "hostname": machine[0], "boot_id": machine[1]},
        launcher={"job": job, "named": identity.is_job_name(job), "variables": variables or {}},
    )
    write_node(folder, header, [])
    (segment,) = folder.glob("*.cpf")
    os.utime(segment, (time.time() - age_s,) * 2)


def ours(job: str, machine: tuple[str, str] = HERE, rendezvous: str = "") -> JobIdentity:
    return JobIdentity(job, identity.is_job_name(job), machine, rendezvous)


def test_an_empty_or_missing_output_folder_is_used_unchanged(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "new"):
        assert choose_output_folder(out, ours("train@20261123-120000-aaaa")) == out


def test_a_second_job_without_an_id_gets_a_numbered_subfolder(tmp_path: Path) -> None:
    record(tmp_path, "train@20261123-120000-aaaa")
    assert choose_output_folder(tmp_path, ours("eval@20261123-120100-bbbb")) == tmp_path / "run-2"
    record(tmp_path / "run-2", "eval@20261123-120100-bbbb")
    assert choose_output_folder(tmp_path, ours("eval@20261123-120200-cccc")) == tmp_path / "run-3"


def test_nodes_steps_and_restarts_of_a_job_share_a_folder(tmp_path: Path) -> None:
    record(tmp_path, "4711.0", age_s=10 * LIVE_S)
    for job in ("4711.0", "4711.1", "4711.0-restart2", "4711"):
        assert choose_output_folder(tmp_path, ours(job, THERE)) == tmp_path
    assert choose_output_folder(tmp_path, ours("4712.0")) == tmp_path / "4712"
    record(tmp_path / "4712", "4712.0")
    assert choose_output_folder(tmp_path, ours("4712.0-restart1", THERE)) == tmp_path / "4712"


def test_jobs_with_and_without_an_id_use_separate_folders(tmp_path: Path) -> None:
    record(tmp_path, "4711")
    assert choose_output_folder(tmp_path, ours("train@20261123-120000-aaaa", THERE)).name == "run-2"


@pytest.mark.parametrize(
    ("age_s", "name"), [(0, ""), (LIVE_S + 60, "run-2")], ids=["being written", "ended"]
)
def test_without_an_id_only_live_recordings_of_other_machines_match(
    tmp_path: Path, age_s: float, name: str
) -> None:
    record(tmp_path, "train@20261123-120000-aaaa", THERE, age_s=age_s)
    chosen = choose_output_folder(tmp_path, ours("train@20261123-120001-bbbb"))
    assert chosen == (tmp_path / name if name else tmp_path)


def test_ranks_with_the_same_rendezvous_share_a_folder(tmp_path: Path) -> None:
    record(tmp_path, "launch-17", variables=MEETING)
    same, other = ours("launch-99", rendezvous="vm:29500:2"), ours("launch-99", HERE, "vm:29501:2")
    assert choose_output_folder(tmp_path, same) == tmp_path
    assert choose_output_folder(tmp_path, other) == tmp_path / "run-2"


def test_the_folder_of_an_unreadable_recording_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    segment = tmp_path / "node" / "000001.cpf"
    segment.write_bytes(b"CPF")  # its recorder died before it had recorded anything
    assert choose_output_folder(tmp_path, ours("4711")) == tmp_path
    segment.write_bytes(b"\xff" * 4096)
    assert choose_output_folder(tmp_path, ours("4711")) == tmp_path / "4711"
    os.mkfifo(tmp_path / "node" / "000002.cpf")  # would block who opens it
    assert choose_output_folder(tmp_path, ours("4711")) == tmp_path / "4711"


def test_step_and_restart_suffixes_are_stripped_from_job_names() -> None:
    names = {
        "4711": "4711",
        "4711.0": "4711",
        "4711.batch-restart12": "4711",
        "my.job": "my.job",
        "trainer-restart1": "trainer",
    }
    assert {job: strip_restart(job) for job in names} == names


def test_two_commands_with_the_same_output_make_separate_recordings(tmp_path: Path) -> None:
    for number in (1, 2):
        words = [sys.executable, "-m", "clusterprof", "record", "-o", "runs", "true"]
        done = subprocess.run(
            words, cwd=tmp_path, env=make_environment(), capture_output=True, text=True, check=True
        )
        expected = "runs" if number == 1 else "runs/run-2"
        assert done.stderr.startswith(f"clusterprof: recording to {expected};")
        assert done.stderr.endswith(f"then: clusterprof analyze {expected}\n")
        _wait_for_end(tmp_path / expected)
    assert [len(list_node_folders(tmp_path / name)) for name in ("runs", "runs/run-2")] == [1, 1]


def _wait_for_end(out: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        records = [record for folder in list_node_folders(out) for record in NodeReader(folder)]
        if any(isinstance(r, Event) and r.kind == "recorder-stopped" for r in records):
            return
        time.sleep(0.05)
    raise AssertionError(f"the recorder of {out} did not stop")
