"""Waits for Python's interpreter lock (GIL) and samples of stacks, by a thread of the probe.

Some twenty times a second the thread sleeps and then needs the lock. If it comes back late, another
thread kept the lock all that time: C code that does not release it, or many threads in turn. A
thread that runs Python code gives the lock away within a switch interval (5 ms). Time in which the
thread itself had no CPU (`schedstat`) does not count; where the kernel does not say, nothing is
recorded. Having the lock, the thread samples the stack of the thread that trains (`stacks.py`).

The thread runs in training processes, and where stacks are sampled also in workers from their
first fetch; waits for the lock are recorded in training processes only. It is started without the
`threading` module, so the job does not see it there, and takes no signals. It ends before a fork,
and starts again in the parent.
"""

import _thread
import atexit
import os
import signal
import sys
from time import monotonic_ns, sleep, thread_time_ns
from typing import Any, Callable, List, Optional, Tuple

from . import handle_error, layout, make_lock, ring, stacks, start_thread

PAUSE_S, SHORT_PAUSE_S = 0.05, 0.012
"""Between two needs of the lock: usually, and after a late one."""
SHORT_PAUSES = 20
"""Number of short pauses after a late one."""
LATE_NS = 8_000_000
"""The least wait that is recorded; of a longer switch interval 1.6."""
MAX_HELD_RATIO, MAX_CPU_RATIO = 0.0009, 0.001
"""Most of the elapsed time in which samples may keep the interpreter lock from the job, and most
that the thread may have of a CPU, its wake-ups included: it then pauses longer."""
WATCHFUL_CPU_RATIO = 0.003
"""The same for some time after a wait for the lock: threads that fight for it are looked at."""
CREDIT_CPU_NS = 60_000_000
"""CPU time that may be used before that, so that jobs of a minute are seen as well."""
MAX_PAUSE_S = 2.0
PROMPT_SWITCH_S, PROMPT_LEAD = 0.0001, 2.5
"""Switch interval before a sample, and for how long before it, in switch intervals of the job."""
PROMPT_RATIO, MAX_PROMPT_SWITCH_S = 0.04, 0.001
"""Where C code keeps the lock, the interval is this part of how late samples are: the thread wakes
up once in each interval for which it waits."""
PROMPT_SAMPLES = 32
"""Number of samples before which the interval is lowered, after one that came at another time than
a switch interval after it was due: the job gave the lock away by itself, or C code kept it."""
WATCHFUL_NS = 10_000_000_000
"""Time after a wait for the lock in which pauses may be shorter."""
_LEAST_NS = 200_000  # shortest pause
_AVERAGED = 16  # pauses over which the cost of a sample is averaged
_PROMPT_NS = stacks.LATE_NS  # a wake-up this late is looked into
_HALF_MICROSECOND_S = 5e-7  # Python keeps whole microseconds and cuts the rest off
_LATE_SAMPLE_NS = 200_000  # then another thread had the lock when the sample was due
# Pauses after which the own delay is read although no wake-up was late, or each a little.
_PAUSES_UNREAD, _LATE_PAUSES_UNREAD = 8, 64
_STOP_TIMEOUT_S = 0.02
_FORK_WARNS = sys.version_info >= (3, 12)  # if the kernel counts another thread at that moment
_SYNCHRONOUS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT")

on_look: List[Callable[[int], None]] = []
"""Called in training processes some twenty times a second, with the time in ns; must not raise."""

_stop: Optional[Any] = None  # locked while the thread shall run
_ended: Optional[Any] = None  # locked until the thread has ended
_thread_id = 0  # of the kernel
_lowered_from_s = 0.0  # the job's switch interval while it is lowered
_lowered_to_s = PROMPT_SWITCH_S
_samplers: List[stacks.Sampler] = [stacks.Sampler()]  # empty while a thread uses it


def start() -> None:
    """Start the thread of a training process, once.

    A process that cannot start it records no waits for the lock and no stacks.
    """
    if not ring.is_helper():
        _start_watching()


def _start_in_worker() -> None:
    if stacks.is_enabled():
        _start_watching()


def _start_watching() -> None:
    global _stop, _ended
    if _stop is not None:
        return
    stop, ended = make_lock(), make_lock()
    stop.acquire()
    ended.acquire()
    try:
        start_thread(_watch, (stop, ended))
    except RuntimeError:  # no more threads allowed
        return
    _stop, _ended = stop, ended


