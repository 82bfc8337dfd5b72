"""Join the begin and end events of a Chrome trace to complete ones.

    pairs = EventPairs(account)
    complete = pairs.join(events)          # block by block
    pairs.finish()

    B and E    one stack per process and thread: an `E` closes the `B` that was opened last
    b and e    asynchronous: one stack per process, category and id, on the thread of the `b`

Source: Trace Event Format, "Duration Events" and "Async Events".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import sub
from typing import Any

from clusterprof.analysis.importers.core.base import Account

_MAX_OPEN_EVENTS = 4096
_MAX_STACKS = 1 << 14


class EventPairs:
    """Begin events of one file that wait for their ends."""

    def __init__(
        self, account: Account, phases: str = "BE", subtract: Callable[[Any, Any], float] = sub
    ) -> None:
        """Prepare to pair the events of one file.

        phases: pairs of letters, "BE" or "BEbe". subtract: computes the µs between two times.
        """
        self._account, self._subtract = account, subtract
        self._begins, self._ends = phases[::2], phases[1::2]
        self._open: dict[tuple[Any, ...], list[Any]] = {}

    def join(self, events: Sequence[Any]) -> list[Any]:
        """Return the events that a block completes; others are counted or wait."""
        joined = []
        for event in events:
            if event.ph in self._begins:
                opened = self._open.setdefault(_get_key(event), [])
                if len(opened) < _MAX_OPEN_EVENTS and len(self._open) < _MAX_STACKS:
                    opened.append(event)
                else:
                    self._account.skipped[f"nested in {_MAX_OPEN_EVENTS:,} others (B)"] += 1
            elif event.ph in self._ends:
                stack = self._open.get(_get_key(event))
                if stack:
                    begin = stack.pop()
                    begin.ph, begin.dur = "X", self._subtract(event.ts, begin.ts)
                    joined.append(begin)
                else:
                    self._account.skipped[f"end without a begin event ({event.ph})"] += 1
        return joined

    def finish(self) -> None:
        """Count the events that no end has closed."""
        for stack in self._open.values():
            if stack:
                self._account.skipped[f"begin without an end event ({stack[0].ph})"] += len(stack)


def _get_key(event: Any) -> tuple[Any, ...]:
    if event.ph in "BE":
        return event.pid, event.tid
    return event.pid, event.cat, str(event.id)
