"""Settle what the detectors claim: every lost nanosecond of one rank goes to one cause or reason.

Claims are shares of pieces. They are taken in the precedence of the taxonomy, each gets at most
what the earlier ones left, and what nobody claims stays unattributed with a reason:

    piece of 100 ns     checkpoint 0    storage-local 0.6    cpu-preprocess 0.7    nobody
    settled                  0               60                    40                 0

Without spans (degraded mode M2) few detectors are asked: see `cooccurrence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.cooccurrence import cooccurring
from clusterprof.attribution.frontier import Frontier
from clusterprof.attribution.hosting import paused
from clusterprof.attribution.lost import Account
from clusterprof.attribution.over_time import Times
from clusterprof.attribution.partial import SHARE, Partial
from clusterprof.attribution.precedence import PRECEDENCE, STARTUP
from clusterprof.attribution.regions import Region
from clusterprof.attribution.spent import Spending
from clusterprof.attribution.step_blocks import StepBlocks
from clusterprof.attribution.totals import completed
from clusterprof.attribution.traced_asked import SIGNS, not_told
from clusterprof.attribution.traced_reads import READS, read_elsewhere, with_reads
from clusterprof.attribution.unmarked import waiting, without_sleep
from clusterprof.detectors.base import Claims, Detector
from clusterprof.detectors.registry import DETECTORS
from clusterprof.findings import Evidence
from clusterprof.timeline.feeding import feed
from clusterprof.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_GAP,
    SOURCE_DEVICE_SAMPLES,
    SOURCE_HOST_SPANS,
    SOURCE_STREAM_EVENTS,
    Feeding,
    Int,
    Lost,
    Rank,
)
from clusterprof.timeline.traced import is_imported, traced_threads

NO_SIGNAL, GAP, EVAL, BLOCKED = "no-signal", "gap", "evaluation", "blocked-unknown"
PEERS = "peers"  # in an operation with other ranks: who was late is told by all of them
PEERS_UNKNOWN = "peers-unknown"  # one was late, for a reason unseen
JITTER = "jitter"  # work that varies from step to step, in turn for every rank
HAND_OVER = "hand-over"  # the batch was ready and on its way to the main process
_SOURCES = (SOURCE_STREAM_EVENTS, SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS)
_SHARES = tuple(one.name for one in fields(Feeding) if one.name not in ("identified", "worker_pid"))
_NAMES = "names of signals"
_EVIDENCE_SCALE = 1000  # evidence is kept to a thousandth of its unit


def settle(
    rank: Rank,
    region: Region,
    lost: Lost,
    account: Account,
    limits: Mapping[str, Any],
    spending: Spending,
    frontier: Frontier,
    blocks: StepBlocks,
    times: Times | None = None,
) -> Partial:
    """Return what a settled stretch adds: its time, its steps, and its lost time by cause.

    `limits` holds a bound limits object per cause id; `spending`, `frontier`, `blocks` and `times`
    are told what the time went to.
    """
    feeding = fed(rank, lost)
    if rank.marked:
        part, shares, left = _by_detectors(rank, lost, feeding, limits)
        spending.add(rank, region, lost, shares)
    else:
        part, shares, left = _by_families(rank, lost, feeding, limits)
    part, share = waiting(part, rank, lost, left, NO_SIGNAL)
    frontier.add(rank, region, lost, shares, share)
    if times is not None:
        times.add(rank, region, lost, shares, (left, share), account)
    blocks.add(rank, region, lost, shares, account)
    return completed(part, rank, region, lost, account)


def _by_families(
    rank: Rank, lost: Lost, feeding: Feeding, limits: Mapping[str, Any]
) -> tuple[Partial, dict[str, Int], Int]:
    """Ask the detectors that need no spans, and share the rest by co-occurrence."""
    part, own, left = _by_detectors(rank, lost, feeding, limits)
    shares: dict[str, Int] = {}
    for name, share in cooccurring(lost, rank).items():
        shares[name] = np.minimum(share, left)
        left = left - shares[name]
    claimed = {
        (name, "C", source): units
        for name, share in shares.items()
        for source in _SOURCES
        if (units := int((lost.lost_ns * share)[lost.source == source].sum()))
    }
    unexplained = {NO_SIGNAL: rest} if (rest := int((lost.lost_ns * left).sum())) else {}
    blind = {one.cause.id for one in DETECTORS if "spans" in one.needs}  # said once for all
    missing = {key: n for key, n in part.missing.items() if key[0] not in blind}
    claimed = {**part.claimed, **claimed}
    part = replace(part, claimed=claimed, unexplained=unexplained, missing=missing)
    return replace(part, totals=paused(lost, shares)), {**own, **shares}, left


def fed(rank: Rank, lost: Lost) -> Feeding:
    """Return what the critical thread did in each piece; only waits are asked when marked."""
    n = lost.start_ns.size
    rows = (lost.phase == PHASE_DATA_WAIT).nonzero()[0] if rank.marked else np.arange(n)
    if rows.size == n > 0:
        return feed(rank, lost.start_ns, lost.end_ns)
    asked = feed(rank, lost.start_ns[rows], lost.end_ns[rows]) if rows.size else None
    shares = np.zeros((len(_SHARES), n))  # columns lie together
    out: dict[str, Any] = dict(zip(_SHARES, shares))
    out["unknown"][:] = 1.0
    out["worker_pid"] = np.zeros(n, np.int64)
    out["identified"] = np.zeros(n, np.bool_)
    if asked is not None:
        for name, column in out.items():
            column[rows] = getattr(asked, name)
    return Feeding(**out)


def seen_of(rank: Rank) -> frozenset[str]:
    """Return what this rank's chunk has of what detectors may need."""
    threads = any(process.threads for process in (rank.main, *rank.workers))
    threads = threads or traced_threads(rank)
    have = {"spans": rank.marked, "threads": threads, "device": bool(rank.device)}
    names: frozenset[str] | None = rank.chunk.shared.get(_NAMES)
    if names is None:
        names = rank.chunk.shared[_NAMES] = frozenset(name for name, _ in rank.chunk.series)
    return names | {word for word, there in have.items() if there}


