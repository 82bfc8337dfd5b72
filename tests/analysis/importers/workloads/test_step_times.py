"""Step tables: which column is what, how steps and waits are placed, who is late; all by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.core.node_tables import compute_group_number
from clusterprof.analysis.importers.workloads.step_times import (
    StepColumns,
    StepTimes,
    match_columns,
)
from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.wording import describe_total_loss
from clusterprof.report.model import Report
from tests.support.metric_imports import SHARED, import_files

MS = 1_000_000
BARRIER = 9
GROUP = compute_group_number([0, 1])


@pytest.mark.parametrize(
    ("heads", "result"),
    [
        ("rank,step,duration_ms", StepColumns(0, 1, duration=2, duration_unit=1e6)),
        ("Iteration,Worker,Step Time (s)", StepColumns(1, 0, duration=2, duration_unit=1e9)),
        (",worker,gpu,time,batch_time_norm", StepColumns(1, 3, duration=4)),
        ("rank,step,start_us,end_us", StepColumns(0, 1, 2, 3, start_unit=1e3, end_unit=1e3)),
        ("host,job,rank,step,elapsed", StepColumns(2, 3, duration=4, host=0, job=1)),
        ("rank,step,loss", None),
        ("rank,step,start", None),
        ("step,duration", None),
        ("rank,step,optype,duration", None),  # several rows for one step
    ],
)
def test_columns_are_recognized_by_their_names(heads: str, result: StepColumns | None) -> None:
    assert match_columns(heads.split(",")) == result


def step(start: int, end: int, number: int) -> tuple[int, ...]:
    """A step as placed."""
    return (start * MS, end * MS, number, 2, -1, -1)


def barrier(start: int, end: int, number: int) -> tuple[int, ...]:
    """The wait at the end of one."""
    return (start * MS, end * MS, GROUP, number, -1, BARRIER)


def test_durations_become_own_time_and_waits_for_the_slowest(tmp_path: Path) -> None:
    text = b"""rank,step,duration_ms
