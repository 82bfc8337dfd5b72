"""torchdata's StatefulDataLoader: iterators and a worker loop of its own, made after torch's.

Its iterators wait through torch's base class and its workers fetch with torch's fetchers, which
`dataloader` has wrapped; what is its own is where an iterator starts and a worker begins.
"""

from types import ModuleType

from . import dataloader
from .seam import wrap

_ITERATORS = ("_StatefulSingleProcessDataLoaderIter", "_StatefulMultiProcessingDataLoaderIter")


def install(module: ModuleType) -> bool:
    """Wrap the worker loop in its module, and the iterators in theirs."""
    if hasattr(module, "_worker_loop") and module.__name__.endswith(".worker"):
        dataloader.wrap_worker_loop(module)
        return True
    return all([wrap(getattr(module, name), "__init__", dataloader.started) for name in _ITERATORS])
