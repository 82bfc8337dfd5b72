"""The ledger of one rank: integer nanoseconds in, exact sums out.

    window_ns  = unmeasured_ns + outside_ns + in_step_ns
    in_step_ns = productive_ns + lost_ns
    lost_ns    = sum of buckets, "unattributed" among them

Claimed amounts arrive as whole numbers of 1/SHARE ns. Each bucket gets its whole nanoseconds, and
what is left over goes one by one to the largest remainders, so that children add up to the parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clusterprof.attribution.confidence import FAMILY_PRIOR, NAMED_FROM, confidence
from clusterprof.attribution.families import CAUSES, FAMILIES
from clusterprof.attribution.local import BLOCKED
from clusterprof.attribution.over_time import RankTimes
from clusterprof.attribution.partial import Partial
from clusterprof.attribution.regions import RankState
from clusterprof.attribution.rounding import largest_remainder
from clusterprof.attribution.step_blocks import Blocks
from clusterprof.attribution.window import NOT_ASKED
from clusterprof.findings import UNATTRIBUTED, RankLedger
from clusterprof.timeline.identity import NOBODY, Place
from clusterprof.timeline.model import SOURCE_HOST_SPANS, Int
from clusterprof.timeline.operation_rows import RankOperations
from clusterprof.timeline.periods import Period

LOW_CONFIDENCE = "low-confidence"
STARTUP, AFTER_STEPS, NO_STEPS = "startup", "after-steps", "no-steps"
LONG_STEP = "long-first-step"
"""Of a first step that was told too late to look into it all: what is settled without its end."""
_WAIT_FAMILIES = ("storage", "cpu")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lost time of one rank under one name, with what it was made of."""

    id: str
    """Cause id, or the id of a family."""
    lost_ns: int
    confidence_ratio: float
    by_grade: Mapping[str, int]
    """Grade -> ns * SHARE."""
    upper_bound: bool
    leaves: tuple[str, ...]
    """The causes that were claimed, largest first."""


@dataclass(frozen=True, slots=True)
class RankBooks:
    """The ledger of a rank and what stands behind its lines."""

    ledger: RankLedger
    buckets: tuple[Bucket, ...]
    """Largest first, then by id; without "unattributed"."""
    reasons: tuple[tuple[str, int], ...]
    """(reason, ns) of what is unattributed."""
    partial: Partial
    has_peers: bool
    marked: bool
    emulated: bool
    identity: Mapping[str, str]
    """Launcher variables that were found."""
    place: Place = NOBODY
    """Where it stands in its job."""
    started_ticks: int = -1
    """With the pid the process's identity on its machine."""
    first_ns: int = 0
    last_ns: int = 0
    """First and last record of it, on its node's clock."""
    job: int = 0
    """Number of its job, or of the life of it that a restart began; -1 where that is unclear."""
    operations: RankOperations | None = None
    """Its operations with other ranks, until they have been charged."""
    frontier: RankOperations | None = None
    """Its steps as operations, where it marked none (`attribution.frontier`)."""
    perhaps: RankOperations | None = None
    """The same with the time in which its device perhaps span; None where there is none."""
    period: Period | None = None
    """What repeats in its lost time, in tenths of a second, where it marked no steps."""
    times: RankTimes | None = None
    """When it lost what; None when nobody asked."""
    blocks: Blocks | None = None
    """The same in blocks of its steps; None without steps."""
    own_steps: tuple[Int, Int] | None = field(default=None, compare=False)
    """What it lost by cause, stretch by stretch (`OwnSteps.stretches`), where it has no peers."""
    caused: Mapping[str, int] = field(default_factory=dict)
    """Cause id -> ns that ranks, itself among them, stood still in operations because of it."""
    felt: Mapping[str, int] = field(default_factory=dict)
    """Cause id -> ns of the ledger in which it stood still in operations."""


@dataclass(frozen=True, slots=True)
class RankName:
    """Who a rank is."""

    node: str
    rank: int | None
    pid: int
    device: str
    marked: bool
    emulated: bool
    has_peers: bool
    identity: Mapping[str, str] = field(default_factory=dict)
    place: Place = NOBODY
    started_ticks: int = -1


