"""torch.save and torch.distributed.checkpoint.save: time and size of every checkpoint."""

import os
from types import ModuleType
from typing import Any

from .. import layout, ring
from .seam import wrap


def install(module: ModuleType) -> bool:
    """Wrap `save` before others import it from this module by name."""
    return wrap(module, "save", _saved)


def _saved(
    token: None, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
) -> None:
    ring.emit(layout.CHECKPOINT, start, end, _bytes_written(*arguments, **keywords))


def _bytes_written(*arguments: Any, **keywords: Any) -> int:
    """Return the size of the file that torch.save was given by name; -1 for anything else."""
    target = arguments[1] if len(arguments) > 1 else keywords.get("f")
    if not isinstance(target, (str, os.PathLike)):
        return -1
    try:
        return os.stat(target).st_size
    except OSError:
        return -1
