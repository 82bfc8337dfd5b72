"""OpenMetrics 1.0, and the older text format of Prometheus that textfile collectors still read.

# TYPE clusterprof_lost_gpu_seconds counter                 # TYPE …_lost_gpu_seconds_total counter
# UNIT clusterprof_lost_gpu_seconds seconds
# HELP clusterprof_lost_gpu_seconds Device time lost …       # HELP …_lost_gpu_seconds_total …
clusterprof_lost_gpu_seconds_total{cause="storage-local",node="gpu-a04",rank="3"} 31.0
# EOF

The metric families of a report: names, units and meanings, in output order.

Metrics under the names that DCGM uses, so that dashboards need no second query.

Only for NVIDIA devices; an emulated device is no GPU.

A report as metric families in base units, for OpenMetrics, Prometheus and OTLP.

An unknown value has no point; `clusterprof_unknown` gives the reason, because a missing
number is not 0. Counters are sums over the run; a growing recording only increases
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.impact import RankUtilization
from clusterprof.report.model import Metric, RankLedger, Report
from clusterprof.units import SECOND_NS


@dataclass(frozen=True, slots=True)
class FamilyDescription:
    """One family; samples of a counter are named `<name>_total`, of an info `<name>_info`."""

    name: str
    kind: Literal["counter", "gauge", "info"]
    unit: str
    """The last word of the name, or ""."""
    help: str

    @property
    def sample(self) -> str:
        """The name of its samples."""
        return self.name + {"counter": "_total", "gauge": "", "info": "_info"}[self.kind]


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a family."""

    labels: tuple[tuple[str, str], ...]
    """Label names and safe label values."""
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """A family with its points; each set of labels occurs once."""

    description: FamilyDescription
    points: tuple[Point, ...]


Points = dict[FamilyDescription, list[Point]]

REPORT = FamilyDescription(
    "clusterprof_report",
    "info",
    "",
    "The recording this is about; emulated is true when no real accelerator was measured.",
)
OBSERVED = FamilyDescription(
    "clusterprof_observed_gpu_seconds",
    "counter",
    "seconds",
    "Observed device time by state: productive, lost, outside_steps, unmeasured.",
)
LOST = FamilyDescription(
    "clusterprof_lost_gpu_seconds",
    "counter",
    "seconds",
    "Device time lost inside steps by the rank that lost it; unattributed lacks evidence.",
)
CAUSED = FamilyDescription(
    "clusterprof_caused_gpu_seconds",
    "counter",
    "seconds",
    "The lost device time by the rank that caused it: what that rank lost itself, and what other"
    " ranks lost waiting for it.",
)
OUTSIDE = FamilyDescription(
    "clusterprof_outside_gpu_seconds",
    "counter",
    "seconds",
    "Device time before the first and after the last step, by cause.",
)
STEPS = FamilyDescription("clusterprof_steps", "counter", "", "Optimizer steps that were seen.")
COVERAGE = FamilyDescription(
    "clusterprof_rank_coverage_ratio",
    "gauge",
    "ratio",
    "Share of the observed time for which the device was measured.",
)
RECOVERABLE = FamilyDescription(
    "clusterprof_recoverable_gpu_seconds",
    "gauge",
    "seconds",
    "Device time that fixing only this cause would save.",
)
CONFIDENCE = FamilyDescription(
    "clusterprof_confidence_ratio", "gauge", "ratio", "Confidence in the cause of a finding."
)
COST = FamilyDescription(
    "clusterprof_lost_cost", "gauge", "", "What the lost device time of a cause cost, in currency."
)
SAVED = FamilyDescription(
    "clusterprof_saved_job_seconds",
    "gauge",
    "seconds",
    "How much sooner the job would end with only this cause fixed.",
)
STEP = FamilyDescription(
    "clusterprof_step_seconds", "gauge", "seconds", "Step time that this share does not exceed."
)
STALL = FamilyDescription(
    "clusterprof_stall_ratio",
    "gauge",
    "ratio",
    "Share of the time in steps lost to a cause, or to a family of causes, which holds its causes.",
)
RECORDED = FamilyDescription(
    "clusterprof_recorded_seconds", "gauge", "seconds", "Length of a recording."
)
DAMAGED = FamilyDescription(
    "clusterprof_damaged_bytes", "gauge", "bytes", "Bytes of a recording that cannot be read."
)
DROPPED = FamilyDescription(
    "clusterprof_dropped_spans", "counter", "", "Spans that were produced and not stored."
)
UNKNOWN = FamilyDescription(
    "clusterprof_unknown", "gauge", "", "1 for a metric that has no value, with the reason."
)
OTHER = FamilyDescription(
    "clusterprof_metric", "gauge", "", "A metric of the report without its own name."
)

