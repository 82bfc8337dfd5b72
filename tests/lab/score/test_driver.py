"""Devices as a vendor's driver shows them: periods, whole percents, late and in lumps, GPM."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Event, Header, Spans
from clusterprof_lab.scenario import Trial, load_corpus
from clusterprof_lab.score.driver import PERIODS_NS, Driver, draw_driver, poll_driver
from clusterprof_lab.score.modes import DEVICE_SPANS, rewrite_for_mode
from clusterprof_lab.synth.interval_sums import measure_covered_ns
from clusterprof_lab.synth.make import make_trial
from clusterprof_lab.truth import WORK_FILE

MS = 1_000_000
BUSY = (np.array([0, 500]) * MS, np.array([125, 1253]) * MS)
"""Busy from 0 to 125 ms and from 500 to 1253 ms."""


def poll(driver: Driver, phase_ms: int = 0) -> tuple[list[float], list[float]]:
    """Poll every 200 ms from 1 s to 2 s; ms of busy time and up to when."""
    t_ns = np.arange(1000, 2001, 200) * MS
    total, until = poll_driver(driver, partial(measure_covered_ns, *BUSY), phase_ms * MS, t_ns)
    return (total / MS).tolist(), (until / MS).tolist()


def test_driver_periods_arrive_late_and_in_batches() -> None:
    total, until = poll(Driver(250 * MS, lump_periods=2, delay_ns=120 * MS, has_gpm=False))
    # Lumps end at 750, 1250, 1750 ms and are handed over at 870, 1370, 1870 ms.
    assert until == [750, 750, 1250, 1250, 1250, 1750]
    # From 750 to 1250 ms it was busy for two whole periods; of the next 250 ms for 3 ms:
    # 1.2 %, shown as 1 %, 2.5 ms.
    assert total == [0, 0, 500, 500, 500, 502.5]


def test_the_period_phase_differs_per_device() -> None:
    total, until = poll(Driver(250 * MS, 1, 0, has_gpm=False), phase_ms=100)
    assert until == [850, 1100, 1350, 1600, 1600, 1850]
    # 1100 to 1350 ms: busy for 153 of 250 ms, 61.2 %, shown as 61 %: 152.5 ms
    assert total == [0, 250, 402.5, 402.5, 402.5, 402.5]


def test_gpm_values_are_exact_at_every_second_poll() -> None:
    total, until = poll(Driver(250 * MS, 2, 120 * MS, has_gpm=True))
    assert until == [1000, 1000, 1400, 1400, 1800, 1800]
    assert total == [0, 0, 253, 253, 253, 253]


def test_a_recording_is_rewritten_to_the_driver_view(tmp_path: Path) -> None:
    [scenario] = [scenario for scenario in load_corpus() if scenario.id == "null-clean"]
    truth = make_trial(Trial(scenario, "medium", 0, "dev"), tmp_path / "run", ranks=2)
    driver = draw_driver(truth)
    assert driver.period_ns in PERIODS_NS
    assert draw_driver(truth) == driver
    for mode, marked in (("D0", True), ("D2", False)):
        shown = rewrite_for_mode(tmp_path / "run" / "recording", mode, tmp_path / mode, truth)
        kinds: set[int] = set()
        columns: set[tuple[str, str]] = set()
        devices: set[str] = set()
        for record in NodeReader(next(iter(list_node_folders(shown)))):
            if isinstance(record, Spans):
                kinds |= set(record.columns["kind"].tolist())
            elif isinstance(record, Columns):
                columns |= {(record.collector, name) for name in record.signals}
                devices |= set(record.devices)
            elif isinstance(record, Header):
                assert [device["emulated"] for device in record.devices] == [False] * len(
                    record.devices
                )
            elif isinstance(record, Event) and record.kind == "process-registered":
                assert record.attributes["device"].startswith("GPU-")
        assert not kinds & DEVICE_SPANS
        assert {layout.STEP, layout.DATA_WAIT} <= kinds if marked else not kinds
        assert ("gpu_nvidia", "gpu.busy_until_ns") in columns
        assert (("gpu_nvidia", "gpu.sm_active_ratio") in columns) == driver.has_gpm
        assert "gpu_emulated" not in {collector for collector, _ in columns}
        assert not [name for name in devices if name.startswith("emulated-")]


def test_without_the_times_of_the_work_the_readings_are_interpolated(tmp_path: Path) -> None:
    [scenario] = [scenario for scenario in load_corpus() if scenario.id == "null-clean"]
    truth = make_trial(Trial(scenario, "medium", 0, "dev"), tmp_path / "run", ranks=2)

    def read_busy_ns(folder: str) -> int:
        shown = rewrite_for_mode(tmp_path / "run" / "recording", "D0", tmp_path / folder, truth)
        return max(
            int(record.values[list(record.signals).index("gpu.busy_ns_total")][-1])
            for record in NodeReader(next(iter(list_node_folders(shown))))
            if isinstance(record, Columns) and "gpu.busy_ns_total" in record.signals
        )

    exact_ns = read_busy_ns("exact")
    (tmp_path / "run" / WORK_FILE).unlink()
    # The two ends lie between readings of 100 ms; all in between cancels out but the rounding.
    assert abs(read_busy_ns("interpolated") - exact_ns) <= 2 * 100 * MS + 0.01 * exact_ns
    assert exact_ns > 2000 * MS
