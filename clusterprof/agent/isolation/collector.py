"""A collector in an abandonable process, seen by the recorder's loop as any other collector.

`sample()` never waits: it takes what has arrived since the last tick and asks every device that
owes no answer. So values were taken just after the tick before; `sampled_ns` says when. A device
that does not answer within a second is an event and `Unavailable`, and nothing else is asked of
it; the others have threads of their own. When the helper crashes, the marker names the device:
it is left alone for 1, 2, 4 … 60 s, and a new helper serves the others at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.recorder import drivers
from clusterprof.recorder.child import ASK_AT_MOST, Child
from clusterprof.recorder.device_pids import DevicePids
from clusterprof.recorder.remote import DEADLINE_NS, Backoff, Remote
from clusterprof.signals import BY_NAME, Signal

Event = tuple[str, dict[str, Any]]

_FIRST_WAIT_SECONDS = 2.0
_ABANDONED_AT_MOST = 2
_LIBRARY = -1
_STARTING = Unavailable("failed", "the helper process is starting")
_STORM = Unavailable("failed", "earlier helpers still hang in the driver", "reboot the node")


class IsolatedCollector:
    """One isolated collector; survives whatever its library does."""

    isolated: ClassVar[bool] = True
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(
        self,
        name: str,
        context: Context,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        absent: Callable[[Mapping[str, str]], Unavailable | None] | None = None,
        options: Sequence[str] = (),
        first_wait_seconds: float = _FIRST_WAIT_SECONDS,
    ) -> None:
        self.name = name
        self.sampled_ns = 0
        """When the newest of the values that `sample()` returned were taken."""
        self._python, self._clock, self._options = python, clock, options
        self._absent = absent or (lambda environ: drivers.why_absent(name, environ))
        word = drivers.WORDS.get(name, name)
        look = "look at the driver; others are unaffected"
        self._silent = Unavailable("failed", f"{word} does not answer", look)
        crashed = f"{word} crashed its process; it is left alone for a while"
        self._resting = Unavailable("failed", crashed)
        self._environment = dict(os.environ if environment is None else environment)
        self._child: Child | None = None
        self._left: list[Child] = []
        self._devices: list[Remote] = []
        self._events: list[Event] = []
        self._pids = DevicePids(context)
        self._started_ns = 0
        self._opened = self._hung = self._changed = False
        self._first, self._first_wait_seconds = True, first_wait_seconds
        self._refusal: Unavailable | None = None
        self._crashed_unopened: set[int] = set()
        self._rest = Backoff()

    @property
    def pid(self) -> int | None:
        """The helper's process, for those who account for what recording costs."""
        return None if self._child is None else self._child.pid

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Start the helper and return its devices' columns.

        Waits for the devices and their first values a while, and only the first time; later
        calls, from within the loop, find what has arrived since. Raises Unavailable, or NothingNew
        while the helper still looks for devices.
        """
        if self._refusal is None:
            self._refusal = self._absent(self._environment)
        now_ns = self._clock()
        if self._refusal is None and self._child is None:
            if not self._rest.over(now_ns):
                raise self._resting
            self._start(now_ns)
        self._receive(now_ns)
        end, self._first = time.monotonic() + self._first * self._first_wait_seconds, False
        self._wait(end, lambda: self._opened or self._refusal is not None)
        self._refuse()
        if not self._opened:
            if self._child is None:
                raise self._resting
            raise self._silent if self._late_opening(self._clock()) else NothingNew
        self._changed = False
        self._ask(self._clock())
        self._wait(end, lambda: not any(device.owes for device in self._devices))
        return [(BY_NAME[name], device.id) for device in self._devices for name in device.signals]

    def sample(self) -> Sequence[Value]:
        """Return what has arrived.

        Raises DevicesChanged when a restart found other devices, NothingNew when a device says so
        or one behind a tool takes its time.
        """
        now_ns = self._clock()
        if self._child is None and self._rest.over(now_ns):
            self._start(now_ns)
        self._receive(now_ns)
        if self._changed:
            raise DevicesChanged("the GPUs of this node are not those of before")
        self._late_opening(now_ns)
        values: list[Value] = []
        if any(device.waits_for_news for device in self._devices):
            for device in self._devices:
                self._events += device.overdue(now_ns, self._child)
            if not any(device.hangs for device in self._devices):
                self._ask(now_ns)
                raise NothingNew
        for device in self._devices:
            self._events += device.overdue(now_ns, self._child)
            taken, width = device.take(), len(device.signals)
            if taken is None or len(taken) != width:
                values += [device.reason(_STARTING if not self._opened else None)] * width
            else:
                values += taken
        self.sampled_ns = max((device.t_ns for device in self._devices), default=0)
        if self._opened:
            self._ask(now_ns)
        return values

    def inventory(self) -> list[dict[str, Any]]:
        """Return for the header what each device is."""
        return [dict(device.entry) for device in self._devices]

    def events(self) -> list[Event]:
        """Return (kind, attributes) of what happened since the last call.

        collector-hung, collector-recovered, helper-died, helper-restarted, device-lost,
        call-slowed, device-used.
        """
        events, self._events = self._events, []
        return self._pids.told(events)

    def close(self) -> None:
        """Close the helper's pipe and return at once, whatever the helper does."""
        if self._child is not None:
            self._child.close()
            self._left.append(self._child)
        self._child = None
        self._opened = self._hung = False
        for device in self._devices:
            device.forget()
            device.take()

    def _refuse(self) -> None:
        """Raise what the helper said instead of its devices; what failed may be tried again."""
        refusal = self._refusal
        if refusal is None:
            return
        self.close()
        if refusal.kind == "failed":
            self._refusal = None
        raise refusal

    def _start(self, now_ns: int) -> None:
        self._left = [child for child in self._left if not child.reap()]
        if len(self._left) >= _ABANDONED_AT_MOST:
            raise _STORM
        parked = {d.index for d in self._devices if not d.parked.over(now_ns)}
        skip = ",".join(str(index) for index in sorted(parked | self._crashed_unopened))
        arguments = [self.name, "--skip", skip, *self._options]
        try:
            self._child = Child(self._python, arguments, self._environment)
        except OSError as error:
            self._rest.fail(now_ns)
            message = f"cannot start {self._python}: {error.strerror}"
            raise Unavailable("failed", message) from None
        self._started_ns = now_ns
        self._opened = self._hung = False
        for device in self._devices:
            device.skipped = device.index in parked

    def _wait(self, end: float, enough: Callable[[], bool]) -> None:
        while not enough() and self._child is not None:
            left = end - time.monotonic()
            if left <= 0:
                return
            self._child.wait_readable(left)
            self._receive(self._clock())

    def _receive(self, now_ns: int) -> None:
        if self._child is None:
            return
        for message in self._child.receive():
            kind = message[0]
            if kind == "values":
                self._events += self._devices[message[1]].answered(message, now_ns)
            elif kind == "opened":
                self._take_devices(message[1], message[2], now_ns)
            elif kind == "adopted":
                self._changed |= self._devices[message[1]].adopted(message[2], message[3])
            elif kind == "unavailable":
                self._refusal = Unavailable(*message[1:4])
        if self._child.ended():
            self._bury(now_ns)

    def _take_devices(
        self, inventory: list[dict[str, Any]], signals: list[list[str]], now_ns: int
    ) -> None:
        if self._hung:
            since = {"device": "", "hung_ns": now_ns - self._started_ns}
            self._events.append(("collector-recovered", {"collector": self.name, **since}))
        self._opened, self._hung = True, False
        if not self._devices:
            self._devices = [Remote(self.name, *pair) for pair in zip(inventory, signals)]
            for index in self._crashed_unopened:
                self._devices[index].park(now_ns)
            self._crashed_unopened = set()
            return
        self._events.append(("helper-restarted", {"collector": self.name}))
        known = len(inventory) == len(self._devices) and all(
            device.skipped or device.is_as(entry, own)
            for device, entry, own in zip(self._devices, inventory, signals)
        )
        if not known:
            resting = {d.index: d for d in self._devices if d.skipped}
            self._devices = [
                resting.get(int(entry["index"])) or Remote(self.name, entry, own)
                for entry, own in zip(inventory, signals)
            ]
            self._changed = True

    def _bury(self, now_ns: int) -> None:
        """Say who killed the helper, leave that device alone, start again for the others."""
        assert self._child is not None
        child, self._child = self._child, None
        culprits = child.culprits()
        child.close()
        self._opened = False
        named = [d for d in self._devices if any(call.device == d.index for call in culprits)]
        attributes: dict[str, Any] = {
            "collector": self.name,
            "signal": child.exit_signal,
            "devices": [device.id for device in named],
            "calls": [call.call for call in culprits],
        }
        self._events.append(("helper-died", attributes))
        for device in self._devices:
            device.forget()
        for device in named:
            device.park(now_ns)
        if not self._devices:
            self._crashed_unopened |= {call.device for call in culprits if call.device >= 0}
        if named or self._crashed_unopened:
            self._start(now_ns)
        else:
            self._rest.fail(now_ns)  # the library itself, or nobody knows

    def _late_opening(self, now_ns: int) -> bool:
        """True, and an event, when the library is not open in time."""
        if self._opened or self._child is None or now_ns - self._started_ns < 2 * DEADLINE_NS:
            return self._hung
        if not self._hung:
            self._hung = True
            call = self._child.in_call(_LIBRARY)
            where = {"device": "", "call": call.call if call else ""}
            self._events.append(("collector-hung", {"collector": self.name, **where}))
        return True

    def _ask(self, now_ns: int) -> None:
        if self._child is None:
            return
        asked = [(d, one) for d in self._devices if (one := d.question(now_ns)) is not None]
        for at in range(0, len(asked), ASK_AT_MOST):
            some = asked[at : at + ASK_AT_MOST]
            if self._child.send([one for _, one in some]):
                for device, _ in some:
                    device.asked(now_ns)
