"""Which dumps of the job enter a recording, and which do not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from clusterprof.agent.processes.registry import (
    MAX_DUMP_BYTES,
    FlightRecorderDumps,
    build_dump_path,
)


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        (b"RANK=3\0TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/s/trace_\0", "/s/trace_3"),
        (b"TORCH_FR_DUMP_TEMP_FILE=/new_\0RANK=0\0TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/old_", "/new_0"),
        (b"RANK=3\0", ""),
        (b"TORCH_FR_DUMP_TEMP_FILE=/s/trace_\0", ""),
        (b"RANK=../../x\0TORCH_FR_DUMP_TEMP_FILE=/s/trace_\0", ""),
        (b"RANK=1\0TORCH_FR_DUMP_TEMP_FILE=relative_\0", ""),
        (b"", ""),
    ],
)
def test_the_dump_path_comes_from_the_environment(environ: bytes, path: str) -> None:
    assert build_dump_path(environ) == path


def job(tmp_path: Path, *pids: int) -> FlightRecorderDumps:
    """Processes whose number is their rank, announced long ago, that dump to `out/trace_<rank>`."""
    for name in ("run/register", "proc", "recording", "out"):
        (tmp_path / name).mkdir(parents=True)
    for pid in pids:
        (tmp_path / f"proc/{pid}").mkdir()
        environ = f"RANK={pid}\0TORCH_FR_DUMP_TEMP_FILE={tmp_path}/out/trace_\0"
        (tmp_path / f"proc/{pid}/environ").write_text(environ)
        announced = tmp_path / f"run/register/{pid}.json"
        announced.write_text("{}")
        os.utime(announced, (1000, 1000))
    return FlightRecorderDumps(tmp_path / "run", tmp_path / "recording", str(tmp_path / "proc"))


def test_dumps_of_observed_ranks_are_copied_after_the_job(tmp_path: Path) -> None:
    dumps = job(tmp_path, 0, 1, 2)
    assert dumps.take(0) == []
    for pid in (0, 1, 2):
        (tmp_path / f"proc/{pid}/environ").unlink()  # the job is over
    for rank in (0, 1, 7):  # rank 2 wrote none; nobody knows a rank 7
        (tmp_path / f"out/trace_{rank}").write_bytes(b"dump %d" % rank)
    assert dumps.finish(0) == []
    copied = {path.name: path.read_bytes() for path in (tmp_path / "recording/nccl").iterdir()}
    assert copied == {"trace_0": b"dump 0", "trace_1": b"dump 1"}


def test_old_large_and_irregular_dumps_are_not_copied(tmp_path: Path) -> None:
    dumps = job(tmp_path, 0, 1, 2, 3, 4)
    dumps.take(0)
    out = tmp_path / "out"
    (out / "trace_0").write_bytes(b"of the job before")
    os.utime(out / "trace_0", (999, 999))
    with open(out / "trace_1", "wb") as large:
        large.truncate(MAX_DUMP_BYTES + 1)
    (out / "elsewhere").write_bytes(b"a secret")
    (out / "trace_2").symlink_to(out / "elsewhere")
    os.mkfifo(out / "trace_3")
    (out / "trace_4").mkdir()
    dumps.finish(0)
    assert list((tmp_path / "recording").rglob("*")) == []


def register(tmp_path: Path, pid: int, rank: int) -> None:
    """Let a process announce itself in the run directory."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "8"}
    registration = {"pid": pid, "started_ticks": 1, "role": "python", "variables": variables}
    (tmp_path / f"run/register/{pid}.json").write_text(json.dumps(registration))
    (tmp_path / f"run/register/{pid}.json").chmod(0o600)


def wanted_at_exit(tmp_path: Path, ranks: dict[int, int]) -> FlightRecorderDumps:
    """Processes (pid -> rank) of a job for which PyTorch's records are wanted."""
    (tmp_path / "run/register").mkdir(parents=True)
    (tmp_path / "recording").mkdir()
    (tmp_path / "run/nccl").symlink_to("absent/nccl")
    for pid, rank in ranks.items():
        register(tmp_path, pid, rank)
    dumps = FlightRecorderDumps(tmp_path / "run", tmp_path / "recording", str(tmp_path / "proc"))
    assert dumps.take(0) == []
    return dumps


def test_the_dump_of_an_exiting_rank_is_copied_immediately(tmp_path: Path) -> None:
    dumps = wanted_at_exit(tmp_path, {70: 3, 71: 4})
    folder = tmp_path / "run/dumps"
    assert [path.name for path in folder.iterdir()] == ["at-exit"]
    (folder / "70.exit.json").write_bytes(b"dump 3")
    (folder / "71.json").write_bytes(b"of a standstill: the autopsy takes it")
    (folder / "99.exit.json").write_bytes(b"no process 99 is registered")
    assert dumps.look(0) is False  # the run directory may be gone after the last process
    copied = {path.name: path.read_bytes() for path in (tmp_path / "recording/nccl").iterdir()}
    assert copied == {"exit_rank_3.json": b"dump 3"}
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["71.json", "99.exit.json", "at-exit"]
    assert dumps.finish(0) == []
    assert not (folder / "at-exit").exists()  # no recorder takes dumps any more


def test_dumps_since_the_last_look_are_copied_at_the_end(tmp_path: Path) -> None:
    dumps = wanted_at_exit(tmp_path, {70: 3})
    folder = tmp_path / "run/dumps"
    (folder / "72.exit.json").write_bytes(b"dump 5")
    dumps.look(0)  # before it is known which rank process 72 is
    register(tmp_path, 72, 5)
    dumps.take(0)
    (folder / "70.exit.json").write_bytes(b"dump 3")
    dumps.finish(0)
    copied = {path.name: path.read_bytes() for path in (tmp_path / "recording/nccl").iterdir()}
    assert copied == {"exit_rank_3.json": b"dump 3", "exit_rank_5.json": b"dump 5"}


def test_a_restarted_rank_replaces_the_earlier_dump(tmp_path: Path) -> None:
    dumps = wanted_at_exit(tmp_path, {70: 3, 71: 3})
    for pid, content in ((70, b"first"), (71, b"second")):
        (tmp_path / f"run/dumps/{pid}.exit.json").write_bytes(content)
        dumps.look(0)
    assert (tmp_path / "recording/nccl/exit_rank_3.json").read_bytes() == b"second"


def test_dumps_are_not_requested_unless_wanted(tmp_path: Path) -> None:
    dumps = job(tmp_path, 3)
    assert not (tmp_path / "run/dumps").exists()
    assert dumps.look(0) is False


def test_a_missing_run_directory_is_not_an_error(tmp_path: Path) -> None:
    dumps = wanted_at_exit(tmp_path, {70: 3})
    shutil.rmtree(tmp_path / "run")
    assert dumps.look(0) is False
    assert dumps.finish(0) == []
