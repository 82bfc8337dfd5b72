"""torch.save, torch.distributed.checkpoint and safetensors: time and size of every checkpoint."""

from types import ModuleType
from typing import Any, Dict, Tuple

from .. import layout
from . import marks

# What writes, and where among its arguments stands the name of the file.
_SAVES = {
    "torch.serialization": (("save", 1, "f"),),
    # An asynchronous save holds the training up only for as long as the call takes.
    "torch.distributed.checkpoint.state_dict_saver": (
        ("save", -1, ""),
        ("async_save", -1, ""),
    ),
    "safetensors.torch": (("save_file", 1, "filename"),),
}


def install(module: ModuleType) -> bool:
    """Wrap what saves before others import it from this module by name."""
    hooked = False
    saves = _SAVES[module.__name__]
    if not hasattr(module, "save"):  # before PyTorch 2.2; later versions of it warn their caller
        saves += (("save_state_dict", -1, ""),)
    for name, at, keyword in saves:
        if hasattr(module, name):
            size = _size_of(at, keyword)
            hooked = marks.wrap(module, name, layout.CHECKPOINT, size, by_parts=False)
    return hooked


def _size_of(at: int, keyword: str) -> marks.Size:
    def size(arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> int:
        if at < 0:
            return marks.UNKNOWN
        return marks.file_size(arguments[at] if len(arguments) > at else keywords.get(keyword))

    return size
