"""Pauses of Python's garbage collector: every full collection, and any over 100 µs."""

import gc
from time import monotonic_ns
from typing import Dict

from .. import handle_error, layout, ring

FULL_GENERATION = 2
MIN_PAUSE_NS = 100_000

_gc_began_ns = 0


def install() -> None:
    """Record pauses from now on; those before the first record of a process are irrelevant."""
    if _record_pause not in gc.callbacks:
        gc.callbacks.append(_record_pause)


def _record_pause(phase: str, info: Dict[str, int]) -> None:
    global _gc_began_ns
    try:
        now_ns = monotonic_ns()
        if phase == "start":
            _gc_began_ns = now_ns
            return
        began, _gc_began_ns = _gc_began_ns, 0
        generation = info["generation"]
        if not began or (generation != FULL_GENERATION and now_ns - began < MIN_PAUSE_NS):
            return
        if ring.is_open():  # a forked child that records nothing else needs no ring
            ring.emit(layout.GC, began, now_ns, generation, info["collected"])
    except BaseException as error:
        handle_error(error)


ring.on_open.append(install)
