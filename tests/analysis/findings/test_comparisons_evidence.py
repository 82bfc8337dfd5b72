"""Numbers of the evidence with what stands beside them: workers of the others, how many reads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from clusterprof.analysis.attribution.accumulator import Accumulator
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.findings.comparisons import with_read_counts, with_worker_counts
from clusterprof.analysis.node.setup import ProcessSetup
from clusterprof.report.model import Culprit, Evidence, Finding
from tests.support.reports import S, make_clean_report

SIZE = Evidence("disk.read_size_bytes", 65536.0, "bytes", "a read requested on average")
COUNT = Evidence("loader.workers_count", 1.0, "count", "on this rank")


def finding(*culprits: Culprit, seen: Evidence = COUNT) -> Finding:
    cause = CAUSES["storage-local"]
    return Finding(cause, 10 * S, 0.1, None, 0.9, "A", False, False, culprits, (seen,))


def guilty(rank: int, own_s: int) -> Culprit:
    return Culprit("node-a", rank, "", "", own_s * S)


def node(*workers: int | None) -> Any:
    """A node whose ranks have so many workers."""
    books = [
        SimpleNamespace(
            ledger=replace(make_clean_report().ranks[0], node="node-a", rank=at, pid=100 + at),
            started_ticks=7,
        )
        for at in range(len(workers))
    ]
    known = {
        (100 + at, 7): ProcessSetup(workers=n) for at, n in enumerate(workers) if n is not None
    }
    return SimpleNamespace(ranks=books, setup=SimpleNamespace(ranks=known))


def noted(*workers: int | None, also: tuple[Culprit, ...] = ()) -> str:
    (annotated,) = with_worker_counts([finding(guilty(1, 9), *also)], [node(*workers)])
    return annotated.evidence[0].note


def test_worker_evidence_notes_the_worker_counts_of_other_ranks() -> None:
    assert noted(4, 1) == "on this rank; the other rank has 4"
    assert noted(4, 1, 4, 4) == "on this rank; each of the other 3 ranks has 4"
    assert noted(4, 1, 2) == "on this rank; each of the other 2 ranks has 2 to 4"
    assert noted(4, 1, 2, also=(guilty(2, 8),)) == "on this rank; the other rank has 4"
    assert noted(None, 1) == "on this rank"  # unknown is not zero


def test_only_the_worker_count_gets_a_note_on_other_ranks() -> None:
    (annotated,) = with_worker_counts([finding(guilty(1, 9), seen=SIZE)], [node(4, 1)])
    assert annotated.evidence == (SIZE,)


def reader(rank: int, reads: int, **totals: int) -> Any:
    """Ten steps: `reads` in the waits, 50 of them in a second."""
    kinds = {"disk.reads_total": reads * 1000, "disk.reads_per_second_count": 50_000}
    evidence = {("storage-local", name, "count", ""): n for name, n in kinds.items()}
    weights = {key: 1 for key in evidence if not key[1].endswith("_total")}
    accumulator = Accumulator(evidence=evidence, weights=weights, totals=totals)
    ledger = replace(make_clean_report().ranks[0], node="node-a", rank=rank, steps=10)
    return SimpleNamespace(ledger=ledger, accumulator=accumulator)


def reads(*books: Any, seen: Evidence = SIZE) -> str:
    (read_counts,) = with_read_counts([finding(guilty(1, 9), seen=seen)], list(books))
    return read_counts.evidence[0].note


def test_read_size_evidence_notes_the_number_of_reads() -> None:
    printed = "a read requested on average; 50 a second, 1,200 in the waits of a step"
    assert reads(reader(0, 5), reader(1, 12_000)) == printed
    # 32 samples a step: 37.5 reads of each
    samples = {"samples": 320, "samples_steps": 10}
    assert reads(reader(1, 12_000, **samples)) == f"{printed}, 38 a sample"
    assert (
        reads(reader(1, 12_000, **samples, samples_unknown_steps=2)) == printed
    )  # 10 of 12 say it
    assert reads(reader(1, 12)).endswith("; 50 a second, 1.2 in the waits of a step")


def test_uncounted_reads_leave_the_note_unchanged() -> None:
    assert reads(reader(0, 5)) == SIZE.note
    assert reads(reader(1, 5), seen=COUNT) == COUNT.note
