"""The emulated accelerator of the training script, in the place of a driver.

It has one queue, run in order. A collective is resident on the device from the moment the queue
reaches it until the real transfer is over; later work in the queue waits for that. A thread, like
that of a driver, runs the queue. All times are CLOCK_MONOTONIC in ns.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from clusterprof.demo.accelerator import EmulatedAccelerator

COMPUTE, COLLECTIVE, COPY = "compute", "collective", "copy"
now_ns = time.monotonic_ns


class Event:
    """As torch.cuda.Event: done when the device has finished what was queued before it."""

    def __init__(self, device: Device) -> None:
        self.device, self.t_ns, self.recorded_ns = device, 0, 0

    def record(self, stream=None) -> None:
        self.t_ns, self.recorded_ns = 0, now_ns()
        self.device.place_event(self)

    def query(self) -> bool:
        return 0 < self.t_ns <= now_ns()

    def elapsed_time(self, other: Event) -> float:
        return (other.t_ns - self.t_ns) / 1e6


class Device:
    """One emulated device, its log, and the thread that takes its queue on."""

    def __init__(self, queue_depth: int) -> None:
        self.accelerator = EmulatedAccelerator.from_environment(queue_depth=queue_depth)
        self.accelerator._keep_log = False
        self.log: list[list] = []
        """[start_ns, end_ns, what, ns of it lost to a lowered clock, number of the collective]"""
        self.depth = queue_depth
        self.clock_ratio = 1.0
        self.collectives = 0
        self._queue: deque = deque()
        self._running = self._open = False
        self._started_ns = 0
        self._joined = True
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def throttle(self, clock_ratio: float, bits: int) -> None:
        self.clock_ratio = clock_ratio
        self.accelerator.throttle(clock_ratio, bits)

    def set_queue_depth(self, queue_depth: int) -> None:
        """Let so many launches be in flight from now on."""
        self.depth = self.accelerator._depth = queue_depth

    def submit(self, length_ns: int) -> None:
        with self._change:
            while self._open and len(self._queue) >= self.depth:
                self._change.wait()
            if self._open:
                self._queue.append((COMPUTE, length_ns, now_ns()))
                return
        self._compute(length_ns, None)

    def _compute(self, length_ns: int, at_ns: int | None) -> None:
        end_ns = self.accelerator.submit(length_ns, at_ns)
        took_ns = round(length_ns / self.clock_ratio)
        start_ns, slowed_ns = end_ns - took_ns, took_ns - length_ns
        last = self.log[-1] if self.log else None
        if last and last[2] == COMPUTE and last[1] >= start_ns:
            last[1], last[3] = end_ns, last[3] + slowed_ns
        else:
            self.log.append([start_ns, end_ns, COMPUTE, slowed_ns, -1])

    def collective(self, transfer) -> None:
        """Queue a collective; `transfer` does the real one, in our thread, when it is its turn."""
        with self._change:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_queue, daemon=True, name="driver")
                self._thread.start()
            self._queue.append((COLLECTIVE, transfer, now_ns()))
            self._open, self._joined = True, False
            self._change.notify_all()

    def join(self) -> None:
        """Let later work wait for the collectives so far, as a stream for another."""
        self._joined = True

    def place_event(self, event: Event) -> None:
        """Give an event its instant, or its place in the queue."""
        with self._change:
            if not self._open:
                event.t_ns = max(event.recorded_ns, self.accelerator.end_ns)
                return
            at = len(self._queue)
            while not self._joined and at and self._queue[at - 1][0] == COLLECTIVE:
                at -= 1
            if not self._joined and not at and self._running:
                event.t_ns = max(event.recorded_ns, self._started_ns)
            else:
                self._queue.insert(at, ("event", event, event.recorded_ns))

    def copy(self, size_bytes: int, pinned: bool) -> None:
        """Copy to the device: pageable holds the host, pinned what is submitted later."""
        self.synchronize(copies=False)
        began_ns = now_ns()
        end_ns = self.accelerator.copy(size_bytes, pinned)
        self.log.append([began_ns, max(end_ns, began_ns), COPY, 0, -1])

    def synchronize(self, copies: bool = True) -> None:
        with self._change:
            while self._open:
                self._change.wait()
        if copies:
            self.accelerator.synchronize()

    def _run_queue(self) -> None:
        while True:
            with self._change:
                while not self._queue:
                    self._open = False
                    self._change.notify_all()
                    self._change.wait()
                what, which, at_ns = self._queue.popleft()
                self._running = what == COLLECTIVE
                self._started_ns = max(at_ns, self.accelerator.end_ns)
                self._change.notify_all()
            if what == COMPUTE:
                self._compute(which, at_ns)
            elif what == COLLECTIVE:
                start_ns, end_ns = self.accelerator.wait_on_device(which, at_ns)
                self.log.append([start_ns, end_ns, COLLECTIVE, 0, self.collectives])
                self.collectives += 1
            else:
                which.t_ns = max(at_ns, self.accelerator.end_ns)
            self._running = False
