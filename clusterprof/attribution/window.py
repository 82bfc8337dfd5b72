"""The part of a run that was asked for: what lies outside of it is outside the steps.

run       |--------------------------------------|
window              |-----------|                    by time: from sample to sample of the device
steps     |---|---|---|---|---|---|---|              by number: from the end of the one before
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clusterprof.attribution.device import sample_times
from clusterprof.attribution.regions import RankState, Region
from clusterprof.probe import layout
from clusterprof.timeline.model import Rank

NOT_ASKED = "not-asked"
_NEVER = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Window:
    """Bounds on one node's clock, or numbers of steps; None = no bound."""

    since_ns: int | None = None
    until_ns: int | None = None
    first_step: int | None = None
    end_step: int | None = None
    """The first step that is not looked at."""

    @property
    def by_steps(self) -> bool:
        """True when it is steps that were asked for."""
        return self.first_step is not None or self.end_step is not None


WHOLE = Window()


def noted(rank: Rank, state: RankState, window: Window) -> RankState:
    """Return the state with the bounds of the window on the clock of the rank, as far as seen."""
    if not window.by_steps:
        return replace(state, since_ns=window.since_ns, until_ns=window.until_ns)
    table = rank.main.spans.get(layout.STEP)
    since_ns, until_ns = state.since_ns, state.until_ns
    if window.end_step is not None and until_ns is None:
        until_ns = _NEVER
    if table is not None and table.end_ns.size:
        if window.first_step is not None:
            ends = table.end_ns[table.a < window.first_step]
            since_ns = max(int(ends.max(initial=_NEVER)), _NEVER if since_ns is None else since_ns)
        if window.end_step is not None and until_ns is not None:
            ends = table.end_ns[table.a < window.end_step]
            until_ns = max(int(ends.max(initial=_NEVER)), until_ns)
    return replace(state, since_ns=since_ns, until_ns=until_ns)


def inside(rank: Rank, region: Region, state: RankState, window: Window) -> Region:
    """Return what of a stretch is asked for; of no length when nothing is."""
    begin, end = region.start_ns, region.end_ns
    if state.since_ns is not None and state.since_ns > begin:
        begin = min(
            _sample(rank, state.since_ns, "left") if _times(window) else state.since_ns, end
        )
    if state.until_ns is not None and state.until_ns < end:
        end = _sample(rank, state.until_ns, "right") if _times(window) else state.until_ns
    return replace(region, start_ns=begin, end_ns=max(begin, end))


def _times(window: Window) -> bool:
    return not window.by_steps


def _sample(rank: Rank, t_ns: int, side: str) -> int:
    """The first sample of the device at or after an instant ("left"), or the last up to it."""
    times = sample_times(rank)
    at = int(np.searchsorted(times, t_ns, side=side))  # type: ignore[call-overload]
    at = at if side == "left" else at - 1
    return int(times[at]) if 0 <= at < times.size else t_ns
