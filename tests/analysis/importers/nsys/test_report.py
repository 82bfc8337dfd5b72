"""Reports of Nsight Systems: exported by `nsys`, or refused with the command to run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from tests.support.trace_imports import SEEDS, import_files, list_ranks

PROFILE = sorted((SEEDS / "nsys").glob("*.sqlite"))[0]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "run 1.nsys-rep"
    path.write_bytes(b"\x00report")
    return path


def install(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program named nsys on the PATH; $7 is the file that it has to write."""
    tool = folder / "bin" / "nsys"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")


def test_a_report_is_exported_and_read(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path, f'echo "$@" > "{tmp_path}/arguments"; cp "{PROFILE}" "$7" || exit 3', monkeypatch
    )
    nodes, (account,) = import_files([report])
    exported, (expected,) = import_files([PROFILE])
    assert [list_ranks(node) for node in nodes] == [list_ranks(node) for node in exported]
    assert [node.bounds_ns() for node in nodes] == [node.bounds_ns() for node in exported]
    assert account.read == expected.read
    words = (tmp_path / "arguments").read_text().split(" --output ")
    assert words[0] == "export --type sqlite --force-overwrite true"
    target, _, source = words[1].strip().partition(".sqlite ")
    assert source == str(report)
    assert not Path(target).parent.exists()  # nothing is left behind


def test_a_missing_nsys_is_reported_with_the_export_command(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotImportError) as caught:
        import_files([report])
    assert caught.value.message == (
        "run 1.nsys-rep: a report of Nsight Systems, and nsys is not installed here; run where it"
        " is: nsys export --type sqlite 'run 1.nsys-rep'; then analyze the .sqlite file"
    )


def test_a_failed_export_reports_its_error(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "echo unsupported version >&2; exit 9", monkeypatch)
    with pytest.raises(CannotImportError) as caught:
        import_files([report])
    assert caught.value.message == (
        "run 1.nsys-rep: nsys export failed with code 9 (unsupported version); use the nsys that"
        " recorded it: nsys export --type sqlite 'run 1.nsys-rep'"
    )
