"""Commands that the manual shows are run, on a recording of ours in the place of the reader's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.cli.app import main
from clusterprof.cli.commands import COMMANDS
from tests.support.manual_pages import PAGES, ROOT, SHELL_WORDS, list_commands, split_command
from tests.support.recording_runs import list_files, make_job_id
from tests.tools.command_pages import iterate_options

RECORDING = ROOT / "tests/recordings/v1"
READERS = ("analyze", "gate", "compare", "export", "dump", "explain", "top")
"""What needs nothing but a recording; `demo` has tests of its own."""
EXPECTED = {0, 3, 4}
NOT_MEANT = (
    "stall.storge",
    "nowhere",
    "[OPTIONS]",
    "…",
    "--to parquet",
    "--to speedscope",
    "--to collapsed",
    "--to otlp",
    "--to recording",
    "--scheduler",
    "--workers",
    "--since 5m",
    "--log-to",
    "--queued-at",
)
"""Lines that show a mistake, usage lines, and what needs an extra, stacks, a cluster, a receiver, a
tracker, a long recording, a recording of that day or other files."""
RUNS = {"--baseline", "--repeat"}


def runnable() -> list[str]:
    """All lines of all pages that a reader could type, each once."""
    lines = [line for page in PAGES for line in list_commands(page, at_start=True)]
    chosen = [line for line in lines if line.split()[1] in READERS]
    return [line for line in dict.fromkeys(chosen) if not any(value in line for value in NOT_MEANT)]


def replaced(line: str, run: Path) -> list[str]:
    """Return the words of a line, every recording in it replaced by ours."""
    words = split_command(line)
    name, rest = words[0], words[1:]
    own = {name: option for option in iterate_options(COMMANDS[name]) for name in option.names}
    out, value_next = [name], False
    for word in rest:
        if out[-1] in RUNS:
            word = str(run)
        elif word.startswith("/"):
            word = str(run.parent / Path(word).name)
        if word in SHELL_WORDS:
            break
        option = own.get(word.partition("=")[0])
        is_run = not value_next and option is None and name != "explain"
        out.append(str(run) if is_run else word)
        value_next = option is not None and not option.is_flag and "=" not in word
    return [*out, "--once"] if name == "top" and "--once" not in out else out


@pytest.mark.parametrize("line", runnable())
def test_every_documented_command_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(RECORDING, run)
    monkeypatch.chdir(tmp_path)
    assert main(replaced(line, run)) in EXPECTED


LAUNCHERS = ("torchrun", "deepspeed", "python", "srun")
RECORDING_PAGES = ("torchrun.md", "deepspeed.md", "quick-start.md")

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))


def list_recording_lines() -> list[str]:
    """Return the lines of these pages that record a job or ask what can be recorded."""
    lines = [
        line
        for page in PAGES
        if page.name in RECORDING_PAGES or page in (ROOT / "README.md", *TUTORIALS)
        for line in list_commands(page, at_start=True)
        if line.split()[1] in ("record", "doctor")
    ]
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("line", list_recording_lines())
def test_every_documented_record_command_runs(line: str, tmp_path: Path) -> None:
    """The launcher is a script that ends at once: what is tested is the line as it stands."""
    launchers = tmp_path / "bin"
    launchers.mkdir()
    for name in LAUNCHERS:
        (launchers / name).write_text("#!/bin/sh\nsleep 1\n", encoding="utf-8")
        (launchers / name).chmod(0o755)
    words = [word for word in split_command(line) if not word.startswith("#")]
    for at, word in enumerate(words):
        if word.startswith(("/shared", "/data")):
            words[at] = str(tmp_path / word.rpartition("/")[2])
        if words[at - 1] == "--rdzv-id":  # two suites on one machine run two jobs
            words[at] = make_job_id("docs")
    (tmp_path / "data").mkdir()
    environment = {**os.environ, "PATH": f"{launchers}:{os.environ['PATH']}", "NODE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "clusterprof", *words],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if words[0] == "record":
        assert "clusterprof: recording to" in done.stderr
        assert list_files(tmp_path, ".cpf")