def missing_of(seen: frozenset[str], detector: Detector) -> tuple[str, ...]:
    """Return what a detector needs and was not seen."""
    return tuple([need for need in detector.needs if need not in seen])


def _by_detectors(
    rank: Rank, lost: Lost, feeding: Feeding, limits: Mapping[str, Any]
) -> tuple[Partial, dict[str, Int], Int]:
    claims: dict[str, Claims] = {}
    missing: dict[tuple[str, str], int] = {}
    seen = seen_of(rank)
    for detector in DETECTORS:
        id_ = detector.cause.id
        absent = missing_of(seen, detector)
        if absent:
            missing.update({(id_, need): 1 for need in absent})
        found = None if absent else detector.claim(rank, lost, feeding, limits[id_])
        if found is not None:
            claims[id_] = found
        elif not absent:
            missing[(id_, "")] = 1
    if STARTUP in claims:
        share = without_sleep(rank, lost, claims[STARTUP].share)
        claims[STARTUP] = replace(claims[STARTUP], share=share)
    shares, left = taken({id_: one.share for id_, one in claims.items()}, lost.lost_ns.size)
    read = read_elsewhere(rank, lost, left)
    left = left if read is None else left - read
    weak = (lost.phase == PHASE_DATA_WAIT) & ~feeding.identified
    weak &= not is_imported(rank.chunk)  # no thread was sampled: the mark says all there is
    unseen = not_told(rank, {id_: bool(share.any()) for id_, share in shares.items()})
    missing.update({(id_, SIGNS): 1 for id_ in unseen})
    part = Partial(
        claimed=_claimed(lost, claims, shares, weak),
        unexplained=_unexplained(lost, left, feeding),
        asked={id_: 1 for id_ in claims if id_ not in unseen},
        missing=missing,
    )
    part = _with_evidence(part, claims)
    if read is not None:
        part, shares = with_reads(part, lost, read), {**shares, READS: read}
    return part, shares, left


