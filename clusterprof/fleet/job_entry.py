"""Condense the report of a job to its entry in the ledger of a cluster.

An entry keeps the exact sums of the report: lost time by cause adds up to the lost time of the job,
and lost time by node does, too, in integer nanoseconds.

A node is a *culprit* in a job of several nodes when causes that a bad node can have
(`Cause.of_node`) cost at least a hundredth of the job's time in steps there, and at least twice the
mean of its nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.model import UNATTRIBUTED, Cause, Culprit, Finding, RankLedger, Report
from clusterprof.units import SECOND_NS

MIN_CULPRIT_RATIO = 0.01
"""Least part of the job's time in steps that a node has to cost to be a culprit."""
MIN_CULPRIT_FACTOR = 2.0
"""Least ratio of what a culprit costs to the mean of all nodes of the job."""
INNER, FIRST, LAST = 0, 1, 2
"""Position of a node in a job, by the ranks that it has."""
MAX_CULPRITS = 16
"""Culprits kept of a cause; the largest come first in a report."""
PLACE_FAMILIES = ("storage", "network")
"""Families of causes whose resources are mounts, disks and NICs."""
MAX_TEXT_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class CauseTime:
    """Device time that a job lost to one cause, ns."""

    cause: str
    family: str
    title: str
    tone: int
    """As in `Cause`."""
    lost_ns: int
    """Inside steps."""
    outside_ns: int
    """Before the first and after the last step."""


@dataclass(frozen=True, slots=True)
class NodeTime:
    """Part of a node in a job: its device time, ns."""

    node: str
    switch: str
    """Its leaf switch; "" when it is not known."""
    ranks: int
    window_ns: int
    lost_ns: int
    caused_ns: int
    """Lost by its ranks and by those that waited for them; own loss where ranks were not compared.
    """
    is_tested: bool
    """Whether the job tells good nodes from bad ones: some of its nodes are culprits, others not.
    """
    is_culprit: bool
    position: int
    """`FIRST` with rank 0, which logs and saves for all others; `LAST` with the highest rank, which
    may be the last stage of a pipeline; else `INNER`.
    """
    chance_ratio: float
    """Probability that it is a culprit if all nodes of the job are alike, 0 to 1: the part of its
    nodes that are culprits.
    """


@dataclass(frozen=True, slots=True)
class CulpritTime:
    """What one rank or resource caused in a job, ns."""

    cause: str
    node: str
    rank: int | None
    device: str
    resource: str
    """Disk, mount or NIC; "" when there is none."""
    caused_ns: int


