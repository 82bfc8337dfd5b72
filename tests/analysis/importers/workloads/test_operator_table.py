"""Operator tables: steps placed one after the other, exchanges, teams; broken and missing files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.node_tables import compute_group_number
from clusterprof.analysis.importers.workloads.operator_table import OperatorTable, build_node
from clusterprof.analysis.importers.workloads.pipeline_stages import (
    OperationRow,
    OperationTable,
    select_joint_waits,
)
from clusterprof.analysis.pipeline import analyze
from clusterprof.cli.common import require_complete_report
from clusterprof.errors import NoRecording, PartialRecording
from clusterprof.output.renderers.json import build_document
from clusterprof.output.renderers.text.culprits import describe_caused_loss, summarize_main_culprits
from clusterprof.probe import layout
from clusterprof.report.model import CulpritGroup
from clusterprof.units import format_quantity
from tests.support.trace_imports import (
    MS,
    SEEDS,
    import_files,
    list_ranks,
    list_readings,
    list_spans,
)

TIMELINE = SEEDS / "operator-table" / "timeline.json"
FORWARD, BACKWARD = compute_group_number("0:0,1"), compute_group_number("1:0,1")
CLIP = compute_group_number("optimizer-clip-main-grad:0,1")
TO_0, TO_1 = (peer + 1 << layout.PEER_SHIFT for peer in (0, 1))
ISSUED, WAITED = (form << layout.FORM_SHIFT for form in (layout.ISSUE, layout.WAIT))


def test_both_stages_of_a_pipeline_are_imported() -> None:
    (node,), (account,) = import_files([TIMELINE])
    assert list_ranks(node) == [(1, 0, 2, "gpu0"), (2, 1, 2, "gpu1")]
    first, last = (list_spans(node, pid) for pid in (1, 2))
    # Steps 7 and 9 are 750 ms long; in the file they begin at 0 and at 1000.
    assert first["step"] == last["step"] == [(0, 750, 7, 2, -1, -1), (750, 1500, 9, 2, -1, -1)]
    assert [span[:2] for span in first["forward"]] == [(0, 100), (750, 850)]
    assert [span[:2] for span in last["backward"]] == [(300, 499), (1050, 1249)]
    assert first["collective"][:3] == [
        (100, 101, FORWARD, 0, -1, layout.SEND | TO_1),
        # A timeline shows the transfer; the first stage came when its send was over.
        (101, 500, BACKWARD, 0, -1, layout.RECV | TO_1),
        (700, 710, CLIP, 0, -1, layout.ALL_REDUCE),
    ]
    assert last["collective"][:3] == [
        (100, 101, FORWARD, 0, -1, layout.RECV | TO_0),  # nothing before it in this step
        (499, 500, BACKWARD, 0, -1, layout.SEND | TO_0),
        (500, 710, CLIP, 0, -1, layout.ALL_REDUCE),
    ]
    assert [span[:4] for span in first["collective"][3:]] == [
        (850, 851, FORWARD, 1),
        (851, 1250, BACKWARD, 1),
        (1450, 1460, CLIP, 1),
    ]
    busy = list_readings(node, "gpu.busy_ns_total", "gpu0")
    assert (busy[710], busy[850]) == (300 * MS, 440 * MS)
    assert account.read == {"operations": 26, "ranks": 2, "steps": 2}
    assert account.notes == [
        # forward and backward: 100 and 200 ms of stage 0, 199 and 199 of stage 1
        "stage 1 does 1.3 times the work of the median stage: give it fewer layers (the last one"
        " also has the output layer and the loss)",
        "each step is timed from its own beginning: steps are placed one after the other",
    ]


def test_a_send_overlapping_a_receive_becomes_issue_and_wait(tmp_path: Path) -> None:
    events = json.loads(TIMELINE.read_text())
    sends = [event for event in events if event["name"] == "forward-send"]
    for send in sends:  # begins with the receive, at 499
        send["ts"] += 399_000
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(events))
    (node,), _ = import_files([path])
    assert list_spans(node, 1)["collective"][:3] == [
        (100, 100, FORWARD, 0, -1, layout.SEND | ISSUED | TO_1),
        (100, 500, BACKWARD, 0, -1, layout.RECV | TO_1),
        (500, 500, FORWARD, 0, -1, layout.SEND | WAITED | TO_1),
    ]


def test_broken_timelines_are_read_to_the_last_whole_event(tmp_path: Path) -> None:
    text = TIMELINE.read_text()
    path = tmp_path / "timeline.json"
    path.write_text(text[: text.rindex('{"name":"backward-compute"') + 30])
    _, (account,) = import_files([path])
    assert account.cut == "broken, or cut off; what came before was read"
    events = json.loads(text)
    work = [event for event in events if event["name"] == "forward-compute"]
    for item, (key, value) in zip(work, (("ts", -1), ("dur", 1e300), ("ts", "x"), ("tid", 99))):
        item[key] = value
    path.write_text(json.dumps(events)[:-1] + ', 7, {"ph": "X"}]')
    _, (account,) = import_files([path])
    assert account.skipped == {
        "operations with an invalid time": 1,
        "operations without a time, a step or a rank": 2,
        "operations of a thread without a stage": 1,
        "entries that are not JSON objects": 1,
        "events without a process": 1,
    }


def test_the_ideal_table_of_a_job_is_left_out(tmp_path: Path) -> None:
    for name in ("ideal-timeline.json", "timeline.json"):
        (tmp_path / name).write_bytes(TIMELINE.read_bytes())
    (_,), (ideal, measured) = import_files(sorted(tmp_path.iterdir()))
    assert (ideal.read["operations"], measured.read["operations"]) == (0, 26)
    assert "not used: another table of the same job was read" in ideal.notes


PASSES = {
    # (stage, pass, microbatch): begin, end; stage 0 works 5 ms a pass, stage 1 works 15
    (0, "forward", 0): (0, 5),
    (1, "forward", 0): (6, 21),
    (0, "forward", 1): (6, 11),
    (1, "backward", 0): (21, 36),
    (0, "backward", 0): (37, 42),
    (1, "forward", 1): (37, 52),
    (1, "backward", 1): (52, 67),
    (0, "backward", 1): (68, 73),
}
MESSAGES = {
    # (pass, microbatch): begin of the receive, begin of the send, end of both; 1 ms of transfer
    ("forward", 0): (0, 5, 6),
    ("forward", 1): (36, 11, 37),
    ("backward", 0): (11, 36, 37),
    ("backward", 1): (42, 67, 68),
}


def write_pipeline(path: Path, steps: int, copies: int = 1) -> None:
    """Write the passes and messages above as a timeline, and that all ranks meet at 73 ms.

    Of several copies of the model the ranks of a stage meet one ms before.
    """
    roles = ("compute", "pp-comm", "misc")
    events: list[dict[str, object]] = [
        {"name": "thread_name", "pid": copy, "tid": 3 * stage + at, "ph": "M"}
        | {"args": {"name": f"PP rank {stage}, TP rank 0, {role}"}}
        for copy in range(copies)
        for stage in (0, 1)
        for at, role in enumerate(roles)
    ]

    def add(step: int, tid: int, name: str, number: int, begin: int, end: int) -> None:
        where = {"step": step, "model_chunk": 0, "mb_id": number, "seq_id": number}
        times = {"ts": 1000 * begin + 1e6 * step + 1, "dur": 1000 * (end - begin)}
        for copy in range(copies):
            event = {"name": name, "pid": copy, "tid": tid, "ph": "X", "args": where}
            events.append(event | times)

    for step in range(steps):
        for (stage, name, number), (begin, end) in PASSES.items():
            add(step, 3 * stage, f"{name}-compute", number, begin, end)
        for (name, number), (receive, send, end) in MESSAGES.items():
            to = name == "forward"
            add(step, 1 + 3 * to, f"{name}-recv", number, receive, end)
            add(step, 4 - 3 * to, f"{name}-send", number, send, end)
        if copies > 1:
            add(step, 2, "grads-reduce-scatter", 0, 72, 73)
            add(step, 5, "grads-reduce-scatter", 0, 67, 68)
        add(step, 2, "optimizer-clip-main-grad", 0, 73, 74)
        add(step, 5, "optimizer-clip-main-grad", 0, 68, 74)
    path.write_text(json.dumps(events))


def test_slowdown_compares_with_the_mean_duration_of_each_pass(tmp_path: Path) -> None:
    # A step takes 74 ms. With the mean of 10 ms a pass: stage 0 forward 0-10 and 11-21, stage 1
    # forward 11-21, backward 21-31, exchange until 32, stage 0 backward 32-42, stage 1 forward
    # 32-42, backward 42-52, sends until 53, stage 0 backward 53-63, all meet until 64.
    path = tmp_path / "timeline.json"
    write_pipeline(path, steps=60)
    report = analyze(path)
    assert report.in_step_ns == 2 * 60 * 74 * MS
    assert report.impact is not None
    yardsticks = {name: value for name, value, _ in report.impact.efficiency_metrics}
    assert yardsticks["straggler slowdown S"] == pytest.approx(74 / 64, rel=5e-3)
    assert yardsticks["load balance"] == pytest.approx(40 / 60)
    # Stage 1 like stage 0: 5 ms a pass; forward 0-5 and 6-11, 6-11, 11-16, exchange until 17,
    # backward 17-22, forward 17-22, 22-27, sends until 28, backward 28-33, all meet until 34.
    first = report.findings[0]
    assert (first.cause.id, first.culprits[0].rank) == ("sync-imbalance", 1)
    work = [line for line in report.impact.causes if line.cause.startswith("sync-")]
    # Whether it was always slow shows after some steps; the two causes share what a fix saves.
    assert sum(line.saved_ns or 0 for line in work) == pytest.approx(60 * 40 * MS, rel=0.01)
    # One answer: the ranked list, the main culprit and the job.
    assert first.recoverable_ns == 2 * (report.impact.causes[0].saved_ns or 0)
    assert first.culprits[0].recoverable_ns == first.recoverable_ns


def test_an_evenly_slow_stage_is_a_single_culprit_group(tmp_path: Path) -> None:
    # The pipeline of the test before, twice: both ranks of stage 1 take 15 ms a pass, others 5.
    path = tmp_path / "timeline.json"
    write_pipeline(path, steps=60, copies=2)
    report = analyze(path)
    first = report.findings[0]
    assert first.cause.id == "sync-imbalance"
    assert first.culprit_group == CulpritGroup("stage 1", (2, 3))
    assert {culprit.rank for culprit in first.culprits} >= {2, 3}
    assert summarize_main_culprits(first) == "stage 1 (all its 2 ranks)"
    advised = [advice.id for advice in first.advice]
    assert advised[0] == "lighter-last-stage" and "compare-devices" not in advised
    assert first.advice[0].what == "Give stage 1 fewer layers"
    (caused,) = describe_caused_loss(first, 4, report.in_step_ns)
    assert caused.startswith("stage 1 (all its 2 ranks): ")
    # With 5 ms a pass all meet at 34 ms instead of 74, or a ms later as in the test before.
    assert report.impact is not None
    work = [line for line in report.impact.causes if line.cause.startswith("sync-")]
    assert sum(line.saved_ns or 0 for line in work) == pytest.approx(60 * 40 * MS, rel=0.03)
    saved_ns = 4 * (report.impact.causes[0].saved_ns or 0)
    assert first.recoverable_ns == saved_ns
    share = format_quantity(saved_ns / report.in_step_ns, "ratio")
    assert caused.endswith(f"fixing it alone saves {format_quantity(saved_ns, 'ns')}, {share}")
    stored = build_document(report)["findings"][0]
    assert stored["culprit_group"] == {"name": "stage 1", "ranks": [2, 3]}


def test_a_single_slow_rank_forms_no_culprit_group(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_pipeline(path, steps=60)
    assert all(finding.culprit_group is None for finding in analyze(path).findings)


def build_stages(passes: dict[tuple[int, int], int], meets: dict[int, int]) -> OperationTable:
    """Build three steps: a pass per rank (stage, copy) from 0, then the reduction of its stage."""
    table, account = OperationTable(), Account(Path("job.parquet"))
    for step in range(3):
        for position, end in passes.items():
            table.add(position, "forward-compute", OperationRow(step, 0, 0, end * MS), account)
            meet = meets[position[0]] * MS
            for name in ("layernorm-grads-all-reduce", "grads-reduce-scatter"):
                table.add(position, name, OperationRow(step, 0, meet, meet + 10 * MS), account)
    return table


def test_stage_ranks_resuming_together_waited_for_the_last_rank() -> None:
    """Stage 0 ends at 100, 140, 190 and goes on at 192; stage 1 all end at 200, then idle."""
    ends = {(0, 0): 100, (0, 1): 140, (0, 2): 190, (1, 0): 200, (1, 1): 200, (1, 2): 201}
    account = Account(Path("job.parquet"))
    node = build_node(build_stages(ends, {0: 192, 1: 240}), account)
    assert node is not None
    waits = {
        pid: [span[:2] for span in list_spans(node, pid)["collective"] if span[5] == layout.BARRIER]
        for pid in range(1, 7)
    }
    steps = (0, 250, 500)
    assert waits == {
        1: [(at + 100, at + 192) for at in steps],
        2: [(at + 140, at + 192) for at in steps],
        3: [(at + 190, at + 192) for at in steps],
        4: [],
        5: [],
        6: [],
    }


@pytest.mark.parametrize(
    ("gaps", "joint"),
    [
        ({0: (0, 99), 1: (50, 100), 2: (90, 101)}, {0, 1, 2}),
        ({0: (0, 99), 1: (50, 100), 2: (90, 110)}, set()),  # two of three are too few
        ({0: (0, 99), 1: (50, 100), 2: (90, 101), 3: (9, 99), 4: (9, 200)}, {0, 1, 2, 3}),
        ({0: (85, 99), 1: (90, 100), 2: (99, 101)}, set()),  # they ended their work together
        ({0: (0, 100), 1: (50, 100)}, set()),  # of two ranks it may be chance
    ],
)
def test_joint_waits_need_enough_ranks_resuming_together(
    gaps: dict[int, tuple[int, int]], joint: set[int]
) -> None:
    in_ns = {rank: (start * MS, end * MS) for rank, (start, end) in gaps.items()}
    assert set(select_joint_waits(in_ns, len(gaps))) == joint


@pytest.mark.parametrize(
    ("slow", "heavy"),
    [({(1, 0), (1, 1), (1, 2)}, True), ({(1, 0)}, False)],  # the whole stage, or one rank of it
)
def test_a_stage_with_more_work_is_the_answer(slow: set[tuple[int, int]], heavy: bool) -> None:
    ends = {(stage, copy): 100 for stage in (0, 1) for copy in range(3)}
    account = Account(Path("job.parquet"))
    build_node(build_stages(ends | dict.fromkeys(slow, 150), {0: 200, 1: 200}), account)
    answer = (
        "stage 1 does 1.5 times the work of the median stage: give it fewer layers (the last one"
        " also has the output layer and the loss)"
    )
    assert account.answers == ([answer] if heavy else [])


def test_a_table_of_another_job_is_refused(tmp_path: Path) -> None:
    events = json.loads(TIMELINE.read_text())
    for event in events:  # a third copy of each stage: other ranks
        event["pid"] = 1
    (tmp_path / "a.json").write_bytes(TIMELINE.read_bytes())
    (tmp_path / "b.json").write_text(json.dumps([*json.loads(TIMELINE.read_text()), *events]))
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    (_,), (used, other) = import_files(paths)
    assert (used.refused, other.refused, dict(other.read)) == (False, True, {})
    assert other.cut == "not used: it is of another job than a.json"
    report = analyze(paths, leave_unknown=True)
    assert len(report.ranks) == 2
    [lost] = [gap for gap in report.coverage_gaps if gap.kind == "lost"]
    assert lost.what == str(paths[1])
    with pytest.raises(PartialRecording, match="1 thing lost"):
        require_complete_report(report)
    with pytest.raises(NoRecording, match="another job"):
        analyze(paths)  # as a gate does
    require_complete_report(analyze(paths[:1], leave_unknown=True))


def test_parquet_is_recognized_by_its_columns_and_needs_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"PAR1 dp_rank stage step optype start_ts duration seq_id PAR1")
    assert OperatorTable().recognizes(path.read_bytes(), path)
    path.write_bytes(b"PAR1 rank step start end PAR1")
    assert not OperatorTable().recognizes(path.read_bytes(), path)
    path.write_bytes(b"PAR1 dp_rank stage step optype start_ts duration seq_id PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CannotImportError, match="needs the package pyarrow") as caught:
        import_files([path])
    assert "pip install pyarrow" in caught.value.remedy
