"""One device behind a helper, as the recorder knows it: what it was asked and what it owes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterprof.collectors.base import Value
from clusterprof.errors import Unavailable
from clusterprof.recorder.child import Child
from clusterprof.recorder.drivers import ELSEWHERE

DEADLINE_NS = 1_000_000_000
_LIBRARY_WORDS = {"gpu_nvidia": "nvml "}
_REST_NS, _REST_AT_MOST_NS = 1_000_000_000, 60_000_000_000
_NOT_YET = Unavailable("failed", "no answer yet")
_PARKED = Unavailable(
    "failed", "left alone after it crashed the driver's library", "look for Xid lines in dmesg"
)


class Backoff:
    """A time to leave something alone: 1, 2, 4 … 60 s, from 1 s again after 60 good seconds."""

    def __init__(self) -> None:
        self._rest_ns = 0
        self.until_ns = 0

    def fail(self, now_ns: int) -> None:
        """Begin the next time of rest, twice as long as the last unless that is long ago."""
        if now_ns - self.until_ns > _REST_AT_MOST_NS:
            self._rest_ns = 0
        self._rest_ns = min(max(2 * self._rest_ns, _REST_NS), _REST_AT_MOST_NS)
        self.until_ns = now_ns + self._rest_ns

    def over(self, now_ns: int) -> bool:
        """True when the rest is over, or there never was one."""
        return now_ns >= self.until_ns


class Remote:
    """A device: at most one question outstanding, its newest answer, and its trouble."""

    def __init__(self, collector: str, entry: dict[str, Any], signals: list[str]) -> None:
        self.entry, self.signals = entry, signals
        self.id = str(entry["id"])
        self.index = int(entry["index"])
        self.t_ns = 0
        """When its newest values were taken."""
        self.parked = Backoff()
        self.skipped = False
        """The helper was started without it."""
        self._collector = collector
        self._sequence = 0
        self._asked_ns: int | None = None
        self._adopting = False
        self._told: list[Value] = []
        """What the helper said last, signal by signal."""
        self._values: list[Value] | None = None
        self._hung: Unavailable | None = None
        self._nothing_new = False

    @property
    def owes(self) -> bool:
        """True while a question is not answered."""
        return self._asked_ns is not None

    @property
    def waits_for_news(self) -> bool:
        """True when nothing is new, or an answer that may take its time is still to come."""
        coming = self.owes and not self.skipped and self._hung is None
        patient = self._collector in ELSEWHERE
        return self._values is None and (self._nothing_new or (patient and coming))

    @property
    def hangs(self) -> bool:
        """True while its answer is late."""
        return self._hung is not None

    def question(self, now_ns: int) -> list[Any] | None:
        """Return what to ask: for values, or for the device to be taken up again; None while an
        answer is owed or the device is left alone."""
        if self._asked_ns is not None or not self.parked.over(now_ns):
            return None
        if self.skipped:
            return ["adopt", self.index]
        return ["sample", self.index, self._sequence + 1]

    def asked(self, now_ns: int) -> None:
        """Note that `question()` has been sent."""
        self._asked_ns = now_ns
        self._adopting = self.skipped
        if not self.skipped:
            self._sequence += 1

    def answered(self, message: list[Any], now_ns: int) -> list[tuple[str, dict[str, Any]]]:
        """Take a `values` message; returns the events it brings."""
        _, _, sequence, t_ns, changes, notes = message
        self._follow(changes or ())  # of an answer that comes too late, too
        events = [(kind, {**self._who(), **attributes}) for kind, attributes in notes]
        if sequence == self._sequence:
            events += self._settle(now_ns)
            self._nothing_new = changes is None
            if changes is not None:
                self.t_ns = t_ns
                self._values = self._told.copy()
        return events

    def adopted(self, entry: dict[str, Any], signals: list[str]) -> bool:
        """Take an `adopted` message; True when this is not the device it was."""
        self._adopting = self.skipped = False
        self._asked_ns = None
        self._hung = None
        # A GPU in MIG mode comes back without its instances: all are to be found anew.
        return not self.is_as(entry, signals) or entry.get("mig") is True

    def is_as(self, entry: dict[str, Any], signals: list[str]) -> bool:
        """True when this is what a helper says of its device."""
        return str(entry["id"]) == self.id and signals == self.signals

    def overdue(self, now_ns: int, child: Child | None) -> list[tuple[str, dict[str, Any]]]:
        """Return the event that the device hangs, once, when its answer is late."""
        if self._asked_ns is None or self._hung or now_ns - self._asked_ns < DEADLINE_NS:
            return []
        call = child.in_call(self.index) if child is not None else None
        name = call.call if call is not None else ""
        inside = f" (inside {_LIBRARY_WORDS.get(self._collector, '')}{name})" if name else ""
        self._hung = Unavailable("failed", f"no answer for over a second{inside}")
        return [("collector-hung", {**self._who(), "call": name})]

    def take(self) -> list[Value] | None:
        """Return the values that arrived since the last call."""
        values, self._values = self._values, None
        return values

    def reason(self, otherwise: Unavailable | None) -> Unavailable:
        """Say why there are no values."""
        if self.skipped or self._adopting:
            return _PARKED
        return self._hung or otherwise or _NOT_YET

    def park(self, now_ns: int) -> None:
        """Leave the device alone for a while: it crashed the helper."""
        self.parked.fail(now_ns)
        self.skipped = True

    def forget(self) -> None:
        """The helper that was asked is gone; what it answered before still counts."""
        self._asked_ns = None
        self._adopting = self._nothing_new = False
        self._hung = None

    def _follow(self, changes: Sequence[Any]) -> None:
        """Take [place, value, …]; a helper says everything first."""
        if len(changes) == 2 * len(self.signals):
            self._told = [_NOT_YET] * len(self.signals)
        for at, value in zip(changes[::2], changes[1::2]):
            if at >= len(self._told):  # another device than was announced
                self._told = []
                return
            self._told[at] = _value(value)

    def _settle(self, now_ns: int) -> list[tuple[str, dict[str, Any]]]:
        asked_ns, self._asked_ns = self._asked_ns, None
        if self._hung is None:
            return []
        self._hung = None
        hung_ns = now_ns - (asked_ns if asked_ns is not None else now_ns)
        return [("collector-recovered", {**self._who(), "hung_ns": hung_ns})]

    def _who(self) -> dict[str, str]:
        return {"collector": self._collector, "device": self.id}


def _value(value: Any) -> Value:
    return Unavailable(*value) if isinstance(value, list) else value
