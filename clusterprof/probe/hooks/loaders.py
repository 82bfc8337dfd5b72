"""Loaders other than PyTorch's: how long the job waits for each batch of tf.data, DALI or SPDL.

Their threads run inside the job's process or in native code. Neither the thread that
built the awaited batch nor the number of threads is known.
"""

from types import ModuleType
from typing import Any, Tuple

from .. import annotations, layout, ring
from . import batch, cuda
from .wrap import wrap_function

UNKNOWN = -1

_WAIT_FUNCTIONS = {
    "tensorflow.python.data.ops.iterator_ops": ("OwnedIterator", "__next__"),
    "nvidia.dali.plugin.pytorch": ("DALIGenericIterator", "__next__"),
    "nvidia.dali.plugin.jax.iterator": ("DALIGenericIterator", "__next__"),
    "spdl.pipeline._pipeline": ("Pipeline", "get_item"),
}


def install(module: ModuleType) -> bool:
    """Wrap the function that delivers the next batch."""
    class_name, name = _WAIT_FUNCTIONS[module.__name__]
    return wrap_function(getattr(module, class_name), name, _finish_loader_wait, _begin_loader_wait)


def _begin_loader_wait(iterator: Any, *arguments: Any, **keywords: Any) -> Tuple[Any, bool]:
    # DALI's iterators fetch their first batch when they are created, and deliver it later.
    return cuda.begin_wait(), getattr(iterator, "_first_batch", None) is None


def _finish_loader_wait(
    token: Tuple[Any, bool],
    start: int,
    end: int,
    data: Any,
    iterator: Any,
    *arguments: Any,
    **keywords: Any,
) -> None:
    if ring.is_helper():
        return  # a loader inside a worker of another loader
    mark, fresh = token
    annotations.begin_first_step(start)
    if fresh:
        annotations.note_batch(id(iterator), start)
    sequence = ring.emit(layout.DATA_WAIT, start, end, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
    cuda.finish_wait(mark, sequence, start, end)
    if fresh:
        batch.record_batch(data)
