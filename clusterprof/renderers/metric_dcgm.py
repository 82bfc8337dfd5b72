"""What of a report DCGM has a name for, under that name, so that dashboards need no second query.

Only of NVIDIA's devices: an emulated one is nobody's GPU.
"""

from __future__ import annotations

from clusterprof.findings import RankLedger, Report
from clusterprof.renderers import metric_names as names
from clusterprof.renderers.metric_names import Described, Point, Points
from clusterprof.renderers.text_safety import safe_text
from clusterprof.underfill import RankFill

_NVIDIA = ("GPU-", "MIG-")
_MIB = 1 << 20


def dcgm(report: Report, points: Points) -> None:
    """Add the points of every NVIDIA device that was measured."""
    if report.underfill is None or report.emulated:
        return
    in_step = {_key(rank): rank.in_step_ns for rank in report.ranks}
    for one in report.underfill.ranks:
        whole_ns = in_step.get(_key(one), 0)
        if not one.device.startswith(_NVIDIA) or whole_ns <= 0:
            continue
        busy = one.busy_ns / whole_ns
        levels = one.levels
        # Levels are means of the time at work; at rest there is no work on a multiprocessor.
        values: dict[Described, float | None] = {
            names.DCGM_GPU_UTIL: 100 * busy,
            names.DCGM_SM_ACTIVE: _of(levels.sm_active_ratio, busy),
            names.DCGM_SM_OCCUPANCY: _of(levels.sm_occupancy_ratio, busy),
            names.DCGM_TENSOR: _of(levels.tensor_active_ratio, busy),
            names.DCGM_FB_USED: _of(levels.memory_used_bytes, 1 / _MIB),
        }
        labels = ("UUID", safe_text(one.device, 200)), ("Hostname", safe_text(one.node, 200))
        for described, value in values.items():
            if value is not None:
                points[described].append(Point(labels, value))


def _of(level: float | None, share: float) -> float | None:
    return None if level is None else level * share


def _key(one: RankLedger | RankFill) -> tuple[str, int | None, int, str]:
    return one.node, one.rank, one.pid, one.device
