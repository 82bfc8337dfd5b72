"""Which causes an imported trace can tell: of the others it shows nothing, and nothing is no zero.

A trace of kernels has no samples of threads, disks or memory. A detector that looks for these in it
finds none and would claim 0.0 %; its cause was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clusterprof.probe import layout
from clusterprof.timeline.model import Rank
from clusterprof.timeline.traced import is_imported

SIGNS = "readings or marks of it"
"""What a recording of ours would have had, as a report says it."""
_KINDS: Mapping[str, tuple[int, ...]] = {
    "storage-local": (layout.LOADING,),
    "storage-remote": (layout.LOADING,),
    "storage-object": (layout.LOADING,),
    "cpu-preprocess": (layout.LOADING,),
    "cpu-gc": (layout.GC,),
    "h2d-copy": (layout.H2D,),
    "h2d-sync": (layout.SYNC, layout.STARVED),
    "launch-bound": (layout.STARVED,),
    "launch-alloc": (layout.ALLOCATOR,),
    "launch-recompile": (layout.COMPILE,),
    "checkpoint": (layout.CHECKPOINT,),
    "eval-host": (layout.EVAL,),
}
"""Spans of which one must be there for a trace to speak of a cause."""
_ANYWAY = frozenset(("input-wait", "startup", "device-throttled", "cpu-throttled"))
"""Told by marks of the loop, or by counters without which they are not asked at all."""


def not_told(rank: Rank, claimed: Mapping[str, bool]) -> Iterable[str]:
    """Return causes that were looked for in what an imported trace cannot show.

    `claimed`: cause -> whether any time was claimed for it. Empty for a recording of ours, and
    where somebody sampled the threads.
    """
    if not is_imported(rank.chunk) or any(one.threads for one in (rank.main, *rank.workers)):
        return ()
    seen = rank.main.spans.keys()
    return [
        id_
        for id_, any_ in claimed.items()
        if not (any_ or id_ in _ANYWAY or seen & set(_KINDS.get(id_, ())))
    ]
