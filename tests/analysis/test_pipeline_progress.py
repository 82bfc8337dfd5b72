"""Progress of an analysis: reported node by node, and shown only on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from clusterprof.analysis.node.selection import Progress
from clusterprof.analysis.pipeline import analyze
from clusterprof.analysis.spill import measure_size_bytes
from tests.support.recordings import write_recording
from tests.support.waiting_jobs import make_scripts


def two_nodes(folder: Path) -> list[int]:
    for number, script in enumerate(make_scripts((0.4, 0.5), (0.0, 0.5), steps=20)):
        write_recording(script, folder / f"node-{number}")
    return [measure_size_bytes([folder / f"node-{number}"]) for number in (0, 1)]


def test_progress_grows_to_the_total_bytes_and_nodes(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path)
    recorded: list[Progress] = []
    with_it = analyze(tmp_path, on_progress=recorded.append)
    assert with_it == analyze(tmp_path)
    both = first + second
    assert next(progress for progress in recorded if progress.nodes == 1) == Progress(
        first, both, 1, 2
    )
    assert recorded[-1] == Progress(both, both, 2, 2)
    sizes = [progress.read_bytes for progress in recorded]
    assert sizes == sorted(sizes)
    assert len(recorded) == 4  # a chunk and the end of each node


def run(folder: Path, stderr: int) -> subprocess.CompletedProcess[bytes]:
    code = (
        "import sys, clusterprof.cli.runs as p; p._DELAY_S = 0.0;"
        "from clusterprof.cli.app import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "analyze", str(folder), "--format", "plain"]
    environment = {**os.environ, "TERM": "xterm"}
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)


def test_the_progress_bar_is_shown_on_terminals_only(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    master, slave = pty.openpty()
    shown = run(tmp_path, slave)
    os.close(slave)
    seen = b""
    try:
        while part := os.read(master, 65536):
            seen += part
    except OSError:  # the other end is closed and all of it was read
        pass
    os.close(master)
    assert b"clusterprof: node 1 of 2" in seen or b"clusterprof: comparing ranks" in seen
    silent = run(tmp_path, subprocess.PIPE)
    assert silent.stderr == b""
    assert silent.stdout == shown.stdout
