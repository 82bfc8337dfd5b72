"""The same recording with less in it, and what a report of clusterprof says in common words."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.report.model import Report
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Clock, Columns, Event, Gap, Header, Rows, Spans
from clusterprof.trace.writer import RecordingWriter
from clusterprof_lab.answer import Answer, NamedCause, dump, load
from clusterprof_lab.families import FAMILIES
from clusterprof_lab.scenario import ExpectedVerdict
from clusterprof_lab.score.ablate import ABLATIONS, MisplacedTime, ablate, compare_reports
from clusterprof_lab.score.clusterprof_answer import (
    compute_residual_ns,
    make_answer,
    sum_buckets_ns,
)
from clusterprof_lab.score.modes import find_visible_rank, restrict_truth, rewrite_for_mode
from clusterprof_lab.score.rewrite import ALL_SPANS, RemovedSignals, rewrite_recording
from clusterprof_lab.truth import read_truth
from tests.support.builders import make_header
from tests.support.score_runs import recordings, write_two_ranks

TESTS = Path(__file__).resolve().parents[2]
STORED = TESTS / "recordings" / "dlrm-8rank"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_ranks(tmp_path_factory.mktemp("runs"), "pair")


@pytest.fixture(scope="module")
def report(run: Path) -> Report:
    return analyze(run / "recording")


def points(answer: Answer) -> dict[str, float]:
    return {name: round(100 * x, 1) for name, x in (answer.family_ratio or {}).items() if x}


def test_a_report_becomes_an_answer(report: Report) -> None:
    answer = make_answer(report)
    # of 600 ms per rank and step: 150 and 50 by rank 1, 100 by nobody
    assert points(answer) == {"storage": 25.0, "cpu": 8.3, "network": 16.7}
    rows = [
        (finding.family, finding.leaf, finding.culprits, finding.outside_steps)
        for finding in answer.causes or ()
    ]
    assert rows == [
        ("storage", "storage-local", (1,), False),
        ("network", "net-transfer", (), False),
        ("cpu", "cpu-preprocess", (1,), False),
        ("startup", "startup", (0, 1), True),
    ]
    assert (answer.culprits, answer.residual_ns, round(answer.lost_ratio or 0, 3)) == ((1,), 0, 0.5)


def test_an_answer_never_gives_a_family_as_a_leaf() -> None:
    answer = make_answer(analyze(STORED))
    assert set(answer.family_ratio or ()) == set(FAMILIES)
    assert all(
        item.leaf is None or item.leaf not in FAMILIES or item.leaf == "startup"
        for item in answer.causes or ()
    )


def test_the_residual_is_found_at_every_level(report: Report) -> None:
    assert compute_residual_ns(report) == 0
    first = report.ranks[0]
    for wrong, gap in (
        (replace(report, lost_ns=report.lost_ns + 5), 5),
        (replace(report, unattributed_ns=report.unattributed_ns - 7), 7),
        (replace(report, outside_buckets=()), report.outside_ns),
        (
            replace(
                report, ranks=(replace(first, window_ns=first.window_ns + 2), *report.ranks[1:])
            ),
            2,
        ),
        (replace(report, lost_without_culprit=(*report.lost_without_culprit, ("cpu-gc", 9))), 9),
        (
            replace(report, findings=(replace(report.findings[0], lost_ns=3),)),
            report.findings[0].lost_ns - 3,
        ),
    ):
        assert compute_residual_ns(wrong) == gap


def test_culprits_of_the_run_are_those_of_its_main_finding(report: Report) -> None:
    storage = report.findings[0]
    chief, small, tiny = (
        replace(storage.culprits[0], rank=rank, own_ns=own, others_ns=0)
        for rank, own in ((1, 1000), (2, 250), (3, 249))
    )
    several = replace(report, findings=(replace(storage, culprits=(chief, small, tiny)),))
    assert make_answer(several).culprits == (1, 2)  # from a quarter of the first one's on
    cause = replace(storage.cause, id="fail-hang", family="fail")
    hang = replace(storage, cause=cause, outside_steps=True, culprits=(tiny,))
    assert make_answer(replace(report, findings=(storage, hang))).culprits == (3,)
    nobodys = replace(storage, culprits=())
    assert make_answer(replace(report, findings=(nobodys, storage))).culprits == (1,)
    assert make_answer(replace(report, findings=(nobodys,))).culprits == ()


def test_rewriting_without_removal_keeps_the_report(tmp_path: Path) -> None:
    same = analyze(
        rewrite_recording(STORED, tmp_path / "same", RemovedSignals("same", "everything"))
    )
    assert replace(same, title="") == replace(analyze(STORED), title="")


def test_each_mode_keeps_only_its_permitted_signals(run: Path, tmp_path: Path) -> None:
    truth = read_truth(run)
    held: dict[str, tuple[list[int], list[str], list[str]]] = {}
    for mode in ("M0", "M1", "M2", "M3"):
        spans, sources, events = set(), set(), set()
        for node in list_node_folders(
            rewrite_for_mode(run / "recording", mode, tmp_path / mode, truth)
        ):
            for record in NodeReader(node):
                if isinstance(record, Spans):
                    spans |= set(record.columns["kind"].tolist())
                elif isinstance(record, Rows | Columns):
                    sources.add(record.table if isinstance(record, Rows) else record.collector)
                elif isinstance(record, Event):
                    events.add(record.kind)
        held[mode] = sorted(spans), sorted(sources), sorted(events)
    markers = [layout.DATA_WAIT, layout.FETCH, layout.STEP, layout.WORKER_START]
    tables, known = ["processes", "threads"], ["process-registered"]
    assert held == {
        "M0": (sorted([*markers, layout.COLLECTIVE]), tables, known),
        "M1": (sorted(markers), tables, known),
        "M2": ([], tables, known),
        "M3": ([], [], known),
    }


def test_user_spans_are_removed_with_all_spans(tmp_path: Path) -> None:
    script = recordings.make_training([(0.1, 0.2)] * 3)
    script.main_spans.append((layout.FIRST_USER_KIND, 1.0, 1.1))
    recordings.write_recording(script, tmp_path / "whole" / "node")
    # three waits, fetches and steps, a worker's start, and one of the user's own
    for kinds, left in ((ALL_SPANS, 0), (ALL_SPANS - {-1}, 1), (frozenset({-1}), 10)):
        less = rewrite_recording(
            tmp_path / "whole", tmp_path / f"less{left}", RemovedSignals("", "", kinds)
        )
        selected = [record for record in NodeReader(less / "node") if isinstance(record, Spans)]
        assert sum(len(item.columns["kind"]) for item in selected) == left


def test_two_ranks_on_a_node_are_distinguished_with_their_workers(tmp_path: Path) -> None:
    """Rank 0 is process 100 with worker 201, rank 1 process 300 with worker 301."""
    devices = [{"id": "gpu-0"}, {"id": "gpu-1"}]
    head = replace(make_header(), devices=devices, collectors=[{"name": "disk"}])
    folder = tmp_path / "whole" / "node"
    writer = RecordingWriter(folder, head, lambda: Clock(0, 0, 0), keep_free_bytes=0)
    for rank, pid in ((0, 100), (1, 300)):
        reported = {"pid": pid, "variables": {"RANK": str(rank)}, "device": f"gpu-{rank}"}
        writer.append(Event(0, "process-registered", reported))
    table = [[0, 0, 0, 0], [100, 201, 300, 301], [1, 100, 1, 300]]
    writer.append(
        Rows("processes", ("t_ns", "pid", "parent_pid"), [array("q", value) for value in table])
    )
    busy, values = ["gpu.busy_ns_total"] * 2, [array("q", [5]), array("q", [7])]
    gpus, now = ["gpu-0", "gpu-1"], array("q", [0])
    writer.append(Columns("gpu_nvidia", busy, gpus, now, values, [None, None]))
    writer.close()
    less = RemovedSignals("", "", sources=frozenset({"disk"}), rank=1)
    records = list(
        NodeReader(rewrite_recording(tmp_path / "whole", tmp_path / "one", less) / "node")
    )
    [kept] = [record for record in records if isinstance(record, Header)]
    assert (list(kept.devices), list(kept.collectors)) == ([{"id": "gpu-1"}], [])
    [rows] = [record for record in records if isinstance(record, Rows)]
    assert rows.columns[1].tolist() == [300, 301]
    [columns] = [record for record in records if isinstance(record, Columns)]
    assert (list(columns.devices), columns.values[0].tolist()) == (["gpu-1"], [7])
    assert [record.attributes["pid"] for record in records if isinstance(record, Event)] == [300]


def test_a_removed_signal_leaves_a_gap(run: Path, tmp_path: Path) -> None:
    less = RemovedSignals("no threads", "", sources=frozenset({"threads"}))
    folder = rewrite_recording(run / "recording", tmp_path / "less", less)
    gaps = [
        record for record in NodeReader(list_node_folders(folder)[0]) if isinstance(record, Gap)
    ]
    assert [(gap.collector, gap.kind) for gap in gaps] == [("threads", "absent")]


def test_a_single_visible_rank_waits_for_an_unknown_peer(run: Path, tmp_path: Path) -> None:
    truth, wanted = read_truth(run), ExpectedVerdict("storage", ("storage-local",), "node")
    assert find_visible_rank(truth) == 1
    assert find_visible_rank(replace(truth, seed=1)) == 0
    mine, asked = restrict_truth(truth, wanted, "M4")
    assert {bucket.cause for bucket in mine.lost} == {
        "storage-local",
        "cpu-preprocess",
        "net-transfer",
    }
    assert asked == replace(wanted, culprit="rank")
    victim, asked = restrict_truth(replace(truth, seed=1), wanted, "M4")
    assert sorted(
        (bucket.cause, bucket.culprit) for bucket in victim.lost if bucket.culprit is None
    ) == [("net-transfer", None), ("sync-unknown-peer", None), ("sync-unknown-peer", None)]
    assert asked == ExpectedVerdict("synchronization", ("sync-unknown-peer",), "everybody")
    alone = analyze(
        rewrite_for_mode(run / "recording", "M4", tmp_path / "M4", replace(truth, seed=1))
    )
    assert [rank.rank for rank in alone.ranks] == [0]
    assert alone.job is not None and alone.job.world_size == 2
    waited = {id_ for id_, ns in sum_buckets_ns(alone).items() if ns}
    assert waited == {"sync-unknown-peer"}  # how much of it was transfer, nobody can tell it
    assert restrict_truth(truth, wanted, "M2") == (truth, wanted)


def test_hidden_ranks_of_the_node_are_removed_with_their_devices(tmp_path: Path) -> None:
    alone = analyze(rewrite_recording(STORED, tmp_path / "alone", RemovedSignals("M4", "", rank=5)))
    assert [(rank.rank, rank.steps > 0) for rank in alone.ranks] == [(5, True)]


def test_time_moved_to_a_wrong_cause_is_reported(report: Report) -> None:
    first, second = report.ranks
    moved = dict(second.buckets)
    moved["cpu-gc"] = moved.pop("storage-local")  # a quarter of the time of one of two ranks
    wrong = replace(report, ranks=(first, replace(second, buckets=tuple(moved.items()))))
    [result] = compare_reports(report, wrong, "threads")
    assert (result.signal, result.to, result.bound) == ("threads", "cpu-gc", False)
    assert round(result.points, 1) == 12.5
    up = dict(second.buckets)
    up["storage"] = up.pop("storage-local")  # up the tree
    better = replace(report, ranks=(first, replace(second, buckets=tuple(up.items()))))
    assert compare_reports(report, better, "threads") == []
    up["unattributed"] = up.get("unattributed", 0) + up.pop("storage")
    best = replace(report, ranks=(first, replace(second, buckets=tuple(up.items()))))
    assert compare_reports(report, best, "threads") == []
    other = dict(second.buckets)
    other["cpu"] = other.pop("storage-local")  # into another family
    worse = replace(report, ranks=(first, replace(second, buckets=tuple(other.items()))))
    assert [item.to for item in compare_reports(report, worse, "threads")] == ["cpu"]


def test_ablation_removes_signals_individually(run: Path, tmp_path: Path) -> None:
    chosen = tuple(
        ablation for ablation in ABLATIONS if ablation.name in ("threads", "collectives")
    )
    result = ablate(run / "recording", tmp_path, chosen)
    assert all(isinstance(value, MisplacedTime) for value in result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collectives", "threads"]
    whole = {kind for ablation in ABLATIONS for kind in ablation.spans}
    assert whole <= ALL_SPANS  # and STEP stays: without it there is no job to speak of


def test_a_stored_answer_is_loaded_unchanged(tmp_path: Path) -> None:
    printed = (
        NamedCause("cpu", None, 0.5, None, (3, 1)),
        NamedCause("startup", "startup", None, 0.9, None, True),
    )
    answer = Answer("other 2", printed, {"cpu": 0.5}, (3,), None, 0.5, 0.1, leaves=False)
    dump(answer, tmp_path / "answer.json")
    assert load(tmp_path / "answer.json") == answer
    short = (
        '{"format": "clusterprof-answer", "schema": 1, "tool": "t", "causes": [{"family": "cpu"}]}'
    )
    (tmp_path / "short.json").write_text(short, encoding="utf-8")
    assert load(tmp_path / "short.json") == Answer("t", (NamedCause("cpu", None, None),))
    (tmp_path / "wrong.json").write_text(short.replace("tool", "tolo"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong\.json"):
        load(tmp_path / "wrong.json")
