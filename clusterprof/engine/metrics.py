"""The numbers a gate may test; a number that could not be seen is None and says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from clusterprof.attribution import filling
from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.partial import Partial, merge
from clusterprof.detectors.network import LIMITS as NETWORK_LIMITS
from clusterprof.detectors.registry import DETECTORS
from clusterprof.findings import UNATTRIBUTED, Metric, NodeFacts
from clusterprof.underfill import Underfill
from clusterprof.units import human, unit_of

Bound = Literal["exact", "at most", "at least"]
_NO_STEPS = "no steps were seen"
_NO_DEVICE = "no accelerator was measured inside steps"
_NO_SM_ACTIVITY = "no SM activity was recorded"
_KNOWN_AT_LEAST_RATIO = 0.9  # of the time: less says too little of all of it


def metrics_of(
    books: Sequence[RankBooks], nodes: Sequence[NodeFacts], underfill: Underfill
) -> tuple[Metric, ...]:
    """Return every metric there is, in a fixed order, for the sum of all ranks."""
    whole = merge(*(one.partial for one in books))
    in_step_ns = sum(one.ledger.in_step_ns for one in books)
    lost_ns = sum(one.ledger.lost_ns for one in books)
    bounded = any(one.ledger.source == "host-spans" for one in books)
    buckets: dict[str, int] = {}
    for one in books:
        for id_, ns in one.ledger.buckets:
            buckets[id_] = buckets.get(id_, 0) + ns
    most: Bound = "at most" if bounded else "exact"
    least: Bound = "at least" if bounded else "exact"
    return (
        _busy(whole),
        _sm_active(whole),
        _underfill(underfill),
        _ratio("lost.ratio", lost_ns, in_step_ns, most),
        _ratio("productive.ratio", in_step_ns - lost_ns, in_step_ns, least),
        _au(whole, in_step_ns, lost_ns, least),
        *_stalls(books, whole, buckets, in_step_ns, most),
        *_peers(books, whole, buckets, in_step_ns, most),
        _ratio("unattributed.ratio", buckets.get(UNATTRIBUTED, 0), in_step_ns, most),
        _waits(books, whole, in_step_ns),
        _coverage(books),
        *_steps(whole),
        _recorder(nodes),
    )


def _metric(name: str, value: float | None, why: str = "", bound: Bound = "exact") -> Metric:
    return Metric(name, value, _unit(name), why if value is None else "", bound)


def _unit(name: str) -> str:
    return unit_of(name.replace(".", "_"))


def _ratio(name: str, part: int, whole: int, bound: Bound = "exact") -> Metric:
    return _metric(name, part / whole if whole > 0 else None, _NO_STEPS, bound)


def _busy(whole: Partial) -> Metric:
    measured, busy = whole.totals.get("measured", 0), whole.totals.get("busy", 0)
    return _metric("gpu.busy_ratio", busy / measured if measured > 0 else None, _NO_DEVICE)


def _sm_active(whole: Partial) -> Metric:
    """Share of the multiprocessors with work, mean of the time in steps, idle or not."""
    active, known = (whole.fill.get((what, 0), 0) for what in (filling.SM, filling.SM_KNOWN))
    return _known_part("gpu.sm_active_ratio", active, known, whole.totals.get("measured", 0))


def _underfill(found: Underfill) -> Metric:
    """Of the time with work, how much of the devices it left empty."""
    known = found.filled_ns + found.underfilled_ns
    return _known_part(
        "underfill.ratio", found.underfilled_ns, known, found.busy_ns - found.lost_ns
    )


def _known_part(name: str, part: int, known: int, whole: int) -> Metric:
    """A share that was measured for most of a time, else why it is not known."""
    if known > 0 and known >= _KNOWN_AT_LEAST_RATIO * whole:
        return _metric(name, part / known)
    why = f"SM activity is known for {human(known / whole, 'ratio')} of it" if known else ""
    return _metric(name, None, why or (_NO_SM_ACTIVITY if whole > 0 else _NO_DEVICE))


def _au(whole: Partial, in_step_ns: int, lost_ns: int, bound: Bound) -> Metric:
    """MLPerf Storage's accelerator utilisation: productive over running time, from step 1 on."""
    rest = in_step_ns - whole.totals.get("first_step", 0)
    lost = lost_ns - whole.totals.get("first_step_lost", 0)
    value = (rest - lost) / rest if rest > 0 else None
    return _metric("au_ratio", value, "no step after the first was seen", bound)


