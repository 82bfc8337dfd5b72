"""Compute efficiency metrics under the names of others as their authors define them.

    goodput                    productive over all recorded device time. No single author: Google's
                               ML Goodput counts waits inside steps as productive, this does not
    load balance               mean over longest useful time of the ranks
    communication efficiency   longest useful time of a rank over the run time
    parallel efficiency        load balance times communication efficiency
    straggler slowdown S       T / T_ideal
    MLPerf Storage AU          time of computation over running time of a block of an epoch, both
                               without its first step; mean of ranks, mean of epochs

Sources: *POP Standard Metrics for Parallel Performance Analysis* (POP Centre of Excellence);
useful time is device time that was not lost here. *Understanding Stragglers in Large Model Training
Using What-if Analysis* (Lin et al., OSDI 2025), eq. 1, and `analyzer/wia.py` of
ByteDance-Seed/StragglerAnalysis: T is the step time replayed without delays of the host, T_ideal
the same with the mean of each computation and the median of each transfer. *MLPerf Storage
Submission Guidelines*, section 4, and `compute_metrics_train` in `utils/statscounter.py` of
argonne-lcf/dlio_benchmark.

    rank   productive   in steps      load balance  (80 + 100) / 2 / 100 = 0.9
    0          80          200        communication efficiency    100 / 200 = 0.5
    1         100          200        parallel efficiency                     0.45

Withhold values of one report that contradict each other:

    S <= 1 / parallel efficiency      no job is shorter than the mean of its ranks' work
    S >= 1                            even work never takes longer
    S without gaps on the way         a replay without time that nothing was recorded of is not the
                                      job if more than 5 % of the steps hangs on that time
    idle time of T_ideal              1 / S - parallel efficiency; at most twice the time that was
                                      lost to anything else than uneven work, since half of what
                                      even work frees may turn into waits of the pipeline
    saved <= job - work that remains  the longest useful time of a rank; with even work the lower
                                      median, since no rank then has more
    saved by all >= saved by one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.importers.workloads.dlio import AU_FACT
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.report.impact import CauseImpact, Impact

EfficiencyMetric = tuple[str, float | None, str]
"""Name, value, and its definition or why it has no value."""
GOODPUT = "productive over all recorded device time; start-up, restarts, checkpoints included"
BALANCE = "POP: mean over longest productive time of the ranks"
EFFICIENCY = "POP: longest productive time of a rank over the run time"
PARALLEL = "POP: load balance times communication efficiency"
SLOWDOWN = (
    "OSDI 2025: step time over the step time if all ranks did the mean work, host delays left out"
)
AU = "MLPerf Storage: computing over running time of epochs without the first step"

NO_STEPS = "no steps were recorded"
NO_DEVICE = "no accelerator was measured inside steps"
TOO_FEW_RANKS = "needs at least two ranks"
NOT_COMPARED = "operations of different ranks were not matched"
GAPS_ON_CRITICAL_PATH = "unrecorded gaps on the critical path are more than 5 % of the step time"
NO_BENCHMARK = "only DLIO's output has the times of computation and of blocks that it is made of"
TOLERANCE = 0.02
MAX_IDLE_FACTOR = 2.0
"""Idle time of even work over what was lost to anything else; see the module."""
MORE_THAN_WORK = "withheld: it contradicts the parallel efficiency: more than even work can save"
LESS_THAN_ONE = "withheld: even work would take longer than uneven work"
UNEXPLAINED_IDLE = (
    "withheld: it contradicts the load balance: even work would leave idle time without a cause"
)
IMPOSSIBLE_SAVINGS = "withheld: less time would remain than the devices worked"


def compute_efficiency_metrics(
    ranks: Sequence[RankResult],
    slowdown: float | None = None,
    why_slow: str = "",
    au: float | None = None,
) -> tuple[EfficiencyMetric, ...]:
    """Compute every efficiency metric, in a fixed order.

    slowdown: S of the what-if replay, None = not known because of `why_slow`. au: see
    `get_storage_au`.
    """
    ledgers = [rank.ledger for rank in ranks if rank.ledger.in_step_ns]
    bounded = any(ledger.source == "host-spans" for ledger in ledgers)
    window_ns = sum(rank.ledger.window_ns for rank in ranks)
    useful = [ledger.productive_ns for ledger in ledgers]
    run_ns = max((ledger.in_step_ns + ledger.unmeasured_ns for ledger in ledgers), default=0)
    why = NO_STEPS if not ledgers else NO_DEVICE if bounded else ""
    goodput = None if why or not window_ns else sum(useful) / window_ns
    alone = why or (TOO_FEW_RANKS if len(ledgers) < 2 else "")
    balance = efficiency = parallel = None
    if not alone and max(useful) > 0:
        balance = sum(useful) / len(useful) / max(useful)
        efficiency = max(useful) / run_ns
        parallel = balance * efficiency
    if len(ledgers) < 2:
        why_slow = TOO_FEW_RANKS
    elif slowdown is None:
        why_slow = why_slow or NOT_COMPARED
    else:
        why_slow = find_slowdown_contradiction(slowdown, parallel, _compute_uneven_ratio(ranks))
    return (
        ("goodput", goodput, GOODPUT if goodput is not None else why or NO_STEPS),
        ("load balance", balance, BALANCE if balance is not None else alone or NO_STEPS),
        ("communication efficiency", efficiency, EFFICIENCY if efficiency else alone or NO_STEPS),
        ("parallel efficiency", parallel, PARALLEL if parallel else alone or NO_STEPS),
        ("straggler slowdown S", None if why_slow else slowdown, why_slow or SLOWDOWN),
        ("MLPerf Storage AU", au, NO_BENCHMARK if au is None else AU),
    )


def find_slowdown_contradiction(
    slowdown: float, parallel_efficiency: float | None, uneven_ratio: float
) -> str:
    """Find which rule of the module S breaks; "" = none.

    uneven_ratio: time lost to uneven work over the time in steps.
    """
    if slowdown < 1.0 - TOLERANCE:
        return LESS_THAN_ONE
    if parallel_efficiency is None:
        return ""
    if slowdown * parallel_efficiency > 1.0 + TOLERANCE:
        return MORE_THAN_WORK
    idle = 1.0 / slowdown - parallel_efficiency
    other_ratio = max(1.0 - parallel_efficiency - uneven_ratio, 0.0)
    return UNEXPLAINED_IDLE if idle > MAX_IDLE_FACTOR * other_ratio + TOLERANCE else ""


def _compute_uneven_ratio(ranks: Sequence[RankResult]) -> float:
    in_step_ns = sum(rank.ledger.in_step_ns for rank in ranks)
    uneven_ns = sum(
        ns
        for rank in ranks
        for id_, ns in rank.ledger.buckets
        if id_ != BUBBLE and _get_family(id_) == "synchronization"
    )
    return uneven_ns / in_step_ns if in_step_ns else 0.0


BUBBLE = "sync-bubble"


def _get_family(id_: str) -> str:
    return CAUSES[id_].family if id_ in CAUSES else id_


def get_storage_au(nodes: Sequence[NodeResult]) -> float | None:
    """Return the AU of MLPerf Storage, 0 to 1; None if it is not that of one benchmark run."""
    epochs = [
        device[AU_FACT]
        for node in nodes
        for device in node.loaded.header.devices
        if device.get(AU_FACT)
    ]
    devices = sum(len(node.ranks) for node in nodes)
    jobs = {rank.job for node in nodes for rank in node.ranks}
    if not epochs or len(epochs) < devices or len(jobs) > 1:
        return None
    return fmean(fmean(map(float, by_epoch)) for by_epoch in epochs)


def withhold_impossible_savings(impact: Impact, ranks: Sequence[RankResult]) -> Impact:
    """Return the impact without savings that leave less time than the devices worked."""
    job_ns = impact.job_ns
    if not job_ns:
        return impact
    longest_ns, median_ns = _compute_remaining_work(ranks)
    slack_ns = TOLERANCE * job_ns

    def is_possible(saved_ns: int | None, even: bool) -> bool:
        least_ns = median_ns if even else longest_ns
        return saved_ns is None or saved_ns <= job_ns - least_ns + slack_ns

    causes = tuple(
        cause
        if is_possible(cause.saved_ns, _get_family(cause.cause) == "synchronization")
        else _without_savings(cause)
        for cause in impact.causes
    )
    single_ns = max((cause.saved_ns or 0 for cause in causes), default=0)
    saved_ns = impact.saved_ns
    impact = replace(impact, causes=causes)
    if saved_ns is None or (is_possible(saved_ns, True) and saved_ns >= single_ns - slack_ns):
        return impact
    return replace(
        impact,
        saved_ns=None,
        saved_low_ns=None,
        saved_high_ns=None,
        tokens_per_second_if_fixed=None,
        samples_per_second_if_fixed=None,
        cost_per_million_tokens_if_fixed=None,
    )


def _without_savings(cause: CauseImpact) -> CauseImpact:
    return replace(
        cause,
        saved_ns=None,
        saved_low_ns=None,
        saved_high_ns=None,
        saved_cost=None,
        why_missing=IMPOSSIBLE_SAVINGS,
        is_unknowable=True,
    )


def _compute_remaining_work(ranks: Sequence[RankResult]) -> tuple[int, int]:
    """Return the longest and the lower median productive time of a rank, ns, jobs added up."""
    by_job: dict[int, list[int]] = {}
    for rank in ranks:
        if rank.ledger.in_step_ns:
            by_job.setdefault(rank.job, []).append(rank.ledger.productive_ns)
    return (
        sum(max(useful) for useful in by_job.values()),
        sum(sorted(useful)[(len(useful) - 1) // 2] for useful in by_job.values()),
    )