def keep_books(
    name: RankName, state: RankState, partial: Partial, operations: RankOperations | None = None
) -> RankBooks:
    """Turn the sums of one rank into its ledger; the law at the top holds by construction."""
    totals = partial.totals
    window_ns = (state.last_ns or 0) - (state.first_ns or 0)
    in_step_ns = totals.get("in_step", 0)
    unmeasured_ns = totals.get("unmeasured", 0)
    seen = name.marked or bool(name.device)
    if not seen:
        unmeasured_ns = window_ns
    outside_ns = window_ns - in_step_ns - unmeasured_ns
    coverage = 1 - unmeasured_ns / window_ns if window_ns > 0 else 0.0
    lost_ns = totals.get("lost", 0)
    buckets, reasons = named(partial, lost_ns, coverage)
    ledger = RankLedger(
        node=name.node,
        rank=name.rank,
        pid=name.pid,
        device=name.device,
        source=_source(name, totals),
        window_ns=window_ns,
        unmeasured_ns=unmeasured_ns,
        outside_ns=outside_ns,
        in_step_ns=in_step_ns,
        productive_ns=in_step_ns - lost_ns,
        lost_ns=lost_ns,
        buckets=_lines(buckets, reasons),
        outside_buckets=_outside(state, outside_ns, totals.get("not_asked", 0)),
        steps=sum(partial.steps.values()),
        coverage_ratio=coverage,
    )
    return RankBooks(
        ledger,
        buckets,
        reasons,
        partial,
        name.has_peers,
        name.marked,
        name.emulated,
        name.identity,
        name.place,
        name.started_ticks,
        state.first_ns or 0,
        state.last_ns or 0,
        operations=operations,
    )


def charged(
    books: RankBooks, partial: Partial, felt: Mapping[str, int], caused: Mapping[str, int]
) -> RankBooks:
    """Return the books with time in operations moved to its causes; no sum above them changes."""
    ledger = books.ledger
    buckets, reasons = named(partial, ledger.lost_ns, ledger.coverage_ratio)
    return replace(
        books,
        ledger=replace(ledger, buckets=_lines(buckets, reasons)),
        buckets=buckets,
        reasons=reasons,
        partial=partial,
        operations=None,
        frontier=None,
        perhaps=None,
        caused=caused,
        felt=felt,
    )