FAMILY_BY_METRIC = {
    "gpu.busy_ratio": FamilyDescription(
        "clusterprof_gpu_busy_ratio",
        "gauge",
        "ratio",
        "Share of the time in steps with a kernel resident, all devices together.",
    ),
    "gpu.sm_active_ratio": FamilyDescription(
        "clusterprof_gpu_sm_active_ratio",
        "gauge",
        "ratio",
        "Share of the multiprocessors with work, mean of the time in steps.",
    ),
    "underfill.ratio": FamilyDescription(
        "clusterprof_underfill_ratio",
        "gauge",
        "ratio",
        "Share of the devices that was unused while they were busy.",
    ),
    "lost.ratio": FamilyDescription(
        "clusterprof_lost_ratio", "gauge", "ratio", "Share of the time in steps that was lost."
    ),
    "productive.ratio": FamilyDescription(
        "clusterprof_productive_ratio",
        "gauge",
        "ratio",
        "Share of the time in steps that was not lost.",
    ),
    "au_ratio": FamilyDescription(
        "clusterprof_accelerator_utilisation_ratio",
        "gauge",
        "ratio",
        "MLPerf Storage's AU, by the rule of the benchmark; only from DLIO's output.",
    ),
    "unattributed.ratio": FamilyDescription(
        "clusterprof_unattributed_ratio",
        "gauge",
        "ratio",
        "Share of the time in steps that was lost without evidence for a cause.",
    ),
    "data_wait.ratio": FamilyDescription(
        "clusterprof_data_wait_ratio",
        "gauge",
        "ratio",
        "Share of the time in steps in which the host waited for data, hidden or not.",
    ),
    "coverage.ratio": FamilyDescription(
        "clusterprof_coverage_ratio",
        "gauge",
        "ratio",
        "Share of the observed time for which devices were measured.",
    ),
    "recorder.cpu_ratio": FamilyDescription(
        "clusterprof_recorder_cpu_ratio",
        "gauge",
        "ratio",
        "CPU time of the recorder over the recorded time, of the node where it is highest.",
    ),
}
"""Name in `Report.metrics` -> its family."""

_MEAN_NOTE = ", mean of the time in steps (what dcgm-exporter gives for an instant)."
DCGM_GPU_UTIL = FamilyDescription(
    "DCGM_FI_DEV_GPU_UTIL", "gauge", "", "Percent of time with a kernel resident" + _MEAN_NOTE
)
DCGM_SM_ACTIVE = FamilyDescription(
    "DCGM_FI_PROF_SM_ACTIVE", "gauge", "", "Share of multiprocessors with a warp" + _MEAN_NOTE
)
DCGM_SM_OCCUPANCY = FamilyDescription(
    "DCGM_FI_PROF_SM_OCCUPANCY", "gauge", "", "Warps resident over those that fit" + _MEAN_NOTE
)
DCGM_TENSOR = FamilyDescription(
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "gauge",
    "",
    "Share of the time in which tensor cores worked" + _MEAN_NOTE,
)
DCGM_FB_USED = FamilyDescription(
    "DCGM_FI_DEV_FB_USED", "gauge", "", "Device memory in use in MiB, the most of the run."
)

ALL_FAMILIES = (
    REPORT,
    OBSERVED,
    LOST,
    CAUSED,
    OUTSIDE,
    STEPS,
    COVERAGE,
    RECOVERABLE,
    CONFIDENCE,
    COST,
    SAVED,
    *FAMILY_BY_METRIC.values(),
    STALL,
    STEP,
    OTHER,
    RECORDED,
    DAMAGED,
    DROPPED,
    UNKNOWN,
    DCGM_GPU_UTIL,
    DCGM_SM_ACTIVE,
    DCGM_SM_OCCUPANCY,
    DCGM_TENSOR,
    DCGM_FB_USED,
)


_NVIDIA_PREFIXES = ("GPU-", "MIG-")
_MIB = 1 << 20


