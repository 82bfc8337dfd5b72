"""A viewer watches a real recording: the node settles it, and stops when the recording ends."""

from __future__ import annotations

import subprocess
import textwrap
import time
from pathlib import Path

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.job import LiveJob
from clusterprof.report.live import LiveView
from clusterprof.signals import SELF_CPU
from clusterprof.trace.live_files import SETTLED_NAMES, VIEWER_FILE
from clusterprof.trace.schema import Columns
from tests.support.recording_runs import (
    PYTHON,
    RECORD,
    make_environment,
    make_job_id,
    read_records,
    wait_for_end,
    wait_for_recording,
    wait_until,
)

TRAINING = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    import clusterprof
    while not Path(sys.argv[1]).exists():
        clusterprof.step()
        time.sleep(0.05)
    """
)


def test_a_watched_node_settles_its_last_minute(tmp_path: Path) -> None:
    out, done = tmp_path / "out", tmp_path / "done"
    job = subprocess.Popen(
        [*RECORD, "-o", str(out), "--", PYTHON, "-c", TRAINING, str(done)],
        env=make_environment(make_job_id("live")),
        stderr=subprocess.DEVNULL,
    )
    try:
        folder = wait_for_recording(out)
        viewer = LiveJob([out], build_limits({}), min_settled_nodes=1)

        def look() -> LiveView | None:
            time.sleep(0.2)
            live = viewer.update(time.time_ns())
            return None if live.reading else live

        live = wait_until(look)
        ((_, rank),) = live.ranks.items()
        assert rank.step_ns is not None and rank.step_ns >= 50_000_000
        assert [node.state for node in live.nodes] == ["recording"]
        assert (folder / SETTLED_NAMES[0]).stat().st_mode & 0o777 == 0o600
    finally:
        done.touch()
        job.wait()
    wait_for_end(out)
    wait_until(lambda: not [*folder.glob("live*")])
    assert not (folder / VIEWER_FILE).exists()
    cpu_devices = {
        device
        for record in read_records(out)
        if isinstance(record, Columns)
        for name, device in zip(record.signals, record.devices)
        if name == SELF_CPU.name
    }
    assert "helper:live" in cpu_devices, "its CPU time is part of the cost of recording"
