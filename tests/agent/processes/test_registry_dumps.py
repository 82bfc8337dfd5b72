"""Which dumps of the job enter a recording, and which do not."""

from __future__ import annotations

import os
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
def test_a_dump_lies_where_the_environment_says(environ: bytes, path: str) -> None:
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


def test_dumps_of_ranks_that_were_seen_are_copied_when_the_job_is_over(tmp_path: Path) -> None:
    dumps = job(tmp_path, 0, 1, 2)
    assert dumps.take(0) == []
    for pid in (0, 1, 2):
        (tmp_path / f"proc/{pid}/environ").unlink()  # the job is over
    for rank in (0, 1, 7):  # rank 2 wrote none; nobody knows a rank 7
        (tmp_path / f"out/trace_{rank}").write_bytes(b"dump %d" % rank)
    assert dumps.finish(0) == []
    copied = {path.name: path.read_bytes() for path in (tmp_path / "recording/nccl").iterdir()}
    assert copied == {"trace_0": b"dump 0", "trace_1": b"dump 1"}


def test_what_is_old_large_or_no_file_stays_where_it_is(tmp_path: Path) -> None:
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
