"""Estimate the time saved without a cause, with bounds, from the what-if replay.

The bounds come from a block bootstrap: the run is cut into blocks of steps, as many blocks are
drawn with replacement, 400 times, and the savings are scaled to the length of the job.

It also estimates which part of the transfer time the hosts caused, not the network.

    transfers 50    communication threads of rank 0    4 on a CPU, 2 waiting for one
                    communication threads of rank 1    3 on a CPU, 9 waiting for one
    host overhead   12 of 50: the rank with the slowest host delays all others

Fixing the network leaves this part. The waits for a CPU in it vanish with their own cause.

It also computes the impact of the findings of a recording: cost, savings, efficiency metrics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterprof.analysis.attribution.accumulator import sum_field
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.network.comm_threads import (
    DELAYED,
    ON_CPU,
    estimate_host_overhead_ns,
)
from clusterprof.analysis.attribution.rank.claims import JITTER
from clusterprof.analysis.attribution.taxonomy import CAUSES, CLAIMABLE_CAUSES
from clusterprof.analysis.attribution.wait_for.blame import (
    IMBALANCE,
    SLOW_COMPUTE,
    TRANSFER,
    UNKNOWN_PEER,
)
from clusterprof.analysis.attribution.what_if import (
    ALL,
    BALANCED,
    CULPRITS,
    DELAYS,
    EVEN,
    EXTRA_COLUMNS,
    GAPS,
    WORK,
)
from clusterprof.analysis.attribution.what_if import TRANSFER as MOVED
from clusterprof.analysis.cross_rank.observers import WhatIfObserver
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.findings.efficiency_metrics import (
    BUBBLE,
    GAPS_ON_CRITICAL_PATH,
    NO_STEPS,
    NOT_COMPARED,
    compute_efficiency_metrics,
    get_storage_au,
    withhold_impossible_savings,
)
from clusterprof.analysis.timeline.model import Float, Int
from clusterprof.report.impact import CauseImpact, Impact
from clusterprof.report.model import Finding, Metric
from clusterprof.units import infer_unit

CPU_DELAY_CAUSES = ("cpu-contention", "cpu-throttled")
"""Causes of waits for a CPU, in communication threads as elsewhere in the job."""


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Parts of the transfer time of the rank whose host caused most of it."""

    on_cpu_part: float = 0.0
    delayed_part: float = 0.0

    @property
    def total(self) -> float:
        """Return the part that fixing the network leaves."""
        return self.on_cpu_part + self.delayed_part

    def get_delayed_part(self, leaves: Collection[str], lost_ns: Mapping[str, int]) -> float:
        """Return the part in which communication threads waited for a CPU because of some causes.

        lost_ns: ns by cause.
        """
        all_ns = sum(lost_ns.get(name, 0) for name in CPU_DELAY_CAUSES)
        own_ns = sum(lost_ns.get(name, 0) for name in CPU_DELAY_CAUSES if name in leaves)
        return self.delayed_part * own_ns / all_ns if all_ns else 0.0


def estimate_host_overhead(ranks: Sequence[RankResult]) -> HostOverhead:
    """Estimate the host overhead of one job; zero where no communication thread is known."""
    candidates = [HostOverhead()]
    for rank in ranks:
        transfer_ns = sum(ns for id_, ns in rank.victim_ns.items() if _is_network_leaf(id_))
        if transfer_ns <= 0:
            continue
        totals = rank.accumulator.totals
        delayed = estimate_host_overhead_ns(totals, DELAYED, transfer_ns) / transfer_ns
        at_work = min(
            estimate_host_overhead_ns(totals, ON_CPU, transfer_ns) / transfer_ns, 1.0 - delayed
        )
        candidates.append(HostOverhead(at_work, delayed))
    return max(candidates, key=lambda overhead: overhead.total)


def _is_network_leaf(id_: str) -> bool:
    return id_ in CAUSES and CAUSES[id_].family == "network"


