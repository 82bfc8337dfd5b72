"""torch.save, torch.distributed.checkpoint and safetensors: time and size of every checkpoint."""

from types import ModuleType
from typing import Any, Dict, Tuple

from .. import layout
from . import outermost_calls

# Functions that write a checkpoint, with the position and keyword of the file name.
_SAVE_FUNCTIONS = {
    "torch.serialization": (("save", 1, "f"),),
    # An asynchronous save blocks training only for the duration of the call.
    "torch.distributed.checkpoint.state_dict_saver": (("save", -1, ""), ("async_save", -1, "")),
    "safetensors.torch": (("save_file", 1, "filename"),),
}


def install(module: ModuleType) -> bool:
    """Wrap the save functions before other modules import them by name."""
    hooked = False
    saves = _SAVE_FUNCTIONS[module.__name__]
    if not hasattr(module, "save"):  # before PyTorch 2.2; later ones warn their caller
        saves += (("save_state_dict", -1, ""),)
    for name, position, keyword in saves:
        if hasattr(module, name):
            size = _make_size_reader(position, keyword)
            hooked = outermost_calls.wrap_outermost(
                module, name, layout.CHECKPOINT, size, by_parts=False
            )
    return hooked


def _make_size_reader(position: int, keyword: str) -> outermost_calls.SizeReader:
    def size(arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> int:
        if position < 0:
            return outermost_calls.UNKNOWN
        return outermost_calls.read_file_size(
            arguments[position] if len(arguments) > position else keywords.get(keyword)
        )

    return size
