"""Use steps as implicit barriers in jobs whose operations between ranks were not marked.

    steps of all ranks ──> do they end together? ──> operations ──> blame
                           no: nothing is blamed     families, not leaf causes

analysis.cross_rank.step_alignment decides which ranks are synchronous, and merges steps that do not
end together.

It also decides whether less active devices were busy-waiting for a late rank.

Steps may be too short for a sampling window that shows busy-waiting alone, and kernels
may simply be small. A comparison of ranks decides:

    s of a 2-s window    rank 0   rank 1   rank 2
    less active             0.4      0.0      0.4    they waited for rank 1
    less active             0.4      0.4      0.4    small kernels, or transfers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clusterprof.analysis.attribution.accumulator import (
    SHARE_SCALE,
    Accumulator,
    merge_accumulators,
)
from clusterprof.analysis.attribution.ledger import RankResult, with_attributed_waits
from clusterprof.analysis.attribution.network.counters import (
    WRONG_PATH,
    find_node_links,
    find_symptoms,
    get_round_trip,
    is_queued,
)
from clusterprof.analysis.attribution.rank.claims import NO_SIGNAL
from clusterprof.analysis.attribution.rank.step_blocks import ALL_RANKS_GROUP, TICK_NS
from clusterprof.analysis.attribution.rank.unprobed_rank import (
    ASLEEP,
    BUSY_WAIT,
    CERTAIN_SLEEP,
    SENDING,
    SUSPECTED_BUSY_WAIT,
    UNMARKED_WAIT_REASONS,
)
from clusterprof.analysis.attribution.rank.utilization import NO_SM_ACTIVITY
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.attribution.wait_for.blame import UNKNOWN_PEER
from clusterprof.analysis.cross_rank.state import ImplicitBarriers, JobState, group_ranks_by_job
from clusterprof.analysis.cross_rank.step_alignment import (
    compute_common_wait_ns,
    find_common_step_ends,
    has_bounded_step_lead,
    has_common_step_ends,
    merge_steps,
    read_step_ends,
)
from clusterprof.analysis.job.ranks import AMBIGUOUS_JOB
from clusterprof.analysis.node.analyze import NodeResult, list_ranks, map_ranks
from clusterprof.analysis.spill import SpillLocation, SpillReader, SpillWriter
from clusterprof.analysis.timeline.model import SOURCE_DEVICE_SAMPLES, Float, Int
from clusterprof.analysis.timeline.series import MIN_CONFIDENT_ACF, Period

BUSY_WAIT_WINDOW_NS = 2_000_000_000
"""Length of a window over which ranks are compared, ns."""
MAX_MIN_TO_MEDIAN_RATIO = 0.5
"""Largest minimum over ranks, relative to their median, that confirms busy-waiting."""
MIN_BUSY_WAIT_RATIO = 0.01
"""Part of the time in steps below which busy-waiting is noise."""


def confirm_busy_wait(steps: Sequence[tuple[Int, Int, Int]]) -> bool:
    """Decide from all ranks whether suspected device busy-waiting was real.

    A rank that the others wait for busy-waits less than they do; if all do equally, the
    kernels are merely small. True if the minimum over ranks per 2-s window is at most half
    of their median, both summed over windows.

    steps: per rank, step numbers, step ends (ns), suspected busy-wait (ns); int64[steps]
    each.
    """
    numbers = steps[0][0]
    for rank_numbers, _, _ in steps[1:]:
        numbers = np.intersect1d(numbers, rank_numbers)
    if numbers.size < 2:
        return False
    table = np.stack(
        [
            busy_wait_ns[np.searchsorted(rank_numbers, numbers)]
            for rank_numbers, _, busy_wait_ns in steps
        ]
    )
    ends = steps[0][1][np.searchsorted(steps[0][0], numbers)]
    window = (ends - ends[0]) // BUSY_WAIT_WINDOW_NS
    sums: Float = np.stack([np.bincount(window, weights=row) for row in table])
    median_ns = float(np.median(sums, axis=0).sum())
    if median_ns < MIN_BUSY_WAIT_RATIO * float(ends[-1] - ends[0]):
        return False
    return float(sums.min(axis=0).sum()) <= MAX_MIN_TO_MEDIAN_RATIO * median_ns


def has_busy_wait(rank: RankResult) -> bool:
    """Return whether the device of a rank surely busy-waited, for more than noise."""
    units = rank.accumulator.unexplained.get(BUSY_WAIT, 0)
    return units > SHARE_SCALE * MIN_BUSY_WAIT_RATIO * rank.accumulator.totals.get("in_step", 0)


UNVERIFIED_BUSY = "unverified_busy"
"""Id of a total, ns: busy time that may have been waiting for other ranks."""


def measure_unverified_busy_time(state: JobState) -> JobState:
    """Measure the busy time of devices that may contain waiting in collectives, unseen.

    A collective that runs on the device looks busy while it waits. Stream events, SM activity or
    power that falls distinguish it from work.
    """
    return replace(state, nodes=map_ranks(state.nodes, _with_unverified_busy_time))


def _with_unverified_busy_time(rank: RankResult) -> RankResult:
    busy_ns = rank.accumulator.utilization.get((NO_SM_ACTIVITY, 0), 0)
    may_wait = rank.has_peers and rank.implicit_steps is not None
    if not busy_ns or not may_wait or has_busy_wait(rank):
        return rank
    unverified = Accumulator(totals={UNVERIFIED_BUSY: busy_ns})
    return replace(rank, accumulator=merge_accumulators(rank.accumulator, unverified))


def revert_suspected_busy_wait(state: JobState) -> JobState:
    """Count suspected busy-waiting that was not confirmed as productive time again."""
    return replace(state, nodes=map_ranks(state.nodes, _with_suspected_as_productive))


def _with_suspected_as_productive(rank: RankResult) -> RankResult:
    units = rank.accumulator.unexplained.get(SUSPECTED_BUSY_WAIT, 0)
    if not units:
        return rank
    ns, fraction_units = divmod(units, SHARE_SCALE)
    moved = {SUSPECTED_BUSY_WAIT: -units, **({NO_SIGNAL: fraction_units} if fraction_units else {})}
    partial = merge_accumulators(
        rank.accumulator, Accumulator(totals={"lost": -ns}, unexplained=moved)
    )
    unexplained = {reason: amount for reason, amount in partial.unexplained.items() if amount}
    ledger = replace(
        rank.ledger, lost_ns=rank.ledger.lost_ns - ns, productive_ns=rank.ledger.productive_ns + ns
    )
    result = replace(rank, ledger=ledger)
    return with_attributed_waits(
        result, replace(partial, unexplained=unexplained), rank.victim_ns, rank.culprit_ns
    )


NETWORK_FAMILY = "network"
"""Id of the family of causes under which transfers are reported without marks."""
_PERIOD_TOLERANCE_RATIO = 0.1
"""Allowed relative difference between the periods of two ranks.

