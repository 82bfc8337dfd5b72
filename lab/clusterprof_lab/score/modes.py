"""The degraded modes M0 to M4: the same run with fewer signals, and the truth that remains visible.

M0 everything · M1 no spans of collectives, forward and backward · M2 no spans at all · M3 the
accelerators' counters alone · M4 one rank of many

D0, D2: the leg "driver". Accelerators as a vendor's driver shows them, without marks in the trace;
with the spans of Python (D0), and without any (D2).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterprof.probe import layout
from clusterprof_lab.families import FAMILY_OF
from clusterprof_lab.scenario import ExpectedVerdict
from clusterprof_lab.score.driver import DriverView
from clusterprof_lab.score.judge import list_culprits
from clusterprof_lab.score.rewrite import (
    ALL_SPANS,
    OF_COLLECTIVES,
    RemovedSignals,
    rewrite_recording,
)
from clusterprof_lab.truth import OTHER, Lost, Truth

DRIVER_MODES = ("D0", "D2")
MODES = ("M0", "M1", "M2", "M3", "M4", *DRIVER_MODES)
UNKNOWN_PEER = "sync-unknown-peer"
GPU_SOURCES = frozenset({"gpu_nvidia", "gpu_emulated"})
COLLECTIVE_SPANS = frozenset(
    {layout.COLLECTIVE, layout.EXPOSED_COLLECTIVE, layout.FORWARD, layout.BACKWARD}
)
DEVICE_SPANS = frozenset(
    {layout.EXPOSED, layout.EXPOSED_COLLECTIVE, layout.H2D, layout.SYNC, layout.ALLOCATOR}
)
"""Spans that need hooks on CUDA."""
_LESS = {
    "D0": RemovedSignals("D0", "the driver's view, no spans of the device", DEVICE_SPANS),
    "D2": RemovedSignals(
        "D2", "the driver's view, no spans at all", ALL_SPANS, events=OF_COLLECTIVES
    ),
    "M1": RemovedSignals(
        "M1", "no collectives, no forward and backward", COLLECTIVE_SPANS, events=OF_COLLECTIVES
    ),
    "M2": RemovedSignals("M2", "no spans at all", ALL_SPANS, events=OF_COLLECTIVES),
    "M3": RemovedSignals(
        "M3", "NVML alone", ALL_SPANS, only_sources=GPU_SOURCES, events=OF_COLLECTIVES
    ),
}


def rewrite_for_mode(recording: Path, mode: str, folder: Path, truth: Truth) -> Path:
    """Return the recording as it is in a mode: itself in M0, else rewritten in `folder`."""
    if mode == "M0":
        return recording
    if mode == "M4":
        rank = find_visible_rank(truth)
        return rewrite_recording(
            recording, folder, RemovedSignals("M4", f"rank {rank} alone", rank=rank)
        )
    if mode in DRIVER_MODES:
        run = recording.parent
        return rewrite_recording(
            recording, folder, _LESS[mode], lambda node: DriverView(truth, run, node).convert
        )
    return rewrite_recording(recording, folder, _LESS[mode])


def find_visible_rank(truth: Truth) -> int:
    """Return the rank that M4 sees: in every other run a culprit, else a bystander."""
    ranks = sorted(place.rank for place in truth.places)
    at_fault = [rank for rank in ranks if rank in list_culprits(truth)]
    others = [rank for rank in ranks if rank not in list_culprits(truth)]
    chosen = at_fault if truth.seed % 2 == 0 else others
    return (chosen or ranks)[0]


def restrict_truth(
    truth: Truth, wanted: ExpectedVerdict, mode: str
) -> tuple[Truth, ExpectedVerdict]:
    """Restrict the truth to what a mode can show: a rank alone does not know whom it waits for."""
    if mode != "M4":
        return truth, wanted
    rank = find_visible_rank(truth)
    lost = tuple(_restrict_loss(loss, rank) for loss in truth.lost if loss.rank == rank)
    injected = tuple(
        replace(fault, culprits=(rank,)) for fault in truth.injected if rank in fault.culprits
    )
    seen = replace(
        truth,
        places=tuple(place for place in truth.places if place.rank == rank),
        lost=lost,
        outside=tuple(loss for loss in truth.outside if loss.rank == rank),
        injected=injected,
    )
    return seen, _restrict_expected(seen, wanted)


def _restrict_loss(loss: Lost, rank: int) -> Lost:
    if loss.culprit in (rank, None):
        return loss
    return replace(loss, cause=UNKNOWN_PEER, culprit=None)


def _restrict_expected(seen: Truth, wanted: ExpectedVerdict) -> ExpectedVerdict:
    """What cost this rank most is what should come first; nobody else can be named."""
    if not wanted.family or wanted.outside_steps:
        return replace(wanted, culprit="nobody" if not seen.injected else "rank", also=())
    by_cause: dict[str, int] = {}
    for loss in seen.lost:
        if loss.cause != OTHER:
            by_cause[loss.cause] = by_cause.get(loss.cause, 0) + loss.ns
    if not by_cause:
        return ExpectedVerdict("", (), "nobody")
    by_family: dict[str, int] = {}
    for cause, ns in by_cause.items():
        by_family[FAMILY_OF[cause]] = by_family.get(FAMILY_OF[cause], 0) + ns
    family = max(by_family, key=lambda name: by_family[name])
    if family == wanted.family and family != "synchronization":
        return replace(wanted, culprit="rank" if seen.injected else "everybody", also=())
    mine = {cause: ns for cause, ns in by_cause.items() if FAMILY_OF[cause] == family}
    return ExpectedVerdict(family, (max(mine, key=lambda name: mine[name]),), "everybody")