def stop() -> None:
    """End the thread, and wait for its end for a moment."""
    global _stop, _ended
    running, ended, _stop, _ended = _stop, _ended, None, None
    if running is not None and ended is not None:
        running.release()
        if ended.acquire(True, _STOP_TIMEOUT_S) and _FORK_WARNS:
            _wait_for_kernel()


def _wait_for_kernel() -> None:
    """Wait until the kernel has no thread of ours any more, or for a moment."""
    path, until_ns = "/proc/self/task/%d" % _thread_id, monotonic_ns() + int(_STOP_TIMEOUT_S * 1e9)
    try:
        while monotonic_ns() < until_ns:
            os.stat(path)
            sleep(_LEAST_NS / 1e10)
    except OSError:
        pass


def _watch(stop: Any, ended: Any) -> None:
    """Run the thread until the lock `stop` is free; then free `ended`."""
    global _thread_id
    watch, _thread_id = None, _thread.get_native_id()
    try:
        signal.pthread_sigmask(
            signal.SIG_BLOCK,
            signal.valid_signals() - {getattr(signal, name) for name in _SYNCHRONOUS},
        )
        watch = _Watch()
        watch.run(stop)
    except (OSError, ValueError, IndexError):
        pass
    except BaseException as error:
        handle_error(error)
    finally:
        restore_switch_interval()
        if watch is not None:
            watch.close()
        ended.release()


def lower_switch_interval(prompt_s: float = PROMPT_SWITCH_S) -> None:
    """Let a thread that runs Python give the lock away sooner, for the next sample.

    Usually it does so after 5 ms. One that calls a function which gives the lock away by itself
    before that would be seen only there, not where it was when the sample was due. If it gives the
    lock away for less time than a wake-up takes, again and again, it would not be seen at all.
    """
    global _lowered_from_s, _lowered_to_s
    switch_s = sys.getswitchinterval()
    if switch_s > prompt_s:
        # First, so that a child forked in between can restore it.
        _lowered_from_s, _lowered_to_s = switch_s, prompt_s
        sys.setswitchinterval(prompt_s)


def restore_switch_interval() -> bool:
    """Restore the job's switch interval, unless it has set another; return if it was lowered."""
    global _lowered_from_s
    switch_s = _lowered_from_s
    if switch_s and abs(sys.getswitchinterval() - _lowered_to_s) < 2 * _HALF_MICROSECOND_S:
        sys.setswitchinterval(switch_s + _HALF_MICROSECOND_S)
    _lowered_from_s = 0.0
    return switch_s > 0.0