0,5,10
1,5,30
0,6,20
1,6,20
0,7,9
0,8,4
1,8,1
"""
    (node,), (account,) = import_files(StepTimes(), tmp_path, run7__csv=text)
    assert (node.name, node.wall) == ("run7", False)
    # Step 7 is not there of rank 1: rank 0's lasts as long as it says, and nobody waits.
    assert node.spans == {
        (0, "step"): [step(0, 30, 5), step(30, 50, 6), step(50, 59, 7), step(59, 63, 8)],
        (1, "step"): [step(0, 30, 5), step(30, 50, 6), step(59, 63, 8)],
        (0, "collective"): [barrier(10, 30, 0), barrier(50, 50, 1), barrier(63, 63, 2)],
        (1, "collective"): [barrier(30, 30, 0), barrier(50, 50, 1), barrier(60, 63, 2)],
    }
    assert account.read == {"rows": 7, "ranks": 2, "steps": 4}
    assert account.notes[-1].startswith("1 of 4 steps lack some rank")


def test_given_start_and_end_times_are_kept(tmp_path: Path) -> None:
    rows = [
        {"rank": 0, "step": 0, "start_ms": 100, "end_ms": 110, "host": "a"},
        {"rank": 1, "step": 0, "start_ms": 101, "end_ms": 130, "host": "b"},
        {"rank": 1, "step": 1, "start_ms": 131, "end_ms": 140, "host": "b"},
        {"rank": 0, "step": 1, "start_ms": 130, "end_ms": 150, "host": "a"},
    ]
    lines = "\n".join(map(json.dumps, rows)).encode()
    nodes, _ = import_files(StepTimes(), tmp_path, steps__jsonl=lines)
    assert {node.name: node.spans for node in nodes} == {
        "a": {
            (0, "step"): [step(100, 130, 0), step(130, 150, 1)],
            (0, "collective"): [barrier(110, 130, 0), barrier(150, 150, 1)],
        },
        "b": {
            (1, "step"): [step(101, 130, 0), step(131, 150, 1)],
            (1, "collective"): [barrier(130, 130, 0), barrier(140, 150, 1)],
        },
    }
    assert [node.wall for node in nodes] == [True, True]


def test_ranks_that_do_not_wait_for_each_other_are_not_reported_as_waiting(tmp_path: Path) -> None:
    rows = [
        {"rank": rank, "step": n, "start_ms": n * took, "end_ms": (n + 1) * took}
        for rank, took in ((0, 10), (1, 30))
        for n in range(3)
    ]
    (node,), (account,) = import_files(StepTimes(), tmp_path, free__json=json.dumps(rows).encode())
    assert node.spans == {
        (0, "step"): [step(0, 10, 0), step(10, 20, 1), step(20, 30, 2)],
        (1, "step"): [step(0, 30, 0), step(30, 60, 1), step(60, 90, 2)],
    }
    assert "no rank is shown to wait" in account.notes[-1]


def test_missing_units_are_guessed_and_reported(tmp_path: Path) -> None:
    (node,), (account,) = import_files(
        StepTimes(), tmp_path, t=b"rank,step,step_time\n0,1,0.5\n1,1,0.25\n"
    )
    assert node.spans[1, "collective"] == [barrier(250, 500, 0)]
    assert account.notes[0].startswith("no unit is stated: durations are read as s;")
    (node,), (account,) = import_files(
        StepTimes(), tmp_path, t=b"rank,step,step_time\n0,1,500\n1,1,250\n"
    )
    assert node.spans[1, "collective"] == [barrier(250, 500, 0)]
    assert account.notes[0].startswith("no unit is stated: durations are read as ms;")


def test_a_table_without_a_unit_reports_shares_only(tmp_path: Path) -> None:
    """Rank 1 takes 3 of the steps' 3, rank 0 takes 1: it waits for two thirds of its time."""
    path = tmp_path / "job.of.two.csv"
    rows = [f"{rank},{step},{1 + 2 * rank}" for step in range(20) for rank in (0, 1)]
    path.write_text("\n".join(["rank,step,duration", *rows]))
    report = analyze(path)
    assert not report.has_time_unit and report.nodes[0].name == "job.of.two"
    assert describe_total_loss(report) == ("33.3 % of step time was lost; 66.7 % was not observed.")
    screen = Terminal().render(report)
    assert "NO UNIT of time is stated" in screen and "rank 1" in screen
    path.write_text("\n".join(["rank,step,duration_s", *rows]))
    assert analyze(path).has_time_unit


def test_bad_rows_are_counted(tmp_path: Path) -> None:
    text = b"""rank,step,duration_ms\r
worker-1,3,10\r
0,3,NaN
0,3,-1
0,3,1e300
-1,3,5
x,3,5
0,99999999999999999999999,5
0,,5
0,3
\xff\xfe,3,5
"0
0,3,7\x00
0,3,8
"""
    (node,), (account,) = import_files(StepTimes(), tmp_path, bad__csv=text)
    assert node.spans[1, "step"] == [step(0, 10, 3)]
    assert sum(account.skipped.values()) + account.read["rows"] >= 10
    assert account.skipped["rows without a duration, or with a negative one"] == 3
    assert account.skipped["rows without a rank"] >= 2
    assert account.skipped["rows without a step"] == 2


@pytest.mark.parametrize("head", [b"", b"{", b"[{}", b"\x00\x01", b"PAR1", b"a,b\n1,2\n"])
def test_other_files_are_not_recognised(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(head)
    assert not StepTimes().recognizes(head, path)


def test_empty_tables_and_unreadable_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotImportError, match="no usable row"):
        import_files(StepTimes(), tmp_path, empty__csv=b"rank,step,duration\n")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        with pytest.raises(CannotImportError, match="pyarrow is not installed"):
            import_files(StepTimes(), tmp_path, t__parquet=b"PAR1\0rank\0step\0duration\0PAR1")


def slowdown(report: Report) -> float | None:
    """The straggler slowdown S."""
    by_key = {metric.name: metric.value for metric in report.metrics}
    return by_key["yardstick.slowdown_factor"]


