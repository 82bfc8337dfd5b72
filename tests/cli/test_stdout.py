"""A result that cannot be written: one line, the right exit code, and never half a file."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.output.renderers.base import RENDERERS
from tests.support.commands import TESTS
from tests.support.forked_commands import CommandForker

RECORDING = str(TESTS / "recordings" / "dlrm-8rank")
RULE = ("--assert", "gpu.busy_ratio >= 1%")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "analyze": ("analyze", "storage"),
    "gate": ("gate", "storage", *RULE),
    "explain": ("explain",),
    "top": ("top", RECORDING, "--once"),
    "dump": ("dump", RECORDING),
}
"""Of a command that came later, what it prints is asked here too, once it has a line."""
EVERY = [
    *ARGUMENTS.values(),
    *(
        ("analyze", "storage", "--format", renderer.name)
        for renderer in RENDERERS
        if renderer.name != "terminal"
    ),
    ("gate", "storage", *RULE, "--json"),
    ("--help",),
]
FULL = "clusterprof: cannot write to stdout: no space left on device\n"


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandForker]:
    with CommandForker(tmp_path_factory.mktemp("forks"), *EVERY) as forks:
        yield forks


def files_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_a_full_disk_behind_stdout_is_a_single_line_error(forks: CommandForker) -> None:
    for arguments in EVERY:
        done = forks.run(*arguments, stdout="/dev/full")
        assert (done.code, done.errors) == (1, FULL), arguments


def test_a_closed_stdout_pipe_exits_with_1(forks: CommandForker) -> None:
    for arguments in ARGUMENTS.values():
        done = forks.run(*arguments, stdout="gone")
        assert (done.code, done.errors) == (1, ""), arguments


def test_a_closed_stdout_is_reported(forks: CommandForker) -> None:
    printed = "clusterprof: cannot write to stdout: it is closed\n"
    for arguments in (("analyze", "storage"), ARGUMENTS["gate"], ("explain",)):
        done = forks.run(*arguments, stdout="closed")
        assert (done.code, done.errors) == (1, printed), arguments


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_every_format_prints_to_a_stdout_of_limited_encoding(
    forks: CommandForker, encoding: str
) -> None:
    for renderer in RENDERERS:
        done = forks.run("analyze", "storage", "--format", renderer.name, encoding=encoding)
        assert (done.code, done.errors) == (0, ""), (renderer.name, encoding)
        assert done.stdout.decode(encoding).strip()


@pytest.mark.parametrize("command", [("analyze", "storage"), ("gate", "clean", *RULE)])
def test_unwritable_output_paths_are_refused_with_a_reason(
    forks: CommandForker, command: tuple[str, ...], tmp_path: Path
) -> None:
    def refused(path: str, why: str, code: int) -> None:
        done = forks.run(*command, "-o", path)
        stated = f"clusterprof: cannot write {path}: {why}\n"
        assert (done.code, done.errors, done.stdout) == (code, stated, b"")

    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old", encoding="utf-8")
    refused(str(tmp_path / "folder"), "is a directory", 2)
    refused(str(tmp_path / "no" / "file"), "no such file or directory", 2)
    refused(str(tmp_path / "file" / "below"), "not a directory", 2)
    refused(str(tmp_path / ("x" * 300)), "file name too long", 2)
    refused("/dev/full", "no space left on device", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_writable_file_in_a_read_only_folder_is_overwritten(forks: CommandForker) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ours").write_text("old", encoding="utf-8")
        os.chmod(folder / "ours", 0o666)
        os.chmod(folder, 0o555)
        try:
            new = forks.run("analyze", "storage", "-o", f"{name}/new", cwd=Path("/"), nobody=True)
            assert (new.code, new.errors) == (
                2,
                f"clusterprof: cannot write {name}/new: permission denied\n",
            )
            ours = forks.run("analyze", "storage", "-o", f"{name}/ours", cwd=Path("/"), nobody=True)
            assert (ours.code, ours.errors) == (0, "")
        finally:
            os.chmod(folder, 0o755)
        assert list(files_in(folder)) == ["ours"]
        assert files_in(folder)["ours"].startswith(" clusterprof  runs/slow-disk")


@pytest.mark.parametrize(
    "format_", [renderer.name for renderer in RENDERERS if renderer.name != "brief"]
)
def test_a_failed_write_keeps_the_old_file(
    forks: CommandForker, format_: str, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the disk that fills up in the middle.

    Two lines, the format `brief`, stay below it.
    """
    file, link = tmp_path / "report", tmp_path / "link"
    file.write_text("good", encoding="utf-8")
    link.symlink_to("report")
    os.chmod(file, 0o640)
    wanted = ("analyze", "storage", "--full", "--format", format_, "-o")
    done = forks.run(*wanted, str(link), bytes_at_most=1000)
    stated = f"clusterprof: cannot write {link}: file too large\n"
    assert (done.code, done.errors) == (1, stated)
    assert files_in(tmp_path) == {"report": "good", "link": "good"}
    assert forks.run(*wanted, str(link)).code == 0
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert len(file.read_bytes()) > 1000
    assert sorted(os.listdir(tmp_path)) == ["link", "report"]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_filling_during_the_write_keeps_the_old_file(
    forks: CommandForker, tmp_path: Path
) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        (tmp_path / "report").write_text("good", encoding="utf-8")
        done = forks.run("analyze", "storage", "--json", "-o", str(tmp_path / "report"))
        stated = f"clusterprof: cannot write {tmp_path}/report: no space left on device\n"
        assert (done.code, done.errors) == (1, stated)
        assert files_in(tmp_path) == {"report": "good"}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [("doctor",), ("doctor", "--json"), ("doctor", "--job")])
def test_doctor_reports_a_stdout_that_cannot_be_written(
    forks: CommandForker, arguments: tuple[str, ...]
) -> None:
    assert forks.run(*arguments, stdout="/dev/full").errors == FULL
    assert forks.run(*arguments, stdout="gone").code == 1
