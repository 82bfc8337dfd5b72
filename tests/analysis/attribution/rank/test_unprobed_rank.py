"""What a main thread does on its CPU while the device idles, without marks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.rank.unprobed_rank import ON_CPU, attribute_to_families
from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks
from clusterprof.analysis.timeline.model import PHASE_NONE, SOURCE_DEVICE_SAMPLES, LostTime, Rank
from tests.support.recordings import SECOND, Script, write_recording

WINDOWS = 40
UNEVEN = [0.02, 0.08] * (WINDOWS // 2)
"""Seconds of each 0.1 s that the device idles, at the end of it."""


def busy(idle: list[float]) -> list[tuple[float, float]]:
    return [(1.0, 2.0), *((2 + k / 10, 2.1 + k / 10 - s) for k, s in enumerate(idle)), (6.0, 7.0)]


def lost(idle: list[float]) -> LostTime:
    """From second 2 to 6."""
    start = 2 * SECOND + np.arange(WINDOWS) * (SECOND // 10)
    alike = np.ones(WINDOWS, np.int64)
    return LostTime(
        start,
        start + SECOND // 10,
        np.rint(np.array(idle) * SECOND).astype(np.int64),
        alike * PHASE_NONE,
        alike * SOURCE_DEVICE_SAMPLES,
        -alike,
    )


def rank_of(script: Script, folder: Path) -> Rank:
    [chunk] = NodeLoader(write_recording(script, folder)).chunks()
    [rank] = find_ranks(chunk)
    return rank


def share_by_family(rank: Rank, idle: list[float]) -> dict[str, float]:
    """Part of the lost time by family."""
    pieces = lost(idle)
    shares = attribute_to_families(pieces, rank)
    whole = float(pieces.lost_ns.sum()) * SHARE_SCALE
    return {name: float((pieces.lost_ns * share).sum()) / whole for name, share in shares.items()}


def test_a_rank_without_loader_processes_loads_in_the_main_thread(tmp_path: Path) -> None:
    alike = [0.05] * WINDOWS
    script = Script(end=8.0, busy=busy(alike), main="U8.0", worker="I8.0")
    rank = rank_of(script, tmp_path / "node")
    assert [worker.pid != rank.pid for worker in rank.workers] == [True]
    assert share_by_family(rank, alike) == {"launch": 1.0}
    assert share_by_family(replace(rank, workers=()), alike) == {"cpu": 1.0}


@pytest.mark.parametrize(("letter", "family"), [("U", ON_CPU), ("K", "launch")])
def test_cpu_time_during_device_idle_time_is_launch_or_unknown(
    tmp_path: Path, letter: str, family: str
) -> None:
    # On a CPU just while the device idles: in its own code, or in the kernel for no bytes.
    parts = [f"I{0.1 - s:.2f} {letter}{s:.2f}" for s in UNEVEN]
    main = " ".join(["I2.0", *parts, "I2.0"])
    script = Script(end=8.0, busy=busy(UNEVEN), main=main, worker="I8.0")
    assert share_by_family(rank_of(script, tmp_path / "node"), UNEVEN) == {
        family: pytest.approx(1.0, abs=0.01)
    }


def test_a_thread_asleep_during_device_idle_time_gives_no_family(tmp_path: Path) -> None:
    main = " ".join(["U2.0", *[f"U{0.1 - s:.2f} I{s:.2f}" for s in UNEVEN], "U2.0"])
    script = Script(end=8.0, busy=busy(UNEVEN), main=main, worker="I8.0")
    assert share_by_family(rank_of(script, tmp_path / "node"), UNEVEN) == {}
