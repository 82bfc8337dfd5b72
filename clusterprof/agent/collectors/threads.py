"""What every thread of the job does, from its own kernel counters.

One row per thread and tick. The main thread of every process of the tree is in every tick; the
other threads are looked at in turn, about once a second, and are in the table while they use CPU
or are blocked. All times are counters, so that nothing is lost between two rows of a thread.

A thread that was not on a CPU since its last row is still where it was: it is written again from
its `schedstat` alone. Such a thread may meanwhile have been woken and be waiting for a CPU; that
wait is in `run_delay_ns_total` of the row after it ran.

## Source

`/proc/<pid>/task/<tid>/{stat,schedstat,wchan}`, `/proc/<pid>/task/<tid>/children`, `/proc/loadavg`
(docs.kernel.org/filesystems/proc, scheduler/sched-stats).

## Privilege

The job's user, or root: `wchan` is shown to who may trace the process. A /proc with hidepid shows
others nothing.

## Cost

A read for each main thread that slept, three for one that ran, and the others in turn, at most 32
in a tick; at most 512 descriptors are held.

## Where it is blind

A thread that is born and ends between two looks is never seen; of a sleep only its place in the
kernel is known, not the line of Python. Waits for block devices need `kernel.task_delayacct=1`.
Processes of other containers or users are not of the job.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from clusterprof.collectors.base import Context, ReadFirst
from clusterprof.linux.processes import ProcessTree, why_invisible
from clusterprof.linux.task import Descriptors, block_io_accounted, hold, is_gone
from clusterprof.linux.thread import COLUMNS, Look, Row, Shared, Thread, look_at, rows_of

_SEARCH_NS = 250_000_000  # births are looked for at most this often
_LIST_NS = 1_000_000_000  # and new threads of known processes
_THOROUGH_NS = 5_000_000_000
_TURN_NS = 1_000_000_000  # an idle thread is looked at about this often …
_MOST_LOOKS = 32  # … but never more of them than this in one tick
_MOST_NEW = 128  # threads taken up in one tick: each costs three opens
_QUIET_NS = 1_000_000_000  # not on a CPU for so long: no longer in every tick
_RUNNING, _BLOCKED = ord("R"), ord("D")


class ThreadsCollector(ReadFirst):
    """State, CPU time, run delay and place of sleep of every thread of the job."""

    name: ClassVar[str] = "threads"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._clock = clock
        self._proc = str(context.roots.proc)

    def open(self) -> Sequence[str]:
        """Start with an empty tree; the first `sample()` finds the processes."""
        self._descriptors = Descriptors(384)
        self._idle_descriptors = Descriptors(128)  # idle threads must not starve new processes
        self._tree = ProcessTree(self._context.roots, self._descriptors)
        self._main: dict[int, Thread] = {}
        self._others: dict[tuple[int, int], Thread] = {}
        self._idle: deque[Thread] = deque()
        self._pids: list[int] = []
        self._born = self._unlisted = True
        self._searched_ns = self._listed_ns = self._thorough_ns = self._last_ns = -_THOROUGH_NS
        setting = hold(f"{self._proc}/sys/kernel/task_delayacct", self._descriptors)
        accounted = block_io_accounted(setting.read() if setting else None)
        self._shared = Shared(accounted)
        if setting is not None:
            setting.close()
        return COLUMNS

    def read(self) -> tuple[int, list[Look]]:
        """Look at the threads due now; raises Unavailable (denied) when /proc hides the job."""
        now_ns = self._clock()
        self._search(now_ns)
        looks, gone = look_at(self._main.values(), now_ns)
        for thread in gone:
            self._forget(thread.pid)
        for key, thread in list(self._others.items()) if self._others else ():
            if not self._take(thread, now_ns, looks):
                self._drop_other(key)
            elif now_ns - thread.ran_ns > _QUIET_NS and thread.state not in (_RUNNING, _BLOCKED):
                del self._others[key]
                thread.rest()
                self._idle.append(thread)
        if self._idle:
            self._look_at_idle(now_ns, looks)
        if self._unlisted and now_ns - self._listed_ns >= _LIST_NS:
            self._list_threads(now_ns, looks)
        self._last_ns = now_ns
        return now_ns, looks

    def parse(self, reading: tuple[int, list[Look]]) -> Sequence[Row]:
        """Return the rows of a tick."""
        return rows_of(*reading, self._shared)

    def strings(self) -> dict[str, Sequence[str]]:
        """Return the kernel functions and names that the columns `wchan` and `name` point to."""
        return {"wchan": self._shared.wchans.all, "name": self._shared.names.all}

    def close(self) -> None:
        """Close every descriptor."""
        for pid in self._main:
            self._context.readings.forget(pid)
        for thread in (*self._main.values(), *self._others.values(), *self._idle):
            thread.close()
        self._tree.close()

    def _take(self, thread: Thread, now_ns: int, looks: list[Look]) -> bool:
        """Look at a thread; False when it has ended."""
        try:
            looks.append(thread.look(now_ns))
        except OSError as error:
            # An unreadable one would be opened anew for ever, so it is dropped like a dead one.
            return not is_gone(error) and thread.pid == thread.tid
        return True

    def _search(self, now_ns: int) -> None:
        pids = list(self._context.job_pids())
        if pids == self._pids:
            if now_ns - self._searched_ns < _SEARCH_NS:
                return
            if self._tree.born():
                self._born = self._unlisted = True
            if not self._born:
                return
        thorough = now_ns - self._thorough_ns >= _THOROUGH_NS
        for pid in self._tree.refresh(pids, thorough):
            if pid not in self._main:
                self._admit(pid)
        if pids and not self._main:
            invisible = why_invisible(self._context.roots, pids)
            if invisible is not None:
                raise invisible
        if thorough:
            self._thorough_ns = now_ns
        self._searched_ns = now_ns
        self._pids = pids
        # After a birth that only a thorough search may find, searching goes on until there was one.
        self._born = not thorough and self._born and now_ns - self._thorough_ns < _THOROUGH_NS

    def _admit(self, pid: int) -> None:
        try:
            thread = self._main[pid] = Thread(self._proc, pid, pid, self._descriptors)
            self._context.readings.share(pid, thread)
            self._unlisted = True
        except OSError:
            self._tree.forget(pid)

    def _forget(self, pid: int) -> None:
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

    def _look_at_idle(self, now_ns: int, looks: list[Look]) -> None:
        due = len(self._idle) * (now_ns - self._last_ns) // _TURN_NS + 1
        for _ in range(min(due, len(self._idle), _MOST_LOOKS)):
            thread = self._idle.popleft()
            if not thread.ran():
                self._idle.append(thread)
            elif self._take(thread, now_ns, looks):
                self._others[thread.pid, thread.tid] = thread
            else:
                thread.close()

    def _list_threads(self, now_ns: int, looks: list[Look]) -> None:
        known = {(thread.pid, thread.tid) for thread in self._idle} | self._others.keys()
        new = 0
        for pid in self._main:
            try:
                tids = [int(name) for name in os.listdir(f"{self._proc}/{pid}/task")]
            except OSError:
                continue
            for tid in tids:
                if tid != pid and (pid, tid) not in known and new < _MOST_NEW:
                    new += 1
                    self._meet(pid, tid, now_ns, looks)
        self._unlisted = new >= _MOST_NEW
        self._listed_ns = now_ns

    def _meet(self, pid: int, tid: int, now_ns: int, looks: list[Look]) -> None:
        try:
            thread = Thread(self._proc, pid, tid, self._idle_descriptors)
        except OSError:
            return
        if self._take(thread, now_ns, looks):
            thread.rest()
            self._idle.append(thread)
        else:
            thread.close()
