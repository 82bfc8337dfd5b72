"""Which recording a command reads, and what it says where there is none or too many."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterprof.analysis.importers.registry import IMPORTERS
from clusterprof.cli.analyze import KNOWN_FORMATS
from clusterprof.errors import EXIT_NO_RECORDING
from tests.support import small_run
from tests.support.commands import make_environment, run_command

_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_STRANGER = 12345


def run_at(folder: Path, age_s: float) -> Path:
    small_run.write_recordings(folder)
    for segment in folder.glob("*/*.cpf"):
        os.utime(segment, (time.time() - age_s,) * 2)
    return folder


def run_without_override(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command so that file modes count for root, too."""

    def drop() -> None:
        if os.geteuid() == 0:
            for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
                assert ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0

    words = [sys.executable, "-m", "clusterprof", *arguments]
    return subprocess.run(
        words,
        cwd=cwd,
        env=make_environment(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=drop,
    )


def close_to_us(path: Path) -> str:
    """Make a path unreadable; return its owner's name as a message shows it."""
    if os.geteuid() == 0:
        os.chown(path, _STRANGER, _STRANGER)
        path.chmod(0o700)
        return f"user {_STRANGER}"
    path.chmod(0)
    return path.owner()


@pytest.mark.parametrize(
    "words",
    [("analyze",), ("top", "--once"), ("gate", "--min-util", "1%"), ("dump",)],
    ids=lambda words: words[0],
)
def test_another_users_recording_is_refused_with_reason_and_remedy(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    small_run.write_recordings(tmp_path / "run")
    owner = close_to_us(tmp_path / "run")
    mode = (tmp_path / "run").stat().st_mode & 0o7777
    done = run_without_override(*words, "run", cwd=tmp_path)
    (tmp_path / "run").chmod(0o700)
    me = "root" if os.geteuid() == 0 else owner
    assert done.returncode == EXIT_NO_RECORDING
    assert done.stderr == (
        f"clusterprof: run: permission denied: run belongs to {owner} and has mode {mode:04o};"
        f" you are {me}\n"
        "  ask its owner for `chmod -R g+rX run`, or to record with --mode 0750; or analyze as"
        " that user\n"
    )


def test_a_recording_in_an_unreadable_folder_names_the_folder_owner(tmp_path: Path) -> None:
    small_run.write_recordings(tmp_path / "runs" / "a")
    owner = close_to_us(tmp_path / "runs")
    done = run_without_override("analyze", "runs/a", cwd=tmp_path)
    (tmp_path / "runs").chmod(0o700)
    assert done.returncode == EXIT_NO_RECORDING
    assert f"permission denied: {tmp_path}/runs belongs to {owner}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_ambiguous_folder_lists_its_recordings_newest_first(tmp_path: Path) -> None:
    for name, age_s in (("a", 300), ("b", 100), ("c", 200)):
        run_at(tmp_path / "runs" / name, age_s)
    done = run_command("analyze", "runs", cwd=tmp_path)
    assert done.returncode == EXIT_NO_RECORDING
    assert done.stderr == (
        "clusterprof: runs: holds 3 recordings of different jobs, newest first: runs/b, runs/c,"
        " runs/a\n  give one of them, for example runs/b\n"
    )


def test_without_an_argument_the_newest_recording_is_read_and_named(tmp_path: Path) -> None:
    run_at(tmp_path / "clusterprof-out" / "old", 300)
    run_at(tmp_path / "clusterprof-out" / "new", 100)
    done = run_command("analyze", "--format", "plain", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == (
        "clusterprof: no recording was given: this is the newest, clusterprof-out/new\n"
    )
    named = run_command("analyze", "--format", "plain", "clusterprof-out/new", cwd=tmp_path)
    assert (named.stdout, named.stderr) == (done.stdout, "")


def test_a_missing_recording_is_reported_with_the_record_command(tmp_path: Path) -> None:
    done = run_command("analyze", cwd=tmp_path)
    assert done.returncode == EXIT_NO_RECORDING
    assert done.stderr == (
        "clusterprof: no recording was given, and none is in this folder or in its"
        " clusterprof-out\n"
        "  record a job with: clusterprof record python train.py; or give the folder of one\n"
    )


def test_other_jobs_inside_a_recording_are_named(tmp_path: Path) -> None:
    run_at(tmp_path / "run", 300)
    run_at(tmp_path / "run" / "run-2", 100)
    done = run_command("analyze", "run", "--format", "plain", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == (
        "clusterprof: run also holds another job, not shown here; the newest is run/run-2\n"
    )


def test_the_help_lists_every_known_format() -> None:
    assert tuple(importer.title for importer in IMPORTERS) == KNOWN_FORMATS
    shown = " ".join(run_command("analyze", "--help").stdout.split())
    assert shown.endswith(f"Known formats of other tools: {', '.join(KNOWN_FORMATS)}.")
