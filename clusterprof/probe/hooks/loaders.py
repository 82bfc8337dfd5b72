"""Loaders that are not PyTorch's: how long the job waits for each batch of tf.data, DALI or SPDL.

Their threads work inside the job's process or in native code. Who made the awaited batch is not
known, nor how many work at it.
"""

from types import ModuleType
from typing import Any, Tuple

from .. import layout, ring, steps
from . import batch, cuda
from .seam import wrap

UNKNOWN = -1

_WAITS = {
    "tensorflow.python.data.ops.iterator_ops": ("OwnedIterator", "__next__"),
    "nvidia.dali.plugin.pytorch": ("DALIGenericIterator", "__next__"),
    "nvidia.dali.plugin.jax.iterator": ("DALIGenericIterator", "__next__"),
    "spdl.pipeline._pipeline": ("Pipeline", "get_item"),
}


def install(module: ModuleType) -> bool:
    """Wrap what hands out the next batch."""
    class_name, name = _WAITS[module.__name__]
    return wrap(getattr(module, class_name), name, _waited, _waits)


def _waits(iterator: Any, *arguments: Any, **keywords: Any) -> Tuple[Any, bool]:
    # DALI's iterators take their first batch when they are made, and hand it out later.
    return cuda.before_wait(), getattr(iterator, "_first_batch", None) is None


def _waited(
    token: Tuple[Any, bool], start: int, end: int, data: Any, *arguments: Any, **keywords: Any
) -> None:
    if ring.helps():
        return  # a loader inside a loader's worker
    mark, fresh = token
    steps.saw(start)
    sequence = ring.emit(layout.DATA_WAIT, start, end, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
    cuda.after_wait(mark, sequence, start, end)
    if fresh:
        batch.handed_over(data)
