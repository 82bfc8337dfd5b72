"""The user's own spans: `with clusterprof.span("tokenize"):`.

The boundaries of optimizer steps, and the samples and tokens handed over within each.

CPU time and disk reads of the calling thread, exact to the microsecond.
"""

from __future__ import annotations

import os
import resource
import sys
from _thread import get_ident, get_native_id
from time import monotonic_ns, thread_time_ns
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from . import handle_error, layout, ring, stacks

before_step_end: List[Callable[[], None]] = []
"""Callbacks that record their spans before the step that contains them ends."""

after_step_end: List[Callable[[int, int], None]] = []
"""Callbacks run on the thread that trains after a step has ended, with its start and end, ns."""

UNKNOWN = -1
OPTIMIZER, FRAMEWORK, USER, BATCHES = 0, 2, 1, 3  # what ended a step: field b of its span

_began_ns = 0  # 0: no activity of the job seen yet
_number = 0
_step_source = (
    OPTIMIZER  # a framework that ends steps overrides optimizers, the user overrides both
)
_thread = 0  # thread that ended the last step
training_thread: Tuple[int, int] = (0, 0)
"""Thread that ends steps, before the first the thread that began it: number in Python, number in
the kernel; (0, 0) = not known yet."""
loading_thread = 0
"""Thread that trains while it waits in a data loader: what it waits for in there is part of it."""
_has_batches = False  # this process has handed over a batch
_samples = _tokens = 0  # handed over since the last step
_job_step = UNKNOWN  # the job's own number of the step that runs, if it is known
_counters = 0  # numbers of the job that were recorded

_loader = 0  # whose batches end steps; 0 = none yet
_batches: Dict[int, int] = {}  # by loader: batches since a step ended

MAX_UNMARKED_BATCHES = 4  # more in a row, and no optimizer has ever stepped: batches end steps
MAX_COUNTERS = 2  # the second one shows whether the job counts the same steps as we do


def begin_first_step(start_ns: int) -> None:
    """Note activity of the job: the first step begins no later than `start_ns`."""
    global _began_ns, training_thread
    if not _began_ns:
        _began_ns = start_ns
        training_thread = get_ident(), get_native_id()


def count_samples(samples: int, tokens: int) -> None:
    """Count a batch handed to the training loop; -1 = its size is unknown."""
    global _has_batches, _samples, _tokens
    _has_batches = True
    _samples = UNKNOWN if samples < 0 or _samples < 0 else _samples + samples
    _tokens = UNKNOWN if tokens < 0 or _tokens < 0 else _tokens + tokens


def has_batches() -> bool:
    """Return whether a batch has been counted."""
    return _has_batches


def is_training_thread(thread: int) -> bool:
    """Return whether a thread is the one that trains; True while that thread is unknown."""
    return _thread in (0, thread)


def count_steps() -> int:
    """Count the steps that have ended."""
    return _number


def begin_loading() -> bool:
    """Note that a thread asks a loader for a batch; return whether it is the one that trains."""
    global loading_thread
    thread = get_ident()
    if not is_training_thread(thread):
        return False
    loading_thread = thread
    return True


def end_loading() -> None:
    """Note that the thread that trains has its batch, or gets none."""
    global loading_thread
    loading_thread = 0


def finish_optimizer_step(end_ns: int) -> None:
    """End a step after an optimizer step, unless a framework or the user marks steps."""
    global _step_source
    if _step_source == BATCHES:  # gradients of several batches were accumulated
        _step_source = OPTIMIZER
    if _step_source == OPTIMIZER:
        _finish_step(end_ns)


def note_batch(loader: int, start_ns: int) -> None:
    """Note that the loop asks a loader for a batch: ends a step in a job without optimizer steps.

    Loops that update parameters themselves, or by another package, mark no steps. Evaluations
    compute no gradients, and threads that fetch ahead do not train: their batches end none.
    """
    global _step_source, _loader
    if _step_source != BATCHES and (_step_source != OPTIMIZER or _number):
        return
    if get_native_id() != os.getpid() or ring.is_helper():
        return
    computes_gradients = getattr(sys.modules.get("torch"), "is_grad_enabled", None)
    if computes_gradients is not None and not computes_gradients():
        return
    if loader != _loader:
        _batches[loader] = _batches.get(loader, 0) + 1
        if _batches[loader] <= MAX_UNMARKED_BATCHES:
            return
        _loader = loader
    _batches.clear()
    _step_source = BATCHES
    _finish_step(start_ns)


def begin_framework_steps() -> None:
    """Let the framework mark steps: one of its steps may contain many optimizer steps."""
    global _step_source
    if _step_source in (OPTIMIZER, BATCHES):
        _step_source = FRAMEWORK


def finish_framework_step(end_ns: int) -> None:
    """End a step after a step of the framework, unless the user marks steps."""
    if _step_source == FRAMEWORK:
        _finish_step(end_ns)


def needs_job_step() -> bool:
    """Return whether the job's own number of a step would still be recorded."""
    return _counters < MAX_COUNTERS


def note_job_step(number: int) -> None:
    """Note the job's own number of the step that runs, which goes on over restarts; -1 = none."""
    global _job_step
    _job_step = number