def add_dcgm_points(report: Report, points: Points) -> None:
    """Add to `points` the values of every NVIDIA device that was measured."""
    if report.device_utilization is None or report.emulated:
        return
    in_step = {_get_device_key(rank): rank.in_step_ns for rank in report.ranks}
    for rank_fill in report.device_utilization.ranks:
        whole_ns = in_step.get(_get_device_key(rank_fill), 0)
        if not rank_fill.device.startswith(_NVIDIA_PREFIXES) or whole_ns <= 0:
            continue
        busy = rank_fill.busy_ns / whole_ns
        levels = rank_fill.levels
        # Levels are means over busy time; an idle device has no work on its multiprocessors.
        values: dict[FamilyDescription, float | None] = {
            DCGM_GPU_UTIL: 100 * busy,
            DCGM_SM_ACTIVE: _scale_level(levels.sm_active_ratio, busy),
            DCGM_SM_OCCUPANCY: _scale_level(levels.sm_occupancy_ratio, busy),
            DCGM_TENSOR: _scale_level(levels.tensor_active_ratio, busy),
            DCGM_FB_USED: _scale_level(levels.memory_used_bytes, 1 / _MIB),
        }
        labels = (
            ("UUID", escape_text(rank_fill.device, 200)),
            ("Hostname", escape_text(rank_fill.node, 200)),
        )
        for description, value in values.items():
            if value is not None:
                points[description].append(Point(labels, value))


def _scale_level(level: float | None, share: float) -> float | None:
    return None if level is None else level * share


def _get_device_key(rank: RankLedger | RankUtilization) -> tuple[str, int | None, int, str]:
    return rank.node, rank.rank, rank.pid, rank.device


_MAX_LABEL_CHARACTERS = 1000
_STEP_PERCENTILES = {"step.p50_ns": "50", "step.p95_ns": "95", "step.p99_ns": "99"}
# "step.count" is exported as `clusterprof_steps`, per rank
_COVERED_METRICS = frozenset({"step.count"})
_STALL_PREFIX = "stall."


def build_families(report: Report) -> tuple[Family, ...]:
    """Build all families that have at least one point, in a fixed order."""
    points: dict[FamilyDescription, list[Point]] = {description: [] for description in ALL_FAMILIES}
    points[REPORT].append(_make_point(1, title=report.title, emulated=str(report.emulated).lower()))
    _add_ledger_points(report, points)
    _add_finding_points(report, points)
    for metric in report.metrics:
        _add_metric_point(metric, points)
    for node in report.nodes:
        points[RECORDED].append(_make_point(node.duration_ns / SECOND_NS, node=node.name))
        points[DAMAGED].append(_make_point(node.damaged_bytes, node=node.name))
        points[DROPPED].append(_make_point(node.dropped_spans, node=node.name))
    add_dcgm_points(report, points)
    return tuple(
        Family(description, _merge_points(description, family_points))
        for description, family_points in points.items()
        if family_points
    )


def _make_point(value: float, **labels: str) -> Point:
    return Point(
        tuple((key, escape_text(text, _MAX_LABEL_CHARACTERS)) for key, text in labels.items()),
        value,
    )


def _merge_points(description: FamilyDescription, points: Iterable[Point]) -> tuple[Point, ...]:
    """Merge points with equal labels: counters add up (restarted ranks), else the last holds."""
    value_by_labels: dict[tuple[tuple[str, str], ...], float] = {}
    for point in points:
        if not math.isfinite(point.value):
            continue
        before = value_by_labels.get(point.labels, 0.0) if description.kind == "counter" else 0.0
        value_by_labels[point.labels] = before + point.value
    return tuple(Point(labels, value) for labels, value in value_by_labels.items())


def _add_ledger_points(report: Report, points: Points) -> None:
    for rank in report.ranks:
        labels = _get_rank_labels(rank)
        states = {
            "productive": rank.productive_ns,
            "lost": rank.lost_ns,
            "outside_steps": rank.outside_ns,
            "unmeasured": rank.unmeasured_ns,
        }
        for state, ns in states.items():
            points[OBSERVED].append(_make_point(ns / SECOND_NS, state=state, **labels))
        for description, buckets in (
            (LOST, rank.buckets),
            (CAUSED, rank.caused),
            (OUTSIDE, rank.outside_buckets),
        ):
            for cause, ns in buckets:
                points[description].append(_make_point(ns / SECOND_NS, cause=cause, **labels))
        points[STEPS].append(_make_point(rank.steps, **labels))
    windows: dict[tuple[tuple[str, str], ...], tuple[int, int]] = {}
    for rank in report.ranks:
        key = tuple(_get_rank_labels(rank).items())
        window, unseen = windows.get(key, (0, 0))
        windows[key] = window + rank.window_ns, unseen + rank.unmeasured_ns
    for key, (window, unseen) in windows.items():
        if window:
            points[COVERAGE].append(_make_point(1 - unseen / window, **dict(key)))