BOOTSTRAP_DRAWS, BOOTSTRAP_SEED = 400, 6
MIN_BOOTSTRAP_BLOCKS = 5
"""Blocks below which no bounds are given."""
UNRECORDED_PEERS = "its waits for unrecorded ranks hide the savings"
NOT_MATCHED = "operations of its ranks were not matched"
SEVERAL_JOBS = "ranks of several jobs were recorded together"
NOT_REPLAYED = "it was not replayed alone"
PIPELINE_ORDER = (
    "it is part of the pipeline schedule: fixing a cause of lost time does not remove it"
)
UNRECORDED_RANKS = "it concerns ranks that were not recorded"
MAX_GAPS_RATIO = 0.05
"""Share of the job that may end sooner without gaps for these to count as waits."""


@dataclass(frozen=True, slots=True)
class Savings:
    """Saved time with its bounds in ns, or the reason why there is none."""

    ns: int | None
    low_ns: int | None = None
    high_ns: int | None = None
    why: str = ""
    is_unknowable: bool = False
    """True if the reason lies in the cause: no other method gives an answer either."""


class SavingsModel:
    """Estimates savings of one recording."""

    def __init__(self, ranks: Sequence[RankResult], whatif: WhatIfObserver | None) -> None:
        self.why = ""
        """Why no cause has savings; "" when causes have."""
        self._lost_ns, self._host_overhead = (
            _sum_lost_by_cause(ranks),
            estimate_host_overhead(ranks),
        )
        self.job_ns, lengths = _compute_job_ns(ranks)
        self._names: tuple[str, ...] = ()
        self.has_groups = False
        """True if ranks met in several groups, such as stages of a pipeline."""
        self._culprits: tuple[tuple[int, int], ...] = ()
        self._length: Int = np.zeros(0, np.int64)
        self._saved: Int = np.zeros((0, EXTRA_COLUMNS), np.int64)
        self._is_replay = False
        if not self.job_ns:
            self.why = NO_STEPS
        elif len({rank.job_position.job for rank in ranks}) > 1:
            self.why = SEVERAL_JOBS
        elif any(rank.has_peers for rank in ranks):
            self._load_replay(ranks, whatif, lengths)
        else:
            self._load_own_steps(ranks)

    def _load_replay(
        self, ranks: Sequence[RankResult], whatif: WhatIfObserver | None, lengths: Mapping[int, int]
    ) -> None:
        savings = {} if whatif is None else whatif.savings()
        if whatif is None or not savings:
            is_single = len({rank.ledger.rank for rank in ranks}) < 2
            self.why = UNRECORDED_PEERS if is_single else NOT_MATCHED
            return
        self._names = whatif.causes
        self.has_groups = any(replayed.several_groups for replayed in savings.values())
        self._culprits = next(iter(savings.values())).culprits
        self._is_replay, parts = True, []
        for job, replayed in savings.items():
            length = replayed.length_ns.astype(np.float64)
            more_ns = max(lengths.get(job, 0) - int(length.sum()), 0)
            if not replayed.skipped:  # includes what was lost before the first operation
                before_ns = min(more_ns, max(whatif.unreplayed_ns(job), 0))
                length[0] += before_ns
                more_ns -= before_ns
            # Time that was not replayed, as behind the last operation, saves the same share.
            scale = 1 + more_ns / max(float(length.sum()), 1.0)
            saved = replayed.savings_ns * scale
            if not replayed.skipped:  # behind the last operation nothing is transferred
                saved[:, MOVED] = replayed.savings_ns[:, MOVED]
            parts.append((length * scale, saved))
        self._length = np.concatenate([length for length, _ in parts])
        self._saved = np.concatenate([shortened for _, shortened in parts])

    def _load_own_steps(self, ranks: Sequence[RankResult]) -> None:
        tables = [rank.losses_by_time_bin for rank in ranks if rank.losses_by_time_bin is not None]
        if not tables or len({rank.job for rank in ranks}) < len(ranks):
            self.why = NO_STEPS if not tables else NOT_MATCHED
            return
        self._names = CLAIMABLE_CAUSES
        self._length = np.concatenate([length for length, _ in tables])
        saved = np.concatenate([saved for _, saved in tables])
        self._saved = np.pad(saved, ((0, 0), (0, EXTRA_COLUMNS - 1)))

    def estimate(self, id_: str, leaves: Collection[str]) -> Savings:
        """Estimate the time saved without a cause; `leaves`: the leaf causes it consists of."""
        if self.why:
            return Savings(None, why=self.why)
        if id_ == BUBBLE:
            return Savings(None, why=PIPELINE_ORDER, is_unknowable=True)
        if id_ == UNKNOWN_PEER:
            return Savings(None, why=UNRECORDED_RANKS, is_unknowable=True)
        return self._with_bounds(self._column(id_, leaves))

    def estimate_culprit(self, rank: int, id_: str, leaves: Collection[str]) -> Savings:
        """Estimate the time saved if a cause were removed from one rank only; needs several groups.

        rank: index over all nodes, in order.
        """
        is_work = _is_work_id(id_)
        if self.why or not self.has_groups or (is_work and not self._are_gaps_waits()):
            return Savings(None, why=self.why or NOT_REPLAYED)
        columns = [
            CULPRITS + number
            for number, (culprit, column) in enumerate(self._culprits)
            if culprit == rank
            and (is_work if column == WORK else self._names[column] in leaves and not is_work)
        ]
        if not columns:
            return Savings(None, why=NOT_REPLAYED)
        saved = self._saved[:, columns].sum(axis=1)
        if is_work:
            saved = (saved - self._saved[:, GAPS]) * self._work_part(id_)
        return self._with_bounds(np.asarray(saved, np.float64))

    def compute_straggler_slowdown(self) -> tuple[float | None, str]:
        """Compute the step time over that of even work, both without delays; or why not."""
        if self.why or not self._is_replay or not self._length.sum():
            return None, NOT_COMPARED
        if not self._are_gaps_waits():
            return None, GAPS_ON_CRITICAL_PATH
        times = float(self._length.sum()) - self._saved.sum(axis=0)
        if min(times[[DELAYS, BALANCED]]) <= 0:
            return None, GAPS_ON_CRITICAL_PATH
        return float(times[DELAYS] / times[BALANCED]), ""

    def _are_gaps_waits(self) -> bool:
        """Return whether gaps end by themselves when the ranks waited for arrive.

        True if the job without them would take about as long: none of them is on its way.
        """
        return float(self._saved[:, GAPS].sum()) < MAX_GAPS_RATIO * float(self._length.sum())

    def estimate_all(self, causes: Sequence[tuple[str, Collection[str]]]) -> Savings:
        """Estimate the time saved without several causes at once: (cause, its leaf causes) each."""
        if self.why:
            return Savings(None, why=self.why)
        own_leaves = {leaf for _, leaves in causes for leaf in leaves if leaf in self._names}
        ns: Float = np.zeros(self._length.size)
        for leaf in own_leaves:
            ns = np.asarray(self._saved[:, self._names.index(leaf)], np.float64)
        if len(own_leaves) > 1:
            ns = np.asarray(self._saved[:, ALL], np.float64)
        transfer_part = self._host_overhead.get_delayed_part(own_leaves, self._lost_ns)
        for id_, leaves in causes:
            if _is_network_id(id_):
                transfer_part += self._transfer_part(id_)
            elif own_leaves.isdisjoint(leaves) and id_ not in (BUBBLE, UNKNOWN_PEER):
                ns = ns + self._column(id_, leaves)
        ns = ns + self._saved[:, MOVED] * min(transfer_part, 1.0)
        return self._with_bounds(np.minimum(ns, self._length))

    def _column(self, id_: str, leaves: Collection[str]) -> Float:
        """Return how much sooner each block would have ended, ns, float64[blocks]."""
        if _is_network_id(id_):
            return np.asarray(self._saved[:, MOVED] * self._transfer_part(id_), np.float64)
        if _is_work_id(id_):
            saved = self._saved[:, WORK]
            if self.has_groups and self._are_gaps_waits():
                saved = self._saved[:, EVEN] - self._saved[:, GAPS]
            return np.asarray(saved * self._work_part(id_), np.float64)
        columns = [self._names.index(leaf) for leaf in leaves if leaf in self._names]
        saved_ns = self._saved[:, columns].sum(axis=1).astype(np.float64)
        saved_ns = saved_ns if len(columns) < 2 else np.minimum(saved_ns, self._saved[:, ALL])
        return saved_ns + self._saved[:, MOVED] * self._host_overhead.get_delayed_part(
            leaves, self._lost_ns
        )

    def _work_part(self, id_: str) -> float:
        """Return the part of what uneven work costs that fixing one of its causes saves."""
        varies = () if self.has_groups else (JITTER,)  # sums over blocks average it out
        return self._lost_part(id_, (IMBALANCE, SLOW_COMPUTE, "synchronization", *varies))

    def _transfer_part(self, id_: str) -> float:
        """Return the part of all transfer time that fixing a network cause saves."""
        part = self._lost_part(
            id_, [cause for cause in self._lost_ns if cause in CAUSES and _is_network_id(cause)]
        )
        # Other network causes claim only time beyond what the transfers need anyway.
        return part * (1.0 - self._host_overhead.total) if id_ == TRANSFER else part

    def _lost_part(self, id_: str, causes: Collection[str]) -> float:
        whole_ns = sum(self._lost_ns.get(name, 0) for name in causes)
        return self._lost_ns.get(id_, 0) / whole_ns if whole_ns else 0.0

    def _with_bounds(self, saved: Float) -> Savings:
        whole_ns, job_ns = float(self._length.sum()), self.job_ns or 0
        if whole_ns <= 0:
            return Savings(None, why=NO_STEPS)
        ns = round(float(saved.sum()) / whole_ns * job_ns)
        if self._length.size < MIN_BOOTSTRAP_BLOCKS:
            return Savings(ns)
        drawn = np.random.default_rng(BOOTSTRAP_SEED).integers(
            0, saved.size, (BOOTSTRAP_DRAWS, saved.size)
        )
        ratios = saved[drawn].sum(axis=1) / np.maximum(self._length[drawn].sum(axis=1), 1)
        low, high = np.quantile(ratios, (0.025, 0.975)) * job_ns
        return Savings(ns, min(round(low), ns), max(round(high), ns))


