"""The clock of the recorder: reads time, and waits for a time or for something to happen."""

from __future__ import annotations

import select
import time
from typing import Protocol

from clusterprof.trace.schema import Clock as ClockRecord


class Clock(Protocol):
    """What the loop knows of time; tests bring their own."""

    def now_ns(self) -> int:
        """Return CLOCK_MONOTONIC."""
        ...

    def read(self) -> ClockRecord:
        """Return the node's three clocks, read together."""
        ...

    def wait_until(self, t_ns: int) -> None:
        """Wait until `t_ns`, or less when a watched descriptor has something to say."""
        ...

    def cpu_ns(self) -> int:
        """Return the CPU time this process has used."""
        ...


class SystemClock:
    """The kernel's clocks; `watched` are descriptors that end a wait early when readable."""

    def __init__(self, watched: list[int]) -> None:
        self._watched = watched

    now_ns = staticmethod(time.monotonic_ns)
    """Returns CLOCK_MONOTONIC; asked a dozen times in every tick."""

    def read(self) -> ClockRecord:
        """Return the three clocks; monotonic is read on both sides and averaged."""
        before = time.monotonic_ns()
        boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        realtime = time.time_ns()
        after = time.monotonic_ns()
        return ClockRecord((before + after) // 2, boottime, realtime)

    def wait_until(self, t_ns: int) -> None:
        """Wait for the absolute time; select() because poll() rounds up to milliseconds."""
        rest = t_ns - time.monotonic_ns()
        if rest > 0:
            select.select(self._watched, (), (), rest / 1e9)

    def cpu_ns(self) -> int:
        """Return user and system time of this process."""
        return time.process_time_ns()
