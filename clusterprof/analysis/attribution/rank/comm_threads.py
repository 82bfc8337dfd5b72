"""What the hosts had to do while data were on their way: what no better network takes away.

Threads of a communication library that sleep until there are data (`MOVERS`) use a CPU for moving
them, or stand and wait for one. Of each window between two samples of the process it is known how
much of both there was, and for how long the rank was in operations; over all windows

    used = idle rate * length + rate * time in operations        least squares, neither below 0

and so of the time in which data were on their way this is the hosts':

    used - idle rate * (length of all windows - data on their way)      no more than those took

Threads that poll use a CPU for nothing, and say nothing; they are not among `MOVERS`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clusterprof.attribution.device import sample_times
from clusterprof.attribution.regions import Region
from clusterprof.probe import layout
from clusterprof.timeline.device_waits import device_waits, on_device
from clusterprof.timeline.intervals import overlap_ns, union
from clusterprof.timeline.model import Rank
from clusterprof.timeline.series import rise_of

MOVERS = ("gloo_tcp_loop", "pt_gloo_runloop")
ON_CPU, DELAYED = "movers_on_cpu", "movers_delayed"
_LENGTH, _INSIDE = "movers_length", "movers_inside"
_LL, _LX, _XX = "movers_ll", "movers_lx", "movers_xx"
_US = 1000
"""Products are of microseconds: they stay whole numbers of 64 bits."""


def moved_by_hosts(rank: Rank, region: Region) -> dict[str, int]:
    """Return, for `Partial.totals`, the sums of a stretch: in us and us * us; {} without movers."""
    spans = rank.main.spans.get(layout.COLLECTIVE)
    movers = [one for one in rank.main.threads.values() if one.name in MOVERS]
    if spans is None or not movers:
        return {}
    times = sample_times(rank)  # edges of stretches, too: how they are cut changes nothing
    times = times if times.size else movers[0].t_ns
    inside = times[(times > region.start_ns) & (times < region.end_ns)]
    edges = np.concatenate([[region.start_ns], inside, [region.end_ns]]).astype(np.int64)
    windows = edges[:-1], edges[1:]
    spans = on_device(spans, device_waits(rank.main))
    sums = {
        _LENGTH: windows[1] - windows[0],
        _INSIDE: overlap_ns(windows, union((spans.start_ns, spans.end_ns))),
    }
    for name, column in ((ON_CPU, "on_cpu_ns"), (DELAYED, "run_delay_ns")):
        used = [rise_of(one.t_ns, getattr(one, column), *windows) for one in movers]
        sums[name] = np.nan_to_num(np.stack(used)).sum(axis=0).astype(np.int64)
    sums = {name: ns // _US for name, ns in sums.items()}
    length, x = sums[_LENGTH], sums.pop(_INSIDE)
    sums |= {_LL: length * length, _LX: length * x, _XX: x * x}
    for name in (ON_CPU, DELAYED):
        sums |= {f"{name}_l": sums[name] * length, f"{name}_x": sums[name] * x}
    return {name: int(us.sum()) for name, us in sums.items()}


def hosted_ns(totals: Mapping[str, int], what: str, moved_ns: int) -> float:
    """Return how much of the time in which a rank's data were on their way its movers were
    `ON_CPU`, or `DELAYED`: 0 where that is not known."""
    length = float(totals.get(_LENGTH, 0))
    if not length or moved_ns <= 0:
        return 0.0
    moved = moved_ns / _US
    idle = _idle_rate(totals, what)
    used = totals.get(what, 0) - idle * length
    return float(min(max(used, 0.0) + min(idle, 1.0) * moved, moved)) * _US


def _idle_rate(totals: Mapping[str, int], what: str) -> float:
    """Return the rate outside operations of the best fit in which neither rate is below 0."""
    ll, lx, xx = (float(totals.get(name, 0)) for name in (_LL, _LX, _XX))
    gl, gx = float(totals.get(f"{what}_l", 0)), float(totals.get(f"{what}_x", 0))
    det = ll * xx - lx * lx
    if det <= 0:  # in operations all the time, or never
        return 0.0
    idle, rate = (gl * xx - gx * lx) / det, (gx * ll - gl * lx) / det
    if rate < 0:
        return gl / ll
    return max(idle, 0.0)