def _stalls(
    books: Sequence[RankBooks],
    whole: Partial,
    buckets: Mapping[str, int],
    in_step_ns: int,
    bound: Bound,
) -> list[Metric]:
    """One metric per family and per cause, 0.0 only where it was looked for and not found."""
    unmarked = any(not one.marked for one in books)
    out = []
    for family in dict.fromkeys(detector.cause.family for detector in DETECTORS):
        of_family = [one.cause.id for one in DETECTORS if one.cause.family == family]
        part = sum(ns for id_, ns in buckets.items() if _family(id_) == family)
        # A leaf that lacks only a counter of its own leaves its time to a sibling.
        blind = any(
            cause in of_family
            and cause not in whole.asked
            and need in ("spans", "threads", "device")
            for cause, need in whole.missing
        )
        asked = any(id_ in whole.asked for id_ in of_family) and not blind
        by_family = unmarked and family in ("storage", "cpu")
        value = part / in_step_ns if in_step_ns > 0 and (asked or by_family) else None
        why = _NO_STEPS if in_step_ns <= 0 else _lacking(whole, of_family)
        least: Bound = "at least" if by_family and bound == "exact" else bound
        out.append(_metric(f"stall.{family}_ratio", value, why, least))
        vague = family not in of_family and buckets.get(family, 0) > 0
        out += [
            _leaf(id_, whole, buckets, in_step_ns, bound, vague or unmarked)
            for id_ in of_family
            if id_ != family
        ]
    return out


def _peers(
    books: Sequence[RankBooks],
    whole: Partial,
    buckets: Mapping[str, int],
    in_step_ns: int,
    bound: Bound,
) -> list[Metric]:
    """What only ranks together tell; unknown where no operation between them was seen."""
    seen = any(one.felt or one.caused for one in books)
    why = "no operations of ranks could be laid side by side" if in_step_ns > 0 else _NO_STEPS
    out = []
    for family in ("network", "synchronization"):
        part = sum(ns for id_, ns in buckets.items() if _family(id_) == family)
        value = part / in_step_ns if seen and in_step_ns > 0 else None
        out.append(_metric(f"stall.{family}_ratio", value, why, bound))
    for id_ in NETWORK_LIMITS:
        if seen and in_step_ns > 0:
            vague = buckets.get("network", 0) > 0
            out.append(_leaf(id_, whole, buckets, in_step_ns, bound, vague))
        else:
            out.append(_metric(f"stall.{id_}_ratio", None, why))
    return out


def _leaf(
    id_: str,
    whole: Partial,
    buckets: Mapping[str, int],
    in_step_ns: int,
    bound: Bound,
    vague: bool,
) -> Metric:
    name = f"stall.{id_}_ratio"
    if in_step_ns <= 0:
        return _metric(name, None, _NO_STEPS)
    if id_ not in whole.asked:
        return _metric(name, None, _lacking(whole, [id_]))
    if vague:
        return _metric(name, None, "some of it could be told only at family level")
    return _metric(name, buckets.get(id_, 0) / in_step_ns, "", bound)


def _lacking(whole: Partial, ids: list[str]) -> str:
    needs = sorted({need for cause, need in whole.missing if cause in ids and need})
    return f"the recording has no {', '.join(needs)}" if needs else "no probe marked the job"


def _family(id_: str) -> str:
    return CAUSES[id_].family if id_ in CAUSES else id_


def _waits(books: Sequence[RankBooks], whole: Partial, in_step_ns: int) -> Metric:
    """Host time in waits for data, hidden or not."""
    value = whole.totals.get("wait", 0) / in_step_ns if in_step_ns > 0 else None
    why = _NO_STEPS
    if not any(one.marked for one in books):
        value, why = None, "no probe marked the job"
    return _metric("data_wait.ratio", value, why)


def _coverage(books: Sequence[RankBooks]) -> Metric:
    window = sum(one.ledger.window_ns for one in books)
    seen = window - sum(one.ledger.unmeasured_ns for one in books)
    why = "no training process was recorded"
    return _metric("coverage.ratio", seen / window if window > 0 else None, why)


def _steps(whole: Partial) -> list[Metric]:
    count = sum(whole.steps.values())
    p50, p95, p99 = (quantile(whole.steps, share) for share in (0.5, 0.95, 0.99))
    return [
        _metric("step.count", float(count)),
        _metric("step.p50_ns", p50, _NO_STEPS),
        _metric("step.p95_ns", p95, _NO_STEPS),
        _metric("step.p99_ns", p99, _NO_STEPS),
    ]


def quantile(lengths: Mapping[int, int], share: float) -> float | None:
    """Return the smallest length that at least this share of the steps does not exceed."""
    count = sum(lengths.values())
    reached = 0
    for ns in sorted(lengths):
        reached += lengths[ns]
        if reached >= share * count:
            return float(ns)
    return None


def _recorder(nodes: Sequence[NodeFacts]) -> Metric:
    known = [node.recorder_cpu_ratio for node in nodes if node.recorder_cpu_ratio is not None]
    why = "the recorder's own CPU time was not recorded"
    return _metric("recorder.cpu_ratio", max(known) if known else None, why)
