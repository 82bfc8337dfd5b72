"""Where one optimizer step ends and the next begins, and how much data came in for it."""

from _thread import get_ident
from time import monotonic_ns
from typing import Callable, List

from . import layout, ring

before_end: List[Callable[[], None]] = []
"""What has something to record before the step that it lies in."""

UNKNOWN = -1
OPTIMIZER, FRAMEWORK, USER = 0, 2, 1  # who ended a step: field b of its span

_began_ns = 0  # 0: nothing of the job seen yet
_number = 0
_ends = OPTIMIZER  # a framework that ends steps is believed before optimizers, the user before all
_thread = 0  # the one that ended the last step
_reads = False  # a batch was handed over in this process
_samples = _tokens = 0  # handed over since the last step


def saw(start_ns: int) -> None:
    """Note that the job does something: the first step begins no later than here."""
    global _began_ns
    if not _began_ns:
        _began_ns = start_ns


def brought(samples: int, tokens: int) -> None:
    """Note a batch that was handed to the job to train on; -1 = not known how much it holds."""
    global _reads, _samples, _tokens
    _reads = True
    _samples = UNKNOWN if samples < 0 or _samples < 0 else _samples + samples
    _tokens = UNKNOWN if tokens < 0 or _tokens < 0 else _tokens + tokens


def trains_in(thread: int) -> bool:
    """Return False for a thread that works beside the one that trains."""
    return _thread in (0, thread)


def optimizer_stepped(end_ns: int) -> None:
    """End a step because the optimizer has done its work."""
    if _ends == OPTIMIZER:
        _finish(end_ns)


def framework_begins() -> None:
    """Believe from now on the framework: one step of its own may be many of its optimizers'."""
    global _ends
    if _ends == OPTIMIZER:
        _ends = FRAMEWORK


def framework_stepped(end_ns: int) -> None:
    """End a step because the framework says so."""
    if _ends == FRAMEWORK:
        _finish(end_ns)


def mark() -> None:
    """End a step because the user says so, and from now on believe only the user."""
    global _ends, _began_ns
    now = monotonic_ns()
    if _ends != USER:
        _ends = USER
        if _number or not _began_ns:
            # The optimizer already ended this step, or nobody knows when it began.
            _began_ns = now
            return
    _finish(now)


def _finish(end_ns: int) -> None:
    global _began_ns, _number, _samples, _tokens, _thread
    for prepare in before_end:
        prepare()
    samples, tokens = (_samples, _tokens) if _reads else (UNKNOWN, UNKNOWN)
    _samples = _tokens = 0
    _thread = get_ident()
    ring.emit(layout.STEP, _began_ns, end_ns, _number, _ends, samples, tokens)
    _began_ns = end_ns
    _number += 1


def _forget() -> None:
    global _began_ns, _number, _ends, _thread, _reads, _samples, _tokens
    _began_ns = _number = _thread = _samples = _tokens = 0
    _ends = OPTIMIZER
    _reads = False


ring.after_fork.append(_forget)
