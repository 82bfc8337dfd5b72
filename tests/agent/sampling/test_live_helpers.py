"""The helper for viewers as the recorder sees it, with real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from clusterprof.agent.sampling.live_helpers import CHECK_NS, ViewerHelper
from clusterprof.trace.live_files import SETTLED_NAMES, VIEWER_FILE, write_viewer_heartbeat
from tests.support.recording_runs import wait_until

SEGMENT = "000001.cpf"
MINUTE_NS = 60_000_000_000
READS_PIPE = "import os, sys; os.read(0, 1); sys.exit(0)"
FAILS = "import sys; sys.exit(1)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / SEGMENT).touch()
    return tmp_path


@pytest.fixture
def helper(folder: Path) -> Iterator[ViewerHelper]:
    helper = ViewerHelper(folder, READS_PIPE)
    yield helper
    helper.close()


def want(folder: Path) -> None:
    assert write_viewer_heartbeat(folder, (folder / SEGMENT).stat().st_mtime) == "left"


def test_a_job_without_viewers_starts_no_helper(helper: ViewerHelper, folder: Path) -> None:
    helper.check(CHECK_NS, SEGMENT)
    assert helper.pid is None
    want(folder)
    helper.check(CHECK_NS + 1, SEGMENT)
    assert helper.pid is None, "it looks for a mark every 5 s"
    helper.check(2 * CHECK_NS, SEGMENT)
    assert helper.pid is not None


def test_a_killed_viewer_helper_is_restarted_after_a_minute(
    helper: ViewerHelper, folder: Path
) -> None:
    want(folder)
    helper.check(CHECK_NS, SEGMENT)
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    now_ns = CHECK_NS

    def has_ended() -> bool:
        nonlocal now_ns
        now_ns += CHECK_NS
        helper.check(now_ns, SEGMENT)
        return helper.pid is None

    wait_until(has_ended)
    assert helper.ended_cpu_ns > 0
    helper.check(now_ns + MINUTE_NS - 1, SEGMENT)
    assert helper.pid is None, "a minute of rest after a failure"
    helper.check(now_ns + MINUTE_NS + CHECK_NS, SEGMENT)
    assert helper.pid is not None


def test_a_failing_helper_is_restarted_less_often_each_time(folder: Path) -> None:
    helper = ViewerHelper(folder, FAILS)
    want(folder)
    now_ns, starts = 0, []
    while now_ns < 12 * MINUTE_NS:
        now_ns += CHECK_NS
        helper.check(now_ns, SEGMENT)
        if helper.pid is not None:
            starts.append(now_ns)
            os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
    # It fails, which is seen 5 s later; then it rests 1, 2, 4 minutes.
    minutes = [round((later - first) / MINUTE_NS, 2) for first, later in pairwise(starts)]
    assert minutes == [1.08, 2.08, 4.08]
    helper.close()


def test_closing_ends_the_helper_and_removes_its_files(helper: ViewerHelper, folder: Path) -> None:
    want(folder)
    helper.check(CHECK_NS, SEGMENT)
    assert helper.pid is not None
    (folder / SETTLED_NAMES[0]).touch()
    helper.close()
    assert os.waitpid(helper.pid, 0)[1] == 0, "the pipe was closed"
    assert os.listdir(folder) == [SEGMENT] and not (folder / VIEWER_FILE).exists()


def test_a_python_that_cannot_be_started_is_not_an_error(
    helper: ViewerHelper, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(folder / "missing"))
    want(folder)
    helper.check(CHECK_NS, SEGMENT)
    assert helper.pid is None