def _is_work_id(id_: str) -> bool:
    return (CAUSES[id_].family if id_ in CAUSES else id_) == "synchronization"


def _is_network_id(id_: str) -> bool:
    return (CAUSES[id_].family if id_ in CAUSES else id_) == "network"


def _sum_lost_by_cause(ranks: Sequence[RankResult]) -> dict[str, int]:
    """Sum what all ranks lost, ns by cause; work that varies is one of the causes."""
    out: dict[str, int] = {}
    for rank in ranks:
        uneven = [reason for reason in rank.reasons if reason[0] == JITTER]
        for id_, ns in (*rank.ledger.buckets, *uneven):
            out[id_] = out.get(id_, 0) + ns
    return out


def _compute_job_ns(ranks: Sequence[RankResult]) -> tuple[int | None, dict[int, int]]:
    """Compute how long the job was in steps, its incarnations added up, and each of them; ns."""
    lengths: dict[int, int] = {}
    for rank in ranks:
        in_steps = rank.ledger.in_step_ns
        if in_steps:
            ns = in_steps + rank.ledger.unmeasured_ns
            lengths[rank.job] = max(ns, lengths.get(rank.job, 0))
    return (sum(lengths.values()) or None), lengths


MIN_KNOWN_STEPS_RATIO = 0.9
"""Part of the steps that must report what they held; with less no rate is given."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples or tokens of the job per second, or why the rate is not known."""

    per_second: float | None
    why: str = ""


