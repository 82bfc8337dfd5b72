"""A collector in a separate process that can be abandoned; the loop sees an ordinary collector.

`sample()` never waits: it takes what has arrived since the last tick and sends a
request to every device without an unanswered one. So values were taken just after the
previous tick; `sampled_ns` is their time. A device that does not answer within a second
becomes an event and `Unavailable`, and no further request is sent to it; the others
have threads of their own. When the helper crashes, the marker page names the device: it
is left alone for 1, 2, 4 … 60 s, and a new helper serves the others at once. A helper that was
killed is replaced at once, too; one that is killed again before a second is over, after a pause.

One device behind a helper as the recorder sees it: its pending request and its newest values.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.isolation import drivers
from clusterprof.agent.isolation.drivers import OPTIONAL_COLLECTORS, DeviceProcessMapper
from clusterprof.agent.isolation.process import MAX_REQUESTS, HelperProcess
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import BY_NAME, Signal

DEADLINE_NS = 1_000_000_000
_CALL_PREFIXES = {"gpu_nvidia": "nvml "}
_REST_NS, _MAX_REST_NS = 1_000_000_000, 60_000_000_000
_NO_ANSWER_YET = Unavailable("failed", "no answer yet")
_PARKED = Unavailable(
    "failed", "paused after it crashed the driver's library", "look for Xid lines in dmesg"
)


class Backoff:
    """Pause before a retry: 1, 2, 4 … 60 s; 1 s again after more than 60 s without a failure."""

    def __init__(self) -> None:
        self._rest_ns = 0
        self.until_ns = 0

    def fail(self, now_ns: int) -> None:
        """Begin the next pause, twice as long as the last unless that ended long ago."""
        if now_ns - self.until_ns > _MAX_REST_NS:
            self._rest_ns = 0
        self._rest_ns = min(max(2 * self._rest_ns, _REST_NS), _MAX_REST_NS)
        self.until_ns = now_ns + self._rest_ns

    def is_over(self, now_ns: int) -> bool:
        """Return whether the pause is over or there was none."""
        return now_ns >= self.until_ns


class RemoteDevice:
    """A device with at most one pending request, its newest values and its problem, if any."""

    def __init__(self, collector: str, entry: dict[str, Any], signals: list[str]) -> None:
        self.entry, self.signals = entry, signals
        self.id = str(entry["id"])
        self.index = int(entry["index"])
        self.t_ns = 0
        """Time of its newest values, ns."""
        self.parked = Backoff()
        self.skipped = False
        """True while the helper runs without this device."""
        self._collector = collector
        self._sequence = 0
        self._sent_ns: int | None = None
        self._adopting = False
        self._latest: list[Value] = []
        """Latest value of each signal that the helper sent."""
        self._values: list[Value] | None = None
        self._hung: Unavailable | None = None
        self._nothing_new = False

    @property
    def is_awaiting_answer(self) -> bool:
        """True while a request is unanswered."""
        return self._sent_ns is not None

    @property
    def has_no_new_values(self) -> bool:
        """True when there are no new values, or a slow answer is still to come."""
        awaiting = self.is_awaiting_answer and not self.skipped and self._hung is None
        may_be_slow = self._collector in OPTIONAL_COLLECTORS
        return self._values is None and (self._nothing_new or (may_be_slow and awaiting))

    @property
    def is_hung(self) -> bool:
        """True while its answer is overdue."""
        return self._hung is not None

    def next_request(self, now_ns: int) -> list[Any] | None:
        """Return the next request: for values, or to adopt the device again.

        None while a request is unanswered or the device is parked.
        """
        if self._sent_ns is not None or not self.parked.is_over(now_ns):
            return None
        if self.skipped:
            return ["adopt", self.index]
        return ["sample", self.index, self._sequence + 1]

    def mark_sent(self, now_ns: int) -> None:
        """Note that the request of `next_request` was sent."""
        self._sent_ns = now_ns
        self._adopting = self.skipped
        if not self.skipped:
            self._sequence += 1

    def handle_values(self, message: list[Any], now_ns: int) -> list[tuple[str, dict[str, Any]]]:
        """Apply a `values` message; return the events it contains."""
        _, _, sequence, t_ns, changes, notes = message
        self._apply_changes(changes or ())  # also those of an answer that arrives too late
        events = [(kind, {**self._attributes(), **attributes}) for kind, attributes in notes]
        if sequence == self._sequence:
            events += self._finish_request(now_ns)
            self._nothing_new = changes is None
            if changes is not None:
                self.t_ns = t_ns
                self._values = self._latest.copy()
        return events

    def handle_adopted(self, entry: dict[str, Any], signals: list[str]) -> bool:
        """Apply an `adopted` message; return True when the device is no longer the one it was."""
        self._adopting = self.skipped = False
        self._sent_ns = None
        self._hung = None
        # A GPU in MIG mode is reopened without its instances: all must be enumerated again.
        return not self.matches(entry, signals) or entry.get("mig") is True

    def matches(self, entry: dict[str, Any], signals: list[str]) -> bool:
        """Return whether a helper's description of a device matches this one."""
        return str(entry["id"]) == self.id and signals == self.signals

    def check_deadline(
        self, now_ns: int, helper: HelperProcess | None
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the event that the device hangs, once, when its answer is overdue."""
        if self._sent_ns is None or self._hung or now_ns - self._sent_ns < DEADLINE_NS:
            return []
        call = helper.find_unfinished_call(self.index) if helper is not None else None
        name = call.call if call is not None else ""
        inside = f" (inside {_CALL_PREFIXES.get(self._collector, '')}{name})" if name else ""
        self._hung = Unavailable("failed", f"no answer for over a second{inside}")
        return [("collector-hung", {**self._attributes(), "call": name})]

    def take(self) -> list[Value] | None:
        """Return the values that arrived since the last call, None if there are none."""
        values, self._values = self._values, None
        return values

    def reason(self, otherwise: Unavailable | None) -> Unavailable:
        """Return why there are no values."""
        if self.skipped or self._adopting:
            return _PARKED
        return self._hung or otherwise or _NO_ANSWER_YET

    def park(self, now_ns: int) -> None:
        """Leave the device alone for a while, because it crashed the helper."""
        self.parked.fail(now_ns)
        self.skipped = True

    def forget(self) -> None:
        """Drop the pending request, because its helper is gone; earlier values remain valid."""
        self._sent_ns = None
        self._adopting = self._nothing_new = False
        self._hung = None

    def _apply_changes(self, changes: Sequence[Any]) -> None:
        """Apply [place, value, …]; the first answer of a helper contains every signal."""
        if len(changes) == 2 * len(self.signals):
            self._latest = [_NO_ANSWER_YET] * len(self.signals)
        for index, value in zip(changes[::2], changes[1::2]):
            if index >= len(self._latest):  # more signals than the device announced
                self._latest = []
                return
            self._latest[index] = _decode_value(value)

    def _finish_request(self, now_ns: int) -> list[tuple[str, dict[str, Any]]]:
        sent_ns, self._sent_ns = self._sent_ns, None
        if self._hung is None:
            return []
        self._hung = None
        hung_ns = now_ns - (sent_ns if sent_ns is not None else now_ns)
        return [("collector-recovered", {**self._attributes(), "hung_ns": hung_ns})]

    def _attributes(self) -> dict[str, str]:
        return {"collector": self._collector, "device": self.id}


def _decode_value(value: Any) -> Value:
    return Unavailable(*value) if isinstance(value, list) else value


CollectorEvent = tuple[str, dict[str, Any]]

_FIRST_WAIT_SECONDS = 2.0
_MAX_ABANDONED_HELPERS = 2
_LIBRARY_INDEX = -1
_STARTING = Unavailable("failed", "the helper process is starting")
_TOO_MANY_HELPERS = Unavailable(
    "failed", "earlier helpers still hang in the driver", "reboot the node"
)


class IsolatedCollector:
    """One isolated collector; keeps working when its library hangs or crashes."""

    isolated: ClassVar[bool] = True
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(
        self,
        name: str,
        context: Context,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        explain_absence: Callable[[Mapping[str, str]], Unavailable | None] | None = None,
        options: Sequence[str] = (),
        first_wait_seconds: float = _FIRST_WAIT_SECONDS,
    ) -> None:
        self.name = name
        self.sampled_ns = 0
        """Time of the newest of the values that `sample()` returned, ns."""
        self._python, self._clock, self._options = python, clock, options
        self._explain_absence = explain_absence or (
            lambda environ: drivers.explain_absence(name, environ)
        )
        library_name = drivers.LIBRARY_NAMES.get(name, name)
        remedy = "look at the driver; others are unaffected"
        self._no_answer = Unavailable("failed", f"{library_name} does not answer", remedy)
        crashed = f"{library_name} crashed its process; it is retried after a pause"
        self._resting = Unavailable("failed", crashed)
        self._environment = dict(os.environ if environment is None else environment)
        self._helper: HelperProcess | None = None
        self._abandoned: list[HelperProcess] = []
        self._devices: list[RemoteDevice] = []
        self._events: list[CollectorEvent] = []
        self._pids = DeviceProcessMapper(context)
        self._started_ns = 0
        self._opened = self._hung = self._changed = False
        self._first, self._first_wait_seconds = True, first_wait_seconds
        self._refusal: Unavailable | None = None
        self._crashed_unopened: set[int] = set()
        self._rest = Backoff()

    @property
    def pid(self) -> int | None:
        """Process id of the helper, to account for recording costs; None without a helper."""
        return None if self._helper is None else self._helper.pid

    def list_ending_pids(self) -> list[int]:
        """Return the helpers whose pipe is closed but that have not ended: devices may be open."""
        self._abandoned = [helper for helper in self._abandoned if not helper.reap()]
        return [helper.pid for helper in self._abandoned]

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Start the helper and return the columns of its devices.

        Waits briefly for the devices and their first values, on the first call only; later
        calls from the loop take what has arrived since.
        Raises: Unavailable when the library cannot be used; NothingNew while the helper still
        looks for devices.
        """
        if self._refusal is None:
            self._refusal = self._explain_absence(self._environment)
        now_ns = self._clock()
        if self._refusal is None and self._helper is None:
            if not self._rest.is_over(now_ns):
                raise self._resting
            self._start(now_ns)
        self._receive(now_ns)
        end, self._first = time.monotonic() + self._first * self._first_wait_seconds, False
        self._wait(end, lambda: self._opened or self._refusal is not None)
        self._raise_refusal()
        if not self._opened:
            if self._helper is None:
                raise self._resting
            raise self._no_answer if self._check_open_deadline(self._clock()) else NothingNew
        self._changed = False
        self._send_requests(self._clock())
        self._wait(end, lambda: not any(device.is_awaiting_answer for device in self._devices))
        return [(BY_NAME[name], device.id) for device in self._devices for name in device.signals]

    def sample(self) -> Sequence[Value]:
        """Return the values that have arrived.

        Raises: DevicesChanged when a restart found other devices; NothingNew when a device has
        no new values or its tool has not answered yet.
        """
        now_ns = self._clock()
        if self._helper is None and self._rest.is_over(now_ns):
            self._start(now_ns)
        self._receive(now_ns)
        if self._changed:
            raise DevicesChanged("the GPUs of this node are not those of before")
        self._check_open_deadline(now_ns)
        values: list[Value] = []
        if any(device.has_no_new_values for device in self._devices):
            for device in self._devices:
                self._events += device.check_deadline(now_ns, self._helper)
            if not any(device.is_hung for device in self._devices):
                self._send_requests(now_ns)
                raise NothingNew
        for device in self._devices:
            self._events += device.check_deadline(now_ns, self._helper)
            arrived, width = device.take(), len(device.signals)
            if arrived is None or len(arrived) != width:
                values += [device.reason(_STARTING if not self._opened else None)] * width
            else:
                values += arrived
        self.sampled_ns = max((device.t_ns for device in self._devices), default=0)
        if self._opened:
            self._send_requests(now_ns)
        return values

    def inventory(self) -> list[dict[str, Any]]:
        """Return a description of each device for the header."""
        return [dict(device.entry) for device in self._devices]

    def events(self) -> list[CollectorEvent]:
        """Return (kind, attributes) of the events since the last call.

        Kinds: collector-hung, collector-recovered, helper-died, helper-restarted, device-lost,
        call-slowed, device-used.
        """
        events, self._events = self._events, []
        return self._pids.map_events(events)

    def close(self) -> None:
        """Close the helper's pipe and return at once, whatever the helper is doing."""
        if self._helper is not None:
            self._helper.close()
            self._abandoned.append(self._helper)
        self._helper = None
        self._opened = self._hung = False
        for device in self._devices:
            device.forget()
            device.take()

    def _raise_refusal(self) -> None:
        """Raise the reason that the helper sent instead of devices; a failure may be retried."""
        refusal = self._refusal
        if refusal is None:
            return
        self.close()
        if refusal.kind == "failed":
            self._refusal = None
        raise refusal

    def _start(self, now_ns: int) -> None:
        if len(self.list_ending_pids()) >= _MAX_ABANDONED_HELPERS:
            raise _TOO_MANY_HELPERS
        parked = {d.index for d in self._devices if not d.parked.is_over(now_ns)}
        skip = ",".join(str(index) for index in sorted(parked | self._crashed_unopened))
        arguments = [self.name, "--skip", skip, *self._options]
        try:
            self._helper = HelperProcess(self._python, arguments, self._environment)
        except OSError as error:
            self._rest.fail(now_ns)
            message = f"cannot start {self._python}: {error.strerror}"
            raise Unavailable("failed", message) from None
        self._started_ns = now_ns
        self._opened = self._hung = False
        for device in self._devices:
            device.skipped = device.index in parked

    def _wait(self, end: float, is_done: Callable[[], bool]) -> None:
        while not is_done() and self._helper is not None:
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                return
            self._helper.wait_readable(remaining_s)
            self._receive(self._clock())

    def _receive(self, now_ns: int) -> None:
        if self._helper is None:
            return
        for message in self._helper.receive():
            kind = message[0]
            if kind == "values":
                self._events += self._devices[message[1]].handle_values(message, now_ns)
            elif kind == "opened":
                self._set_devices(message[1], message[2], now_ns)
            elif kind == "adopted":
                self._changed |= self._devices[message[1]].handle_adopted(message[2], message[3])
            elif kind == "unavailable":
                self._refusal = Unavailable(*message[1:5])
        if self._helper.ended():
            self._handle_crash(now_ns)

    def _set_devices(
        self, inventory: list[dict[str, Any]], signal_lists: list[list[str]], now_ns: int
    ) -> None:
        if self._hung:
            attributes = {"device": "", "hung_ns": now_ns - self._started_ns}
            self._events.append(("collector-recovered", {"collector": self.name, **attributes}))
        self._opened, self._hung = True, False
        if not self._devices:
            self._devices = [
                RemoteDevice(self.name, *pair) for pair in zip(inventory, signal_lists)
            ]
            for index in self._crashed_unopened:
                self._devices[index].park(now_ns)
            self._crashed_unopened = set()
            return
        self._events.append(("helper-restarted", {"collector": self.name}))
        unchanged = len(inventory) == len(self._devices) and all(
            device.skipped or device.matches(entry, signals)
            for device, entry, signals in zip(self._devices, inventory, signal_lists)
        )
        if not unchanged:
            resting = {d.index: d for d in self._devices if d.skipped}
            self._devices = [
                resting.get(int(entry["index"])) or RemoteDevice(self.name, entry, signals)
                for entry, signals in zip(inventory, signal_lists)
            ]
            self._changed = True

    def _handle_crash(self, now_ns: int) -> None:
        """Record which device crashed the helper, park it, and restart for the others."""
        assert self._helper is not None
        helper, self._helper = self._helper, None
        # Killed by a user, or for its memory: no device did it, whichever was being asked.
        is_killed = helper.exit_signal == signal.SIGKILL
        crashed_calls = [] if is_killed else helper.find_crashed_calls()
        helper.close()
        self._opened = False
        named = [d for d in self._devices if any(call.device == d.index for call in crashed_calls)]
        attributes: dict[str, Any] = {
            "collector": self.name,
            "signal": helper.exit_signal,
            "devices": [device.id for device in named],
            "calls": [call.call for call in crashed_calls],
        }
        self._events.append(("helper-died", attributes))
        for device in self._devices:
            device.forget()
        for device in named:
            device.park(now_ns)
        if not self._devices:
            self._crashed_unopened |= {call.device for call in crashed_calls if call.device >= 0}
        may_start = is_killed and self._rest.is_over(now_ns)
        if not (named or self._crashed_unopened):
            self._rest.fail(now_ns)  # the library itself crashed, or the cause is unknown
            if not may_start:
                return
        self._start(now_ns)

    def _check_open_deadline(self, now_ns: int) -> bool:
        """Return whether the library is overdue to open; record the first time as an event."""
        if self._opened or self._helper is None or now_ns - self._started_ns < 2 * DEADLINE_NS:
            return self._hung
        if not self._hung:
            self._hung = True
            call = self._helper.find_unfinished_call(_LIBRARY_INDEX)
            attributes = {"device": "", "call": call.call if call else ""}
            self._events.append(("collector-hung", {"collector": self.name, **attributes}))
        return True

    def _send_requests(self, now_ns: int) -> None:
        if self._helper is None:
            return
        pending = [
            (d, request) for d in self._devices if (request := d.next_request(now_ns)) is not None
        ]
        for begin in range(0, len(pending), MAX_REQUESTS):
            block = pending[begin : begin + MAX_REQUESTS]
            if self._helper.send([request for _, request in block]):
                for device, _ in block:
                    device.mark_sent(now_ns)
