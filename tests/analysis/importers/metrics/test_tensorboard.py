"""Scalars that TensorBoard gave out: steps between points, readings of devices; all by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.metrics import tensorboard
from clusterprof.analysis.importers.metrics.tensorboard import TensorBoard
from clusterprof.analysis.importers.registry import find_importer
from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from tests.support.import_results import read_span_table

SEEDS = Path(__file__).parents[1] / "seeds" / "tensorboard"
LOSS = SEEDS / "loss.csv"
S = 1_000_000_000
T = 1_767_712_383 * S


def imported(*paths: Path) -> tuple[list[NodeTables], list[Account]]:
    sources = [source for path in paths for source in open_sources(path)]
    assert all(TensorBoard().recognizes(source.head, source.path) for source in sources)
    accounts = [Account(source.path, TensorBoard.title) for source in sources]
    return list(TensorBoard().nodes(sources, accounts)), accounts


def steps(node: NodeTables) -> list[tuple[int, ...]]:
    table = read_span_table(node._spans[1])
    assert set(table[2].tolist()) == {layout.STEP}
    return [tuple(row) for row in table[[0, 1, 3]].T.tolist()]


def series(node: NodeTables) -> dict[str, list[tuple[int, float]]]:
    return {
        f"{column.signal} {column.device}": list(zip(column.t_ns.tolist(), column.values.tolist()))
        for column in node._columns
    }


def test_scalar_points_become_steps_and_readings() -> None:
    (node,), accounts = imported(*sorted((SEEDS / "run").iterdir()))
    assert (node.display_name, node.wall_minus_own_ns) == ("version_0", 0)
    assert steps(node) == [
        (T, T + S, 1),
        (T + S, T + 5 * S // 2, 2),
        (T + 5 * S // 2, T + 9 * S // 2, 3),
        (T + 9 * S // 2, T + 13 * S // 2, 4),
    ]
    result = series(node)
    assert str(result.pop("gpu.busy_ratio unseen")) == str(
        [(T, float("nan")), (T + 13 * S // 2, float("nan"))]
    )
    ((name, (first, missing, last)),) = result.items()
    assert (name, first, last) == ("gpu.busy_ratio gpu0", (T, 0.97), (T + 5 * S // 2, 0.4))
    assert missing[0] == T + S and missing[1] != missing[1]
    assert [dict(account.read) for account in accounts] == [
        {"points": 3},
        {"points": 4, "steps": 4},
    ]
    assert accounts[1].notes == [
        "points are up to 2 steps apart: each step between two points gets their mean"
    ]


def test_step_times_between_points_add_up(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[[1767712383.0, 10, 1], [1767712384.0, 13, 1]]")
    (node,), _ = imported(path)
    third = 333_333_333
    assert steps(node) == [
        (T, T + third, 11),
        (T + third, T + 2 * third, 12),
        (T + 2 * third, T + S, 13),
    ]


def test_the_gap_before_a_restarted_run_is_excluded(tmp_path: Path) -> None:
    path = tmp_path / "run-a-tag-b.csv"
    rows = [(0, 5), (1, 6), (100, 5), (101, 6), (101, 7), (102, 6)]
    lines = [f"{1_767_712_383 + t}.0,{step},1" for t, step in rows]
    path.write_text("\n".join(["Wall time,Step,Value", *lines, "x,1,2", "1,2", "-1.0,3,3"]))
    (node,), (account,) = imported(path)
    assert steps(node) == [(T, T + S, 6), (T + 100 * S, T + 101 * S, 6)]
    assert account.skipped == {
        "pairs of points without a later step or time": 3,
        "points without a time or a step": 3,
    }


def test_runs_are_distinguished_by_file_names() -> None:
    nodes, _ = imported(*sorted((SEEDS / "run").iterdir()), LOSS)
    assert sorted(node.display_name for node in nodes) == ["loss", "version_0"]


def test_readings_alone_give_devices_without_ranks() -> None:
    (node,), _ = imported(SEEDS / "run-a-tag-system_gpu.1.powerWatts.json")
    assert list(series(node)) == ["gpu.power_watts gpu1"]
    assert node._ranks == {}


def test_scalar_points_give_step_times_without_findings() -> None:
    report = analyze(LOSS)
    known = {metric.name: metric.value for metric in report.metrics}
    assert (known["step.count"], known["step.p50_ns"]) == (4.0, pytest.approx(2 * S, rel=0.3))
    assert report.findings == ()


@pytest.mark.parametrize(
    "head", [b"Wall time;Step\n", b"[[1, 2, 3], [4, 5, 6]]", b"[[1767712383.5, 1.5, 3]]", b"[]"]
)
def test_other_json_lists_are_not_recognised(head: bytes) -> None:
    assert find_importer(head, Path("x.json")) is None


def test_a_single_point_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("Wall time,Step,Value\n1767712383.0,0,2.5\n")
    with pytest.raises(CannotImportError, match="no two consecutive points"):
        imported(path)


def test_event_files_are_refused_with_an_export_hint(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1767712383.host.1.0"
    path.write_bytes(
        b"\x18" + bytes(11) + b"\x09" + bytes(8) + b"\x1a\x0dbrain.Event:2" + bytes(90)
    )
    with pytest.raises(
        CannotImportError, match="event files are not read: export the scalars from TensorBoard"
    ):
        imported(path)
    nodes, (account, _) = imported(path, LOSS)
    assert (len(nodes), account.refused) == (1, True)


def test_too_many_points_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = "".join(f"{n}.0,{n},1\n" for n in range(262_145))
    path.write_text(f"Wall time,Step,Value\n{rows}")
    with pytest.raises(CannotImportError, match="more than 262,144 points"):
        imported(path)


def test_the_point_limit_applies_to_all_files_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "MAX_POINTS", 5)
    paths = [tmp_path / f"{name}-tag-loss.csv" for name in ("run-a", "run-b")]
    for path in paths:
        rows = "".join(f"17000000{second:02}.0,{second},1\n" for second in range(3))
        path.write_text("Wall time,Step,Value\n" + rows)
    imported(paths[0])
    with pytest.raises(CannotImportError, match="more than 5 points in all files"):
        imported(*paths)


def test_only_the_last_steps_of_a_long_run_are_kept(tmp_path: Path) -> None:
    paths = [tmp_path / f"run-{name}-tag-x.csv" for name in "ab"]
    rows = "1.0,0,1\n2.0,9007199254740991,1\n3.0,9007199254740992,1\n4.0,1,1\n5.0,100001,1\n"
    for path in paths:
        path.write_text(f"Wall time,Step,Value\n{rows}")
    (node,), accounts = imported(*paths)
    assert len(steps(node)) == 100_000
    assert (steps(node)[0][0], steps(node)[-1][1]) == (4 * S, 5 * S)
    room = "all runs together have room for 131,072"
    assert f"only the last 100,000 steps are shown: {room}" in accounts[0].notes
    assert accounts[1].notes == [f"only the last 0 steps are shown: {room}"]
