"""What a late rank works in a step beside those that wait for it, from ledgers made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from clusterprof.analysis.attribution.accumulator import Accumulator
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.findings.comparisons import with_work_evidence
from clusterprof.report.model import Culprit, Evidence, Finding, RankLedger
from tests.support.reports import make_clean_report

MS = 1_000_000


def ledger(
    rank: int, step_ms: int, waited_ms: int = 0, cause: str = "sync-slow-compute"
) -> RankLedger:
    """Ten steps, each of so much work; `waited_ms` of all were lost to the cause."""
    plain = make_clean_report().ranks[0]
    return replace(
        plain,
        node="a",
        rank=rank,
        steps=10,
        productive_ns=10 * step_ms * MS,
        lost_ns=waited_ms * MS,
        buckets=((cause, waited_ms * MS),) if waited_ms else (),
    )


def finding(cause: str, *ranks: int | None) -> Finding:
    culprits = tuple(Culprit("a", rank, "", "") for rank in ranks)
    return Finding(
        CAUSES[cause], 300 * MS, 0.1, None, 0.9, "B", False, False, culprits, evidence=()
    )


def test_late_step_work_is_compared_with_the_median_waiting_rank() -> None:
    # 60, 62 and 70 wait for 95; 40 does not wait, and 62 is the middle of the three.
    ledgers = [
        ledger(0, 60, 300),
        ledger(1, 62, 290),
        ledger(2, 95),
        ledger(3, 70, 200),
        ledger(4, 40),
    ]
    (annotated,) = with_work_evidence([finding("sync-slow-compute", 2, 3)], ledgers)
    assert annotated.evidence == (
        Evidence("step.worked_ns", 95.0 * MS, "ns", "a step of rank 2; waiting ranks: 62.0 ms"),
    )


COUNTS = [
    ("step.samples_count", 32, "samples in a step of rank 2; waiting ranks: 10"),
    ("step.tokens_count", 200, "tokens in a step of rank 2; waiting ranks: 100"),
]
MORE_SAMPLES = (
    "step.samples_excess_ratio",
    2.2,
    "more samples in a step than the waiting ranks have",
)
MORE_TOKENS = "step.tokens_excess_ratio", 1.0, "more tokens in a step than the waiting ranks have"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1000, 1000, 2000, 8000], [*COUNTS, MORE_TOKENS]),
        # Shorter sequences, more of them: no more work.
        ([2000, 2000, 2000, 8000], [COUNTS[0], (*COUNTS[1][:2], f"{COUNTS[1][2][:-3]}200")]),
        (None, [COUNTS[0], MORE_SAMPLES]),
    ],
)
def test_samples_per_step_are_compared_with_waiting_ranks(
    tokens: list[int] | None, expected: list[tuple[str, float, str]]
) -> None:
    """More samples; of rank 3 a fifth of the steps do not say it."""
    ledgers = [ledger(0, 60, 300), ledger(1, 62, 290), ledger(2, 95), ledger(3, 61, 200)]
    held = list(zip((320, 100, 320, 800), tokens or [0] * 4))
    books = [
        SimpleNamespace(
            ledger=ledger(at, 60),
            accumulator=Accumulator(
                totals={
                    "samples": samples,
                    "samples_steps": 8 if at == 3 else 10,
                    "samples_unknown_steps": 2 if at == 3 else 0,
                    "tokens": count,
                    "tokens_steps": 0 if tokens is None else 8 if at == 3 else 10,
                    "tokens_unknown_steps": 10 if tokens is None else 2 if at == 3 else 0,
                }
            ),
        )
        for at, (samples, count) in enumerate(held)
    ]
    (annotated,) = with_work_evidence(
        [finding("sync-imbalance", 2)],
        [
            replace(item, buckets=(("sync-imbalance", item.lost_ns),) if item.lost_ns else ())
            for item in ledgers
        ],
        books,
    )
    assert [
        (evidence_row.name, evidence_row.value, evidence_row.note)
        for evidence_row in annotated.evidence[1:]
    ] == expected


MB = 1_000_000


def all_to_all(*ranks: tuple[int, int]) -> list[SimpleNamespace]:
    """By rank: bytes brought in ten steps, and the mean of the members; (0, 0) = none."""
    names = ("all_to_all_bytes", "all_to_all_mean_bytes")
    totals = [dict(zip(names, sizes)) if sizes[1] else {} for sizes in ranks]
    steps = SimpleNamespace(steps=10)
    return [SimpleNamespace(accumulator=Accumulator(totals=t), ledger=steps) for t in totals]


def test_excess_all_to_all_bytes_of_late_ranks_are_evidence() -> None:
    ledgers = [ledger(0, 60, 300), ledger(1, 62, 290), ledger(2, 95), ledger(3, 61, 200)]
    late = [finding("sync-slow-compute", 2)]
    # 18 MB in ten steps, where the members brought 10 MB on average; the middle of 0.6 and 0.8.
    sizes = all_to_all((6 * MB, 10 * MB), (8 * MB, 10 * MB), (18 * MB, 10 * MB), (0, 0))
    (annotated,) = with_work_evidence(late, ledgers, sizes)
    assert annotated.evidence[1:] == (
        Evidence(
            "step.all_to_all_bytes",
            1.8 * MB,
            "bytes",
            "brought to all-to-all in a step by rank 2, 1.8 times the mean of the ranks (the load"
            " of its experts, if it has any); waiting ranks: 0.6 times",
        ),
    )


def test_all_to_all_evidence_needs_excess_bytes_of_late_ranks() -> None:
    ledgers = [ledger(0, 60, 300), ledger(1, 62, 290), ledger(2, 95)]
    late = [finding("sync-slow-compute", 2)]
    mean = 10 * MB
    for ranks in (
        ((8 * MB, mean), (18 * MB, mean), (14 * MB, mean)),  # another rank brings more
        ((9 * MB, mean), (9 * MB, mean), (11 * MB, mean)),  # hardly more than the mean
        ((0, 0), (0, 0), (18 * MB, mean)),  # no waiting rank is known
        ((9 * MB, mean), (9 * MB, mean), (0, 0)),
    ):
        (annotated,) = with_work_evidence(late, ledgers, all_to_all(*ranks))
        assert [evidence.name for evidence in annotated.evidence] == ["step.worked_ns"]


def test_a_rank_without_longer_work_gets_no_work_evidence() -> None:
    ledgers = [ledger(0, 60, 300), ledger(1, 60)]
    for item in (
        finding("sync-slow-compute", 1),  # as long as the other
        finding("sync-slow-compute"),
        finding("sync-slow-compute", None),
        finding("net-transfer", 1),
        finding("sync-imbalance", 0),  # nobody waited for it
    ):
        assert with_work_evidence([item], ledgers) == (item,)
