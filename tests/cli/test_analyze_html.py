"""`analyze --format html`: into a file or a pipe, never onto a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.support.commands import TESTS, make_environment, run_with_report


def test_output_option_writes_the_html_page_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = run_with_report("analyze", "storage", "--format", "html", "-o", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    page = file.read_bytes()
    assert page.startswith(b"<!doctype html>\n<html lang=") and page.endswith(b"</html>\n")


def test_html_is_refused_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "clusterprof", "analyze", str(tmp_path), "--format", "html"],
            cwd=TESTS.parent,
            env=make_environment(),
            stdout=theirs,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            "clusterprof: an HTML page cannot be shown in a terminal",
            "  add: -o report.html",
        ]
    finally:
        os.close(ours)
        os.close(theirs)
