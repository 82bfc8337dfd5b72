"""Waits for Python's interpreter lock (GIL), seen by a thread of the probe.

Some twenty times a second the thread sleeps and then needs the lock. If it comes back late, another
thread kept the lock all that time: C code that does not release it, or many threads in turn. A
thread that runs Python code gives the lock away within a switch interval (5 ms). Time in which the
thread itself had no CPU (`schedstat`) does not count; where the kernel does not say, nothing is
recorded.

The thread runs in training processes only, not in workers. It is started without the `threading`
module, so the job does not see it there, and takes no signals. It ends before a fork, and starts
again in the parent.
"""

import _thread
import atexit
import os
import signal
import sys
from time import monotonic_ns
from typing import Any, Optional

from . import handle_error, layout, ring

PAUSE_S, SHORT_PAUSE_S = 0.05, 0.012
"""Between two needs of the lock: usually, and after a late one."""
SHORT_PAUSES = 20
"""Number of short pauses after a late one."""
LATE_NS = 8_000_000
"""The least wait that is recorded; of a longer switch interval 1.6."""
_STOP_TIMEOUT_S = 0.02
_SYNCHRONOUS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT")

_stop: Optional[Any] = None  # locked while the thread shall run
_ended: Optional[Any] = None  # locked until the thread has ended


def start() -> None:
    """Start the thread, once; a process that cannot start one records no waits for the lock."""
    global _stop, _ended
    if _stop is not None or ring.is_helper():
        return
    stop, ended = _thread.allocate_lock(), _thread.allocate_lock()
    stop.acquire()
    ended.acquire()
    try:
        _thread.start_new_thread(_watch_lock, (stop, ended))
    except RuntimeError:  # no more threads allowed
        return
    _stop, _ended = stop, ended


def stop() -> None:
    """End the thread, and wait for its end for a moment."""
    global _stop, _ended
    running, ended, _stop, _ended = _stop, _ended, None, None
    if running is not None and ended is not None:
        running.release()
        ended.acquire(True, _STOP_TIMEOUT_S)


def _watch_lock(stop: Any, ended: Any) -> None:
    schedstat = -1
    try:
        signal.pthread_sigmask(
            signal.SIG_BLOCK,
            signal.valid_signals() - {getattr(signal, name) for name in _SYNCHRONOUS},
        )
        path = "/proc/self/task/%d/schedstat" % _thread.get_native_id()
        schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        acquire, pread, beats, short_until = stop.acquire, os.pread, 0, 0
        delayed_ns = int(pread(schedstat, 64, 0).split()[1])
        while True:
            # Pauses of unequal length keep no time with what happens in the job.
            beats += 1
            length_s = (SHORT_PAUSE_S if beats <= short_until else PAUSE_S) * (
                0.75 + 0.5 * (beats * 0.618 % 1.0)
            )
            due_ns = monotonic_ns() + int(length_s * 1e9)
            if acquire(True, length_s):
                return
            now, before_ns = monotonic_ns(), delayed_ns
            delayed_ns = int(pread(schedstat, 64, 0).split()[1])
            due_ns += delayed_ns - before_ns
            if now - due_ns >= max(LATE_NS, int(sys.getswitchinterval() * 1.6e9)):
                # Reading the file gave the lock away: until now others kept it again.
                ring.emit(layout.INTERPRETER_WAIT, due_ns, monotonic_ns(), int(length_s * 1e9))
                short_until = beats + SHORT_PAUSES
    except (OSError, ValueError, IndexError):
        pass
    except BaseException as error:
        handle_error(error)
    finally:
        if schedstat >= 0:
            os.close(schedstat)
        ended.release()


_was_running = False


def _stop_before_fork() -> None:
    global _was_running
    try:
        _was_running = _stop is not None
        stop()
    except BaseException as error:
        handle_error(error)


def _start_after_fork() -> None:
    try:
        if _was_running:
            start()
    except BaseException as error:
        handle_error(error)


def _forget() -> None:
    global _stop, _ended, _was_running
    _stop = _ended = None
    _was_running = False


ring.on_open.append(start)
ring.after_fork.append(_forget)
os.register_at_fork(before=_stop_before_fork, after_in_parent=_start_after_fork)
atexit.register(stop)