@dataclass(frozen=True, slots=True)
class PlaceTime:
    """What a mount, disk or NIC caused in a job, ns."""

    name: str
    """A path is one mount on all nodes; other names have their node before them."""
    cause: str
    """Cause of most of it."""
    nodes: int
    caused_ns: int


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job of the ledger."""

    key: str
    """Identity of the job: equal for its recording and for stored reports of it."""
    recordings: tuple[str, ...]
    """Names of its nodes' folders, sorted; empty when they are not known."""
    title: str
    """Where it was read from."""
    name: str
    user: str
    """"" when it is not known, like `account`."""
    account: str
    started_ns: int | None
    """ns since 1970; None when it is not known."""
    nodes: int
    gpus: int
    """Devices that were measured; one per rank where none was."""
    ranks: int
    steps: int
    window_ns: int
    unmeasured_ns: int
    outside_ns: int
    in_step_ns: int
    productive_ns: int
    lost_ns: int
    main_cause: str
    """Cause that lost most; "" without one."""
    is_upper_bound: bool
    """Whether the loss is known only as "at most"."""
    is_emulated: bool
    too_little_seen: str
    causes: tuple[CauseTime, ...] = ()
    node_times: tuple[NodeTime, ...] = ()
    culprits: tuple[CulpritTime, ...] = ()
    places: tuple[PlaceTime, ...] = ()

    @property
    def first_recording(self) -> str:
        """Return its first recording, which stays in it when nodes join; "" without one."""
        return self.recordings[0] if self.recordings else ""

    @property
    def week(self) -> str:
        """Return the ISO week in which it started, in UTC ("2026-W48"); "" when not known."""
        if self.started_ns is None:
            return ""
        when = datetime.fromtimestamp(self.started_ns // SECOND_NS, timezone.utc)
        year, week, _ = when.isocalendar()
        return f"{year}-W{week:02d}"


def build_job_entry(report: Report, causes: Mapping[str, Cause], user: str = "") -> JobEntry:
    """Build the entry of a job from its report.

    causes: every cause that is known, by id. user: user of the job where the report names none.
    """
    job, fingerprint = report.job, report.fingerprint
    recordings = tuple(sorted(fingerprint.recordings)) if fingerprint is not None else ()
    upper = any(finding.upper_bound for finding in report.findings)
    main = report.main_cause
    return JobEntry(
        key=_compute_key(recordings, report.title),
        recordings=recordings,
        title=escape_text(report.title, MAX_TEXT_CHARACTERS),
        name=_escape(job.name if job is not None else ""),
        user=_escape((job.user if job is not None else "") or user),
        account=_escape(job.account if job is not None else ""),
        started_ns=_check_start(None if fingerprint is None else fingerprint.started_at_ns),
        nodes=len({node.name for node in report.nodes}),
        gpus=(job.gpus if job is not None else 0) or report.rank_count,
        ranks=report.rank_count,
        steps=sum(ledger.steps for ledger in report.ledgers),
        window_ns=report.window_ns,
        unmeasured_ns=report.unmeasured_ns,
        outside_ns=report.outside_ns,
        in_step_ns=report.in_step_ns,
        productive_ns=report.productive_ns,
        lost_ns=report.lost_ns,
        main_cause=_escape(main.cause.id) if main is not None and main.lost_ns else "",
        is_upper_bound=upper or any(rank.source == "host-spans" for rank in report.ranks),
        is_emulated=report.emulated,
        too_little_seen=_escape(report.too_little_seen),
        causes=_list_cause_times(report, causes),
        node_times=_list_node_times(report, causes),
        culprits=tuple(_list_culprits(report)),
        places=_sum_places(report),
    )


def _escape(text: str) -> str:
    return escape_text(text, MAX_TEXT_CHARACTERS)


def _check_start(started_ns: int | None) -> int | None:
    """Return a start that a calendar knows: from 1970 to 2200; else None."""
    last_ns = 7_258_118_400 * SECOND_NS
    return started_ns if started_ns is not None and 0 < started_ns < last_ns else None


def _compute_key(recordings: Sequence[str], title: str) -> str:
    """Compute the identity of a job: its nodes' folders, whose names are unique; else its path."""
    words = [f"recording {name}" for name in recordings] or [f"path {title}"]
    return hashlib.sha256("\n".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _list_cause_times(report: Report, causes: Mapping[str, Cause]) -> tuple[CauseTime, ...]:
    known = {**{finding.cause.id: finding.cause for finding in report.findings}, **causes}
    lost: dict[str, int] = {}
    outside: dict[str, int] = {}
    for ledger in report.ledgers:
        _add_buckets(lost, ledger.buckets)
        _add_buckets(outside, ledger.outside_buckets)
    times = []
    for id_ in sorted({*lost, *outside}):
        cause = known.get(id_, Cause(id_, id_, "", ""))
        times.append(
            CauseTime(
                _escape(id_),
                _escape(cause.family),
                _escape(cause.title),
                cause.tone,
                lost.get(id_, 0),
                outside.get(id_, 0),
            )
        )
    return tuple(time for time in times if time.lost_ns or time.outside_ns)


def _add_buckets(sums: dict[str, int], buckets: Sequence[tuple[str, int]]) -> None:
    for cause, ns in buckets:
        sums[cause] = sums.get(cause, 0) + ns


@dataclass
class _NodeSums:
    ranks: int = 0
    window_ns: int = 0
    lost_ns: int = 0
    caused_ns: int = 0
    of_node_ns: int = 0
    """Caused by causes that a bad node can have."""
    highest_rank: int = -1
    """-1 when no rank of it is listed."""
    is_first: bool = False


def _list_node_times(report: Report, causes: Mapping[str, Cause]) -> tuple[NodeTime, ...]:
    has_caused = any(ledger.caused for ledger in report.ledgers)
    switches = {node.name: node.rack for node in report.nodes}
    sums: dict[str, _NodeSums] = {name: _NodeSums() for name in switches}
    for ledger in report.ledgers:
        if isinstance(ledger, RankLedger):
            node = sums.setdefault(ledger.node, _NodeSums())
            node.ranks += 1
            node.is_first |= ledger.rank == 0
            node.highest_rank = max(node.highest_rank, -1 if ledger.rank is None else ledger.rank)
        else:
            node = sums.setdefault(ledger.name, _NodeSums())
            node.ranks += ledger.ranks
        node.window_ns += ledger.window_ns
        node.lost_ns += ledger.lost_ns
        caused = [
            (cause, ns)
            for cause, ns in (ledger.caused if has_caused else ledger.buckets)
            if cause != UNATTRIBUTED
        ]
        node.caused_ns += sum(ns for _, ns in caused)
        node.of_node_ns += sum(ns for cause, ns in caused if _is_of_node(causes, cause))
    culprits = _find_culprit_nodes(sums, report.in_step_ns)
    is_tested = 0 < len(culprits) < len(sums)
    last_rank = max((node.highest_rank for node in sums.values()), default=-1)
    return tuple(
        NodeTime(
            _escape(name),
            _escape(switches.get(name, "")),
            node.ranks,
            node.window_ns,
            node.lost_ns,
            node.caused_ns,
            is_tested,
            name in culprits,
            FIRST if node.is_first else LAST if node.highest_rank == last_rank >= 0 else INNER,
            len(culprits) / len(sums) if is_tested else 0.0,
        )
        for name, node in sums.items()
    )


def _is_of_node(causes: Mapping[str, Cause], id_: str) -> bool:
    return id_ in causes and causes[id_].can_be_node_fault


def _find_culprit_nodes(sums: Mapping[str, _NodeSums], in_step_ns: int) -> set[str]:
    """Find the nodes that cost the job much more than its other nodes do."""
    if len(sums) < 2:
        return set()
    mean_ns = sum(node.of_node_ns for node in sums.values()) / len(sums)
    least_ns = max(MIN_CULPRIT_RATIO * in_step_ns, MIN_CULPRIT_FACTOR * mean_ns, 1)
    return {name for name, node in sums.items() if node.of_node_ns >= least_ns}


def _list_culprits(report: Report) -> list[CulpritTime]:
    return [
        CulpritTime(
            _escape(finding.cause.id),
            _escape(culprit.node),
            culprit.rank,
            _escape(culprit.device),
            _escape(culprit.resource),
            _estimate_caused_ns(finding, culprit),
        )
        for finding in report.findings
        for culprit in finding.culprits[:MAX_CULPRITS]
    ]


def _estimate_caused_ns(finding: Finding, culprit: Culprit) -> int:
    """Return what a culprit caused; of a single one for which it is not known, the whole loss."""
    is_only = len(finding.culprits) == 1 and culprit.own_ns is culprit.others_ns is None
    return finding.lost_ns if is_only else culprit.caused_ns


def _sum_places(report: Report) -> tuple[PlaceTime, ...]:
    """Sum what culprits of storage and network causes did by mount, disk or NIC."""
    causes: dict[str, dict[str, int]] = {}
    nodes: dict[str, set[str]] = {}
    for finding in report.findings:
        if finding.cause.family not in PLACE_FAMILIES:
            continue  # resources of other causes are worker processes
        for culprit in finding.culprits:
            if not culprit.resource:
                continue
            is_path = culprit.resource.startswith("/")
            name = culprit.resource if is_path else f"{culprit.node}: {culprit.resource}"
            sums = causes.setdefault(_escape(name), {})
            cause = _escape(finding.cause.id)
            sums[cause] = sums.get(cause, 0) + _estimate_caused_ns(finding, culprit)
            nodes.setdefault(_escape(name), set()).add(culprit.node)
    return tuple(
        PlaceTime(name, max(sums, key=lambda id_: sums[id_]), len(nodes[name]), sum(sums.values()))
        for name, sums in causes.items()
    )