class _Watch:
    """The loop of the thread: it pauses, needs the lock, samples, and records a late wake-up."""

    def __init__(self) -> None:
        self.schedstat = -1
        self.delayed_ns = 0
        self.unread = 0
        self.records_waits = not ring.is_helper()
        self.samples_stacks = stacks.is_enabled()
        self.sampler: Optional[stacks.Sampler] = None
        self.sampled_ns = 0
        self.cpu_ns = 0
        self.woken_cpu_ns = self.used_ns = 0
        self.prompt_samples = PROMPT_SAMPLES
        self.mean_late_ns = 0.0
        self.random = (monotonic_ns() ^ os.getpid() << 8) & 0x7FFFFFFF

    def run(self, stop: Any) -> None:
        """Watch until the lock `stop` is free."""
        path = "/proc/self/task/%d/schedstat" % _thread.get_native_id()
        self.schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.delayed_ns = self._read_delay()
        acquire, short_pauses, watchful_until_ns, sample_due_ns = stop.acquire, 0, 0, 0
        while True:
            # Pauses of random length keep no time with what happens in the job. The job's own
            # generators are left alone.
            self.random = (self.random * 1103515245 + 12345) & 0x7FFFFFFF
            begun_ns = monotonic_ns()
            mean_s = self._choose_pause(begun_ns < watchful_until_ns)
            mean_s = SHORT_PAUSE_S if short_pauses and mean_s == PAUSE_S else mean_s
            due_ns = begun_ns + int(mean_s * (0.5 + self.random / 0x80000000) * 1e9)
            if _lowered_from_s:
                due_ns = sample_due_ns
            else:
                # The time of the sample is drawn before: when the first wake-up gets the lock
                # depends on what the job does.
                sample_due_ns = due_ns
                if self.prompt_samples > 0 and not short_pauses:
                    due_ns = max(begun_ns + _LEAST_NS, due_ns - self._choose_lead())
            length_s = max(due_ns - begun_ns, _LEAST_NS) / 1e9
            if acquire(True, length_s):
                return
            self.woken_cpu_ns = thread_time_ns()
            short_pauses = max(0, short_pauses - 1)
            now_ns = monotonic_ns()
            is_prompt = restore_switch_interval()
            is_early = not is_prompt and sample_due_ns - now_ns >= _LEAST_NS
            prepares = is_early and self._is_sample_due(sample_due_ns)
            taken_ns = 0 if prepares else self._take_sample(now_ns)
            other_threads = self._take_others(now_ns - due_ns, taken_ns)
            if self._needs_delay(now_ns - due_ns, is_prompt):
                before_ns, self.delayed_ns, self.unread = self.delayed_ns, self._read_delay(), 0
                due_ns += self.delayed_ns - before_ns
                sample_due_ns += self.delayed_ns - before_ns
                if self.records_waits and now_ns - due_ns >= max(
                    LATE_NS, int(sys.getswitchinterval() * 1.6e9)
                ):
                    # Reading the file gave the lock away: until now others kept it again.
                    pause_ns = int(length_s * 1e9)
                    ring.emit(layout.INTERPRETER_WAIT, due_ns, monotonic_ns(), pause_ns)
                    if self.sampler is not None:
                        self.sampler.record_others(other_threads, due_ns, now_ns, now_ns - due_ns)
                    short_pauses = SHORT_PAUSES
                    watchful_until_ns = now_ns + WATCHFUL_NS
            self.unread += 1
            if self.sampler is not None:
                self._finish_sample(sample_due_ns, taken_ns, int(length_s * 1e9), is_prompt)
                if taken_ns and self.sampler.waits_for_others():
                    interval_ns = self.sampler.interval_ns
                    self.sampler.record_others(other_threads, taken_ns, taken_ns, interval_ns)
            if prepares:
                lower_switch_interval(self._choose_switch_interval())
            elif self.records_waits:
                for look in on_look:
                    look(now_ns)

    def _choose_lead(self) -> int:
        """Return how long before a sample the switch interval is lowered, ns.

        Longer than a thread keeps the lock from the wake-up that does it: a switch interval in
        Python, and in C code until the next call returns.
        """
        return int(min(sys.getswitchinterval() * PROMPT_LEAD, PAUSE_S / 2) * 1e9)

    def _choose_switch_interval(self) -> float:
        """Return the switch interval for the next sample, s: whole microseconds."""
        needed_s = int(self.mean_late_ns * PROMPT_RATIO / 1000) / 1e6
        return min(max(PROMPT_SWITCH_S, needed_s), MAX_PROMPT_SWITCH_S)

    def _needs_delay(self, late_ns: int, is_prompt: bool) -> bool:
        """Return whether the own wait for a CPU must be read to judge this wake-up.

        Not of one in time, nor of one that was late by just the switch interval, as it is when
        another thread runs Python. Reading gives the lock away, and the job must give it back.

        is_prompt: the switch interval was lowered for this wake-up.
        """
        if late_ns < _PROMPT_NS:
            return self.unread >= _PAUSES_UNREAD
        if late_ns >= LATE_NS or self.unread >= _LATE_PAUSES_UNREAD:
            return True
        switch_ns = int((_lowered_to_s if is_prompt else sys.getswitchinterval()) * 1e9)
        return not switch_ns <= late_ns < switch_ns + _PROMPT_NS

    def _is_sample_due(self, now_ns: int) -> bool:
        """Return whether a sample shall be taken; not if the last was just taken."""
        if self.sampler is None:
            if not _samplers or not self.samples_stacks:
                return False
            self.sampler = _samplers.pop()
        return now_ns - self.sampled_ns >= self._choose_pause() * 0.5e9

    def _take_sample(self, now_ns: int) -> int:
        """Take a sample if it is due; return when, ns, 0 = none."""
        if not self._is_sample_due(now_ns) or self.sampler is None:
            return 0
        self.sampled_ns = now_ns
        try:
            return self.sampler.take()
        except Exception:  # an audit hook of the job forbids it
            self.sampler = None
            self.samples_stacks = False
            return 0

    def _choose_pause(self, is_watchful: bool = False) -> float:
        """Return the mean pause that the cost of recent samples allows, s."""
        if self.sampler is None:
            return PAUSE_S
        sampler = self.sampler
        needed_ns = 0.0 if is_watchful else sampler.mean_held_ns / MAX_HELD_RATIO
        elapsed_ns = monotonic_ns() - sampler.started_ns
        max_ratio = WATCHFUL_CPU_RATIO if is_watchful else MAX_CPU_RATIO
        if sampler.all_cpu_ns > CREDIT_CPU_NS + elapsed_ns * max_ratio:
            needed_ns = max(needed_ns, sampler.mean_cpu_ns / max_ratio)
        return min(MAX_PAUSE_S, max(PAUSE_S, needed_ns / 1e9))

    def _take_others(self, late_ns: int, taken_ns: int) -> List[Tuple[int, int]]:
        """Return the stacks of other threads, at most MAX_OTHERS.

        If this wake-up was late, or the thread that was just sampled waits for another one.
        """
        if not self.records_waits or self.sampler is None:
            return []
        if late_ns < LATE_NS and not (taken_ns and self.sampler.waits_for_others()):
            return []
        try:
            return self.sampler.take_others()
        except Exception:  # an audit hook of the job forbids it
            return []

    def _finish_sample(self, due_ns: int, taken_ns: int, interval_ns: int, is_prompt: bool) -> None:
        """Record the sample, if one was taken, and what it cost."""
        assert self.sampler is not None
        is_late = False
        if taken_ns:
            self.sampler.record(due_ns, taken_ns, interval_ns)
            late_ns = taken_ns - due_ns
            is_late = late_ns >= _LATE_SAMPLE_NS
            # A thread that runs Python all the time gives the lock away when it is asked to, after
            # a switch interval: then the sample shows where it was, and need not be prompt.
            switch_ns = int((_lowered_to_s if is_prompt else sys.getswitchinterval()) * 1e9)
            self.mean_late_ns += (late_ns - self.mean_late_ns) / _AVERAGED
            is_asked = 0.9 * switch_ns <= late_ns < switch_ns + _LATE_SAMPLE_NS
            if is_late and not is_asked:
                self.prompt_samples = PROMPT_SAMPLES
            else:
                self.prompt_samples = max(0, self.prompt_samples - 1)
        before_ns, self.cpu_ns = self.cpu_ns, thread_time_ns()
        used_ns = self.cpu_ns - before_ns
        self.sampler.own_cpu_ns += used_ns
        self.sampler.all_cpu_ns += used_ns
        self.used_ns += used_ns  # since the last sample
        if taken_ns:
            used_ns, self.used_ns = self.used_ns, 0
            # A wake-up takes time of another CPU. What follows it keeps the lock from the job, if
            # the job wanted it.
            held_ns = self.cpu_ns - self.woken_cpu_ns if is_late else 0
            sampler = self.sampler
            sampler.mean_cpu_ns += (used_ns - sampler.mean_cpu_ns) / _AVERAGED
            sampler.mean_held_ns += (held_ns - sampler.mean_held_ns) / _AVERAGED

    def _read_delay(self) -> int:
        """Read how long this thread has waited for a CPU, ns; gives the lock away."""
        self.unread = 0
        return int(os.pread(self.schedstat, 64, 0).split()[1])

    def close(self) -> None:
        """Close the files, and leave the sampler to the next thread."""
        if self.schedstat >= 0:
            os.close(self.schedstat)
        if self.sampler is not None:
            self.sampler.close()
            _samplers.append(self.sampler)


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
            _start_watching()
    except BaseException as error:
        handle_error(error)


def _forget() -> None:
    global _stop, _ended, _was_running
    restore_switch_interval()
    _stop = _ended = None
    _was_running = False
    _samplers[:] = [stacks.Sampler()]


def _stop_at_exit() -> None:
    try:
        stop()
        if _samplers and ring.is_open():
            _samplers[0].report(monotonic_ns())
    except BaseException as error:
        handle_error(error)


ring.on_open.append(start)
stacks.on_first_fetch.append(_start_in_worker)
ring.after_fork.append(_forget)
os.register_at_fork(before=_stop_before_fork, after_in_parent=_start_after_fork)
atexit.register(_stop_at_exit)
