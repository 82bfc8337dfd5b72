"""Timelines of one rank whose lost time fits in a comment."""

from __future__ import annotations

from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.attribution.rank.lost_time import find_lost_intervals
from clusterprof.analysis.timeline.model import Rank
from tests.support.builders import make_process, make_rank

BUSY = ("gpu.busy_ns_total", "emulated-0")
WORKER = 201


def settle_all(timeline: Rank):
    """Settle a recording that is one whole region; return rows of seconds."""
    lost_intervals, state = find_lost_intervals(timeline, RankState(), last=True)
    assert len(lost_intervals) <= 1
    if not lost_intervals:
        return [], None, state
    region, lost, account = lost_intervals[0]
    rows = [
        (s / 1e9, e / 1e9, n / 1e9, int(phase), int(source), int(step))
        for s, e, n, phase, source, step in zip(
            lost.start_ns, lost.end_ns, lost.lost_ns, lost.phase, lost.source, lost.step
        )
    ]
    assert region.start_ns == state.step_begin_ns
    return rows, account, state


def mark_steps(
    end: float, table: dict, series: dict | None = None, device: str = "emulated-0"
) -> Rank:
    return make_rank(end, make_process(100, spans=table), series=series, device=device)
