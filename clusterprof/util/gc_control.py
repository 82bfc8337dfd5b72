"""Collect garbage seldom while many objects that live are built.

Python looks for cycles each time 700 more objects exist than before. The results of nodes and ranks
are many objects that live, none of them in a cycle: those searches find nothing, and each takes
longer than the one before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 100_000
"""New objects after which Python looks for cycles: a few tens of megabytes."""


@contextmanager
def reduce_gc_frequency() -> Iterator[None]:
    """Look for cycles only after 100,000 new objects within this block, in all threads.

    A caller that has disabled garbage collection, or set a higher threshold, keeps its setting.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
