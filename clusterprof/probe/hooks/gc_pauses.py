"""Pauses of the garbage collector: every full collection, and any that took over 100 µs."""

import gc
from time import monotonic_ns
from typing import Dict

from .. import failed, layout, ring

FULL = 2
NOTABLE_NS = 100_000

_began_ns = 0


def install() -> None:
    """Watch from now on; collections before the first record of a process tell nothing."""
    if _pause not in gc.callbacks:
        gc.callbacks.append(_pause)


def _pause(phase: str, info: Dict[str, int]) -> None:
    global _began_ns
    try:
        now = monotonic_ns()
        if phase == "start":
            _began_ns = now
            return
        began, _began_ns = _began_ns, 0
        generation = info["generation"]
        if not began or (generation != FULL and now - began < NOTABLE_NS):
            return
        if ring.is_open():  # a forked child that does nothing else needs no ring
            ring.emit(layout.GC, began, now, generation, info["collected"])
    except BaseException as error:
        failed(error)


ring.when_open.append(install)
