"""Counters of a running job as metric families: of one node's ranks, or of a whole job.

    clusterprof_live_lost_gpu_seconds_total{job_name="slurm-42",node="gpu-a04",gpu="GPU-…",rank="3",
                                            cause="storage-remote"} 31.0

The number of series is bounded, whatever a recording holds: causes are a closed set; ranks and
culprits beyond a limit share the series "other", which they never leave, so no counter goes back.
Label values are escaped and cut. Process ids and paths are in none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from clusterprof.output.renderers.openmetrics import Family, FamilyDescription, Point
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.live import JobPart, NodePart, RankPart
from clusterprof.units import SECOND_NS

Scope = Literal["node", "job"]
"""What the series are of: the ranks of one node, or a job with its culprits."""
MAX_LABEL_CHARACTERS = 80
MAX_RANKS = 32
"""Ranks of a node with series of their own; 16 devices twice, after an elastic restart."""
MAX_CULPRITS = 150
"""Pairs of a cause and a rank with a series of their own in the series of a job."""
_MIN_CULPRIT_RATIO = 0.01
"""Share of the culprit time of a part for which a culprit gets one of the last of these series."""
OTHER = "other"
NOBODY = ""

OBSERVED = FamilyDescription(
    "clusterprof_live_observed_gpu_seconds",
    "counter",
    "seconds",
    "Settled device time by state: productive, lost, outside_steps, unmeasured.",
)
LOST = FamilyDescription(
    "clusterprof_live_lost_gpu_seconds",
    "counter",
    "seconds",
    "Device time lost inside steps by the rank that lost it; wait-for-ranks is a wait, whose cause"
    " clusterprof collect names.",
)
STEPS = FamilyDescription("clusterprof_live_steps", "counter", "", "Optimizer steps that ended.")
STEP = FamilyDescription(
    "clusterprof_live_step_seconds", "gauge", "seconds", "Median of the latest steps."
)
SINCE_STEP = FamilyDescription(
    "clusterprof_live_since_step_seconds", "gauge", "seconds", "Time since the last step ended."
)
BUSY = FamilyDescription(
    "clusterprof_live_gpu_busy_ratio",
    "gauge",
    "ratio",
    "Share of the latest time with a kernel resident.",
)
SM_ACTIVE = FamilyDescription(
    "clusterprof_live_gpu_sm_active_ratio",
    "gauge",
    "ratio",
    "Share of the multiprocessors with work, mean of the latest time.",
)
COVERAGE = FamilyDescription(
    "clusterprof_live_coverage_ratio",
    "gauge",
    "ratio",
    "Share of the latest time for which the device was measured.",
)
CPU = FamilyDescription(
    "clusterprof_live_recorder_cpu_seconds",
    "counter",
    "seconds",
    "CPU time of the recorder and of its helper processes.",
)
SETTLED = FamilyDescription(
    "clusterprof_live_settled_timestamp_seconds",
    "gauge",
    "seconds",
    "Until when the node is settled, seconds since 1970 by its wall clock.",
)
STARTED = FamilyDescription(
    "clusterprof_live_start_timestamp_seconds",
    "gauge",
    "seconds",
    "Since when the counters count, seconds since 1970.",
)
SKIPPED = FamilyDescription(
    "clusterprof_live_skipped_seconds",
    "counter",
    "seconds",
    "Time that was never settled, because the settling process was away.",
)
DAMAGED = FamilyDescription(
    "clusterprof_live_damaged_bytes", "gauge", "bytes", "Bytes of the recording not readable."
)
DROPPED = FamilyDescription(
    "clusterprof_live_dropped_exports",
    "counter",
    "",
    "Requests dropped while the receiver of OTLP was away.",
)
INFO = FamilyDescription(
    "clusterprof_live_node",
    "info",
    "",
    "The recorder of a node; emulated is true when no real accelerator is measured.",
)
UNKNOWN = FamilyDescription(
    "clusterprof_live_unknown", "gauge", "", "1 for a metric that has no value, with the reason."
)
JOB_OBSERVED = FamilyDescription(
    "clusterprof_job_observed_gpu_seconds",
    "counter",
    "seconds",
    "Settled device time of all ranks by state: productive, lost, outside_steps, unmeasured.",
)
JOB_LOST = FamilyDescription(
    "clusterprof_job_lost_gpu_seconds",
    "counter",
    "seconds",
    "Device time of all ranks lost inside steps, by cause; waits are counted under their root"
    " cause.",
)
JOB_CAUSED = FamilyDescription(
    "clusterprof_job_caused_gpu_seconds",
    "counter",
    "seconds",
    "The lost device time by the rank that caused it: its own loss, and what other ranks lost"
    " waiting for it. An empty node: no rank is the culprit.",
)
JOB_STEPS = FamilyDescription(
    "clusterprof_job_steps", "counter", "", "Optimizer steps that ended, of all ranks."
)
JOB_STEP = FamilyDescription(
    "clusterprof_job_step_seconds", "gauge", "seconds", "Median over ranks of their latest steps."
)
JOB_SINCE_STEP = FamilyDescription(
    "clusterprof_job_since_step_seconds",
    "gauge",
    "seconds",
    "Time since the last step ended, of the rank for which it is longest.",
)
JOB_BUSY = FamilyDescription(
    "clusterprof_job_gpu_busy_ratio",
    "gauge",
    "ratio",
    "Share of the latest time with a kernel resident, mean of all devices.",
)
JOB_COVERAGE = FamilyDescription(
    "clusterprof_job_coverage_ratio",
    "gauge",
    "ratio",
    "Share of the latest time of all ranks for which devices were measured.",
)
JOB_RANKS = FamilyDescription("clusterprof_job_ranks", "gauge", "", "Ranks in the latest part.")
JOB_NODES = FamilyDescription(
    "clusterprof_job_nodes", "gauge", "", "Nodes by the state of their recorder."
)
JOB_SETTLED = FamilyDescription(
    "clusterprof_job_settled_timestamp_seconds",
    "gauge",
    "seconds",
    "Until when all nodes are settled, seconds since 1970.",
)
JOB_STARTED = FamilyDescription(
    "clusterprof_job_start_timestamp_seconds",
    "gauge",
    "seconds",
    "Since when the counters count, seconds since 1970.",
)
JOB_CPU = FamilyDescription(
    "clusterprof_job_collect_cpu_seconds", "counter", "seconds", "CPU time of clusterprof collect."
)
JOB_DROPPED = FamilyDescription("clusterprof_job_dropped_exports", "counter", "", DROPPED.help)
JOB_UNKNOWN = FamilyDescription("clusterprof_job_unknown", "gauge", "", UNKNOWN.help)

FAMILIES: Mapping[Scope, tuple[FamilyDescription, ...]] = {
    "node": (
        *(INFO, OBSERVED, LOST, STEPS, STEP, SINCE_STEP, BUSY, SM_ACTIVE, COVERAGE, CPU),
        *(SETTLED, STARTED, SKIPPED, DAMAGED, DROPPED, UNKNOWN),
    ),
    "job": (
        *(JOB_OBSERVED, JOB_LOST, JOB_CAUSED, JOB_STEPS, JOB_STEP, JOB_SINCE_STEP, JOB_BUSY),
        *(JOB_COVERAGE, JOB_RANKS, JOB_NODES, JOB_SETTLED, JOB_STARTED, JOB_CPU, JOB_DROPPED),
        JOB_UNKNOWN,
    ),
}
"""All families of each scope, in the order of output."""
_STATES = {
    "productive": "productive_ns",
    "lost": "lost_ns",
    "outside_steps": "outside_ns",
    "unmeasured": "unmeasured_ns",
}
_RANK_GAUGES = (
    (STEP, "step_ns", SECOND_NS, "no step ended in the latest time"),
    (SINCE_STEP, "since_step_ns", SECOND_NS, "no step has ended yet"),
    (BUSY, "busy_ratio", 1, "no device was sampled"),
    (SM_ACTIVE, "sm_active_ratio", 1, "it is not recorded for this device"),
)

Labels = tuple[tuple[str, str], ...]


class LiveSeries:
    """Counters and latest values of one node's ranks, or of a job."""

    def __init__(self, scope: Scope, started_at_ns: int) -> None:
        """Start at zero. started_at_ns: since when the counters count, ns since 1970."""
        self.scope = scope
        self.started_at_ns = started_at_ns
        self._counters: dict[FamilyDescription, dict[Labels, int]] = {}
        self._gauges: dict[FamilyDescription, dict[Labels, float]] = {}
        self._ranks: dict[Labels, None] = {}
        self._culprits: dict[Labels, None] = {}
        self._job = ""

    def add(self, part: JobPart) -> None:
        """Add a part to the counters, and take its latest values."""
        self._job = part.job or self._job
        self._gauges = {}
        if self.scope == "node":
            for node in part.nodes:
                self._add_node(node, part.ranks)
            for rank in part.ranks:
                self._add_rank(rank)
        else:
            self._add_job(part)

    def set_own_cost(self, cpu_ns: int, dropped: Mapping[str, int]) -> None:
        """Set the CPU time of this process, ns, and how many requests each receiver lost."""
        job = (("job_name", shorten_label(self._job)),)
        if self.scope == "job":
            self._raise(JOB_CPU, job, cpu_ns)
        family = DROPPED if self.scope == "node" else JOB_DROPPED
        for target, count in dropped.items():
            self._raise(family, (*job, ("target", shorten_label(target))), count)

    def build_families(self) -> tuple[Family, ...]:
        """Build all families that have a point, in a fixed order."""
        started = STARTED if self.scope == "node" else JOB_STARTED
        job = (("job_name", shorten_label(self._job)),)
        out = []
        for described in FAMILIES[self.scope]:
            divisor = SECOND_NS if described.unit == "seconds" else 1
            points = [
                Point(labels, count / divisor)
                for labels, count in self._counters.get(described, {}).items()
            ]
            points += [
                Point(labels, value) for labels, value in self._gauges.get(described, {}).items()
            ]
            if described is started:
                points.append(Point(job, self.started_at_ns / SECOND_NS))
            if points:
                out.append(Family(described, tuple(points)))
        return tuple(out)

    # --- across restarts -------------------------------------------------------------------------

    def encode(self) -> dict[str, Any]:
        """Encode the counters, for a process that continues them."""
        return {
            "scope": self.scope,
            "started_at_ns": self.started_at_ns,
            "job": self._job,
            "ranks": list(self._ranks),
            "culprits": list(self._culprits),
            "counters": {
                described.name: list(counts.items()) for described, counts in self._counters.items()
            },
        }

    # --- one node --------------------------------------------------------------------------------

    def _add_node(self, node: NodePart, ranks: Iterable[RankPart]) -> None:
        labels = self._label(node=node.name)
        emulated = any(rank.is_emulated for rank in ranks)
        sources = sorted({rank.source for rank in ranks})
        self._set(
            INFO,
            (
                *labels,
                ("state", node.state),
                ("emulated", str(emulated).lower()),
                ("source", ",".join(sources)),
            ),
            1.0,
        )
        for process, cpu_ns in node.cpu_ns.items():
            self._raise(CPU, (*labels, ("process", shorten_label(process))), cpu_ns)
        self._raise(SKIPPED, labels, node.skipped_ns)
        self._set(DAMAGED, labels, float(node.damaged_bytes))
        if node.settled_at_ns is not None:
            self._set(SETTLED, labels, node.settled_at_ns / SECOND_NS)
        if node.trouble:
            self._set_unknown(labels, LOST, node.trouble)

    def _add_rank(self, rank: RankPart) -> None:
        labels = self._label_rank(rank)
        for state, name in _STATES.items():
            self._count(OBSERVED, (*labels, ("state", state)), getattr(rank, name))
        for cause, ns in rank.lost.items():
            self._count(LOST, (*labels, ("cause", shorten_label(cause))), ns)
        self._count(STEPS, labels, rank.steps)
        if dict(labels)["gpu"] == OTHER:
            return  # a latest value of several ranks would mean nothing
        node = labels[:2]
        observed_ns = sum(getattr(rank, name) for name in _STATES.values())
        if observed_ns:
            self._set(COVERAGE, labels, 1 - rank.unmeasured_ns / observed_ns)
        for described, name, divisor, why in _RANK_GAUGES:
            value = None if rank.status is None else getattr(rank.status, name)
            if value is None:
                self._set_unknown(node, described, why)
            else:
                self._set(described, labels, value / divisor)

    def _label_rank(self, rank: RankPart) -> Labels:
        """Return the labels of a rank; those beyond MAX_RANKS share theirs."""
        labels = self._label(
            node=rank.node, gpu=rank.device, rank="" if rank.rank is None else str(rank.rank)
        )
        if labels not in self._ranks:
            if len(self._ranks) >= MAX_RANKS:
                return self._label(node=rank.node, gpu=OTHER, rank="")
            self._ranks[labels] = None
        return labels

    # --- a job -----------------------------------------------------------------------------------

    def _add_job(self, part: JobPart) -> None:
        job = self._label()
        for rank in part.ranks:
            for state, name in _STATES.items():
                self._count(JOB_OBSERVED, (*job, ("state", state)), getattr(rank, name))
            for cause, ns in rank.lost.items():
                self._count(JOB_LOST, (*job, ("cause", shorten_label(cause))), ns)
            self._count(JOB_STEPS, job, rank.steps)
        self._add_culprits(part.ranks)
        for cause, ns in part.unblamed.items():
            labels = self._label(node=NOBODY, gpu="", rank="", cause=cause)
            self._count(JOB_CAUSED, labels, ns)
        self._add_job_gauges(part, job)

    def _add_job_gauges(self, part: JobPart, job: Labels) -> None:
        self._set(JOB_RANKS, job, float(len(part.ranks)))
        for state in ("recording", "silent", "ended", "gone"):
            count = sum(node.state == state for node in part.nodes)
            self._set(JOB_NODES, (*job, ("state", state)), float(count))
        statuses = [rank.status for rank in part.ranks if rank.status is not None]
        steps = sorted(status.step_ns for status in statuses if status.step_ns is not None)
        since = [status.since_step_ns for status in statuses if status.since_step_ns is not None]
        busy = [status.busy_ratio for status in statuses if status.busy_ratio is not None]
        observed_ns = sum(getattr(rank, name) for rank in part.ranks for name in _STATES.values())
        unmeasured_ns = sum(rank.unmeasured_ns for rank in part.ranks)
        settled = [node.settled_at_ns for node in part.nodes if node.state == "recording"]
        settled_ns = [t_ns for t_ns in settled if t_ns is not None]
        values: tuple[tuple[FamilyDescription, float | None, str], ...] = (
            (JOB_STEP, steps[len(steps) // 2] / SECOND_NS if steps else None, "no step ended"),
            (JOB_SINCE_STEP, max(since) / SECOND_NS if since else None, "no step has ended yet"),
            (JOB_BUSY, sum(busy) / len(busy) if busy else None, "no device was sampled"),
            (
                JOB_COVERAGE,
                1 - unmeasured_ns / observed_ns if observed_ns else None,
                "nothing was settled in the latest time",
            ),
            (
                JOB_SETTLED,
                min(settled_ns) / SECOND_NS if settled_ns else None,
                "no recorder writes",
            ),
        )
        for described, value, why in values:
            if value is None:
                self._set_unknown(job, described, why)
            else:
                self._set(described, job, value)
        troubles = [text for text in (part.trouble, *(n.trouble for n in part.nodes)) if text]
        if troubles:
            self._set_unknown(job, JOB_LOST, troubles[0])

    def _add_culprits(self, ranks: Sequence[RankPart]) -> None:
        """Add culprit time, the largest first, because not all may get a series of their own."""
        caused = [(ns, cause, rank) for rank in ranks for cause, ns in rank.caused.items()]
        total_ns = sum(ns for ns, _, _ in caused)
        for ns, cause, rank in sorted(caused, key=lambda culprit: -culprit[0]):
            number = "" if rank.rank is None else str(rank.rank)
            labels = self._label(node=rank.node, gpu=rank.device, rank=number, cause=cause)
            if labels not in self._culprits:
                count = len(self._culprits)
                is_small = ns < _MIN_CULPRIT_RATIO * total_ns
                if count >= MAX_CULPRITS or (count >= MAX_CULPRITS // 2 and is_small):
                    labels = self._label(node=OTHER, gpu="", rank="", cause=cause)
                else:
                    self._culprits[labels] = None
            self._count(JOB_CAUSED, labels, ns)

    # --- values ----------------------------------------------------------------------------------

    def _label(self, **labels: str) -> Labels:
        named = {"job_name": self._job, **labels}
        return tuple((name, shorten_label(text)) for name, text in named.items())

    def _count(self, described: FamilyDescription, labels: Labels, amount: int) -> None:
        """Add to a counter; a series begins with its first amount."""
        counts = self._counters.setdefault(described, {})
        if amount > 0 or (labels in counts and amount == 0):
            counts[labels] = counts.get(labels, 0) + amount
        elif described in (OBSERVED, JOB_OBSERVED, STEPS, JOB_STEPS):
            counts.setdefault(labels, 0)  # a rate needs the zero before the first amount

    def _raise(self, described: FamilyDescription, labels: Labels, total: int) -> None:
        """Raise a counter to a total that is counted elsewhere."""
        counts = self._counters.setdefault(described, {})
        counts[labels] = max(counts.get(labels, 0), total)

    def _set(self, described: FamilyDescription, labels: Labels, value: float) -> None:
        self._gauges.setdefault(described, {})[labels] = value

    def _set_unknown(self, labels: Labels, metric: FamilyDescription, why: str) -> None:
        described = UNKNOWN if self.scope == "node" else JOB_UNKNOWN
        named = (("metric", metric.sample), ("reason", shorten_label(why)))
        self._set(described, (*labels, *named), 1.0)


def shorten_label(text: str) -> str:
    """Return a safe label value; one that is cut ends with a digest, so that two stay two."""
    safe = escape_text(text, 4 * MAX_LABEL_CHARACTERS)
    if len(safe) <= MAX_LABEL_CHARACTERS:
        return safe
    digest = blake2b(text.encode("utf-8", "backslashreplace"), digest_size=4).hexdigest()
    return f"{safe[: MAX_LABEL_CHARACTERS - 9]}-{digest}"


def decode_series(values: Mapping[str, Any]) -> LiveSeries:
    """Decode the counters that another process has encoded.

    Raises: ValueError when the values are not those of series.
    """
    try:
        series = LiveSeries(values["scope"], int(values["started_at_ns"]))
        families = {described.name: described for described in FAMILIES[series.scope]}
        series._job = str(values["job"])
        series._ranks = {_decode_labels(labels): None for labels in values["ranks"]}
        series._culprits = {_decode_labels(labels): None for labels in values["culprits"]}
        for name, counts in values["counters"].items():
            decoded = {_decode_labels(labels): int(count) for labels, count in counts}
            series._counters[families[name]] = decoded
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"these are no series: {error!r}") from None
    return series


def _decode_labels(labels: Any) -> Labels:
    return tuple((str(name), str(text)) for name, text in labels)


def format_json(values: Mapping[str, Any]) -> bytes:
    """Format encoded series as JSON."""
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii")
