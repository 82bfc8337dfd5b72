"""Values of several devices that one thread brings all at once, for those who ask device by device.

The thread puts one row per device; each device hands out every row once and says "nothing new" in
between. A source that has been silent for too long is a reason, never an old value.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from clusterprof.errors import Unavailable

Value = int | float | Unavailable
_REST_SECONDS, _REST_AT_MOST_SECONDS = 1.0, 60.0


class Feed:
    """The newest rows; written by one thread, read by many."""

    def __init__(
        self, width: int, silent_ns: int, silent: Callable[[], Unavailable],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:  # fmt: skip
        self.clock, self.silent_ns, self.silent, self.width = clock, silent_ns, silent, width
        self.began_ns = clock()
        self.newest: tuple[int, Sequence[Sequence[Value]] | Unavailable] | None = None
        """When it came, and one row per device, or why there is none."""

    def put(self, rows: Sequence[Sequence[Value]] | Unavailable) -> None:
        """Take new rows, or a reason that stands for all of them."""
        self.newest = (self.clock(), rows)


class FedDevice:
    """One device of a feed; `sample()` never raises and never waits."""

    def __init__(self, feed: Feed, index: int) -> None:
        self.index = index
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=64)
        """Events since somebody last took them."""
        self.t_ns = 0
        """When the values last handed out were taken."""
        self._feed = feed
        self._seen_ns = 0

    def sample(self) -> list[Value] | None:
        """Return the row that has come since the last call; None = none has."""
        feed, newest = self._feed, self._feed.newest
        if newest is not None and newest[0] > self._seen_ns:
            self._seen_ns = self.t_ns = newest[0]
            rows = newest[1]
            return [rows] * feed.width if isinstance(rows, Unavailable) else list(rows[self.index])
        now_ns = feed.clock()
        if now_ns - max(self.t_ns, self._seen_ns, feed.began_ns) > feed.silent_ns:
            self.t_ns = now_ns
            return [feed.silent()] * feed.width
        return None


class Keeper:
    """The thread that keeps a feed filled: calls `work(wanted)` again whenever it ends.

    `work` returns when it is due again after `every_seconds`, or raises Unavailable, which is put
    in the place of rows; it is then left alone for 1, 2, 4 … 60 s.
    """

    def __init__(
        self,
        feed: Feed,
        work: Callable[[Callable[[], bool]], None],
        every_seconds: float,
    ) -> None:
        self._feed, self._work, self._every_seconds = feed, work, every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="feed")

    def start(self) -> None:
        """Begin; the thread lives until `stop()`."""
        self._thread.start()

    def stop(self, seconds: float = 3.0) -> None:
        """Have the work end, and wait a while for it."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _wanted(self) -> bool:
        return not self._over.is_set()

    def _run(self) -> None:
        rest = _REST_SECONDS
        while self._wanted():
            began = time.monotonic()
            try:
                self._work(self._wanted)
                pause, rest = self._every_seconds, _REST_SECONDS
            except Unavailable as reason:
                self._feed.put(reason)
                if time.monotonic() - began > _REST_AT_MOST_SECONDS:
                    rest = _REST_SECONDS
                pause, rest = rest, min(2 * rest, _REST_AT_MOST_SECONDS)
            except Exception as error:
                self._feed.put(Unavailable("failed", f"{type(error).__name__}: {error}"[:300]))
                pause, rest = rest, min(2 * rest, _REST_AT_MOST_SECONDS)
            self._over.wait(max(0.0, pause - (time.monotonic() - began)))
