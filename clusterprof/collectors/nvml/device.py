"""One GPU or MIG instance: every value guarded for itself, every call made when it is due."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from clusterprof.collectors.nvml.calls import CALLS, SIGNALS, Call, Memory
from clusterprof.collectors.nvml.errors import FATAL, explain
from clusterprof.collectors.nvml.gpm import Gpm, Value
from clusterprof.errors import Unavailable

Mark = Callable[[int, str], None]
"""Told (index of the device, name of the call, "" = it is back) around every call."""

_SLOW_NS = 5_000_000
_SLOWER = 10
_SECOND_NS = 1_000_000_000


class Device:
    """One GPU, read by one thread; `sample()` never raises."""

    def __init__(
        self,
        nvml: Any,
        index: int,
        handle: Any,
        mark: Mark,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.index = index
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=64)
        """Events since somebody last took them: `device-lost`, `call-slowed`, `device-processes`
        (held: [pid, bytes], whenever that is another list than before)."""
        self._nvml, self._handle, self._mark, self._clock = nvml, handle, mark, clock
        self._lost: Unavailable | None = None
        self._memory = Memory(clock, self.notes)
        self._states = [_State(call) for call in CALLS]
        self.signals = SIGNALS
        """Names of its values."""

    def follow(
        self,
        calls: Sequence[Call],
        gpm: Gpm | Unavailable,
        most: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        """Make these calls. `gpm`: its counters, or why there are none; `most`: `most_bytes()`."""
        self._memory.gpm, self._memory.most = gpm, most
        self._states = [_State(call) for call in calls]
        self.signals = tuple(signal for call in calls for signal in call.signals)

    def sample(self) -> list[Value]:
        """Return one value per entry of `signals`, asking only what is due."""
        now_ns = self._clock()
        for state in self._states:
            if now_ns >= state.due_ns and self._lost is None:
                self._ask(state)
        if self._lost is not None:
            return [self._lost] * len(self.signals)
        return [value for state in self._states for value in state.values]

    def fail(self, reason: Unavailable) -> None:
        """Never ask this device again; it could not even be opened."""
        self._lost = reason

    def _ask(self, state: _State) -> None:
        call = state.call
        began_ns = self._clock()
        self._mark(self.index, call.name)
        try:
            state.values = call.read(self._nvml, self._handle, self._memory)
        except Exception as error:
            reason = explain(self._nvml, error)
            state.values = (reason,) * len(call.signals)
            if getattr(error, "value", 0) in FATAL:
                self._lost = reason
                self.notes.append(("device-lost", {"message": reason.message, "call": call.name}))
        finally:
            self._mark(self.index, "")
        slowed_ns = state.timed(began_ns, self._clock())
        if slowed_ns:
            self.notes.append(("call-slowed", {"call": call.name, "median_ns": slowed_ns}))


class _State:
    """When a call is due, what it last returned and how long it takes."""

    __slots__ = ("_durations", "call", "due_ns", "every_ns", "values")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.every_ns = call.every_ns
        self.due_ns = 0
        self.values: tuple[Value, ...] = ()
        self._durations: deque[int] = deque(maxlen=9)

    def timed(self, began_ns: int, ended_ns: int) -> int:
        """Plan the next call; return the median duration if it has just become a slow one."""
        took_ns = ended_ns - began_ns
        self._durations.append(took_ns)
        if took_ns <= _SLOW_NS and len(self._durations) > 3:  # the median was low, and is no higher
            self.due_ns = began_ns + self.every_ns
            return 0
        median_ns = sorted(self._durations)[len(self._durations) // 2]
        slowed = self.every_ns == self.call.every_ns and (
            len(self._durations) >= 3 and median_ns > _SLOW_NS
        )
        if slowed:
            self.every_ns = _SLOWER * max(self.call.every_ns, _SECOND_NS // 10)
        self.due_ns = began_ns + self.every_ns
        return median_ns if slowed else 0
