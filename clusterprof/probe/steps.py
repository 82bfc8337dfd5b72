"""Where one optimizer step ends and the next begins."""

from time import monotonic_ns
from typing import Callable, List

from . import layout, ring

before_end: List[Callable[[], None]] = []
"""What has something to record before the step that it lies in."""
_began_ns = 0  # 0: nothing of the job seen yet
_number = 0
_marked = False  # the user marks steps: what optimizers say no longer counts


def saw(start_ns: int) -> None:
    """Note that the job does something: the first step begins no later than here."""
    global _began_ns
    if not _began_ns:
        _began_ns = start_ns


def optimizer_stepped(end_ns: int) -> None:
    """End a step because the optimizer has done its work."""
    if not _marked:
        _finish(end_ns, 0)


def mark() -> None:
    """End a step because the user says so, and from now on believe only the user."""
    global _marked, _began_ns
    now = monotonic_ns()
    if not _marked:
        _marked = True
        if _number or not _began_ns:
            # The optimizer already ended this step, or nobody knows when it began.
            _began_ns = now
            return
    _finish(now, 1)


def _finish(end_ns: int, marked: int) -> None:
    global _began_ns, _number
    for prepare in before_end:
        prepare()
    ring.emit(layout.STEP, _began_ns, end_ns, _number, marked)
    _began_ns = end_ns
    _number += 1


def _forget() -> None:
    global _began_ns, _number, _marked
    _began_ns = _number = 0
    _marked = False


ring.after_fork.append(_forget)
