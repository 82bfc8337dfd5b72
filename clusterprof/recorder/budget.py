"""The CPU budget the recorder enforces on itself: over it, every interval doubles, and it is said.

3 % of one core at 10 Hz, measured over 30 s; a higher rate that somebody asked for has
proportionally more.
"""

from __future__ import annotations

from clusterprof.trace.schema import Event

WINDOW_NS = 30_000_000_000
RATIO_AT_10_HZ = 0.03
SLOWDOWN_AT_MOST = 64


class Budget:
    """CPU time against wall time, in windows of 30 s."""

    def __init__(self, hz: float, now_ns: int, cpu_ns: int) -> None:
        self.ratio = RATIO_AT_10_HZ * max(hz, 10.0 / 3) / 10
        self._since_ns = now_ns
        self._cpu_ns = cpu_ns

    def check(self, now_ns: int, cpu_ns: int, slowdown: int) -> Event | None:
        """Return an event with the new slowdown when the window's usage asks for one."""
        wall_ns = now_ns - self._since_ns
        if wall_ns < WINDOW_NS:
            return None
        used = (cpu_ns - self._cpu_ns) / wall_ns
        self._since_ns, self._cpu_ns = now_ns, cpu_ns
        attributes = {"cpu_ratio": used, "budget_ratio": self.ratio}
        if used > self.ratio and slowdown < SLOWDOWN_AT_MOST:
            return Event(now_ns, "recorder-slowed", {**attributes, "slowdown": slowdown * 2})
        # Half the intervals cost about twice as much: only well below half is it safe.
        if slowdown > 1 and used < self.ratio / 3:
            return Event(now_ns, "recorder-restored", {**attributes, "slowdown": slowdown // 2})
        return None