def compute_rate(ranks: Sequence[RankResult], job_ns: int | None, unit: str) -> Rate:
    """Compute the rate of "samples" or "tokens" over all ranks that read them.

    Steps that do not report what they held count like the others, if they are few.
    """
    if not job_ns:
        return Rate(None, NO_STEPS)
    totals = sum_field((rank.accumulator for rank in ranks), "totals")
    count, known_steps = totals.get(unit, 0), totals.get(f"{unit}_steps", 0)
    steps = known_steps + totals.get(f"{unit}_unknown_steps", 0)
    if not known_steps or not count:
        return Rate(None, f"the steps do not report how many {unit} they held")
    if known_steps < MIN_KNOWN_STEPS_RATIO * steps:
        return Rate(
            None, f"only {known_steps:,} of {steps:,} steps report how many {unit} they held"
        )
    return Rate(count * (steps / known_steps) / (job_ns / 1e9))


HOUR_NS = 3600 * 10**9
MILLION = 1e6
OUTSIDE_STEPS = "it lies outside the steps: only steps are replayed"
UPPER_BOUND_ONLY = 'no device was measured: the loss itself is known only as "at most"'
NO_MARKED_STEPS = "no rank marked its steps: there is nothing to replay"
TRANSFER_ID = "net-transfer"
"""Time that transfers need anyway; no fault, so not among the fixable causes."""
NO_PRICE = "no price: set facts.gpu_price_per_hour in a profile"
EMULATED = "the accelerators were emulated: they cost nothing"


