"""Data-wait breakdowns made by hand; a share that is not given is unknown."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.timeline.model import DataWaitBreakdown

KINDS = (
    "user_cpu",
    "reading_cpu",
    "runnable",
    "block_io",
    "remote_io",
    "socket",
    "memory",
    "no_work",
    "no_worker",
    "delivery",
)


def make_breakdown(
    *rows: dict[str, float], identified: bool = True, worker: int = 201
) -> DataWaitBreakdown:
    """Make a breakdown with a row per segment, such as {"block_io": 0.6, "user_cpu": 0.3}; the rest
    is unknown."""
    columns = {kind: np.array([row.get(kind, 0.0) for row in rows]) for kind in KINDS}
    unknown = 1.0 - sum(columns.values(), np.zeros(len(rows)))
    return DataWaitBreakdown(
        **columns,
        unknown=unknown,
        identified=np.full(len(rows), identified),
        worker_pid=np.full(len(rows), worker, np.int64),
    )