def test_the_slow_rank_is_named_and_its_slowdown_is_exact(tmp_path: Path) -> None:
    # Rank 2 takes 130 ms, the others 100; the mean of the four is 107.5.
    rows = [f"{r},{n},{130 if r == 2 else 100}" for n in range(1, 61) for r in range(4)]
    path = tmp_path / "steps.csv"
    path.write_text("rank,step,duration_ms\n" + "\n".join(rows))
    report = analyze(path)
    assert report.lost_ns == 3 * 60 * 30 * MS
    first = report.findings[0]
    assert (first.cause.family, first.culprits[0].rank) == ("synchronization", 2)
    assert slowdown(report) == pytest.approx(130 / 107.5, rel=1e-9)


def test_equally_fast_ranks_lose_no_time(tmp_path: Path) -> None:
    rows = [f"{r},{n},100" for n in range(1, 61) for r in range(4)]
    path = tmp_path / "steps.csv"
    path.write_text("rank,step,duration_ms\n" + "\n".join(rows))
    report = analyze(path)
    assert (report.lost_ns, report.findings) == (0, ())


def answers(folder: Path, durations: Callable[[int, int], float]) -> tuple[str, ...]:
    """Analyze 60 steps of 4 ranks; durations: milliseconds of a rank in a step."""
    rows = [f"{r},{n},{durations(r, n)}" for n in range(1, 61) for r in range(4)]
    path = folder / "steps.csv"
    path.write_text("rank,step,duration_ms\n" + "\n".join(rows))
    report = analyze(path)
    if report.answers:  # above the fold
        first_lines = " ".join(Terminal(width=100).render(report).split("\n")[:4])
        assert report.answers[0][1:60] in " ".join(first_lines.split())
    return report.answers


def test_the_answer_names_the_slowest_ranks(tmp_path: Path) -> None:
    # 0.6 % are lost, too little for a finding
    assert answers(tmp_path, lambda r, n: 100.8 if r == 2 else 100) == (
        "Slowest of 4 ranks: rank 2 in 60 of 60 steps (1.01 times the median rank's mean)",
    )
    # ranks 1 and 3 in turn: 30 of 60 each, where 15 are even and 3 deviations 11.6 more
    (both,) = answers(tmp_path, lambda r, n: 120 if r % 2 and n % 4 // 2 == r // 2 else 100)
    assert "rank 1 in 30 of 60 steps" in both and "rank 3 in 30 of 60 steps" in both
    # each in turn: nobody is slow; all alike: neither
    assert answers(tmp_path, lambda r, n: 120 if n % 4 == r else 100) == ()
    assert answers(tmp_path, lambda r, n: 100) == ()


ALIBABA = SHARED / "alibaba-minibatch"


@pytest.mark.skipif(not ALIBABA.exists(), reason="the real tables do not lie beside the repository")
@pytest.mark.parametrize(("name", "slowest"), [("job_2", [5]), ("job_3", [0, 1])])
def test_the_known_stragglers_of_real_jobs_are_named(name: str, slowest: list[int]) -> None:
    known = json.loads((ALIBABA / "known.json").read_text())["jobs"][name]["computed_by_us"]
    most = sorted(known["slowest_counts"].items(), key=lambda item: -item[1])[: len(slowest)]
    assert sorted(int(rank) for rank, _ in most) == slowest
    report = analyze(ALIBABA / f"{name}_norm.csv")
    first = report.findings[0]
    assert first.cause.id == "sync-imbalance"
    assert sorted(culprit.rank or 0 for culprit in first.culprits[: len(slowest)]) == slowest
    others = sum(culprit.others_ns or 0 for culprit in first.culprits[len(slowest) :])
    assert others < 0.1 * first.lost_ns


def test_impossibly_long_durations_are_refused(tmp_path: Path) -> None:
    rows = b"rank,step,duration\n0,0,1e17\n1,0,1e17\n"
    with pytest.raises(CannotImportError, match="more than a century"):
        import_files(StepTimes(), tmp_path, huge__csv=rows)
