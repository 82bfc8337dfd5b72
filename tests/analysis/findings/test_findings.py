"""The order of findings, and what time without a cause takes from them: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterprof.analysis.attribution import confidence
from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.ledger import RankResult, with_attributed_waits
from clusterprof.analysis.cross_rank.wait_totals import CulpritTotals
from clusterprof.analysis.findings.findings import (
    build_findings,
    classify_visibility,
    limit_savings,
    with_imbalance_in_turn,
)
from clusterprof.analysis.timeline.load.ranks import JobPosition
from clusterprof.analysis.timeline.model import SOURCE_DEVICE_SAMPLES
from clusterprof.report.model import Culprit, Finding, Persistence
from tests.support import advice_contexts
from tests.support.rank_results import S, make_rank_result

STORAGE, PREPROCESS, CONTENTION = "storage-local", "cpu-preprocess", "cpu-contention"


def lose(number: int = 0, unattributed_s: int = 0, **lost_s: int) -> RankResult:
    """A rank with 100 s in steps that lost so many seconds to each cause ("_" for "-")."""
    named = {name.replace("_", "-"): seconds for name, seconds in lost_s.items()}
    plain = make_rank_result(number, lost=(sum(named.values()) + unattributed_s) * S)
    claimed = {
        (cause, "A", SOURCE_DEVICE_SAMPLES): seconds * S * SHARE_SCALE
        for cause, seconds in named.items()
    }
    unexplained = {"peers-unknown": unattributed_s * S * SHARE_SCALE} if unattributed_s else {}
    accumulator = replace(plain.accumulator, claimed=claimed, unexplained=unexplained)
    return with_attributed_waits(plain, accumulator, {}, {})


def find(*ranks: RankResult) -> list[Finding]:
    """The findings inside steps."""
    totals = [CulpritTotals(dict(rank.ledger.buckets), {}) for rank in ranks]
    in_step_ns = sum(rank.ledger.in_step_ns for rank in ranks)
    findings = build_findings(ranks, totals, None, in_step_ns, 110 * S)
    return [finding for finding in findings if not finding.outside_steps]


def list_ids(*ranks: RankResult) -> list[str]:
    return [finding.cause.id for finding in find(*ranks)]


def test_the_family_with_the_largest_loss_comes_first() -> None:
    # 8 s of storage, and 6 + 5 s of CPUs: no cause of theirs lost more, together they did
    rank = lose(storage_local=8, cpu_preprocess=6, cpu_contention=5)
    assert list_ids(rank) == [PREPROCESS, CONTENTION, STORAGE]
    # 6 + 1 s are less than 8
    rank = lose(storage_local=8, cpu_preprocess=6, cpu_contention=1)
    assert list_ids(rank) == [STORAGE, PREPROCESS, CONTENTION]


def test_behind_the_leading_family_the_largest_cause_comes_first() -> None:
    # CPUs lead with 11 s; then 9 s of a copy, 8 s of storage and 2 more, whatever their families
    rank = lose(storage_local=8, cpu_preprocess=6, cpu_contention=5, h2d_copy=9, storage_metadata=2)
    assert list_ids(rank) == [PREPROCESS, CONTENTION, "h2d-copy", STORAGE, "storage-metadata"]


def test_families_are_summed_over_ranks() -> None:
    # 4 s of the disk on each rank, 3 s of preprocessing on one and of contention on both
    ranks = (
        lose(0, storage_local=4, cpu_preprocess=3, cpu_contention=3),
        lose(1, storage_local=4, cpu_contention=3),
    )
    assert list_ids(*ranks) == [CONTENTION, PREPROCESS, STORAGE]


def test_equal_families_are_ordered_by_their_largest_cause() -> None:
    rank = lose(storage_local=8, cpu_preprocess=5, cpu_contention=3)
    assert list_ids(rank) == [STORAGE, PREPROCESS, CONTENTION]


def test_a_negligible_cause_does_not_count_for_its_family() -> None:
    # below 1 % of 200 s: 1 s of contention makes no finding, and does not help its family
    ranks = (lose(0, storage_local=9, cpu_preprocess=8), lose(1, cpu_contention=1))
    assert list_ids(*ranks) == [STORAGE, PREPROCESS]


def test_unattributed_loss_lowers_the_confidence_of_all_findings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(confidence, "CALIBRATION", {})
    # 15 s of 20 s have a cause: three quarters of what is sure without the others
    known = find(lose(storage_local=10, cpu_preprocess=5))
    clouded = find(lose(storage_local=10, cpu_preprocess=5, unattributed_s=5))
    for alone, beside in zip(known, clouded):
        assert beside.cause.id == alone.cause.id
        assert beside.confidence_ratio == pytest.approx(0.75 * alone.confidence_ratio)
    # of another rank it is as much: 5 of 20 s of the job
    ranks = lose(0, storage_local=10, cpu_preprocess=5), lose(1, unattributed_s=5)
    assert [finding.confidence_ratio for finding in find(*ranks)] == pytest.approx(
        [finding.confidence_ratio for finding in clouded]
    )


def test_a_job_without_loss_has_no_findings() -> None:
    assert find(lose()) == []


def see(
    number: int, source: str = "device-samples", world_size: int | None = 2, **changes: bool
) -> RankResult:
    rank = make_rank_result(number)
    place = JobPosition(job="job", rank=number, world_size=world_size)
    ledger = replace(rank.ledger, source=source)  # type: ignore[arg-type]
    return replace(rank, job_position=place, ledger=ledger, **{"marked": True, **changes})


def test_job_visibility_is_that_of_the_least_visible_rank() -> None:
    both = [see(0, "stream-events"), see(1, "stream-events")]
    assert classify_visibility(both, True) == "hooked"
    assert classify_visibility([see(0, emulated=True), see(1, emulated=True)], True) == "hooked"
    assert classify_visibility([both[0], see(1)], True) == "driver"
    assert classify_visibility(both, False) == "unmatched"
    assert classify_visibility([both[0], see(1, "host-spans")], True) is None
    assert classify_visibility([see(0), see(1, marked=False)], True) == "unmarked"
    assert classify_visibility([see(0, marked=False)], True) == "partial"  # one of two
    # A second job on the same nodes does not make up for a rank that is missing.
    other = replace(see(0), job_position=JobPosition(job="other", rank=0, world_size=1))
    assert classify_visibility([see(0), other], True) == "partial"
    assert classify_visibility([see(0, world_size=None)], True) == "driver"  # not known how many


def test_an_imbalance_with_changing_culprits_is_titled_as_in_turn() -> None:
    turns = Persistence("wandering", 0, 60 * S, 20, 20, 2, 12)
    culprits = tuple(Culprit("node-a", rank, "", "", others_ns=20 * S) for rank in (0, 1))
    finding = advice_contexts.make_finding("sync-imbalance", persistence=turns, culprits=culprits)
    title = "Ranks take longer for their work in turn, as with batches of different length"
    assert with_imbalance_in_turn(finding).cause.title == title
    # One culprit each time, one that caused nearly all, or another cause: as they are.
    steady = replace(finding, persistence=replace(turns, kind="steady"))
    rare = replace(finding, culprits=(culprits[0], replace(culprits[1], others_ns=2 * S)))
    other = advice_contexts.make_finding("sync-slow-compute", persistence=turns, culprits=culprits)
    for same in (steady, rare, other):
        assert with_imbalance_in_turn(same) == same


@pytest.mark.parametrize(
    ("all_ns", "least_ns", "saved_ns"),
    [
        (0, 7, 0),  # computed, and nothing: an answer
        (30, 7, 30),
        (300, 7, 100),  # no more than was lost
        (None, 7, 7),
        (None, 0, None),  # at least nothing says nothing
    ],
)
def test_savings_of_nothing_are_known_and_at_least_nothing_are_not(
    all_ns: int | None, least_ns: int, saved_ns: int | None
) -> None:
    assert limit_savings(all_ns, least_ns, lost_ns=100) == saved_ns
