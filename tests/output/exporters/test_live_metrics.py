"""The process that offers live metrics, on a recording that grows under it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.incremental import JobSettler
from clusterprof.output.exporters.live_metrics import (
    MAX_CPU_RATIO,
    MAX_PERIOD_S,
    PERIOD_S,
    LiveExporter,
    SavedState,
)
from clusterprof.trace.live_files import METRICS_STATE_NAME
from tests.support.growing_recording import STEPS, GrowingRecording
from tests.support.recordings import SECOND, Script, make_training

LIMITS = build_limits({})


@pytest.fixture(scope="module")
def script() -> Script:
    return make_training([*STEPS, *[(0.0, 1.0)] * 200])


@pytest.fixture
def growing(script: Script, tmp_path: Path) -> GrowingRecording:
    return GrowingRecording(script, tmp_path / "node-a", 1_700_000_000 * SECOND)


class Process:
    """What one start of the process would do."""

    def __init__(self, tmp_path: Path, *targets: str) -> None:
        folder = tmp_path / "node-a"
        self.notes: list[str] = []
        self.file = tmp_path / "live.prom"
        self.state = SavedState(folder)
        parts = JobSettler([folder], LIMITS, False, {folder.name: self.state.cursor})
        self.exporter = LiveExporter(
            parts, "node", (str(self.file), *targets), {}, self.notes.append, self.state
        )

    def export(self) -> dict[str, float]:
        """Export a part; return the samples of the textfile."""
        self.exporter.export_part()
        lines = self.file.read_text().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


def sum_of(values: dict[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.startswith(name))


def start_of(values: dict[str, float]) -> float:
    return sum_of(values, "clusterprof_live_start_timestamp_seconds")


def test_a_restarted_process_continues_its_counters(
    growing: GrowingRecording, tmp_path: Path
) -> None:
    growing.write_until(12)
    first = Process(tmp_path)
    before = first.export()
    growing.write_until(22)
    second = Process(tmp_path)  # the first was killed
    after = second.export()
    assert start_of(before) == start_of(after) > 0
    for name, value in before.items():
        if "_total{" in name:
            assert after[name] >= value
    # 12 s: the last step that is closed at 11.9 - 2.5 s ends at 9 s, and the part with the first
    # sample 20 ms later, at 9.1 s. 22 s: the same at 19.1 s.
    observed = "clusterprof_live_observed_gpu_seconds_total"
    assert sum_of(before, observed) == pytest.approx(9.1)
    assert sum_of(after, observed) == pytest.approx(19.1)
    second.exporter.close()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["000001.cpf"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format":1}', b'{"format":99}', b"\xff"])
def test_a_damaged_state_file_resets_counters_and_their_start_time(
    growing: GrowingRecording, tmp_path: Path, content: bytes
) -> None:
    growing.write_until(12)
    before = Process(tmp_path).export()
    (tmp_path / "node-a" / METRICS_STATE_NAME).write_bytes(content)
    growing.write_until(200)
    after = Process(tmp_path).export()
    assert start_of(before) == 1_700_000_000.0
    assert start_of(after) == pytest.approx(1_700_000_139.9), "a minute before the newest record"
    assert sum_of(after, "clusterprof_live_skipped_seconds_total") == 0


def test_counters_are_published_even_if_saving_fails(
    growing: GrowingRecording, tmp_path: Path
) -> None:
    growing.write_until(12)
    (tmp_path / "node-a" / METRICS_STATE_NAME).mkdir()
    process = Process(tmp_path)
    assert sum_of(process.export(), "clusterprof_live_observed") > 0
    assert any("cannot be saved" in note for note in process.notes)


def test_the_state_file_contains_no_paths_or_secrets(
    growing: GrowingRecording, tmp_path: Path
) -> None:
    growing.write_until(12)
    Process(tmp_path).export()
    values = json.loads((tmp_path / "node-a" / METRICS_STATE_NAME).read_text())
    assert values.keys() == {"format", "cursor", "series"}
    assert str(tmp_path) not in json.dumps(values)


def test_an_unavailable_target_is_reported_once_and_retried(
    growing: GrowingRecording, tmp_path: Path
) -> None:
    growing.write_until(12)
    taken = tmp_path / "taken.prom"
    taken.write_text("# clusterprof other/node\n")
    process = Process(tmp_path, str(taken))
    process.export()
    growing.write_until(20)
    process.export()
    (note,) = process.notes
    assert "another job writes this file" in note
    taken.unlink()
    growing.write_until(30)
    process.export()
    assert taken.exists()


def test_costly_parts_are_settled_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent_ns = 0
    module = "clusterprof.output.exporters.live_metrics.time.process_time_ns"
    monkeypatch.setattr(module, lambda: spent_ns)
    exporter = LiveExporter(JobSettler([tmp_path], LIMITS, False), "node", (), {}, print)
    allowed_ns = round(MAX_CPU_RATIO * PERIOD_S * 1e9)  # 75 ms in 15 s
    periods = []
    for cost_ns in (allowed_ns, allowed_ns + 1, 100 * allowed_ns, allowed_ns // 2, allowed_ns // 3):
        spent_ns += cost_ns
        exporter.adjust_period()
        periods.append(exporter.period_s)
    assert periods == [PERIOD_S, 2 * PERIOD_S, MAX_PERIOD_S, 2 * PERIOD_S, PERIOD_S]
