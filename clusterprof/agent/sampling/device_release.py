"""Release all devices on SIGUSR2, and open them again on the next one.

A GPU cannot be reset, and its MIG mode not be changed, while any process has it open. So a user
asks the recorder to release it, and the recording goes on without the devices:

    SIGUSR2 -> handler counts -> `look()` in the loop -> collectors closed -> helpers end
    SIGUSR2 -> handler counts -> `look()` in the loop -> collectors are opened at the next tick

A helper is not killed: its pipe is closed, and it ends as soon as it is in no call of the driver.
One that a call keeps for more than `DEADLINE_NS` is an event `devices-still-held`: nothing can make
it let go of its devices but the driver.

Events: devices-released (collectors), devices-closed (took_ns: all their helpers have ended),
devices-still-held (collectors, pids), devices-resumed (collectors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.trace.schema import Event, Record

DEADLINE_NS = 2_000_000_000
"""Time after which a helper that has not ended is reported, ns."""


class DeviceRelease:
    """The devices of all collectors: open, or released until they are asked for again."""

    def __init__(
        self, runners: Sequence[CollectorRunner], count_requests: Callable[[int], int]
    ) -> None:
        """Take the runners of all collectors; those that hold no device are left alone.

        count_requests: returns how many requests have arrived since the start, given how many of
        them are known already.
        """
        self._runners = [runner for runner in runners if runner.holds_device]
        self._count_requests = count_requests
        self._handled = 0
        self._events: list[Record] = []
        self._released: list[str] = []
        self._released_ns: int | None = None
        """When helpers were asked to end that may not have ended, ns; None = no helper is left."""
        self._is_overdue = False

    def look(self, now_ns: int) -> bool:
        """Handle the requests since the last call; return True while helpers are still ending."""
        requests = self._count_requests(self._handled)
        while self._handled < requests:
            self._handled += 1
            if self._handled % 2:
                self._release(now_ns)
            else:
                self._resume(now_ns)
        if self._released_ns is not None:
            self._check_helpers(now_ns, self._released_ns)
        return self._released_ns is not None

    def take(self, now_ns: int) -> Sequence[Record]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def finish(self, now_ns: int) -> Sequence[Record]:
        """Return the remaining events."""
        return self.take(now_ns)

    def _release(self, now_ns: int) -> None:
        self._released = [runner.name for runner in self._runners if runner.release(now_ns)]
        self._released_ns, self._is_overdue = now_ns, False
        self._add_event(now_ns, "devices-released", collectors=self._released)

    def _resume(self, now_ns: int) -> None:
        for runner in self._runners:
            runner.resume(now_ns)
        self._add_event(now_ns, "devices-resumed", collectors=self._released)

    def _check_helpers(self, now_ns: int, released_ns: int) -> None:
        """Report that the helpers of the last release have ended, or that they are overdue."""
        pids = {runner.name: list_ending_pids(runner) for runner in self._runners}
        held = {name: ending for name, ending in pids.items() if ending}
        took_ns = now_ns - released_ns
        if not held:
            self._released_ns = None
            self._add_event(now_ns, "devices-closed", took_ns=took_ns)
        elif took_ns >= DEADLINE_NS and not self._is_overdue:
            self._is_overdue = True
            all_pids = sorted(pid for ending in held.values() for pid in ending)
            self._add_event(now_ns, "devices-still-held", collectors=sorted(held), pids=all_pids)

    def _add_event(self, t_ns: int, kind: str, **attributes: object) -> None:
        self._events.append(Event(t_ns, kind, attributes))


def list_ending_pids(runner: CollectorRunner) -> list[int]:
    """Return the helper processes of a collector that were asked to end and are still there."""
    list_pids: Callable[[], list[int]] | None = getattr(runner.collector, "list_ending_pids", None)
    return list_pids() if list_pids is not None else []
