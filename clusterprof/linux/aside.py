"""A reading that a driver may hold up, taken in a thread of its own: nobody waits for it.

Some counters lie in a network card's firmware. Reading them takes milliseconds and a lock of the
whole network stack, and for ever when the firmware hangs. So a thread reads, and `take()` returns
what it brought since the last call. It reads at most a 200th of the time, or as its maker says, and
is left behind when it does not come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from clusterprof.errors import Unavailable

DEADLINE_NS = 2_000_000_000
_REST_TIMES = 200
_FIRST_WAIT_SECONDS = 0.5
_LATER_WAIT_SECONDS = 0.2  # opened anew, within the recorder's loop
_STACK_BYTES = 1 << 20  # the recorder's address space is bounded; 8 MiB is usual
Reading = TypeVar("Reading")
SILENT = Unavailable(
    "failed", "the driver does not answer", "look at the kernel's log; others are unaffected"
)


class Aside(Generic[Reading]):
    """One function, called again and again in a thread that waits in between."""

    def __init__(
        self,
        read: Callable[[], Reading],
        clock: Callable[[], int] = time.monotonic_ns,
        first_wait_seconds: float = _FIRST_WAIT_SECONDS,
        rest_times: int = _REST_TIMES,
        rest_ns: int = 0,
    ) -> None:
        """After a reading it rests `rest_times` as long as that took, and at least `rest_ns`."""
        self._read = read
        self._clock = clock
        self._rest_times, self._rest_ns = rest_times, rest_ns
        self._wait_seconds = first_wait_seconds
        self._worker: _Worker[Reading] | None = None

    @property
    def hangs(self) -> bool:
        """True while a reading is under way: what it reads must not be taken from it."""
        return self._worker is not None and self._worker.hangs

    def first(self) -> tuple[int, Reading]:
        """Start, and wait a moment for the first reading: (when it was taken, what it is).

        Raises `Unavailable` when it does not come, or one from before a `close()` still hangs;
        raises what the function raised.
        """
        self.start()
        self.wait(self._wait_seconds)
        self._wait_seconds = min(self._wait_seconds, _LATER_WAIT_SECONDS)
        taken = self.take()
        if taken is None:
            raise SILENT.with_traceback(None)
        return taken

    def start(self) -> None:
        """Start and ask for the first reading; raises `Unavailable` while an old one hangs."""
        if self.hangs:
            raise SILENT.with_traceback(None)
        self._worker = _Worker(self._read, self._clock, self._rest_times, self._rest_ns)
        self._worker.ask()

    def wait(self, seconds: float) -> None:
        """Wait until the reading that is under way has come, or so long."""
        if self._worker is not None:
            self._worker.answered.wait(max(0.0, seconds))

    def take(self) -> tuple[int, Reading] | None:
        """Return what has been read since the last call and ask anew; None = nothing yet.

        Raises `Unavailable` when a reading has been under way for 2 s, and what the function
        raised.
        """
        worker = self._worker
        assert worker is not None, "first() comes first"
        if worker.hangs:
            if self._clock() - worker.asked_ns >= DEADLINE_NS:
                raise SILENT.with_traceback(None)
            return None
        answer, worker.answer = worker.answer, None
        if self._clock() >= worker.due_ns:
            worker.ask()
        if answer is None:
            return None
        taken_ns, reading = answer
        if isinstance(reading, Exception):
            raise reading
        return taken_ns, reading

    def close(self, let_go: Callable[[], None] = lambda: None) -> None:
        """Let the thread end, when it comes back; `let_go` closes what it reads, now or then."""
        if self._worker is not None and self._worker.hangs:
            self._worker.end(let_go)
            return
        let_go()
        if self._worker is not None:
            self._worker.end()


class _Worker(Generic[Reading]):
    """The thread, and what passes between it and whoever asks."""

    def __init__(
        self,
        read: Callable[[], Reading],
        clock: Callable[[], int],
        rest_times: int,
        rest_ns: int,
    ) -> None:
        self._read, self._clock = read, clock
        self._rest_times, self._rest_ns = rest_times, rest_ns
        self._asked = threading.Event()
        self._ended = False
        self._let_go: Callable[[], None] = lambda: None
        self.answered = threading.Event()
        self.answered.set()
        self.answer: tuple[int, Reading | Exception] | None = None
        self.asked_ns = self.due_ns = 0
        thread = threading.Thread(target=self._run, daemon=True, name="aside")
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual_bytes)

    @property
    def hangs(self) -> bool:
        """True while a reading is under way."""
        return not self.answered.is_set()

    def ask(self) -> None:
        """Have it read once."""
        self.answered.clear()
        self.asked_ns = self._clock()
        self._asked.set()

    def end(self, let_go: Callable[[], None] = lambda: None) -> None:
        """Have it end once it waits again, and call `let_go` as the last thing it does."""
        if not self._ended:
            self._let_go = let_go
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
