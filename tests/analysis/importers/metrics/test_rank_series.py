"""Series of data readiness by rank: waits, what they are for, and the straggler of a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.metrics.rank_series import RankSeries
from clusterprof.analysis.pipeline import analyze
from tests.support.metric_imports import SHARED, import_files

S = 1_000_000_000
T = 1_745_861_820


def series(times: list, **ranks: list) -> bytes:
    """A file as SPDL publishes them."""
    return json.dumps({"event_time": times, **{k.strip("r"): v for k, v in ranks.items()}}).encode()


def step(minute: int) -> tuple[int, ...]:
    """The step that stands for a window."""
    start = (T + 60 * minute) * S
    return (start, start + 60 * S, minute + 1, 2, -1, -1)


def wait(minute: int, seconds: int) -> tuple[int, int]:
    """Start and end of a wait."""
    start = (T + 60 * minute) * S
    return start, start + seconds * S


def test_an_unready_rank_waits_for_its_unready_stage(tmp_path: Path) -> None:
    times = [T, T + 60, str(T + 120)]
    nodes, accounts = import_files(
        RankSeries(),
        tmp_path,
        job_data_readiness__json=series(times, r0=[1.0, "0.95", 1], r19=[0.25, None, 0.5]),
        job_decompress__json=series(times, r0=[1, 1, 1], r19=[0.99, 0.99, 0.99]),
        job_compose__json=series(times, r0=[1, 0.95, 1], r19=[0.1, 0.1, 0.99]),
        job_compose_ave_time__json=series(times, r0=[0.3, 0.3, 0.3], r19=[0.4, 0.4, 0.4]),
    )
    (node,) = nodes
    assert node.spans == {
        (0, "step"): [step(0), step(1), step(2)],
        (0, "data_wait"): [(*wait(1, 3), -1, -1, -1, -1)],
        (19, "step"): [step(0), step(2)],  # nothing is known of the second window
        (19, "data_wait"): [(*wait(0, 45), -1, -1, -1, -1), (*wait(2, 30), -1, -1, -1, -1)],
        # Of the last wait no stage is known to be the reason.
        (19, "loading"): [(*wait(0, 45), 0, 45 * S, 0, 0)],
    }
    assert accounts[0].notes[1] == (
        "rank 19: data was ready 38% of the time, 68% on the median rank; compose 40% (69%);"
        " compose_ave_time 0.400 s (0.350 s); decompress 99% (99%)"
    )


def test_an_unready_download_stage_counts_as_reading(tmp_path: Path) -> None:
    nodes, _ = import_files(
        RankSeries(),
        tmp_path,
        data_readiness__csv=b"event_time,rank_0,rank_1\n%d,0.5,1.0\n" % T,
        data_download__csv=b"event_time,rank_0,rank_1\n%d,0.1,1.0\n" % T,
    )
    assert nodes[0].spans[0, "loading"] == [(*wait(0, 30), 30 * S, 0, 0, 0)]


def test_readiness_alone_gives_data_waits_without_a_cause(tmp_path: Path) -> None:
    data = series([T, T + 60], r0=[1, 1], r1=[0.5, 0.5], r2=[1, 1])
    (node,), _ = import_files(RankSeries(), tmp_path, data_readiness__json=data)
    assert set(node.spans) == {(0, "step"), (1, "step"), (1, "data_wait"), (2, "step")}
    with pytest.raises(CannotImportError, match="no series contains the data readiness"):
        import_files(RankSeries(), tmp_path, compose__json=data)


def test_bad_values_are_counted(tmp_path: Path) -> None:
    data = series(
        [T + 60, T, -5, "x"], r0=[0.5, 1, 0, 0], r1=[7, "NaN", 0, 0], r2=[1], name=[1, 2, 3, 4]
    )
    (node,), (account,) = import_files(RankSeries(), tmp_path, readiness__json=data)
    assert node.spans == {
        (0, "step"): [step(0), step(1)],
        (0, "data_wait"): [(*wait(1, 30), -1, -1, -1, -1)],
    }
    assert account.skipped == {
        "columns without a rank, or of another length": 2,
        "windows with an impossible time": 2,
        "values outside 0 to 1": 1,
    }
    with pytest.raises(CannotImportError):
        import_files(RankSeries(), tmp_path, readiness__json=data[:-20])


REAL = SHARED / "spdl-fleet"


@pytest.mark.skipif(not REAL.exists(), reason="the real series do not lie beside the repository")
def test_rank_19_of_a_real_job_waits_for_computed_data() -> None:
    known = json.loads((REAL / "known.json").read_text())["computed_by_us"]
    ready = {int(rank): mean for rank, mean in known["across_ranks_data_readiness"].items()}
    report = analyze(REAL)
    assert len(report.ranks) == 32
    for rank in report.ranks:
        lost = rank.lost_ns / rank.in_step_ns
        assert lost == pytest.approx(1 - ready[rank.rank or 0], abs=1e-4)
    first, second = sorted(report.ranks, key=lambda item: -item.lost_ns)[:2]
    assert (first.rank, second.rank) == (19, 0)
    assert any(
        "Rank 19: data was ready 21% of the time, 99% on the median rank; compose 9%" in answer
        for answer in report.answers
    )
