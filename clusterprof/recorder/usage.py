"""What recording costs: the `self` collector reads the recorder and its helpers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from clusterprof.collectors.base import Value
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.linux.held import hold
from clusterprof.recorder.identity import stat_fields
from clusterprof.recorder.tier import Pace
from clusterprof.signals import SELF_CPU, SELF_LATE, SELF_RSS, SELF_TICKS_MISSED, Signal

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GONE = Unavailable("failed", "the process is gone")
RECORDER = "recorder"


class SelfCollector:
    """CPU time and memory of the recorder and its helpers, lateness and missed ticks."""

    name: ClassVar[str] = "self"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(
        self,
        pace: Pace,
        cpu_ns: Callable[[], int],
        helpers: Callable[[], Mapping[str, int]],
        proc: str = "/proc",
    ) -> None:
        self._pace = pace
        self._cpu_ns = cpu_ns
        self._helpers = helpers
        self._proc = proc
        self._open_helpers: dict[str, int] = {}
        self._own = hold(f"{proc}/self/statm")

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Return two columns per process and two of the loop."""
        self._open_helpers = dict(self._helpers())
        columns = []
        for process in (RECORDER, *self._open_helpers):
            columns += [(SELF_CPU, process), (SELF_RSS, process)]
        return [*columns, (SELF_LATE, ""), (SELF_TICKS_MISSED, "")]

    def sample(self) -> Sequence[Value]:
        """Read /proc/self and the helpers; another set of helpers is another set of devices."""
        if self._helpers() != self._open_helpers:
            raise DevicesChanged
        values: list[Value] = [self._cpu_ns(), self._rss()]
        for pid in self._open_helpers.values():
            fields = stat_fields(self._proc, pid)
            if fields is None:
                values += [_GONE, _GONE]
            else:
                values += [(int(fields[11]) + int(fields[12])) * _TICK_NS, _rss_bytes(fields)]
        return [*values, self._pace.late_ns, self._pace.missed]

    def close(self) -> None:
        """Nothing is held that another `open()` would not want."""

    def _rss(self) -> Value:
        try:
            return int(self._own.read().split(None, 2)[1]) * _PAGE_BYTES
        except Unavailable as reason:
            return reason


def _rss_bytes(fields: Sequence[bytes]) -> int:
    return int(fields[21]) * _PAGE_BYTES
