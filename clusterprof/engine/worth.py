"""What the findings of a recording are worth: money, time of the job, yardsticks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.attribution.ledger import RankBooks
from clusterprof.engine.gained import Gained, Saved
from clusterprof.engine.peers import Across
from clusterprof.engine.yardsticks import Rate, brought, yardsticks_of
from clusterprof.findings import Finding, Metric
from clusterprof.units import unit_of
from clusterprof.worth import CauseWorth, Worth

HOUR_NS = 3600 * 10**9
MILLION = 1e6
OUTSIDE = "it lies outside the steps: only steps are played again"
AT_MOST = 'no device was measured: the loss itself is known only as "at most"'
UNMARKED = "no rank marked its steps: there is nothing to play again"
STRUCTURAL = "net-transfer"
"""As long as data take on their way is no fault: not among what can be fixed."""
NO_PRICE = "no price: set facts.gpu_price_per_hour in a profile"
EMULATED = "the accelerators were emulated: they cost nothing"


def worth_of(
    books: Sequence[RankBooks],
    across: Across,
    findings: Sequence[Finding],
    facts: Mapping[str, Any],
) -> Worth:
    """Return what the findings are worth; `facts` are those of the site (profile, `facts`)."""
    price = facts.get("gpu_price_per_hour")
    why_no_cost = NO_PRICE if price is None else ""
    if any(one.emulated for one in books):
        why_no_cost = EMULATED
    per_ns = None if why_no_cost or price is None else float(price) / HOUR_NS
    gpus = _gpus(books)
    gained = Gained(books, across.whatif)
    leaves = _leaves(books)
    marked = any(one.marked for one in books)
    causes = tuple(_cause(one, gained, leaves, per_ns, gpus, marked) for one in findings)
    fixable = [
        (one.cause.id, leaves.get(one.cause.id, ()))
        for one, said in zip(findings, causes)
        if said.saved_ns is not None and one.cause.id != STRUCTURAL
    ]
    every = gained.without_all(fixable) if fixable else Saved(None, why=gained.why)
    samples, tokens = (brought(books, gained.job_ns, what) for what in ("samples", "tokens"))
    return Worth(
        price_per_gpu_hour=price,
        currency=str(facts.get("currency", "USD")),
        lost_cost=_times(sum(one.ledger.lost_ns for one in books), per_ns),
        job_ns=gained.job_ns,
        causes=causes,
        tokens_per_second=tokens.per_second,
        tokens_per_second_if_fixed=_faster(tokens, gained.job_ns, every),
        samples_per_second=samples.per_second,
        cost_per_million_tokens=_cost(tokens.per_second, per_ns, gpus),
        cost_per_million_tokens_if_fixed=_cost(_faster(tokens, gained.job_ns, every), per_ns, gpus),
        yardsticks=yardsticks_of(books, gained.job_ns, gained.shared_out_ns()),
        gpus=gpus,
        upper_bound=any(one.upper_bound for one in findings if not one.outside_steps),
        why_no_cost=why_no_cost,
        saved_ns=every.ns,
        saved_low_ns=every.low_ns,
        saved_high_ns=every.high_ns,
        samples_per_second_if_fixed=_faster(samples, gained.job_ns, every),
        why_no_tokens=tokens.why,
        why_no_samples=samples.why,
    )


def metrics_of(worth: Worth) -> tuple[Metric, ...]:
    """Return what a gate may test of it, in a fixed order."""
    named = {name: (value, text) for name, value, text in worth.yardsticks}
    found = [
        (metric, *named[name])
        for metric, name in (
            ("yardstick.goodput_ratio", "goodput"),
            ("yardstick.load_balance_ratio", "load balance"),
            ("yardstick.communication_efficiency_ratio", "communication efficiency"),
            ("yardstick.parallel_efficiency_ratio", "parallel efficiency"),
            ("yardstick.slowdown_factor", "straggler slowdown S"),
        )
    ]
    no_cost = worth.why_no_cost or worth.why_no_tokens
    found += [
        ("yardstick.tokens_per_second", worth.tokens_per_second, worth.why_no_tokens),
        ("yardstick.samples_per_second", worth.samples_per_second, worth.why_no_samples),
        ("yardstick.million_tokens_cost", worth.cost_per_million_tokens, no_cost),
        ("yardstick.lost_cost", worth.lost_cost, worth.why_no_cost),
    ]
    return tuple(
        Metric(name, value, unit_of(name.replace(".", "_")), why if value is None else "")
        for name, value, why in found
    )


def _cause(
    finding: Finding,
    gained: Gained,
    leaves: Mapping[str, Sequence[str]],
    per_ns: float | None,
    gpus: int,
    marked: bool,
) -> CauseWorth:
    id_ = finding.cause.id
    if finding.outside_steps:
        saved = Saved(None, why=OUTSIDE)
    elif finding.upper_bound:
        saved = Saved(None, why=AT_MOST)
    elif not marked:
        saved = Saved(None, why=UNMARKED)
    else:
        saved = gained.without(id_, leaves.get(id_, ()))
    return CauseWorth(
        cause=id_,
        lost_cost=_times(finding.lost_ns, per_ns),
        saved_ns=saved.ns,
        saved_low_ns=saved.low_ns,
        saved_high_ns=saved.high_ns,
        why_missing=saved.why,
        outside_steps=finding.outside_steps,
        lost_ns=finding.lost_ns,
        saved_cost=None if saved.ns is None else _times(saved.ns * gpus, per_ns),
    )


def _leaves(books: Sequence[RankBooks]) -> dict[str, tuple[str, ...]]:
    """Return id of a bucket -> causes that were claimed under it, over all ranks."""
    out: dict[str, set[str]] = {}
    for one in books:
        for bucket in one.buckets:
            out.setdefault(bucket.id, set()).update(bucket.leaves)
    return {id_: tuple(sorted(leaves)) for id_, leaves in out.items()}


def _gpus(books: Sequence[RankBooks]) -> int:
    """Devices of the largest life of a job: those that are paid for at any time."""
    count: dict[int, int] = {}
    for one in books:
        count[one.job] = count.get(one.job, 0) + 1
    return max(count.values(), default=0)


def _times(ns: int, per_ns: float | None) -> float | None:
    return None if per_ns is None else ns * per_ns


def _faster(rate: Rate, job_ns: int | None, saved: Saved) -> float | None:
    """Return a rate with all fixed; None where nothing can be said."""
    if rate.per_second is None or saved.ns is None or not job_ns or saved.ns >= job_ns:
        return None
    return rate.per_second * job_ns / (job_ns - saved.ns)


def _cost(per_second: float | None, per_ns: float | None, gpus: int) -> float | None:
    """Return what a million of something costs that comes at a rate."""
    if not per_second or per_ns is None:
        return None
    return gpus * per_ns * 1e9 / per_second * MILLION
