"""Holistic Trace Analysis: its idle split and its stragglers, re-implemented from documentation.

Read: facebookresearch/HolisticTraceAnalysis, docs/source/features/idle_time_breakdown.rst and
temporal_breakdown.rst, commit f4d0062 (2026-05-01), https://hta.readthedocs.io. HTA reads kernel
traces; a recording has the device's busy time in samples and the host's spans, so gaps are seen in
sum, not one by one.

| its word | here | as a cause |
|---|---|---|
| host wait: the CPU enqueued no kernel in time | idle while the host was in `HOST` | cpu |
| kernel wait: short gaps between kernels | not visible in samples: 0 | launch |
| other wait: not attributed | the rest of the idle time | unattributed |
| potential stragglers, 2 by default | last where stays differ most | culprits |

"Stalling due to the CPU" is whatever a host does: cpu here, and it covers `HOSTS_WORK`. Shares are
of the device time in steps, as HTA's are of its trace; it names no leaf.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from baselines.operations import match_operations
from baselines.recording_tables import read_recording
from baselines.sagemaker import compute_busy_percent
from baselines.tables import Rank, RecordingTables
from clusterprof.probe import layout
from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.families import UNATTRIBUTED
from clusterprof_lab.truth import Truth

TOOL = "HTA idle split (re-implemented from documentation, f4d0062)"
CANDIDATES = 2
HOST = (
    layout.DATA_WAIT,
    layout.H2D,
    layout.GC,
    layout.CHECKPOINT,
    layout.EVAL,
    layout.COMPILE,
    layout.COLLECTIVE,
)
HOSTS_WORK = ("storage", "launch", "h2d", "checkpoint", "eval")


def split_idle_time(recording: Path, truth: Truth) -> Answer:
    """Split the idle time of devices in steps; name the potential stragglers."""
    seen = read_recording(recording, truth.clocks)
    parts = [part for rank in seen.ranks.values() if (part := _split_rank(rank)) is not None]
    if not parts:
        return Answer(TOOL, None, culprits=_find_stragglers(seen))
    idle, host = np.sum(parts, axis=0) / seen.in_step_ns
    families = {"cpu": host, "launch": 0.0, UNATTRIBUTED: idle - host}
    named = [
        NamedCause("cpu", None, host, covers=HOSTS_WORK),
        NamedCause(UNATTRIBUTED, None, idle - host),
    ]
    causes = tuple(sorted((s for s in named if s.share_ratio), key=lambda s: -(s.share_ratio or 0)))
    blamed = _find_stragglers(seen)
    return Answer(TOOL, causes, families, culprits=blamed, lost_ratio=float(idle), leaves=False)


def _split_rank(rank: Rank) -> tuple[float, float] | None:
    """Idle time of the device in steps, and what of it the host can have caused."""
    host_ns = rank.sum_by_step(rank.of(*HOST))
    idle = host = 0.0
    for (start, end), spent in zip(rank.steps.tolist(), host_ns.tolist()):
        busy = compute_busy_percent(rank, np.array([start, max(end, start + 1)]))
        if busy is None:
            return None
        alone = (end - start) * (1 - min(float(busy[0]), 100.0) / 100)
        idle, host = idle + alone, host + min(alone, spent)
    return idle, host


def _find_stragglers(seen: RecordingTables) -> tuple[int, ...] | None:
    """Find the ranks that came last most often where the stays differ most."""
    by_kind: dict[tuple[int, int], list[dict]] = defaultdict(list)
    for key, stays in match_operations(seen).items():
        if len(key) == 2 and len(stays) > 1:
            by_kind[key[0], next(iter(stays.values())).kind].append(stays)
    if not by_kind:
        return None
    spread = {
        name: sum(np.std([stay.blocked_ns for stay in stays.values()]) for stays in meetings)
        for name, meetings in by_kind.items()
    }
    chosen = by_kind[max(spread, key=lambda name: spread[name])]
    last: Counter[int] = Counter()
    for stays in chosen:
        order = sorted(stays.values(), key=lambda stay: (-stay.arrive_ns, stay.rank))
        last.update({stay.rank: 1 for stay in order[:CANDIDATES]})
    return tuple(rank for rank, _ in sorted(last.items(), key=lambda e: (-e[1], e[0])))[:CANDIDATES]


RULES: Mapping[str, Callable[[Path, Truth], Answer]] = {"HTA": split_idle_time}
