"""Several devices read side by side, each by a thread of its own, for one sample of all.

A device that is slow delays the sample of all; one that does not answer for 2 s has that reason
in the place of its values, and the others go on without it. All devices together are read at most
a fiftieth of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from clusterprof.errors import NothingNew, Unavailable
from clusterprof.linux.aside import SILENT, Aside

_REST_TIMES = 50
_FIRST_WAIT_SECONDS = 0.5
_LATER_WAIT_SECONDS = 0.2
Reading = TypeVar("Reading")


class Together(Generic[Reading]):
    """Functions by name, called again and again; a name's thread that hangs has no second one."""

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        first_wait_seconds: float = _FIRST_WAIT_SECONDS,
        rest_ns: int = 0,
    ) -> None:
        """`rest_ns`: the least time between two readings of a device."""
        self._clock, self._rest_ns = clock, rest_ns
        self._wait_seconds = first_wait_seconds
        self._asides: dict[str, Aside[Reading]] = {}
        self._left: dict[str, Aside[Reading]] = {}
        self._reads: dict[str, Callable[[], Reading]] = {}
        self._rest = _REST_TIMES
        self._taken: dict[str, tuple[int, Reading]] = {}
        self._silent: set[str] = set()

    def open(self, reads: Mapping[str, Callable[[], Reading]]) -> None:
        """Start a thread for each, and wait a moment for their first readings."""
        self._reads = dict(reads)
        self._rest = _REST_TIMES * max(1, len(reads))
        self._taken.clear()
        self._silent.clear()
        old = {name: self._left[name] for name in reads if name in self._left}
        for name in reads:
            if name not in old:
                self._start(name)
        end = time.monotonic() + self._wait_seconds
        for name, aside in old.items():  # one that was only just under way comes back
            aside.wait(end - time.monotonic())
            if aside.hangs:
                self._asides[name] = aside
                self._silent.add(name)
            else:
                del self._left[name]
                self._start(name)
        for name, aside in self._asides.items():
            if name not in self._silent:
                aside.wait(end - time.monotonic())
                if aside.hangs:
                    self._silent.add(name)
        self._wait_seconds = min(self._wait_seconds, _LATER_WAIT_SECONDS)

    def take(self) -> tuple[int, dict[str, Reading | Unavailable]]:
        """Return (when, what) was read since the last call, a reason where a device is silent.

        Raises NothingNew while some are still to come, Unavailable when all are silent, and what
        the functions raised.
        """
        for name, aside in list(self._asides.items()):
            if name in self._taken:
                continue
            if name in self._left:
                if not aside.hangs:
                    del self._left[name]
                    self._start(name)
                continue
            try:
                taken = aside.take()
            except Unavailable as reason:
                if reason is not SILENT:
                    raise
                self._silent.add(name)
                continue
            if taken is not None:
                self._silent.discard(name)
                self._taken[name] = taken
        if len(self._silent) == len(self._asides):
            raise SILENT.with_traceback(None)
        if len(self._taken) + len(self._silent) < len(self._asides) or not self._taken:
            raise NothingNew
        taken_all, self._taken = self._taken, {}
        found = {name: taken_all[name][1] if name in taken_all else SILENT for name in self._asides}
        return max(taken_ns for taken_ns, _ in taken_all.values()), found

    def _start(self, name: str) -> None:
        read = self._reads[name]
        self._asides[name] = Aside(read, self._clock, rest_times=self._rest, rest_ns=self._rest_ns)
        self._asides[name].start()

    def close(self, let_go: Mapping[str, Callable[[], None]] = MappingProxyType({})) -> None:
        """Let the threads end when they come back; `let_go` closes what each reads, now or then."""
        for name, aside in self._asides.items():
            aside.close(let_go.get(name, lambda: None))
        for name in let_go.keys() - self._asides.keys():
            let_go[name]()  # nobody has read it yet
        self._left |= {name: aside for name, aside in self._asides.items() if aside.hangs}
        self._asides, self._taken, self._reads = {}, {}, {}