def build_impact(
    ranks: Sequence[RankResult],
    across: JobState,
    findings: Sequence[Finding],
    facts: Mapping[str, Any],
) -> Impact:
    """Build the impact of the findings; `facts`: those of the site in its profile."""
    price = facts.get("gpu_price_per_hour")
    why_no_cost = NO_PRICE if price is None else ""
    if any(rank.emulated for rank in ranks):
        why_no_cost = EMULATED
    per_ns = None if why_no_cost or price is None else float(price) / HOUR_NS
    gpus = _count_gpus(ranks)
    model = SavingsModel(ranks, across.what_if)
    leaves = collect_leaves(ranks)
    marked = any(rank.marked for rank in ranks)
    causes = tuple(
        _build_cause_impact(finding, model, leaves, per_ns, gpus, marked) for finding in findings
    )
    fixable = [
        (finding.cause.id, leaves.get(finding.cause.id, ()))
        for finding, impact in zip(findings, causes)
        if impact.saved_ns is not None and finding.cause.id != TRANSFER_ID
    ]
    all_savings = model.estimate_all(fixable) if fixable else Savings(None, why=model.why)
    samples, tokens = (compute_rate(ranks, model.job_ns, unit) for unit in ("samples", "tokens"))
    impact = Impact(
        price_per_gpu_hour=price,
        currency=str(facts.get("currency", "USD")),
        lost_cost=_compute_cost(sum(rank.ledger.lost_ns for rank in ranks), per_ns),
        job_ns=model.job_ns,
        causes=causes,
        tokens_per_second=tokens.per_second,
        tokens_per_second_if_fixed=_estimate_fixed_rate(tokens, model.job_ns, all_savings),
        samples_per_second=samples.per_second,
        cost_per_million_tokens=_compute_cost_per_million(tokens.per_second, per_ns, gpus),
        cost_per_million_tokens_if_fixed=_compute_cost_per_million(
            _estimate_fixed_rate(tokens, model.job_ns, all_savings), per_ns, gpus
        ),
        efficiency_metrics=compute_efficiency_metrics(
            ranks, *model.compute_straggler_slowdown(), get_storage_au(across.nodes)
        ),
        gpus=gpus,
        upper_bound=any(finding.upper_bound for finding in findings if not finding.outside_steps),
        why_no_cost=why_no_cost,
        saved_ns=all_savings.ns,
        saved_low_ns=all_savings.low_ns,
        saved_high_ns=all_savings.high_ns,
        samples_per_second_if_fixed=_estimate_fixed_rate(samples, model.job_ns, all_savings),
        why_no_tokens=tokens.why,
        why_no_samples=samples.why,
    )
    return withhold_impossible_savings(impact, ranks)


