"""Reads of files of which a trace does not say where they lie: storage, and no more is known.

The leaf of a read is told by the kind of its file system. A tracer of system calls often has only a
path, so what the loading thread read from there goes to the family, after every cause was asked.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clusterprof.attribution.partial import SHARE, Partial
from clusterprof.detectors.base import in_phase
from clusterprof.timeline.model import PHASE_DATA_WAIT, Int, Lost, Rank
from clusterprof.timeline.traced import loading_shares

READS = "storage"
"""The family they are claimed for."""
_EVIDENCE = (
    READS,
    "loading.reading_ratio",
    "ratio",
    "of the waits, the loading thread was in a read of a file, as the trace shows",
)
_SCALE = 1000  # as evidence is kept


def read_elsewhere(rank: Rank, lost: Lost, left: Int) -> Int | None:
    """Return int64[n] in 1/SHARE: which part of each piece such reads explain, of what is left.

    None when a trace shows none of them.
    """
    seen = loading_shares(rank, lost.start_ns, lost.end_ns)
    if seen is None or not seen["elsewhere"].any():
        return None
    wanted = np.where(in_phase(lost, PHASE_DATA_WAIT), seen["elsewhere"], 0.0)
    share = np.minimum(np.rint(wanted * SHARE).astype(np.int64), left)
    return share if share.any() else None


def with_reads(part: Partial, lost: Lost, share: Int) -> Partial:
    """Return what a stretch adds, with the claim of these reads and its evidence."""
    amount = lost.lost_ns * share
    claimed = dict(part.claimed)
    for source in np.unique(lost.source).tolist():
        units = int(amount[lost.source == source].sum())
        if units:
            claimed[READS, "B", int(source)] = units
    total = int(amount.sum())
    length = max(int(lost.lost_ns[share > 0].sum()), 1)
    weight = max(1, total // SHARE)
    evidence = {**part.evidence, _EVIDENCE: round(total / SHARE / length * _SCALE) * weight}
    return replace(
        part, claimed=claimed, evidence=evidence, weights={**part.weights, _EVIDENCE: weight}
    )
