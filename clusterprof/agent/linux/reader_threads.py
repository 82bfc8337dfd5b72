"""A reading that a driver may delay, taken in a thread of its own so that no caller waits.

Some counters live in a network card's firmware. Reading them takes milliseconds and a lock of the
whole network stack, and never returns when the firmware hangs. So a thread reads them, and `take()`
returns what it has read since the last call. By default it reads at most a 200th of the time. A
thread that does not return is abandoned.

Several devices read in parallel, each by its own thread, as one sample of all.

A slow device delays the sample. A device that does not answer for 2 s has that reason in place of
its values, and the sample continues without it. All devices together are read at most a fiftieth of
the time.

Values of several devices that one thread reads together, served device by device.

The thread stores one row per device. Each device returns every row once and "nothing new" in
between. A source that has been silent for too long yields a reason, never an old value.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from clusterprof.errors import NothingNew, Unavailable

DEADLINE_NS = 2_000_000_000
_REST_FACTOR = 200
_FIRST_WAIT_SECONDS = 0.5
_LATER_WAIT_SECONDS = 0.2  # when it is reopened inside the recorder's loop
_STACK_BYTES = 1 << 20  # the recorder's address space is limited; the usual size is 8 MiB
Reading = TypeVar("Reading")
SILENT = Unavailable(
    "failed", "the driver does not answer", "check the kernel log; other devices are unaffected"
)


class BackgroundReader(Generic[Reading]):
    """A function that is called repeatedly in a thread, with a pause between two calls."""

    def __init__(
        self,
        read: Callable[[], Reading],
        clock: Callable[[], int] = time.monotonic_ns,
        first_wait_seconds: float = _FIRST_WAIT_SECONDS,
        rest_factor: int = _REST_FACTOR,
        rest_ns: int = 0,
    ) -> None:
        """Set up the reader.

        After a reading the thread pauses for `rest_factor` times its duration, at least `rest_ns`.
        """
        self._read = read
        self._clock = clock
        self._rest_times, self._rest_ns = rest_factor, rest_ns
        self._wait_seconds = first_wait_seconds
        self._worker: _Worker[Reading] | None = None

    @property
    def hangs(self) -> bool:
        """True while a reading is in progress: its files must not be closed."""
        return self._worker is not None and self._worker.hangs

    def first(self) -> tuple[int, Reading]:
        """Start the thread and return its first reading as (time it was taken in ns, value).

        Raises: Unavailable when no reading arrives in time, or a reading from before `close()`
        still hangs; also what the function raised.
        """
        self.start()
        self.wait(self._wait_seconds)
        self._wait_seconds = min(self._wait_seconds, _LATER_WAIT_SECONDS)
        reading = self.take()
        if reading is None:
            raise SILENT.with_traceback(None)
        return reading

    def start(self) -> None:
        """Start the thread and request the first reading.

        Raises: Unavailable while an earlier reading hangs.
        """
        if self.hangs:
            raise SILENT.with_traceback(None)
        self._worker = _Worker(self._read, self._clock, self._rest_times, self._rest_ns)
        self._worker.request()

    def wait(self, seconds: float) -> None:
        """Wait for the reading in progress, at most this many seconds."""
        if self._worker is not None:
            self._worker.answered.wait(max(0.0, seconds))

    def take(self) -> tuple[int, Reading] | None:
        """Return the reading since the last call and request the next; None = no new reading.

        Raises: Unavailable when a reading has been in progress for 2 s; also what the function
        raised.
        """
        worker = self._worker
        assert worker is not None, "first() comes first"
        if worker.hangs:
            if self._clock() - worker.requested_ns >= DEADLINE_NS:
                raise SILENT.with_traceback(None)
            return None
        answer, worker.answer = worker.answer, None
        if self._clock() >= worker.due_ns:
            worker.request()
        if answer is None:
            return None
        taken_ns, reading = answer
        if isinstance(reading, Exception):
            raise reading
        return taken_ns, reading

    def close(self, release: Callable[[], None] = lambda: None) -> None:
        """End the thread once its reading returns; `release` then closes what it reads.

        Without a reading in progress `release` is called immediately.
        """
        if self._worker is not None and self._worker.hangs:
            self._worker.end(release)
            return
        release()
        if self._worker is not None:
            self._worker.end()


class _Worker(Generic[Reading]):
    """The thread, and the requests and answers that it exchanges with its owner."""

    def __init__(
        self, read: Callable[[], Reading], clock: Callable[[], int], rest_factor: int, rest_ns: int
    ) -> None:
        self._read, self._clock = read, clock
        self._rest_times, self._rest_ns = rest_factor, rest_ns
        self._asked = threading.Event()
        self._ended = False
        self._let_go: Callable[[], None] = lambda: None
        self.answered = threading.Event()
        self.answered.set()
        self.answer: tuple[int, Reading | Exception] | None = None
        self.requested_ns = self.due_ns = 0
        thread = threading.Thread(target=self._run, daemon=True, name="aside")
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual_bytes)

    @property
    def hangs(self) -> bool:
        """True while a reading is in progress."""
        return not self.answered.is_set()

    def request(self) -> None:
        """Request one reading."""
        self.answered.clear()
        self.requested_ns = self._clock()
        self._asked.set()

    def end(self, release: Callable[[], None] = lambda: None) -> None:
        """End the thread once it is idle, and call `release` last."""
        if not self._ended:
            self._let_go = release
        self._ended = True
        self._asked.set()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._ended:
                self._let_go()
                self.answered.set()
                return
            began_ns = self._clock()
            reading: Reading | Exception
            try:
                reading = self._read()
            except Exception as error:
                reading = error
            took_ns = self._clock() - began_ns
            self.due_ns = began_ns + took_ns + max(self._rest_times * took_ns, self._rest_ns)
            self.answer = (began_ns + took_ns // 2, reading)
            self.answered.set()


_PARALLEL_REST_FACTOR = 50


class ParallelReaders(Generic[Reading]):
    """Named functions that are called repeatedly, each by at most one thread."""

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        first_wait_seconds: float = _FIRST_WAIT_SECONDS,
        rest_ns: int = 0,
    ) -> None:
        """Set up the readers.

        rest_ns: minimum time between two readings of a device.
        """
        self._clock, self._rest_ns = clock, rest_ns
        self._wait_seconds = first_wait_seconds
        self._readers: dict[str, BackgroundReader[Reading]] = {}
        self._abandoned: dict[str, BackgroundReader[Reading]] = {}
        self._reads: dict[str, Callable[[], Reading]] = {}
        self._rest = _PARALLEL_REST_FACTOR
        self._taken: dict[str, tuple[int, Reading]] = {}
        self._silent: set[str] = set()

    def open(self, reads: Mapping[str, Callable[[], Reading]]) -> None:
        """Start a thread for each function and wait briefly for their first readings."""
        self._reads = dict(reads)
        self._rest = _PARALLEL_REST_FACTOR * max(1, len(reads))
        self._taken.clear()
        self._silent.clear()
        abandoned = {name: self._abandoned[name] for name in reads if name in self._abandoned}
        for name in reads:
            if name not in abandoned:
                self._start(name)
        end = time.monotonic() + self._wait_seconds
        for name, aside in abandoned.items():  # a thread that was merely in mid-reading returns
            aside.wait(end - time.monotonic())
            if aside.hangs:
                self._readers[name] = aside
                self._silent.add(name)
            else:
                del self._abandoned[name]
                self._start(name)
        for name, aside in self._readers.items():
            if name not in self._silent:
                aside.wait(end - time.monotonic())
                if aside.hangs:
                    self._silent.add(name)
        self._wait_seconds = min(self._wait_seconds, _LATER_WAIT_SECONDS)

    def take(self) -> tuple[int, dict[str, Reading | Unavailable]]:
        """Return (time in ns, values by name) since the last call; silent devices have a reason.

        Raises: NothingNew while some readings are outstanding, Unavailable when all devices are
        silent; also what the functions raised.
        """
        for name, aside in list(self._readers.items()):
            if name in self._taken:
                continue
            if name in self._abandoned:
                if not aside.hangs:
                    del self._abandoned[name]
                    self._start(name)
                continue
            try:
                reading = aside.take()
            except Unavailable as reason:
                if reason is not SILENT:
                    raise
                self._silent.add(name)
                continue
            if reading is not None:
                self._silent.discard(name)
                self._taken[name] = reading
        if len(self._silent) == len(self._readers):
            raise SILENT.with_traceback(None)
        if len(self._taken) + len(self._silent) < len(self._readers) or not self._taken:
            raise NothingNew
        taken_all, self._taken = self._taken, {}
        readings = {
            name: taken_all[name][1] if name in taken_all else SILENT for name in self._readers
        }
        return max(taken_ns for taken_ns, _ in taken_all.values()), readings

    def _start(self, name: str) -> None:
        read = self._reads[name]
        self._readers[name] = BackgroundReader(
            read, self._clock, rest_factor=self._rest, rest_ns=self._rest_ns
        )
        self._readers[name].start()

    def close(self, release: Mapping[str, Callable[[], None]] = MappingProxyType({})) -> None:
        """End the threads once their readings return; `release` closes what each reads.

        Without a reading in progress it is called immediately.
        """
        for name, aside in self._readers.items():
            aside.close(release.get(name, lambda: None))
        for name in release.keys() - self._readers.keys():
            release[name]()  # no thread reads it yet
        self._abandoned |= {name: aside for name, aside in self._readers.items() if aside.hangs}
        self._readers, self._taken, self._reads = {}, {}, {}


Value = int | float | Unavailable
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0


class LatestRows:
    """The newest rows; written by one thread, read by several."""

    def __init__(
        self,
        width: int,
        timeout_ns: int,
        timeout_reason: Callable[[], Unavailable],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.clock, self.timeout_ns, self.timeout_reason, self.width = (
            clock,
            timeout_ns,
            timeout_reason,
            width,
        )
        self.began_ns = clock()
        self.newest: tuple[int, Sequence[Sequence[Value]] | Unavailable] | None = None
        """When the rows arrived, and one row per device or the reason why there are none."""

    def put(self, rows: Sequence[Sequence[Value]] | Unavailable) -> None:
        """Store new rows, or one reason that replaces all of them."""
        self.newest = (self.clock(), rows)


class RowReader:
    """One device of the shared rows; `sample()` never raises and never waits."""

    def __init__(self, feed: LatestRows, index: int) -> None:
        self.index = index
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=64)
        """Events since the list was last cleared."""
        self.t_ns = 0
        """When the values returned last were taken."""
        self._feed = feed
        self._seen_ns = 0

    def sample(self) -> list[Value] | None:
        """Return the row that arrived since the last call; None = no new row."""
        feed, newest = self._feed, self._feed.newest
        if newest is not None and newest[0] > self._seen_ns:
            self._seen_ns = self.t_ns = newest[0]
            rows = newest[1]
            return [rows] * feed.width if isinstance(rows, Unavailable) else list(rows[self.index])
        now_ns = feed.clock()
        if now_ns - max(self.t_ns, self._seen_ns, feed.began_ns) > feed.timeout_ns:
            self.t_ns = now_ns
            return [feed.timeout_reason()] * feed.width
        return None


class PollingThread:
    """The thread that updates the shared rows by calling `work(wanted)` repeatedly.

    `work` is called again `every_seconds` after its start. If it raises Unavailable, the reason
    replaces the rows, and the next call waits 1, 2, 4 … 60 s.
    """

    def __init__(
        self, feed: LatestRows, work: Callable[[Callable[[], bool]], None], every_seconds: float
    ) -> None:
        self._feed, self._work, self._every_seconds = feed, work, every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="feed")

    def start(self) -> None:
        """Start the thread; it runs until `stop()`."""
        self._thread.start()

    def stop(self, seconds: float = 3.0) -> None:
        """Ask the work to end and wait for it, at most `seconds`."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _wanted(self) -> bool:
        return not self._over.is_set()

    def _run(self) -> None:
        retry_seconds = _MIN_RETRY_SECONDS
        while self._wanted():
            began = time.monotonic()
            try:
                self._work(self._wanted)
                pause, retry_seconds = self._every_seconds, _MIN_RETRY_SECONDS
            except Unavailable as reason:
                self._feed.put(reason)
                if time.monotonic() - began > _MAX_RETRY_SECONDS:
                    retry_seconds = _MIN_RETRY_SECONDS
                pause, retry_seconds = retry_seconds, min(2 * retry_seconds, _MAX_RETRY_SECONDS)
            except Exception as error:
                self._feed.put(Unavailable("failed", f"{type(error).__name__}: {error}"[:300]))
                pause, retry_seconds = retry_seconds, min(2 * retry_seconds, _MAX_RETRY_SECONDS)
            self._over.wait(max(0.0, pause - (time.monotonic() - began)))
