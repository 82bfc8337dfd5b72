"""A main thread on its CPU while the device idles a little in every window, without marks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from recordings import SECOND, Script, write

from clusterprof.attribution.cooccurrence import cooccurring
from clusterprof.attribution.partial import SHARE
from clusterprof.timeline.load import NodeLoad
from clusterprof.timeline.model import PHASE_NONE, SOURCE_DEVICE_SAMPLES, Lost
from clusterprof.timeline.ranks import ranks_of

WINDOWS = 40


def lost() -> Lost:
    """50 ms of each 0.1 s from second 2 on."""
    start = 2 * SECOND + np.arange(WINDOWS) * (SECOND // 10)
    alike = np.ones(WINDOWS, np.int64)
    return Lost(
        start, start + SECOND // 10, alike * (SECOND // 20), alike * PHASE_NONE,
        alike * SOURCE_DEVICE_SAMPLES, -alike,
    )  # fmt: skip


def test_who_has_no_loading_process_loads_with_the_same_thread(tmp_path: Path) -> None:
    script = Script(end=8.0, busy=[(1.0, 7.0)], main="U8.0", worker="I8.0")
    folder = write(script, tmp_path / "node")
    [chunk] = NodeLoad(folder).chunks()
    [rank] = ranks_of(chunk)
    assert [one.pid != rank.pid for one in rank.workers] == [True]
    fed = cooccurring(lost(), rank)
    assert {name: units.tolist() for name, units in fed.items()} == {"launch": [SHARE] * WINDOWS}
    assert cooccurring(lost(), replace(rank, workers=())) == {}
