"""When a cause began, and who ended early, from histories made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.findings.comparisons import find_onset, with_onsets
from clusterprof.analysis.findings.history import find_early_ends
from clusterprof.report.history import WAITING_FOR_RANKS, History, RankHistory
from clusterprof.report.model import Culprit, Finding, Onset, Report
from tests.support.reports import S, make_clean_report, make_storage_report


def series(*costs: int) -> list[tuple[int, int]]:
    """Costs in percent of stretches of 100."""
    return [(cost, 100) for cost in costs]


def test_a_lasting_rise_of_lost_time_is_an_onset() -> None:
    assert find_onset(series(*[0] * 8, *[40] * 16)) == 8
    assert find_onset(series(*[2] * 8, *[40] * 16)) == 8
    # 48 stretches, two to a part: the part of stretches 20 and 21 is half of it, 21 the first
    assert find_onset(series(*[0] * 21, *[40] * 27)) == 21


def test_a_constant_intermittent_or_ended_loss_has_no_onset() -> None:
    assert find_onset(series(*[40] * 24)) is None
    assert find_onset(series(40, *[38] * 23)) is None
    assert find_onset(series(0, *[40] * 23)) is None  # warming up
    assert find_onset(series(*[0] * 8, *[40] * 8, *[0] * 8)) is None
    assert (
        find_onset(series(*[0] * 8, *[40] * 8, *[12] * 8)) is None
    )  # mean 26: 12 is less than half
    assert find_onset(series(*[0, 0, 0, 40] * 6)) is None
    assert find_onset(series(*[0] * 8, *[40, 0, 40, 40] * 4)) is None
    assert find_onset(series(*[10] * 8, *[40] * 16)) is None  # a quarter of it was there before
    assert find_onset(series(*[0] * 8, *[2] * 16)) is None  # too little
    assert find_onset(series(*[0] * 3, *[40] * 4)) is None  # too short
    assert find_onset([]) is None


def test_bins_with_little_step_time_are_ignored_for_the_onset() -> None:
    assert find_onset([(0, 0)] * 8 + series(*[40] * 16)) is None
    assert find_onset([*series(*[0] * 8, *[40] * 16), (0, 10)]) == 8


def straggled(cause: str, others_ns: int, waits: tuple[int, ...]) -> Report:
    """24 stretches of a second: rank 1 is late, rank 0 waits; both ended a step in each."""
    base = make_storage_report()
    ranks = tuple(replace(rank, steps=24) for rank in base.ranks)
    ends = tuple(S * (at + 1) for at in range(24))
    first = RankHistory(0, (S,) * 24, ((WAITING_FOR_RANKS, waits),), ends)
    second = RankHistory(1, (S,) * 24, (), ends)
    culprit = Culprit("node-a", 1, "", own_ns=0, others_ns=others_ns)
    finding = Finding(CAUSES[cause], others_ns, 0.1, None, 0.9, "B", False, False, (culprit,))
    history = History(0, S, 24, (first, second))
    return replace(base, ranks=ranks, findings=(finding,), history=history)


LATE = (0,) * 8 + (S // 2,) * 16  # 8 s of waiting


def began(report: Report) -> Onset | None:
    return with_onsets(report).findings[0].onset


def test_waiting_for_the_culprit_dates_the_onset() -> None:
    report = straggled("sync-slow-compute", 8 * S, LATE)
    assert began(report) == Onset(8 * S, 8, 24)
    assert began(straggled("sync-slow-compute", 4 * S, LATE)) is None  # half of it was for others
    assert began(replace(report, history=None)) is None
    whole = replace(report.history, step_stride=2, begin_ns=-S)  # type: ignore[type-var]
    assert began(replace(report, history=whole)) == Onset(7 * S, 14, 24)


def test_own_loss_of_a_single_culprit_dates_the_onset() -> None:
    report = straggled("cpu-preprocess", 0, (0,) * 24)
    assert report.history is not None
    own = replace(report.history.ranks[1], lost=(("cpu-preprocess", LATE),))
    culprit = Culprit("node-a", 1, "", own_ns=8 * S)
    result = replace(report.findings[0], culprits=(culprit,))
    history = replace(report.history, ranks=(report.history.ranks[0], own))
    report = replace(report, findings=(result,), history=history)
    assert began(report) == Onset(8 * S, 8, 24)
    both = replace(result, culprits=(culprit, replace(culprit, rank=0, own_ns=S)))
    assert began(replace(report, findings=(both,))) is None
    assert began(replace(report, findings=(replace(result, outside_steps=True),))) is None


def book(rank: int | None, job: int = 0, pid: int = 1) -> Any:
    return SimpleNamespace(
        job=job, ledger=replace(make_clean_report().ranks[0], rank=rank, pid=pid)
    )


def ran(at: int, first: int, last: int, of: int = 48, ends: tuple[int, ...] = ()) -> RankHistory:
    """In steps in the stretches of 10 ns from one to another."""
    return RankHistory(at, tuple(10 if first <= n <= last else 0 for n in range(of)), (), ends)


def test_an_early_ended_rank_is_reported_with_its_last_step() -> None:
    books = [book(0), book(1), book(2)]
    ranks = [ran(0, 1, 19), ran(1, 0, 47), ran(2, 0, 46)]
    # 200 of 480; 470 is within a 24th of it
    assert find_early_ends(ranks, books, 0, 10, 1) == ((0, 200),)
    exact = [ran(0, 1, 19, ends=(100, 193)), *ranks[1:]]
    assert find_early_ends(exact, books, 0, 10, 1) == ((0, 193),)
    assert find_early_ends(exact, books, 0, 10, 2) == ((0, 200),)  # not every end is known


def test_a_restarted_rank_is_not_an_early_end() -> None:
    ranks = [ran(0, 0, 19), ran(1, 0, 47), ran(2, 21, 47)]
    assert find_early_ends(ranks, [book(0), book(1), book(0)], 0, 10, 1) == ()
    assert find_early_ends(ranks, [book(0, job=1), book(1), book(2)], 0, 10, 1) == ()
    nameless = [book(None, pid=1), book(None, pid=2), book(None, pid=3)]
    assert find_early_ends(ranks, nameless, 0, 10, 1) == ((0, 200),)
    idle = [ran(0, 48, 48), *ranks[1:]]  # never in a step
    assert find_early_ends(idle, [book(0), book(1), book(2)], 0, 10, 1) == ()
