"""torchdata's StatefulDataLoader: its own iterators and worker loop, modeled on torch's.

Its iterators wait through torch's base class and its workers fetch with torch's
fetchers, which `probe.hooks.dataloader` wraps; only iterator start and worker start
are its own.
"""

from types import ModuleType

from . import dataloader
from .wrap import wrap_function

_STATEFUL_ITERATORS = (
    "_StatefulSingleProcessDataLoaderIter",
    "_StatefulMultiProcessingDataLoaderIter",
)


def install(module: ModuleType) -> bool:
    """Wrap the worker loop in its module, and the iterators in theirs."""
    if hasattr(module, "_worker_loop") and module.__name__.endswith(".worker"):
        dataloader.wrap_worker_loop(module)
        return True
    return all(
        [
            wrap_function(getattr(module, name), "__init__", dataloader.record_loader_start)
            for name in _STATEFUL_ITERATORS
        ]
    )