def taken(claims: Mapping[str, NDArray[np.float64]], n: int) -> tuple[dict[str, Int], Int]:
    """Give each claim, in precedence, what the earlier ones left; return the rest too.

    Shares are whole numbers of `SHARE`; per row they and the rest add up to `SHARE` exactly.
    """
    left, none = np.full(n, SHARE, np.int64), np.zeros(n, np.int64)
    shares: dict[str, Int] = {}
    for id_ in sorted(claims, key=_rank_of):
        if not claims[id_].any():
            shares[id_] = none
            continue
        # A number beats NaN in `fmax`: an unknown share claims nothing.
        wanted = np.rint(np.minimum(np.fmax(claims[id_], 0.0), 1.0) * SHARE).astype(np.int64)
        shares[id_] = np.minimum(wanted, left)
        left = left - shares[id_]
    return shares, left


def _rank_of(id_: str) -> int:
    return PRECEDENCE.index(id_)


def _claimed(
    lost: Lost, claims: Mapping[str, Claims], shares: Mapping[str, Int], weak: NDArray[np.bool_]
) -> dict[tuple[str, str, int], int]:
    """Add up per cause, grade and source; a share whose thread was inferred is graded C."""
    out: dict[tuple[str, str, int], int] = {}
    sources = [source for source in _SOURCES if (lost.source == source).any()]
    doubts = bool(weak.any())
    for id_, share in shares.items():
        if not share.any():
            continue
        amount = lost.lost_ns * share
        for source in sources:
            rows = amount if len(sources) == 1 else np.where(lost.source == source, amount, 0)
            doubtful = int(rows[weak].sum()) if doubts else 0
            of_grade = {grade: 0 for grade in (claims[id_].grade, max("C", claims[id_].grade))}
            of_grade[claims[id_].grade] += int(rows.sum()) - doubtful
            of_grade[max("C", claims[id_].grade)] += doubtful
            out.update({(id_, grade, source): n for grade, n in of_grade.items() if n})
    return out


def _unexplained(lost: Lost, left: Int, feeding: Feeding) -> dict[str, int]:
    in_wait = lost.phase == PHASE_DATA_WAIT
    seen = in_wait & (feeding.worker_pid > 0)
    moving = np.rint(np.where(seen, feeding.delivery, 0.0) * SHARE).astype(np.int64)
    moving = np.minimum(moving, left)
    amount = lost.lost_ns * (left - moving)
    by_phase = {
        EVAL: lost.phase == PHASE_EVAL,
        GAP: lost.phase == PHASE_GAP,
        PEERS: lost.phase == PHASE_COLLECTIVE,
        BLOCKED: seen,
    }
    out = {reason: int(amount[rows].sum()) for reason, rows in by_phase.items()}
    out[NO_SIGNAL] = int(amount.sum()) - sum(out.values())
    out[HAND_OVER] = int((lost.lost_ns * moving).sum())
    return {reason: units for reason, units in out.items() if units}


def _with_evidence(part: Partial, claims: Mapping[str, Claims]) -> Partial:
    evidence: dict[tuple[str, str, str, str], int] = {}
    weights: dict[tuple[str, str, str, str], int] = {}
    resources: dict[tuple[str, str], int] = {}
    for id_, one in claims.items():
        units = sum(n for key, n in part.claimed.items() if key[0] == id_)
        if not units:
            continue
        if one.resource:
            resources[(id_, one.resource)] = units
        for item in one.evidence:
            key = (id_, item.name, item.unit, item.note)
            weight = max(1, units // SHARE)
            scaled = round(item.value * _EVIDENCE_SCALE)
            evidence[key] = scaled if is_sum(item) else scaled * weight
            if not is_sum(item):
                weights[key] = weight
    return replace(part, evidence=evidence, weights=weights, resources=resources)


def is_sum(item: Evidence) -> bool:
    """True for evidence that adds up over time rather than being averaged."""
    return item.name.endswith("_total")


def evidence_of(part: Partial, cause_id: str) -> tuple[Evidence, ...]:
    """Return the merged evidence for a cause."""
    out = []
    for key, value in part.evidence.items():
        id_, name, unit, note = key
        if id_ == cause_id:
            weight = part.weights.get(key, 1)
            out.append(Evidence(name, value / weight / _EVIDENCE_SCALE, unit, note))
    return tuple(out)
