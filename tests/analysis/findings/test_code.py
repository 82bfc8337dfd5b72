"""Lines of findings and stacks of the job, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.attribution.ledger import Bucket, RankResult
from clusterprof.analysis.attribution.lines.lost_time_by_stack import (
    PEERS,
    RankStackTimes,
    StackSums,
)
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.cross_rank.wait_totals import CulpritTotals
from clusterprof.analysis.findings import code as code_module
from clusterprof.analysis.findings.code import build_code
from clusterprof.analysis.timeline.stacks import StackInterner, StackTree
from clusterprof.output.renderers.text.code import describe_line
from clusterprof.report.code import CodeLocation, CodeProfile, StackTime
from clusterprof.report.model import Finding
from tests.support.rank_results import S, make_rank_result

PREPROCESS = "cpu-preprocess"
MAIN = CodeLocation("/job/train.py", 1, "main")
AUGMENT = CodeLocation("/job/data.py", 42, "augment")
RESIZE = CodeLocation("/lib/python3.11/site-packages/PIL/Image.py", 2450, "resize")
PAD = CodeLocation("/job/data.py", 60, "pad")


def _build_table() -> StackTree:
    """1 main, 2 main > augment, 3 main > augment > resize, 4 main > pad."""
    interner = StackInterner()
    files = [MAIN.file, AUGMENT.file, RESIZE.file]
    rows = [[0, 0, 1, "main"], [1, 0, 42, "augment"], [2, 0, 2450, "resize"], [1, 0, 60, "pad"]]
    stacks = [[0, 0], [1, 1], [2, 2], [1, 3]]
    interner.add(
        {
            "pid": 1,
            "started_ticks": 1,
            "files": [0, files],
            "places": [0, rows],
            "stacks": [1, stacks],
        }
    )
    return interner.build_table()


TABLE = _build_table()


def _sums(**samples: int) -> StackSums:
    """So many samples of 1 s for each stack ("s2")."""
    rows = [(int(name[1:]), n * S, n, n * S**2) for name, n in sorted(samples.items())]
    return np.array(rows, np.float64).reshape(-1, 4).T


def _rank(
    number: int, steps: int = 0, in_steps: StackSums | None = None, **lost: StackSums
) -> RankResult:
    rank = make_rank_result(number)
    causes = {cause.replace("_", "-"): sums for cause, sums in lost.items()}
    code = RankStackTimes(causes, _sums() if in_steps is None else in_steps, 100)
    return replace(rank, code=code, ledger=replace(rank.ledger, steps=steps))


def _finding(lost_s: float, cause: str = PREPROCESS) -> Finding:
    return Finding(CAUSES[cause], int(lost_s * S), 0.1, None, 0.9, "A", False, False)


def _build(
    findings: list[Finding],
    ranks: list[RankResult],
    totals: list[CulpritTotals],
    nobody: tuple[tuple[str, int], ...] = (),
) -> tuple[tuple[Finding, ...], CodeProfile]:
    with_lines, code = build_code(findings, ranks, [TABLE] * len(ranks), totals, nobody)
    assert code is not None
    assert sum(time.lost_ns for time in code.stacks) == sum(
        sum(total.total.values()) for total in totals
    ) + sum(ns for _, ns in nobody)
    return with_lines, code


def test_the_ledger_loss_is_shared_among_lines_by_samples() -> None:
    # 10 samples: 6 in resize below augment, 1 in augment itself, 3 in pad. 10 s are lost.
    rank = _rank(0, cpu_preprocess=_sums(s2=1, s3=6, s4=3))
    totals = [CulpritTotals({PREPROCESS: 10 * S}, {})]
    (finding,), code = _build([_finding(10)], [rank], totals)
    first, second = finding.lines
    assert (first.place, first.library, first.lost_ns, first.samples) == (AUGMENT, RESIZE, 7 * S, 7)
    assert (second.place, second.library, second.lost_ns, second.samples) == (PAD, None, 3 * S, 3)
    assert (first.share_ratio, second.share_ratio) == (0.7, 0.3)
    assert (first.library_ratio, second.library_ratio) == (pytest.approx(6 / 7), 1.0)
    assert describe_line(first, {AUGMENT.file: "data.py", RESIZE.file: "PIL/Image.py"}) == (
        "data.py:42 in augment → PIL/Image.py:2450 resize (86 % of that)"
    )
    # Wilson, n = 10: 1.96 * sqrt(0.21 / 10 + 3.8416 / 400) / 1.38416
    assert first.error_ratio == pytest.approx(0.2477, abs=1e-4)
    assert not finding.lines_compared
    assert code.places == (MAIN, AUGMENT, RESIZE, PAD)
    assert code.is_library == (False, False, True, False)
    assert code.stacks == (
        StackTime(PREPROCESS, 0, (0, 1, 2), 6 * S, 6, 1),
        StackTime(PREPROCESS, 0, (0, 3), 3 * S, 3, 3),
        StackTime(PREPROCESS, 0, (0, 1), 1 * S, 1, 1),
    )
    assert code.samples == 100


def test_time_without_samples_has_no_stack() -> None:
    # 4 samples of 1 s stand for 4 s and, with three standard errors of 2 s, for 10 of the 20 s.
    rank = _rank(0, cpu_preprocess=_sums(s2=4))
    (finding,), code = _build([_finding(20)], [rank], [CulpritTotals({PREPROCESS: 20 * S}, {})])
    assert [(line.place, line.lost_ns) for line in finding.lines] == [(AUGMENT, 10 * S)]
    assert code.stacks[-1] == StackTime(PREPROCESS, 0, (0, 1), 10 * S, 4, 1)
    assert code.stacks[0] == StackTime(PREPROCESS, 0, (), 10 * S, 0)


def test_lines_of_a_culprit_include_the_waits_of_its_victims() -> None:
    slow, victim = _rank(0, cpu_preprocess=_sums(s2=8)), _rank(1, cpu_preprocess=_sums(s4=50))
    totals = [
        CulpritTotals({PREPROCESS: 3 * S}, {PREPROCESS: 5 * S}),
        CulpritTotals({PREPROCESS: 2 * S}, {}),
    ]
    (finding,), _ = _build([_finding(10)], [slow, victim], totals)
    assert [(line.place, line.lost_ns) for line in finding.lines] == [
        (AUGMENT, 8 * S),
        (PAD, 2 * S),
    ]


def test_lines_of_a_longer_working_culprit_are_compared_with_peers() -> None:
    # 100 steps: rank 0 spends 1 s a step in augment, its peers 0.2 s; all 0.5 s in main.
    slow = _rank(0, 100, _sums(s1=50, s2=100))
    peers = [_rank(number, 100, _sums(s1=50, s2=20)) for number in (1, 2)]
    imbalance = "sync-imbalance"
    totals = [CulpritTotals({}, {imbalance: 8 * S}), *[CulpritTotals({}, {})] * 2]
    (finding,), code = _build([_finding(8, imbalance)], [slow, *peers], totals)
    (line,) = finding.lines
    assert (line.place, line.lost_ns, line.samples) == (AUGMENT, 8 * S, 100)
    assert finding.lines_compared
    # Nothing differs by more than the sampling error: no line is named.
    even = [_rank(number, 100, _sums(s1=50, s2=20 + number)) for number in (0, 1, 2)]
    (finding,), code = _build([_finding(8, imbalance)], even, totals)
    assert finding.lines == () and not finding.lines_compared
    assert code.stacks == (StackTime(imbalance, 0, (), 8 * S, 0),)


def test_transfer_time_goes_to_the_lines_where_ranks_waited() -> None:
    ranks = [_rank(0, **{PEERS: _sums(s1=1)}), _rank(1, **{PEERS: _sums(s2=2)})]
    transfer = "net-transfer"
    bucket = Bucket(transfer, 4 * S, 0.9, {}, False, (transfer,))
    ranks = [
        replace(rank, victim_ns={transfer: waited_s * S}, buckets=(bucket,))
        for rank, waited_s in zip(ranks, (1, 3))
    ]
    totals = [CulpritTotals({}, {}), CulpritTotals({}, {})]
    (finding,), code = _build([_finding(4, transfer)], ranks, totals, ((transfer, 4 * S),))
    assert [(time.rank, time.places, time.lost_ns) for time in code.stacks] == [
        (1, (0, 1), 3 * S),
        (0, (0,), 1 * S),
    ]
    assert [(line.place, line.lost_ns) for line in finding.lines] == [(AUGMENT, 3 * S), (MAIN, S)]


def test_work_of_ranks_without_a_device_is_shared_among_samples() -> None:
    # 200 s in steps, 160 of them worked. Rank 0: 80 s, 3 of 4 samples in resize; rank 1: 80 s.
    ranks = [_rank(0), _rank(1)]
    for at, sums in enumerate((_sums(s1=1, s3=3), _sums(s4=2))):
        ranks[at] = replace(ranks[at], code=RankStackTimes({}, _sums(), 4, sums))
    _, code = _build([], ranks, [CulpritTotals({}, {})] * 2)
    assert [
        (line.place, line.library, line.worked_ns, line.share_ratio, line.samples)
        for line in code.busiest_lines
    ] == [
        (PAD, None, 80 * S, 0.4, 2),
        (AUGMENT, RESIZE, 60 * S, 0.3, 3),
        (MAIN, None, 20 * S, 0.1, 1),
    ]
    # The squares of the scaled samples, 4 * 20² + 2 * 40², make n = 160² / 4,800 = 5.33;
    # Wilson for 0.5 of 160 s: 1.96 * sqrt(0.25 / n + 3.8416 / (4 * n²)) / (1 + 3.8416 / n).
    assert code.busiest_lines[0].error_ratio == pytest.approx(0.3236 * 0.8, abs=2e-4)


def test_time_without_a_cause_has_lines_too() -> None:
    rank = _rank(0, unattributed=_sums(s3=6, s4=2))
    _, code = _build([], [rank], [CulpritTotals({"unattributed": 8 * S}, {})])
    assert [(line.place, line.library, line.lost_ns) for line in code.unattributed] == [
        (AUGMENT, RESIZE, 6 * S),
        (PAD, None, 2 * S),
    ]
    assert [line.share_ratio for line in code.unattributed] == [0.75, 0.25]


def test_findings_without_samples_get_no_lines() -> None:
    findings = [_finding(20)]
    with_lines, code = build_code(
        findings, [make_rank_result(0)], [TABLE], [CulpritTotals({}, {})], ()
    )
    assert with_lines == tuple(findings) and code is None


def test_small_stacks_are_merged_into_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_module, "MAX_STACKS", 2)
    rank = _rank(0, cpu_preprocess=_sums(s1=1, s2=10, s3=2, s4=3))
    _, code = _build([_finding(16)], [rank], [CulpritTotals({PREPROCESS: 16 * S}, {})])
    # Kept: augment. Then resize -> augment, pad -> main, main -> unknown; and again.
    assert [(time.places, time.lost_ns) for time in code.stacks] == [((0, 1), 12 * S), ((), 4 * S)]