One rank's period may show at a multiple of another's that falls on a sample.
"""


@dataclass(frozen=True, slots=True)
class _JobSteps:
    """What the ranks of one job show when their steps are compared."""

    is_synchronous: bool
    note: str
    numbers: Int | None = None
    """Numbers of the steps that the ranks end together, int64[n]; None = not known."""
    common_wait_ns: int | None = None
    """Time for which all ranks waited in every step, summed over steps, ns; None = not known."""


def apply_implicit_barriers(state: JobState) -> JobState:
    """Use the steps of synchronous jobs without marked operations as implicit barriers.

    In jobs whose network shows a fault, suspected busy-waiting counts as waiting. Where the
    steps cannot be read back, `not_compared` says why.
    """
    by_job = group_ranks_by_job(state.nodes)
    busy_waiting: set[int] = set(state.faulty_jobs)
    compared: dict[int, _JobSteps] = {}
    try:
        for job, ranks in by_job.items():
            with_steps = _select_ranks_to_compare(ranks)
            steps = _compare_job_steps(with_steps, state.spill) if with_steps else None
            if steps is None:
                continue
            compared[job] = steps
            needs_check = steps.is_synchronous and job not in busy_waiting
            if needs_check and _is_busy_wait_confirmed(with_steps, state.spill):
                busy_waiting.add(job)
        synchronous = {job: steps for job, steps in compared.items() if steps.is_synchronous}
        nodes = _with_implicit_barriers(state, synchronous, busy_waiting)
    except OSError as error:
        return replace(state, not_compared=str(error))
    members = {
        (job, ALL_RANKS_GROUP): np.arange(
            max(rank.job_position.world_size or 0 for rank in by_job[job])
        )
        for job in synchronous
    }
    complete = {
        job for job in synchronous if len(by_job[job]) >= members[job, ALL_RANKS_GROUP].size
    }
    barriers = ImplicitBarriers(
        jobs=frozenset(synchronous),
        complete_jobs=frozenset(complete),
        members=members,
        notes=tuple(dict.fromkeys(steps.note for steps in compared.values())),
        common_wait_ns={
            job: steps.common_wait_ns
            for job, steps in synchronous.items()
            if steps.common_wait_ns is not None
        },
    )
    return replace(state, nodes=nodes, barriers=barriers)


def _select_ranks_to_compare(ranks: Sequence[RankResult]) -> list[RankResult]:
    """Select the ranks of a job whose steps can be compared; none where operations were marked.

    Operations that hosts only issued do not count where devices busy-waited: nothing else shows how
    long the devices waited in them.
    """
    with_steps = [rank for rank in ranks if rank.implicit_steps is not None]
    marked = [rank for rank in ranks if rank.operations is not None]
    only_issued = len(with_steps) == len(ranks) and any(
        has_busy_wait(rank) or rank.suspected_steps is not None for rank in ranks
    )
    if len(with_steps) < 2 or (marked and not only_issued):
        return []
    if not any(
        rank.accumulator.unexplained.keys() & set(UNMARKED_WAIT_REASONS) for rank in with_steps
    ):
        return []  # no rank was seen waiting: no device was measured, or nothing was waited for
    return with_steps


def _compare_job_steps(ranks: Sequence[RankResult], spill: SpillLocation) -> _JobSteps | None:
    """Decide whether the ranks of a job are synchronous; None where only some mark their steps.

    Raises: OSError when the steps cannot be read back.
    """
    if all(rank.marked for rank in ranks):
        barrier_steps = _find_barrier_steps(ranks, spill)
        if barrier_steps is None:
            return _JobSteps(False, _NOT_SYNCHRONOUS_NOTE)
        return _JobSteps(True, _STEPS_NOTE, *barrier_steps)
    if any(rank.marked for rank in ranks):
        return None
    return _JobSteps(*_compare_periods([rank.period for rank in ranks]))


def _with_implicit_barriers(
    state: JobState, synchronous: Mapping[int, _JobSteps], busy_waiting: Collection[int]
) -> tuple[NodeResult, ...]:
    """Return the nodes with steps in place of operations in the synchronous jobs.

    Raises: OSError when the steps cannot be read back or written.
    """
    with SpillReader(state.spill) as reader, SpillWriter(state.spill) as shelf:

        def apply_barriers(rank: RankResult) -> RankResult:
            if rank.job not in synchronous:
                return rank
            with_steps = _with_steps_as_operations(rank, rank.job in busy_waiting)
            return _with_merged_steps(with_steps, synchronous[rank.job].numbers, reader, shelf)

        return map_ranks(state.nodes, apply_barriers)


def _find_barrier_steps(
    ranks: Sequence[RankResult], spill: SpillLocation
) -> tuple[Int, int] | None:
    """Return the steps that synchronous ranks end together, and their common wait in ns.

    The common wait is how long all ranks waited equally long in every step. None for ranks
    that are not synchronous. Steps: int64[n], numbers.
    """
    with SpillReader(spill) as reader:
        table = [
            read_step_ends(rank.implicit_steps, reader)
            for rank in ranks
            if rank.implicit_steps is not None
        ]
    ends = [(number, end) for number, end, _ in table]
    own_ns = [_compute_own_loss_ns(rank) for rank in ranks]
    if not (
        has_common_step_ends(ends)
        or has_bounded_step_lead(ends, own_ns, any(map(has_busy_wait, ranks)))
    ):
        return None
    return find_common_step_ends(ends), compute_common_wait_ns(table)


def _is_busy_wait_confirmed(ranks: Sequence[RankResult], spill: SpillLocation) -> bool:
    """Return whether the suspected busy-waiting of devices in one job is confirmed.

    Ranks of a job run one program: where one rank surely busy-waits, the others do too.
    """
    if all(rank.suspected_steps is None for rank in ranks):
        return False
    with SpillReader(spill) as reader:
        return any(map(has_busy_wait, ranks)) or confirm_busy_wait(
            [_read_suspected_busy_wait(rank, reader) for rank in ranks]
        )


def _with_steps_as_operations(rank: RankResult, busy_waited: bool) -> RankResult:
    """Return a rank with its steps as operations; `busy_waited`: suspected time counts."""
    if busy_waited and rank.suspected_steps is not None:
        return replace(rank, operations=rank.suspected_steps)
    return replace(rank, operations=rank.implicit_steps, suspected_steps=None)


def _with_merged_steps(
    rank: RankResult, numbers: Int | None, reader: SpillReader, shelf: SpillWriter
) -> RankResult:
    if numbers is None or rank.operations is None:
        return rank
    operations = merge_steps(rank.operations, numbers, reader, shelf)
    return replace(rank, operations=operations)


_STEPS_NOTE = (
    "no operations between ranks were marked: waits are inferred from their steps, and causes"
    " of waits are named by family only"
)
_PERIODS_NOTE = (
    "neither steps nor operations between ranks were marked: waits are inferred from which rank"
    " waited least; "
)
_NOT_SYNCHRONOUS_NOTE = (
    "no operations between ranks were marked, and their steps do not end together: time in which"
    " they slept inside steps has no cause"
)


def _compare_periods(periods: Sequence[Period | None]) -> tuple[bool, str]:
    """Return whether repeating periods of ranks are equally long, and a note on them."""
    acf = min((rank.acf if rank is not None else 0.0) for rank in periods)
    if acf < MIN_CONFIDENT_ACF:
        return True, f"{_PERIODS_NOTE}no step was recognized, the best autocorrelation is {acf:.2f}"
    length_s = [rank.samples * TICK_NS / 1e9 for rank in periods if rank is not None]
    ratio = max(length_s) / min(length_s)
    if abs(ratio - round(ratio)) > _PERIOD_TOLERANCE_RATIO * round(ratio):
        range_s = f"{min(length_s):.1f} and {max(length_s):.1f} s"
        return False, f"ranks repeat every {range_s}: they do not wait for each other in every step"
    return (
        True,
        f"{_PERIODS_NOTE}steps seem to take {min(length_s):.1f} s (autocorrelation {acf:.2f})",
    )


def blame_unrecorded_peers(state: JobState) -> JobState:
    """Attribute busy-waiting to unrecorded ranks where only one rank of a job was recorded."""
    count = Counter(rank.job for rank in list_ranks(state.nodes))

    def blame_peers(rank: RankResult) -> RankResult:
        is_alone = count[rank.job] == 1 and rank.job != AMBIGUOUS_JOB
        return _with_unknown_peer_wait(rank) if is_alone else rank

    return replace(state, nodes=map_ranks(state.nodes, blame_peers))


def _with_unknown_peer_wait(rank: RankResult) -> RankResult:
    units = rank.accumulator.unexplained.get(BUSY_WAIT, 0)
    if not units:
        return rank
    claim = {(UNKNOWN_PEER, "C", SOURCE_DEVICE_SAMPLES): units}
    partial = merge_accumulators(
        rank.accumulator, Accumulator(claimed=claim, unexplained={BUSY_WAIT: -units})
    )
    unexplained = {reason: ns for reason, ns in partial.unexplained.items() if ns}
    victim_ns = {
        **rank.victim_ns,
        UNKNOWN_PEER: rank.victim_ns.get(UNKNOWN_PEER, 0) + units // SHARE_SCALE,
    }
    return with_attributed_waits(
        rank, replace(partial, unexplained=unexplained), victim_ns, rank.culprit_ns
    )


def _compute_own_loss_ns(rank: RankResult) -> int:
    """Compute the time that a rank lost outside its waits for other ranks, ns."""
    units = sum(rank.accumulator.unexplained.get(name, 0) for name in UNMARKED_WAIT_REASONS)
    return rank.accumulator.totals.get("lost", 0) - units // SHARE_SCALE


def _read_suspected_busy_wait(rank: RankResult, reader: SpillReader) -> tuple[Int, Int, Int]:
    """Return the steps of a rank: number, end (ns), suspected busy-waiting (ns); int64[steps]."""
    assert rank.implicit_steps is not None
    number, end, stay = read_step_ends(rank.implicit_steps, reader)
    if rank.suspected_steps is None:
        return number, end, stay if BUSY_WAIT in rank.accumulator.unexplained else 0 * stay
    suspected_ns = read_step_ends(rank.suspected_steps, reader)[2]
    return (
        number,
        end,
        suspected_ns if BUSY_WAIT in rank.accumulator.unexplained else suspected_ns - stay,
    )


def subtract_waits_from_reasons(
    rank: RankResult, waits_ns: Mapping[str, int], rest_ns: int
) -> dict[str, int]:
    """Return what each reason of a rank loses to its attributed waits, in ns, negative.

    waits_ns: waits by cause. rest_ns: further waits without a cause. Transfers are
    subtracted first where the device was busy-waiting or the node was sending; suspected
    busy-waiting counts only if the steps of the rank confirm it.
    """
    remaining = {
        name: rank.accumulator.unexplained.get(name, 0) // SHARE_SCALE
        for name in UNMARKED_WAIT_REASONS
    }
    if rank.suspected_steps is None:
        remaining[SUSPECTED_BUSY_WAIT] = 0
    out = dict.fromkeys(UNMARKED_WAIT_REASONS, 0)
    transfer_ns = waits_ns.get(NETWORK_FAMILY, 0)
    for ns, order in (
        (transfer_ns, (BUSY_WAIT, SENDING, ASLEEP, SUSPECTED_BUSY_WAIT)),
        (
            sum(waits_ns.values()) + rest_ns - transfer_ns,
            (SUSPECTED_BUSY_WAIT, ASLEEP, SENDING, BUSY_WAIT),
        ),
    ):
        for name in order:
            part = min(ns, remaining[name])
            remaining[name] -= part
            out[name] -= part
            ns -= part
        assert ns == 0, "a rank waited for longer than it may have"
    return out


def limit_transfer_ns(
    ranks: Sequence[RankResult],
    troubled: Collection[int],
    steady_ns: Mapping[int, int],
    sending_ns: Mapping[int, int],
) -> dict[int, int]:
    """Return by job the longest transfer time that its ranks' measurements support, ns.

    Time that all ranks of a job slept equally long is not known to be a transfer, unless
    devices busy-wait, nodes send as fast as they can, or the network of the job is
    `troubled`: then there is no limit. Else the limit is the time all ranks waited in every
    step (`steady_ns`) while their devices were idle, and no longer than the job's
    connections had data in flight (`sending_ns`). The smallest limit of its ranks counts.
    """
    out: dict[int, int] = {}
    for rank in ranks:
        if rank.implicit_steps is not None and rank.job not in troubled:
            names = (
                SENDING,
                BUSY_WAIT,
                *((SUSPECTED_BUSY_WAIT,) if rank.suspected_steps is not None else ()),
            )
            units = sum(rank.accumulator.unexplained.get(name, 0) for name in names)
            limits = steady_ns.get(rank.job, 0), sending_ns.get(rank.job, 0)
            slept_ns = rank.accumulator.totals.get(CERTAIN_SLEEP, 0) // SHARE_SCALE
            limit_ns = units // SHARE_SCALE + min(slept_ns, *limits)
            out[rank.job] = min(limit_ns, out.get(rank.job, limit_ns))
    return out


def cap_transfer(waits_ns: Mapping[str, int], limit_ns: int | None) -> dict[str, int]:
    """Return waits by cause (ns) with transfers capped at `limit_ns`; None = no limit."""
    out = dict(waits_ns)
    if limit_ns is not None:
        out[NETWORK_FAMILY] = min(out.get(NETWORK_FAMILY, 0), limit_ns)
    return {cause: ns for cause, ns in out.items() if ns}


def sum_by_family(amounts: Mapping[str, int]) -> dict[str, int]:
    """Sum amounts of waiting and transfer causes under the names of their families.

    Without marks neither the work of a late rank nor the transferring operation is known.
    Waits for ranks that were not recorded keep their cause.
    """
    out: Counter[str] = Counter()
    for cause, ns in amounts.items():
        family = CAUSES[cause].family if cause in CAUSES else ""
        general = family in ("network", "synchronization") and cause != UNKNOWN_PEER
        out[family if general else cause] += ns
    return {cause: ns for cause, ns in out.items() if ns}


DISTANT_RTT_NS = 2_000_000
"""Round trip (ns) too long for a cluster: machines of one hall are 0.2 ms apart."""

TCP_BUSY_SIGNAL = "tcp.job_busy_ns_total"
MIN_QUEUED_RATIO = 3.0
"""Median over shortest round trip from which packets stand in a queue."""


def find_jobs_with_network_faults(
    nodes: Sequence[NodeResult], limits: Mapping[str, Any]
) -> frozenset[int]:
    """Find the jobs with a node that shows loss, queues, errors, or long round trips."""
    faulty: set[int] = set()
    for number, node in enumerate(nodes):
        jobs = {rank.job for rank in node.ranks if rank.job != AMBIGUOUS_JOB}
        if jobs - faulty and _has_network_fault(number, node, limits):
            faulty |= jobs
    return frozenset(faulty)


def measure_sending_ns(nodes: Sequence[NodeResult]) -> dict[int, int]:
    """Compute an upper bound of the time each job's connections had data in flight, ns.

    The largest value of its nodes, all connections of a node together. Jobs without a
    reading are left out.
    """
    longest_ns: dict[int, int] = {}
    for node in nodes:
        network = node.network_throughout
        busy = sum(
            int(network.total(TCP_BUSY_SIGNAL, d) or 0) for d in network.devices(TCP_BUSY_SIGNAL)
        )
        for job in {rank.job for rank in node.ranks if rank.job != AMBIGUOUS_JOB} if busy else ():
            longest_ns[job] = max(busy, longest_ns.get(job, 0))
    return longest_ns


def _has_network_fault(number: int, node: NodeResult, limits: Mapping[str, Any]) -> bool:
    host = node.loaded.header.host
    links = find_node_links(
        number, node.facts.name, node.network_throughout, host, (0.0, None), limits
    )
    if not links.used:
        return False
    rtt_ns, least_ns, _ = get_round_trip(links)
    if least_ns is not None and least_ns >= DISTANT_RTT_NS:
        return True
    # No matter whose packets fill the queue: those of the job wait in it.
    if rtt_ns is not None and least_ns and is_queued(rtt_ns, least_ns, MIN_QUEUED_RATIO):
        return True
    return any(sign.kind != WRONG_PATH for sign in find_symptoms(links, limits))
