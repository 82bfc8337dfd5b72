"""The clock of the recorder: reads time, and waits for a time or for something to happen."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Protocol

from clusterprof.linux.inotify import News
from clusterprof.trace.schema import Clock as ClockRecord


class Clock(Protocol):
    """What the loop knows of time; tests bring their own."""

    attentive: bool
    """True when a wait ends as soon as there is anything to look at, so that none is missed."""

    def now_ns(self) -> int:
        """Return CLOCK_MONOTONIC."""
        ...

    def read(self) -> ClockRecord:
        """Return the node's three clocks, read together."""
        ...

    def wait_until(self, t_ns: int) -> bool:
        """Wait until `t_ns`, or less when a watched descriptor has something to say: then True."""
        ...

    def cpu_ns(self) -> int:
        """Return the CPU time this process has used."""
        ...


class SystemClock:
    """The kernel's clocks; `watched` are descriptors that end a wait early when readable.

    `news`, where there is any, ends one wait early and then none before the next time that was
    waited for: a thousand files that come one by one are looked at in every tick, not each.
    """

    def __init__(self, watched: Sequence[int], news: News | None = None) -> None:
        self._watched = list(watched)
        self._news = news
        self._listens = [*watched, news.descriptor] if news is not None else self._watched
        self._told = False
        self.attentive = news is not None

    now_ns = staticmethod(time.monotonic_ns)
    """Returns CLOCK_MONOTONIC; asked a dozen times in every tick."""

    def read(self) -> ClockRecord:
        """Return the three clocks; monotonic is read on both sides and averaged."""
        before = time.monotonic_ns()
        boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        realtime = time.time_ns()
        after = time.monotonic_ns()
        return ClockRecord((before + after) // 2, boottime, realtime)

    def wait_until(self, t_ns: int) -> bool:
        """Wait for the absolute time; select() because poll() rounds up to milliseconds."""
        told, self._told = self._told, False
        rest = t_ns - time.monotonic_ns()
        if rest <= 0:
            return True  # nobody has listened
        ready = select.select(self._watched if told else self._listens, (), (), rest / 1e9)[0]
        if self._news is not None and (told or self._news.descriptor in ready):
            self._news.drain()
            self._told = not told
            return True
        return bool(ready)

    def cpu_ns(self) -> int:
        """Return user and system time of this process."""
        return time.process_time_ns()
