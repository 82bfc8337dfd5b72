"""The sampling loop: wait for the next tick, sample what is due, periodically yield the records.

A generator of records driven by a given clock. Every collector has its own interval;
ticks lie on the grid `start + k × interval`, so collectors of equal rate share a
wake-up. A late tick is recorded with its real time and never invented; ticks that were
missed are counted.

Reads the files of all collectors that only read files in one loop: most of the work of a tick.

After a sleep every distinct piece of code must be fetched from memory, so one line of
code reads the files of several collectors, whose owners are determined once. Anything
unusual (a file that is gone, denied or too long, a reopened collector) makes every
collector read its own files in that tick and handle the problem itself.

The recorder's clock: reads the time, and waits for a time or for an event.

Collectors in two rate groups: those of the shortest interval, and all others.

The slow group is skipped as a whole until one of its collectors is due. Each keeps its
own time grid; collectors of the fast group that only read files are read together
(`BatchedReader`).

The CPU budget of the recorder: when exceeded, every interval doubles and an event records it.

3 % of one core at 10 Hz, measured over 30 s; a higher requested rate gets
proportionally more.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import ge
from os import pread
from typing import Protocol, TypeVar

from clusterprof.agent.linux.files import FolderWatch, OpenFile
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.trace.schema import Clock as ClockRecord
from clusterprof.trace.schema import Event, Record


class BatchedReader:
    """Runners of one interval that are due together at `due_ns`."""

    def __init__(self, runners: Sequence[CollectorRunner]) -> None:
        self.due_ns = 0
        self.stale = True
        """True when a runner or a file has changed and the members must be regrouped."""
        self.members: list[CollectorRunner] = []
        self._candidates = runners
        self._destinations: list[tuple[Callable[[tuple[int, list[bytes]]], None], int, int]] = []
        self._files: list[tuple[int, int]] = []  # descriptor, size in bytes
        self._complete_below: list[int] = []
        self._grouped_due_ns = 0  # value of `due_ns` when the members were grouped
        for runner in runners:
            runner.on_change = self._changed

    def regroup(self) -> None:
        """Choose anew whose files are read in one batch; other runners read their own files."""
        for runner in self.members:
            if runner.due_ns == self._grouped_due_ns:  # else it rests or was reopened
                runner.due_ns = self.due_ns
        self.stale = False
        readable = [(runner, files) for runner in self._candidates if (files := runner.files())]
        self.due_ns = self._grouped_due_ns = min((slot.due_ns for slot, _ in readable), default=0)
        self.members, self._destinations, open_files = [], [], list[OpenFile]()
        for runner, files in readable:
            if runner.due_ns == self.due_ns:
                self.members.append(runner)
                self._destinations.append(
                    (runner.add_reading, len(open_files), len(open_files) + len(files))
                )
                open_files += files
        single_reads = [read for file in open_files if (read := file.single_read) is not None]
        self._files = [(descriptor, size) for descriptor, size, _ in single_reads]
        self._complete_below = [complete_below for _, _, complete_below in single_reads]

    def tick(self, t_ns: int) -> None:
        """Take a reading of every member."""
        try:
            contents = [pread(descriptor, size, 0) for descriptor, size in self._files]
            complete = True not in map(ge, map(len, contents), self._complete_below)
        except OSError:
            complete = False
        if complete:
            for add_reading, begin, end in self._destinations:
                add_reading((t_ns, contents[begin:end]))
            return
        self.stale = True  # a file may have been reopened, or stay too long
        for runner in self.members:
            runner.tick(t_ns)

    def _changed(self) -> None:
        self.stale = True


class SamplingClock(Protocol):
    """The time interface of the sampling loop; tests supply their own."""

    wakes_on_files: bool
    """True when a wait ends as soon as a new file is announced, so that none is missed."""

    def now_ns(self) -> int:
        """Return CLOCK_MONOTONIC, ns."""
        ...

    def read(self) -> ClockRecord:
        """Return the node's three clocks, read together."""
        ...

    def wait_until(self, t_ns: int) -> bool:
        """Wait until `t_ns`; return True if a watched descriptor ended the wait earlier."""
        ...

    def cpu_ns(self) -> int:
        """Return the CPU time that this process has used, ns."""
        ...


