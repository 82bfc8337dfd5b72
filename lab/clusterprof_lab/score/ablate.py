"""Metamorphic checks: with one signal less, time moves up the tree or to "unattributed" only.

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
from clusterprof_lab.score.modes import COLLECTIVE_SPANS, GPU_SOURCES
from clusterprof_lab.score.ours import bucket_ns, family_of
from clusterprof_lab.score.rewrite import OF_COLLECTIVES, Less, rewrite

SIDEWAYS_FROM = 0.5
"""Points of the in-step time."""


def _sources(name: str, *sources: str) -> Less:
    return Less(name, f"no {name}", sources=frozenset(sources))


def _spans(name: str, *kinds: int) -> Less:
    return Less(name, f"no {name}", spans=frozenset(kinds))


ABLATIONS: tuple[Less, ...] = (
    _sources("threads", "threads"),
    _sources("processes", "processes"),
    _sources("disk", "disk"),
    _sources("mounts", "mounts"),
    _sources("pressure", "pressure"),
    _sources("cgroup", "cgroup"),
    _sources("memory", "memory"),
    _sources("cpu", "cpu", "cores"),
    _sources("network", "network", "ethtool", "rdma", "sockets"),
    _sources("device", *GPU_SOURCES),
    _spans("gc", layout.GC),
    _spans("h2d", layout.H2D),
    _spans("checkpoint", layout.CHECKPOINT),
    _spans("exposed", layout.EXPOSED, layout.EXPOSED_COLLECTIVE),
    _spans("fetch", layout.FETCH),
    _spans("data-wait", layout.DATA_WAIT, layout.FETCH, layout.LOADER_START),
    Less("collectives", "no collectives", spans=COLLECTIVE_SPANS, events=OF_COLLECTIVES),
)


@dataclass(frozen=True, slots=True)
class Sideways:
    """Time that went where it may not."""

    signal: str
    """What was left out."""
    to: str
    """Leaf, or family as a whole, that grew."""
    points: float
    bound: bool
    """Lost time itself became an upper bound, as without a measured device."""


def ablate(
    recording: Path, folder: Path, signals: tuple[Less, ...] = ABLATIONS
) -> tuple[Sideways, ...]:
    """Analyze a recording once more without each signal; return what went sideways."""
    whole = analyze(recording)
    out: list[Sideways] = []
    for less in signals:
        try:
            without = analyze(rewrite(recording, folder / less.name, less))
        except Exception as error:  # no report at all is worse than a wrong one
            out.append(Sideways(less.name, f"no report ({type(error).__name__})", 100.0, False))
            continue
        out += compared(whole, without, less.name)
    return tuple(out)


def compared(whole: Report, without: Report, signal: str) -> list[Sideways]:
    """Return each leaf that grew, and each family that grew as a whole."""
    before, after = _points(whole), _points(without)
    bound = any(rank.source == "host-spans" for rank in without.ranks) and not any(
        rank.source == "host-spans" for rank in whole.ranks
    )
    out = []
    for id_ in after:
        grew = after[id_] - before.get(id_, 0.0)
        if id_ not in FAMILIES and grew > SIDEWAYS_FROM:
            out.append(Sideways(signal, id_, grew, bound))
    for family, points in _families(after, without).items():
        grew = points - _families(before, whole).get(family, 0.0)
        leaf_listed = any(family_of(sideways.to, without) == family for sideways in out)
        if family != UNATTRIBUTED and grew > SIDEWAYS_FROM and not leaf_listed:
            out.append(Sideways(signal, family, grew, bound))
    return out


def _points(report: Report) -> dict[str, float]:
    whole = max(report.in_step_ns, 1)
    return {id_: 100.0 * ns / whole for id_, ns in bucket_ns(report).items()}


def _families(points: Mapping[str, float], report: Report) -> dict[str, float]:
    out: dict[str, float] = {}
    for id_, value in points.items():
        family = family_of(id_, report)
        out[family] = out.get(family, 0.0) + value
    return out