def _get_rank_labels(rank: RankLedger) -> dict[str, str]:
    number = "" if rank.rank is None else str(rank.rank)
    return {"node": rank.node, "rank": number, "device": rank.device}


def _add_finding_points(report: Report, points: Points) -> None:
    for finding in report.findings:
        where: Mapping[str, str] = {
            "cause": finding.cause.id,
            "outside_steps": str(finding.outside_steps).lower(),
        }
        points[CONFIDENCE].append(_make_point(finding.confidence_ratio, **where))
        if finding.recoverable_ns is not None:
            points[RECOVERABLE].append(_make_point(finding.recoverable_ns / SECOND_NS, **where))
    job_impact = report.impact
    if job_impact is None:
        return
    for cause in job_impact.causes:
        if cause.lost_cost is not None:
            point = _make_point(cause.lost_cost, cause=cause.cause, currency=job_impact.currency)
            points[COST].append(point)
        if cause.saved_ns is not None:
            point = _make_point(cause.saved_ns / SECOND_NS, cause=cause.cause)
            points[SAVED].append(point)


def _add_metric_point(metric: Metric, points: Points) -> None:
    if metric.name in _COVERED_METRICS:
        return
    if metric.value is None:
        why = metric.why_missing or "not known"
        points[UNKNOWN].append(_make_point(1, metric=metric.name, reason=why))
        return
    bound: Literal["exact", "at most", "at least"] = metric.bound
    if metric.name in _STEP_PERCENTILES:
        percentile = _STEP_PERCENTILES[metric.name]
        points[STEP].append(_make_point(metric.value / SECOND_NS, percentile=percentile))
    elif metric.name.startswith(_STALL_PREFIX):
        stall = metric.name.removeprefix(_STALL_PREFIX).removesuffix("_ratio")
        points[STALL].append(_make_point(metric.value, stall=stall, bound=bound))
    elif metric.name in FAMILY_BY_METRIC:
        points[FAMILY_BY_METRIC[metric.name]].append(_make_point(metric.value, bound=bound))
    else:
        point = _make_point(metric.value, metric=metric.name, unit=metric.unit, bound=bound)
        points[OTHER].append(point)


class OpenMetrics:
    """The ledger as metrics, for Prometheus and compatible systems."""

    name: ClassVar[str] = "openmetrics"
    suffix: ClassVar[str] = ".om"

    def __init__(self, prometheus: bool = False) -> None:
        """prometheus: write the Prometheus text format 0.0.4, without what it does not support."""
        self._prometheus = prometheus

    def render(self, report: Report) -> str:
        """Return the complete exposition."""
        return render_families(build_families(report), self._prometheus)


def render_families(families: Iterable[Family], prometheus: bool = False) -> str:
    """Render families as OpenMetrics text; prometheus: as Prometheus text format 0.0.4."""
    lines = []
    for family in families:
        lines += _format_head(family.description, prometheus)
        lines += _format_samples(family)
    if not prometheus:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _format_head(described: FamilyDescription, prometheus: bool) -> list[str]:
    if prometheus:
        kind = "gauge" if described.kind == "info" else described.kind
        name = described.sample
        return [f"# HELP {name} {_escape_help(described.help)}", f"# TYPE {name} {kind}"]
    unit = [f"# UNIT {described.name} {described.unit}"] if described.unit else []
    return [
        f"# TYPE {described.name} {described.kind}",
        *unit,
        f"# HELP {described.name} {_escape_help(described.help)}",
    ]


def _format_samples(family: Family) -> list[str]:
    lines = []
    for point in family.points:
        labels = ",".join(f'{name}="{_escape_label(text)}"' for name, text in point.labels)
        shown = f"{{{labels}}}" if labels else ""
        lines.append(f"{family.description.sample}{shown} {float(point.value)!r}")
    return lines


def _escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