def list_impact_metrics(job_impact: Impact) -> tuple[Metric, ...]:
    """List the metrics of the impact that a gate may test, in a fixed order."""
    named = {name: (value, text) for name, value, text in job_impact.efficiency_metrics}
    metrics = [
        (metric, *named[name])
        for metric, name in (
            ("yardstick.goodput_ratio", "goodput"),
            ("yardstick.load_balance_ratio", "load balance"),
            ("yardstick.communication_efficiency_ratio", "communication efficiency"),
            ("yardstick.parallel_efficiency_ratio", "parallel efficiency"),
            ("yardstick.slowdown_factor", "straggler slowdown S"),
        )
    ]
    no_cost = job_impact.why_no_cost or job_impact.why_no_tokens
    metrics += [
        ("yardstick.tokens_per_second", job_impact.tokens_per_second, job_impact.why_no_tokens),
        ("yardstick.samples_per_second", job_impact.samples_per_second, job_impact.why_no_samples),
        ("yardstick.million_tokens_cost", job_impact.cost_per_million_tokens, no_cost),
        ("yardstick.lost_cost", job_impact.lost_cost, job_impact.why_no_cost),
    ]
    return tuple(
        Metric(name, value, infer_unit(name.replace(".", "_")), why if value is None else "")
        for name, value, why in metrics
    )


def _build_cause_impact(
    finding: Finding,
    model: SavingsModel,
    leaves: Mapping[str, Sequence[str]],
    per_ns: float | None,
    gpus: int,
    marked: bool,
) -> CauseImpact:
    id_ = finding.cause.id
    if finding.outside_steps:
        saved = Savings(None, why=OUTSIDE_STEPS, is_unknowable=True)
    elif finding.upper_bound:
        saved = Savings(None, why=UPPER_BOUND_ONLY, is_unknowable=True)
    elif not marked:
        saved = Savings(None, why=NO_MARKED_STEPS)
    else:
        saved = model.estimate(id_, leaves.get(id_, ()))
    return CauseImpact(
        cause=id_,
        lost_cost=_compute_cost(finding.lost_ns, per_ns),
        saved_ns=saved.ns,
        saved_low_ns=saved.low_ns,
        saved_high_ns=saved.high_ns,
        why_missing=saved.why,
        is_unknowable=saved.is_unknowable,
        outside_steps=finding.outside_steps,
        lost_ns=finding.lost_ns,
        saved_cost=None if saved.ns is None else _compute_cost(saved.ns * gpus, per_ns),
    )


def collect_leaves(ranks: Sequence[RankResult]) -> dict[str, tuple[str, ...]]:
    """Return by bucket id the causes that were claimed under it, over all ranks."""
    out: dict[str, set[str]] = {}
    for rank in ranks:
        for bucket in rank.buckets:
            out.setdefault(bucket.id, set()).update(bucket.causes)
    return {id_: tuple(sorted(leaves)) for id_, leaves in out.items()}


def _count_gpus(ranks: Sequence[RankResult]) -> int:
    """Count the devices of the largest incarnation of a job: those paid for at any time."""
    count: dict[int, int] = {}
    for rank in ranks:
        count[rank.job] = count.get(rank.job, 0) + 1
    return max(count.values(), default=0)


def _compute_cost(ns: int, per_ns: float | None) -> float | None:
    return None if per_ns is None else ns * per_ns


def _estimate_fixed_rate(rate: Rate, job_ns: int | None, saved: Savings) -> float | None:
    """Estimate a rate with all causes fixed; None where it is not known."""
    if rate.per_second is None or saved.ns is None or not job_ns or saved.ns >= job_ns:
        return None
    return rate.per_second * job_ns / (job_ns - saved.ns)


def _compute_cost_per_million(
    per_second: float | None, per_ns: float | None, gpus: int
) -> float | None:
    """Compute the cost of a million items at a rate (items per second)."""
    if not per_second or per_ns is None:
        return None
    return gpus * per_ns * 1e9 / per_second * MILLION
