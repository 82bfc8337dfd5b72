"""Loaders other than PyTorch's: how long the job waits for each batch of tf.data, DALI or SPDL.

Their threads run inside the job's process or in native code. Neither the thread that
built the awaited batch nor the number of threads is known.
"""

from types import ModuleType
from typing import Any, Optional, Tuple

from .. import annotations, layout, ring
from . import batch_size, cuda
from .dataloader import end_wait
from .wrap import wrap_function

UNKNOWN = -1

LoaderToken = Optional[Tuple[Any, bool]]

_WAIT_FUNCTIONS = {
    "tensorflow.python.data.ops.iterator_ops": ("OwnedIterator", "__next__"),
    "nvidia.dali.plugin.pytorch": ("DALIGenericIterator", "__next__"),
    "nvidia.dali.plugin.jax.iterator": ("DALIGenericIterator", "__next__"),
    "spdl.pipeline._pipeline": ("Pipeline", "get_item"),
}


def install(module: ModuleType) -> bool:
    """Wrap the function that delivers the next batch."""
    class_name, name = _WAIT_FUNCTIONS[module.__name__]
    owner = getattr(module, class_name)
    return wrap_function(owner, name, _finish_loader_wait, _begin_loader_wait, raised=end_wait)


def _begin_loader_wait(iterator: Any, *arguments: Any, **keywords: Any) -> LoaderToken:
    if not annotations.begin_loading():
        return None
    # DALI's iterators fetch their first batch when they are created, and deliver it later.
    return cuda.begin_wait(), getattr(iterator, "_first_batch", None) is None


def _finish_loader_wait(
    token: LoaderToken,
    start: int,
    end: int,
    data: Any,
    iterator: Any,
    *arguments: Any,
    **keywords: Any,
) -> None:
    if token is None:
        batch_size.record_batch(data)  # of a thread that fetches ahead
        return
    annotations.end_loading()
    if ring.is_helper():
        return  # a loader inside a worker of another loader
    mark, fresh = token
    annotations.begin_first_step(start)
    if fresh:
        annotations.note_batch(id(iterator), start)
    sequence = ring.emit(layout.DATA_WAIT, start, end, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
    cuda.finish_wait(mark, sequence, start, end)
    if fresh:
        batch_size.record_batch(data)
