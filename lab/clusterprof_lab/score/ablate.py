"""Metamorphic checks: without one signal, lost time may move up the tree or to "unattributed" only.

storage-local -> storage -> unattributed       allowed
storage-local -> cpu-preprocess                sideways: a false cause that a signal had prevented
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.report.model import UNATTRIBUTED, Report
from clusterprof_lab.families import FAMILIES
from clusterprof_lab.score.clusterprof_answer import find_family, sum_buckets_ns
from clusterprof_lab.score.modes import COLLECTIVE_SPANS, GPU_SOURCES
from clusterprof_lab.score.rewrite import OF_COLLECTIVES, RemovedSignals, rewrite_recording

SIDEWAYS_FROM = 0.5
"""Points of the in-step time."""


def _list_sources(name: str, *sources: str) -> RemovedSignals:
    return RemovedSignals(name, f"no {name}", sources=frozenset(sources))


def _list_span_kinds(name: str, *kinds: int) -> RemovedSignals:
    return RemovedSignals(name, f"no {name}", spans=frozenset(kinds))


ABLATIONS: tuple[RemovedSignals, ...] = (
    _list_sources("threads", "threads"),
    _list_sources("processes", "processes"),
    _list_sources("disk", "disk"),
    _list_sources("mounts", "mounts"),
    _list_sources("pressure", "pressure"),
    _list_sources("cgroup", "cgroup"),
    _list_sources("memory", "memory"),
    _list_sources("cpu", "cpu", "cores"),
    _list_sources("network", "network", "ethtool", "rdma", "sockets"),
    _list_sources("device", *GPU_SOURCES),
    _list_span_kinds("gc", layout.GC),
    _list_span_kinds("h2d", layout.H2D),
    _list_span_kinds("checkpoint", layout.CHECKPOINT),
    _list_span_kinds("exposed", layout.EXPOSED, layout.EXPOSED_COLLECTIVE),
    _list_span_kinds("fetch", layout.FETCH),
    _list_span_kinds("data-wait", layout.DATA_WAIT, layout.FETCH, layout.LOADER_START),
    RemovedSignals("collectives", "no collectives", spans=COLLECTIVE_SPANS, events=OF_COLLECTIVES),
)


@dataclass(frozen=True, slots=True)
class MisplacedTime:
    """Lost time that moved to a cause where it may not be."""

    signal: str
    """What was left out."""
    to: str
    """Leaf, or family as a whole, that grew."""
    points: float
    bound: bool
    """Lost time itself became an upper bound, as without a measured device."""


def ablate(
    recording: Path, folder: Path, signals: tuple[RemovedSignals, ...] = ABLATIONS
) -> tuple[MisplacedTime, ...]:
    """Analyze a recording once more without each signal; return what went sideways."""
    whole = analyze(recording)
    out: list[MisplacedTime] = []
    for less in signals:
        try:
            without = analyze(rewrite_recording(recording, folder / less.name, less))
        except Exception as error:  # no report at all is worse than a wrong one
            out.append(
                MisplacedTime(less.name, f"no report ({type(error).__name__})", 100.0, False)
            )
            continue
        out += compare_reports(whole, without, less.name)
    return tuple(out)


def compare_reports(whole: Report, without: Report, signal: str) -> list[MisplacedTime]:
    """Return each leaf that grew, and each family that grew as a whole."""
    before, after = _list_points(whole), _list_points(without)
    bound = any(rank.source == "host-spans" for rank in without.ranks) and not any(
        rank.source == "host-spans" for rank in whole.ranks
    )
    out = []
    for id_ in after:
        grew = after[id_] - before.get(id_, 0.0)
        if id_ not in FAMILIES and grew > SIDEWAYS_FROM:
            out.append(MisplacedTime(signal, id_, grew, bound))
    for family, points in _sum_families(after, without).items():
        grew = points - _sum_families(before, whole).get(family, 0.0)
        leaf_listed = any(find_family(sideways.to, without) == family for sideways in out)
        if family != UNATTRIBUTED and grew > SIDEWAYS_FROM and not leaf_listed:
            out.append(MisplacedTime(signal, family, grew, bound))
    return out


def _list_points(report: Report) -> dict[str, float]:
    whole = max(report.in_step_ns, 1)
    return {id_: 100.0 * ns / whole for id_, ns in sum_buckets_ns(report).items()}


def _sum_families(points: Mapping[str, float], report: Report) -> dict[str, float]:
    out: dict[str, float] = {}
    for id_, value in points.items():
        family = find_family(id_, report)
        out[family] = out.get(family, 0.0) + value
    return out