def mark_step(number: int = UNKNOWN) -> None:
    """End a step at the user's mark, and from now on at the user's marks only.

    number: the job's own number of this step, -1 = not stated.
    """
    global _step_source, _began_ns, _counters
    now_ns = monotonic_ns()
    if number >= 0:
        note_job_step(number)
    if _step_source != USER:
        _step_source = USER
        _counters = 0  # the user may count otherwise than the optimizer
        if _number or not _began_ns:
            # The optimizer has already ended this step, or its start is unknown.
            _began_ns = now_ns
            return
    _finish_step(now_ns)


def _finish_step(end_ns: int) -> None:
    global _began_ns, _number, _samples, _tokens, _thread, training_thread
    global _job_step, _counters
    for prepare in before_step_end:
        prepare()
    samples, tokens = (_samples, _tokens) if _has_batches else (UNKNOWN, UNKNOWN)
    _samples = _tokens = 0
    thread = get_ident()
    if thread != _thread:
        _thread = thread
        training_thread = thread, get_native_id()
    ring.emit(layout.STEP, _began_ns, end_ns, _number, _step_source, samples, tokens)
    if _job_step >= 0:
        if _counters < MAX_COUNTERS:
            ring.emit(layout.STEP_COUNTER, end_ns, end_ns, _job_step, _number)
            _counters += 1
        _job_step = UNKNOWN
    began_ns, _began_ns = _began_ns, end_ns
    _number += 1
    for callback in tuple(after_step_end):
        callback(began_ns, end_ns)


def _clear_steps() -> None:
    global _began_ns, _number, _step_source, _thread, _has_batches, _samples, _tokens
    global training_thread, _job_step, _counters, _loader, loading_thread
    _began_ns = _number = _thread = _samples = _tokens = _counters = _loader = loading_thread = 0
    _batches.clear()
    _job_step = UNKNOWN
    _step_source = OPTIMIZER
    _has_batches = False
    training_thread = (0, 0)


ring.after_fork.append(_clear_steps)


SECTOR_BYTES = 512  # getrusage counts blocks of this size whatever the file system's own


def read_usage() -> Any:
    """Read the thread's current resource usage.

    getrusage alone omits what the running thread used since its last scheduler tick, up to
    4 ms that would look like blocked time; reading the thread's clock first updates it.
    """
    thread_time_ns()
    return resource.getrusage(resource.RUSAGE_THREAD)


def compute_usage_since(before: Any) -> Tuple[int, int, int]:
    """Return (user CPU ns, system CPU ns, bytes read from block devices) since `before`."""
    usage = read_usage()
    return (
        round((usage.ru_utime - before.ru_utime) * 1e9),
        round((usage.ru_stime - before.ru_stime) * 1e9),
        (usage.ru_inblock - before.ru_inblock) * SECTOR_BYTES,
    )


# Names of built-in kinds; the values are kind and fields a and b, "unknown" where not known.
BUILTIN_SPANS: Dict[str, Tuple[int, int, int]] = {
    "data_wait": (layout.DATA_WAIT, -1, -1),
    "checkpoint": (layout.CHECKPOINT, -1, 0),
    "h2d": (layout.H2D, -1, 0),
    "forward": (layout.FORWARD, 0, 0),
    "backward": (layout.BACKWARD, 0, 0),
    "collective": (layout.COLLECTIVE, 0, -1),  # group unknown, without a number
    "eval": (layout.EVAL, 0, 0),
    "compile": (layout.COMPILE, 0, 0),
    "sync": (layout.SYNC, layout.WHOLE_NS, 1),
    "warm_up": (layout.HOST_WORK, layout.WARMING_UP, -1),
}


class Span:
    """Records from entry to exit, also when an exception is raised inside."""

    __slots__ = ("a", "b", "began_ns", "kind")

    def __init__(self, kind: int, a: int, b: int) -> None:
        self.kind = kind
        self.a = a
        self.b = b
        self.began_ns = 0

    def __enter__(self) -> None:
        self.began_ns = monotonic_ns()

    def __exit__(self, *exception: Any) -> None:
        try:
            begin_first_step(self.began_ns)
            ring.emit(self.kind, self.began_ns, monotonic_ns(), self.a, self.b)
        except BaseException as error:
            handle_error(error)


class FetchSpan:
    """Records how a user's own loader built a batch: wall time, CPU time, bytes read."""

    __slots__ = ("before", "began_ns")

    def __init__(self) -> None:
        self.before: Any = None
        self.began_ns = 0

    def __enter__(self) -> None:
        try:
            stacks.note_fetch()
            self.before = read_usage()
        except BaseException as error:
            handle_error(error)
        self.began_ns = monotonic_ns()

    def __exit__(self, *exception: Any) -> None:
        try:
            ended_ns = monotonic_ns()
            if self.before is not None:
                ring.emit(
                    layout.FETCH, self.began_ns, ended_ns, 1, *compute_usage_since(self.before)
                )
        except BaseException as error:
            handle_error(error)


def make_span(name: str) -> "Optional[Union[Span, FetchSpan]]":
    """Return a context manager for a span of this name, None when all names are taken."""
    if name == "fetch":
        return FetchSpan()
    builtin = BUILTIN_SPANS.get(name)
    if builtin is not None:
        return Span(*builtin)
    kind = ring.assign_kind(name)
    return None if kind < 0 else Span(kind, 0, 0)