class SystemClock:
    """The kernel's clocks; `watched` are descriptors that end a wait early when readable.

    `news` (inotify, optional) ends one wait early and then none until the next planned
    time: a thousand files that arrive one by one are handled once per tick, not a thousand
    times.
    """

    def __init__(self, watched: Sequence[int], news: FolderWatch | None = None) -> None:
        self._watched = list(watched)
        self._news = news
        self._all_watched = [*watched, news.descriptor] if news is not None else self._watched
        self._news_reported = False
        self.wakes_on_files = news is not None

    now_ns = staticmethod(time.monotonic_ns)
    """Return CLOCK_MONOTONIC, ns; called a dozen times in every tick."""

    def read(self) -> ClockRecord:
        """Return the three clocks; monotonic is read before and after the others and averaged."""
        before = time.monotonic_ns()
        boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        realtime = time.time_ns()
        after = time.monotonic_ns()
        return ClockRecord((before + after) // 2, boottime, realtime)

    def wait_until(self, t_ns: int) -> bool:
        """Wait for the absolute time; select() because poll() rounds up to milliseconds."""
        was_reported, self._news_reported = self._news_reported, False
        remaining_ns = t_ns - time.monotonic_ns()
        if remaining_ns <= 0:
            return True  # no descriptor was checked
        ready = select.select(
            self._watched if was_reported else self._all_watched, (), (), remaining_ns / 1e9
        )[0]
        if self._news is not None and (was_reported or self._news.descriptor in ready):
            self._news.discard_events()
            self._news_reported = not was_reported
            return True
        return bool(ready)

    def cpu_ns(self) -> int:
        """Return the user and system time of this process, ns."""
        return time.process_time_ns()


NEVER_NS = 1 << 62


@dataclass(slots=True)
class Schedule:
    """Lateness and missed ticks of the sampling loop; the `self` collector records them."""

    late_ns: int = 0
    missed: int = 0
    slowdown: int = 1
    """Factor on all intervals, above 1 while the recorder exceeds its CPU budget."""

    def advance(self, due_ns: int, now_ns: int, interval_ns: int, count: int) -> int:
        """Count the lateness of runners due together; return when they are due again, ns."""
        interval_ns *= self.slowdown
        late_ns = now_ns - due_ns
        if late_ns < interval_ns:
            self.late_ns += late_ns * count
            return due_ns + interval_ns
        missed = late_ns // interval_ns
        self.late_ns += late_ns * count
        self.missed += missed * count
        return due_ns + (missed + 1) * interval_ns


def split_rate_groups(runners: Sequence[CollectorRunner]) -> tuple[RateGroup, RateGroup]:
    """Split the runners into those of the shortest interval and the others."""
    shortest_ns = min((runner.interval_ns for runner in runners), default=0)
    fastest = [runner for runner in runners if runner.interval_ns == shortest_ns]
    slower = [runner for runner in runners if runner.interval_ns > shortest_ns]
    return RateGroup(fastest, BatchedReader(fastest)), RateGroup(slower, BatchedReader(()))


class RateGroup:
    """Collector runners that are checked together."""

    def __init__(self, runners: Sequence[CollectorRunner], reader: BatchedReader) -> None:
        """Create a group; `reader` reads the files of those members that share one interval."""
        self._runners = runners
        self._reader = reader
        self._separate: Sequence[CollectorRunner] = runners

    def sample(self, now_ns: int, clock: SamplingClock, schedule: Schedule) -> tuple[int, int]:
        """Sample the runners that are due; return the next due time and the next wake-up time, ns.

        An unavailable collector is retried when another one is sampled.
        """
        soonest_ns = wake_ns = NEVER_NS
        reader = self._reader
        if reader.stale:
            reader.regroup()
            self._separate = [runner for runner in self._runners if runner not in reader.members]
        members = reader.members
        if members:
            if now_ns >= reader.due_ns:
                interval_ns = members[0].interval_ns
                reader.due_ns = schedule.advance(reader.due_ns, now_ns, interval_ns, len(members))
                reader.tick(now_ns)
            soonest_ns = wake_ns = reader.due_ns
        for runner in self._separate:
            # One whose device was released stays due, so that it is opened at once on request.
            if now_ns >= runner.due_ns and not runner.is_released:
                t_ns = clock.now_ns()  # earlier collectors of this tick took time
                runner.due_ns = schedule.advance(runner.due_ns, t_ns, runner.interval_ns, 1)
                runner.tick(t_ns)
            due_ns = runner.due_ns
            if due_ns < soonest_ns:
                soonest_ns = due_ns
            if due_ns < wake_ns and runner.status == "available":
                wake_ns = due_ns
        return soonest_ns, wake_ns


WINDOW_NS = 30_000_000_000
CPU_RATIO_AT_10_HZ = 0.03
MAX_SLOWDOWN = 64


class Budget:
    """CPU time compared with wall time, in windows of 30 s."""

    def __init__(self, hz: float, now_ns: int, cpu_ns: int) -> None:
        self.ratio = CPU_RATIO_AT_10_HZ * max(hz, 10.0 / 3) / 10
        self._since_ns = now_ns
        self._cpu_ns = cpu_ns

    def check(self, now_ns: int, cpu_ns: int, slowdown: int) -> Event | None:
        """Return an event with a new slowdown factor if the window's CPU use requires it."""
        wall_ns = now_ns - self._since_ns
        if wall_ns < WINDOW_NS:
            return None
        used = (cpu_ns - self._cpu_ns) / wall_ns
        self._since_ns, self._cpu_ns = now_ns, cpu_ns
        attributes = {"cpu_ratio": used, "budget_ratio": self.ratio}
        if used > self.ratio and slowdown < MAX_SLOWDOWN:
            return Event(now_ns, "recorder-slowed", {**attributes, "slowdown": slowdown * 2})
        # Halving the intervals about doubles the cost: do it only well below half the budget.
        if slowdown > 1 and used < self.ratio / 3:
            return Event(now_ns, "recorder-restored", {**attributes, "slowdown": slowdown // 2})
        return None


# kill -9 must lose less than a second, including the poll by which the ring reader lags.
FLUSH_INTERVAL_NS = 800_000_000
CLOCK_INTERVAL_NS = 10_000_000_000
_Answer = TypeVar("_Answer")


class RecordSource(Protocol):
    """A producer of its own records: registrations, rings, helpers.

    A source that needs prompt attention also has a method `look(now_ns)`. It is called when
    the clock reports a new file, and in the last two ticks before a flush; at every tick
    when the clock cannot report new files. It returns True to be called again at the next
    tick.
    """

    def take(self, now_ns: int) -> Sequence[Record]:
        """Return the records since the last call."""
        ...

    def finish(self, now_ns: int) -> Sequence[Record]:
        """Return all remaining records; the recorder is stopping."""
        ...


class OptionalSource:
    """A source that the recording can do without: its first error ends it, and is logged."""

    def __init__(
        self, name: str, source: RecordSource, note: Callable[[str, BaseException], None]
    ) -> None:
        """name: of the source in the log. note: writes to the recorder's log."""
        self._name, self._source, self._note, self._is_off = name, source, note, False

    def take(self, now_ns: int) -> Sequence[Record]:
        """Return the records since the last call; after an error there are no more."""
        return self._call(self._source.take, now_ns, ())

    def finish(self, now_ns: int) -> Sequence[Record]:
        """Return all remaining records, none after an error."""
        return self._call(self._source.finish, now_ns, ())

    def look(self, now_ns: int) -> bool:
        """Let the source look for news, if it does; nothing more is awaited after an error."""
        look = getattr(self._source, "look", None)
        return look is not None and self._call(look, now_ns, False)

    def _call(self, method: Callable[[int], _Answer], now_ns: int, nothing: _Answer) -> _Answer:
        if self._is_off:
            return nothing
        try:
            return method(now_ns)
        except Exception as error:
            self._is_off = True
            self._note(self._name, error)
            return nothing


def record_batches(
    runners: Sequence[CollectorRunner],
    sources: Sequence[RecordSource],
    clock: SamplingClock,
    schedule: Schedule,
    budget: Budget,
    tick_ns: int,
    stop: Callable[[int], str],
    end_ns: int = NEVER_NS,
) -> Iterator[list[Record]]:
    """Yield the batches of a recording after its header until `stop(now_ns)` returns a reason.

    `stop` is called after the sources were polled, and at `end_ns`. tick_ns: longest time
    between two polls when the clock does not report new files. Collectors must be open. The
    last batch holds the remaining records, the event `recorder-stopped` and the clock. All
    times in ns.
    """
    now_ns = clock.now_ns()
    for runner in runners:
        runner.due_ns = max(runner.due_ns, now_ns)
    polls: list[Callable[[int], bool | None]] = [
        source.look for source in sources if hasattr(source, "look")
    ]
    fast, slow = split_rate_groups(runners)
    fast_due_ns = fast_wake_ns = slow_due_ns = slow_wake_ns = now_ns
    planned_ns = poll_ns = flush_ns = now_ns
    clock_ns = now_ns + CLOCK_INTERVAL_NS
    notified = pending = False
    while True:
        polled = notified or now_ns >= min(poll_ns, end_ns)
        if polled:
            pending = True in [look(now_ns) for look in polls]
            reason = stop(now_ns)
            if reason:
                break
        if now_ns >= fast_due_ns:
            fast_due_ns, fast_wake_ns = fast.sample(now_ns, clock, schedule)
        if now_ns >= slow_due_ns:
            slow_due_ns, slow_wake_ns = slow.sample(now_ns, clock, schedule)
        now_ns = clock.now_ns()
        if planned_ns >= flush_ns:
            # Advance on the grid, not from now: the next flush then shares a tick's wake-up.
            flush_ns = max(planned_ns + FLUSH_INTERVAL_NS, now_ns)
            batch = [
                *_take_source_records(sources, now_ns),
                *_take_collector_records(runners, now_ns),
            ]
            batch += _adapt_slowdown(budget, schedule, clock, now_ns)
            if now_ns >= clock_ns:
                clock_ns = now_ns + CLOCK_INTERVAL_NS
                batch.append(clock.read())
            yield batch
        if polled:
            poll_ns = _compute_next_tick(poll_ns, tick_ns * schedule.slowdown, now_ns)
            if clock.wakes_on_files and not pending:
                poll_ns = max(poll_ns, flush_ns - tick_ns * schedule.slowdown)
        planned_ns = min(poll_ns, fast_wake_ns, slow_wake_ns, flush_ns, end_ns)
        notified = clock.wait_until(planned_ns)
        now_ns = clock.now_ns()
    yield _finish_recording(runners, sources, clock, reason)


def _adapt_slowdown(
    budget: Budget, schedule: Schedule, clock: SamplingClock, now_ns: int
) -> list[Record]:
    """Adapt the slowdown to the CPU time used; return the event if it changes."""
    change = budget.check(now_ns, clock.cpu_ns(), schedule.slowdown)
    if change is None:
        return []
    schedule.slowdown = change.attributes["slowdown"]
    return [change]


def _finish_recording(
    runners: Sequence[CollectorRunner],
    sources: Sequence[RecordSource],
    clock: SamplingClock,
    reason: str,
) -> list[Record]:
    now_ns = clock.now_ns()
    records = [record for source in sources for record in source.finish(now_ns)]
    records += _take_collector_records(runners, now_ns)
    for runner in runners:
        runner.close()
    stopped = Event(now_ns, "recorder-stopped", {"reason": reason, "pid": os.getpid()})
    return [*records, stopped, clock.read()]


def _compute_next_tick(planned_ns: int, interval_ns: int, now_ns: int) -> int:
    return planned_ns + ((now_ns - planned_ns) // interval_ns + 1) * interval_ns


def _take_source_records(sources: Sequence[RecordSource], now_ns: int) -> Iterator[Record]:
    for source in sources:
        yield from source.take(now_ns)


def _take_collector_records(runners: Sequence[CollectorRunner], now_ns: int) -> list[Record]:
    return [record for runner in runners for record in runner.take(now_ns)]
