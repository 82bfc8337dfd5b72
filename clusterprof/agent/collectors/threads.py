"""Activity of every thread of the job, from its kernel counters.

One row per thread and tick. The main thread of every process of the tree is in every
tick. The other threads are read in turn, about once a second, and are in the table
while they use CPU or are blocked. All times are counters, so that nothing is lost
between two rows of a thread.

A thread that did not run since its last row is unchanged: its row is repeated from its
`schedstat` alone. It may have been woken since and be waiting for a CPU; that wait
is in `run_delay_ns_total` of the first row after it ran.

## Source

`/proc/<pid>/task/<tid>/{stat,schedstat,wchan}`, `/proc/<pid>/task/<tid>/children`,
`/proc/loadavg` (docs.kernel.org/filesystems/proc, scheduler/sched-stats).

## Privilege

The job's user, or root: `wchan` is readable only for a user who may trace the process.
A /proc with hidepid shows other users nothing.

## Cost

One read for each main thread that slept, three for one that ran, and the other threads
in turn, at most 32 in a tick; at most 512 descriptors are open.

## Where it is blind

A thread that starts and ends between two readings is never seen. Of a sleep only the
kernel function is known, not the line of Python. Waits for block devices need
`kernel.task_delayacct=1`. Processes of other containers or users do not belong to the
job.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from clusterprof.agent.collectors.base import Context, DeferredCollector
from clusterprof.agent.linux.processes import ProcessTree, explain_invisible_processes
from clusterprof.agent.linux.threads import (
    COLUMNS,
    DescriptorBudget,
    Row,
    SharedThreadState,
    Thread,
    ThreadReading,
    build_rows,
    is_block_io_accounted,
    is_task_gone,
    open_task_file,
    read_main_threads,
)

_SEARCH_NS = 250_000_000  # minimum time between searches for new processes
_LIST_NS = 1_000_000_000  # and for new threads of known processes
_THOROUGH_SEARCH_NS = 5_000_000_000
_IDLE_INTERVAL_NS = 1_000_000_000  # an idle thread is read about this often …
_MAX_IDLE_READS = 32  # … but never more of them than this in one tick
_MAX_NEW_THREADS = 128  # threads added in one tick: each costs three opens
_QUIET_NS = 1_000_000_000  # not on a CPU for this long: no longer read in every tick
_RUNNING, _BLOCKED = ord("R"), ord("D")


class ThreadsCollector(DeferredCollector):
    """State, CPU time, run delay and wait channel of every thread of the job."""

    name: ClassVar[str] = "threads"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._clock = clock
        self._proc = str(context.roots.proc)

    def open(self) -> Sequence[str]:
        """Start with an empty tree; the first `sample()` finds the processes."""
        self._descriptors = DescriptorBudget(384)
        # separate, so that idle threads cannot starve new processes
        self._idle_descriptors = DescriptorBudget(128)
        self._tree = ProcessTree(self._context.roots, self._descriptors)
        self._main: dict[int, Thread] = {}
        self._others: dict[tuple[int, int], Thread] = {}
        self._idle: deque[Thread] = deque()
        self._pids: list[int] = []
        self._search_needed = self._listing_needed = True
        self._searched_ns = self._listed_ns = self._thorough_ns = (
            self._last_ns
        ) = -_THOROUGH_SEARCH_NS
        setting = open_task_file(f"{self._proc}/sys/kernel/task_delayacct", self._descriptors)
        accounted = is_block_io_accounted(setting.read() if setting else None)
        self._shared = SharedThreadState(accounted)
        if setting is not None:
            setting.close()
        return COLUMNS

    def read(self) -> tuple[int, list[ThreadReading]]:
        """Read the threads that are due now.

        Raises: Unavailable ("denied") when /proc hides the job.
        """
        now_ns = self._clock()
        self._search(now_ns)
        readings, ended = read_main_threads(self._main.values(), now_ns)
        for thread in ended:
            self._remove_process(thread.pid)
        for key, thread in list(self._others.items()) if self._others else ():
            if not self._read_thread(thread, now_ns, readings):
                self._drop_other(key)
            elif now_ns - thread.ran_ns > _QUIET_NS and thread.state not in (_RUNNING, _BLOCKED):
                del self._others[key]
                thread.close_sampling_files()
                self._idle.append(thread)
        if self._idle:
            self._read_idle_threads(now_ns, readings)
        if self._listing_needed and now_ns - self._listed_ns >= _LIST_NS:
            self._list_threads(now_ns, readings)
        self._last_ns = now_ns
        return now_ns, readings

    def parse(self, reading: tuple[int, list[ThreadReading]]) -> Sequence[Row]:
        """Build the rows of a tick."""
        return build_rows(*reading, self._shared)

    def strings(self) -> dict[str, Sequence[str]]:
        """Return the kernel functions and names that the columns `wchan` and `name` refer to."""
        return {"wchan": self._shared.wchans.all, "name": self._shared.names.all}

    def close(self) -> None:
        """Close every descriptor."""
        for pid in self._main:
            self._context.readings.forget(pid)
        for thread in (*self._main.values(), *self._others.values(), *self._idle):
            thread.close()
        self._tree.close()

    def _read_thread(self, thread: Thread, now_ns: int, readings: list[ThreadReading]) -> bool:
        """Read a thread; return False when it has ended."""
        try:
            readings.append(thread.read(now_ns))
        except OSError as error:
            # An unreadable thread would be reopened forever, so it is dropped like an ended one.
            return not is_task_gone(error) and thread.pid == thread.tid
        return True

    def _search(self, now_ns: int) -> None:
        pids = list(self._context.job_pids())
        if pids == self._pids:
            if now_ns - self._searched_ns < _SEARCH_NS:
                return
            if self._tree.has_new_tasks():
                self._search_needed = self._listing_needed = True
            if not self._search_needed:
                return
        thorough = now_ns - self._thorough_ns >= _THOROUGH_SEARCH_NS
        for pid in self._tree.refresh(pids, thorough):
            if pid not in self._main:
                self._add_process(pid)
        if pids and not self._main:
            invisible = explain_invisible_processes(self._context.roots, pids)
            if invisible is not None:
                raise invisible
        if thorough:
            self._thorough_ns = now_ns
        self._searched_ns = now_ns
        self._pids = pids
        # If only a thorough search may find a new task, keep searching until there was one.
        self._search_needed = (
            not thorough
            and self._search_needed
            and now_ns - self._thorough_ns < _THOROUGH_SEARCH_NS
        )

    def _add_process(self, pid: int) -> None:
        try:
            thread = self._main[pid] = Thread(self._proc, pid, pid, self._descriptors)
            self._context.readings.share(pid, thread)
            self._listing_needed = True
        except OSError:
            self._tree.forget(pid)

    def _remove_process(self, pid: int) -> None:
        self._main.pop(pid).close()
        self._context.readings.forget(pid)
        self._tree.forget(pid)
        for key in [key for key in self._others if key[0] == pid]:
            self._drop_other(key)
        dead = [thread for thread in self._idle if thread.pid == pid]
        for thread in dead:
            thread.close()
            self._idle.remove(thread)

    def _drop_other(self, key: tuple[int, int]) -> None:
        self._others.pop(key).close()

    def _read_idle_threads(self, now_ns: int, readings: list[ThreadReading]) -> None:
        due = len(self._idle) * (now_ns - self._last_ns) // _IDLE_INTERVAL_NS + 1
        for _ in range(min(due, len(self._idle), _MAX_IDLE_READS)):
            thread = self._idle.popleft()
            if not thread.has_run():
                self._idle.append(thread)
            elif self._read_thread(thread, now_ns, readings):
                self._others[thread.pid, thread.tid] = thread
            else:
                thread.close()

    def _list_threads(self, now_ns: int, readings: list[ThreadReading]) -> None:
        listed = {(thread.pid, thread.tid) for thread in self._idle} | self._others.keys()
        new_count = 0
        for pid in self._main:
            try:
                tids = [int(name) for name in os.listdir(f"{self._proc}/{pid}/task")]
            except OSError:
                continue
            for tid in tids:
                if tid != pid and (pid, tid) not in listed and new_count < _MAX_NEW_THREADS:
                    new_count += 1
                    self._add_thread(pid, tid, now_ns, readings)
        self._listing_needed = new_count >= _MAX_NEW_THREADS
        self._listed_ns = now_ns

    def _add_thread(self, pid: int, tid: int, now_ns: int, readings: list[ThreadReading]) -> None:
        try:
            thread = Thread(self._proc, pid, tid, self._idle_descriptors)
        except OSError:
            return
        if self._read_thread(thread, now_ns, readings):
            thread.close_sampling_files()
            self._idle.append(thread)
        else:
            thread.close()