def _lines(
    buckets: tuple[Bucket, ...], reasons: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    lines = [(bucket.id, bucket.lost_ns) for bucket in buckets]
    return (*lines, (UNATTRIBUTED, sum(ns for _, ns in reasons)))


def called(books: RankBooks, names: Mapping[str, str]) -> RankBooks:
    """Return the books with causes under these ids, whatever this rank alone is sure of."""
    ledger = books.ledger
    buckets, reasons = named(books.partial, ledger.lost_ns, ledger.coverage_ratio, names)
    ledger = replace(ledger, buckets=_lines(buckets, reasons))
    return replace(books, ledger=ledger, buckets=buckets, reasons=reasons)


def named(
    partial: Partial, lost_ns: int, coverage_ratio: float, names: Mapping[str, str] | None = None
) -> tuple[tuple[Bucket, ...], tuple[tuple[str, int], ...]]:
    """Share lost time among buckets and reasons; together they are `lost_ns` to the nanosecond.

    `names`: cause -> the id it has; of any other it is asked how sure this rank is.
    """
    amounts: dict[tuple[str, str], dict[str, int]] = {}
    host: dict[str, int] = {}
    leaves: dict[str, dict[str, int]] = {}
    rest = {("reason", reason): units for reason, units in partial.unexplained.items()}
    for (cause, grade, source), units in sorted(partial.claimed.items()):
        id_ = (names or {}).get(cause) or said(partial, cause, coverage_ratio)
        if id_ is None:
            key = ("reason", LOW_CONFIDENCE)
            rest[key] = rest.get(key, 0) + units
            continue
        by_grade = amounts.setdefault(("bucket", id_), {})
        by_grade[grade] = by_grade.get(grade, 0) + units
        host[id_] = host.get(id_, 0) + (units if source == SOURCE_HOST_SPANS else 0)
        of_leaf = leaves.setdefault(id_, {})
        of_leaf[cause] = of_leaf.get(cause, 0) + units
    units_of = {**{key: sum(grades.values()) for key, grades in amounts.items()}, **rest}
    shared = largest_remainder(units_of, lost_ns)
    unexplained = partial.unexplained.get(BLOCKED, 0)
    buckets = [
        Bucket(
            id_,
            shared[("bucket", id_)],
            _confidence(id_, grades, unexplained, coverage_ratio),
            grades,
            2 * host[id_] > sum(grades.values()),
            tuple(sorted(leaves[id_], key=lambda leaf: (-leaves[id_][leaf], leaf))),
        )
        for (_, id_), grades in amounts.items()
    ]
    reasons = [(reason, ns) for (kind, reason), ns in shared.items() if kind == "reason" and ns]
    return (
        tuple(sorted(buckets, key=lambda bucket: (-bucket.lost_ns, bucket.id))),
        tuple(sorted(reasons, key=lambda line: (-line[1], line[0]))),
    )


def said(partial: Partial, cause_id: str, coverage_ratio: float) -> str | None:
    """Return the id under which a claim is reported: the leaf, else its family, else None."""
    family = CAUSES[cause_id].family
    unexplained = partial.unexplained.get(BLOCKED, 0)
    grades = _grades(partial, {cause_id})
    if _confidence(cause_id, grades, unexplained, coverage_ratio) >= NAMED_FROM:
        return cause_id
    siblings = {id_ for id_, _, _ in partial.claimed if CAUSES[id_].family == family}
    grades = _grades(partial, siblings)
    sure = _confidence(family, grades, unexplained, coverage_ratio, family=True) >= NAMED_FROM
    return family if sure else None


def _grades(partial: Partial, causes: set[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for (cause, grade, _), units in partial.claimed.items():
        if cause in causes:
            out[grade] = out.get(grade, 0) + units
    return out


def _confidence(
    id_: str,
    grades: Mapping[str, int],
    unexplained: int,
    coverage_ratio: float,
    family: bool = False,
) -> float:
    cause = CAUSES[id_]
    related = unexplained if cause.family in _WAIT_FAMILIES else 0
    if family or cause is FAMILIES.get(id_):
        return confidence(grades, related, coverage_ratio, FAMILY_PRIOR)
    return confidence(grades, related, coverage_ratio)


def _source(name: RankName, totals: Mapping[str, int]) -> str:
    if totals.get("host_lost", 0) and not name.device:
        return "host-spans"  # the larger part is an upper bound, whatever a few events measured
    if totals.get("stream_pieces", 0):
        return "stream-events"
    if name.device:
        return "device-samples"
    return "host-spans" if name.marked else "none"


def _outside(state: RankState, outside_ns: int, not_asked: int) -> tuple[tuple[str, int], ...]:
    begun_ns, told_ns = state.begun_ns, state.told_ns
    if begun_ns is None or state.first_ns is None:
        return ((NO_STEPS, outside_ns),) if outside_ns else ()
    not_asked = min(not_asked, outside_ns)
    asked_ns = max(state.first_ns, state.since_ns or state.first_ns)
    told_ns = max(begun_ns if told_ns is None else told_ns, asked_ns)
    startup_ns = min(told_ns - asked_ns, outside_ns - not_asked)
    long_ns = min(max(begun_ns - told_ns, 0), outside_ns - not_asked - startup_ns)
    rest_ns = outside_ns - startup_ns - long_ns - not_asked
    lines = (
        (STARTUP, startup_ns), (LONG_STEP, long_ns), (NOT_ASKED, not_asked), (AFTER_STEPS, rest_ns)
    )  # fmt: skip
    return tuple(line for line in lines if line[1])
