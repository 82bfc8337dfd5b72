"""How much a batch holds: samples, and tokens where it is text.

Only what certainly costs nothing and has no effect is looked at: plain tensors and arrays inside
plain containers. A subclass might run code of the job when it is asked for its shape.
"""

import sys
from _thread import get_ident
from collections import UserDict
from typing import Any, Callable, Sequence, Set, Tuple

from .. import steps
from . import marks

UNKNOWN = -1
_DEPTH = 3  # containers within containers
_WIDTH = 16  # members of one that are looked at
_TOKENS = ("input_ids", "tokens")  # whose every element is a token, padding too
_NOTHING = UNKNOWN, UNKNOWN

_arrays: Set[Any] = set()  # the classes of plain tensors and arrays, as far as they are loaded


def _yes() -> bool:
    return True


_trains: Callable[[], bool] = _yes  # torch.is_grad_enabled


def handed_over(data: Any) -> None:
    """Count a batch to the step under way, unless it is for an evaluation."""
    if len(_arrays) < 2:
        _look_around()
    if not _trains() or (marks.evaluating and get_ident() in marks.evaluating):
        return
    steps.brought(*sizes(data))


def sizes(data: Any, depth: int = _DEPTH) -> Tuple[int, int]:
    """Return samples (the first dimension of the first array in a batch) and tokens (all elements
    of its `input_ids` or `tokens`), each -1 where there is none."""
    if type(data) in _arrays:
        return _first_and_all(data)[0], UNKNOWN
    members, mapping = _members(data)
    samples = tokens = UNKNOWN
    if mapping is not None:
        for name in _TOKENS:
            if type(dict.get(mapping, name)) in _arrays:
                tokens = _first_and_all(dict.get(mapping, name))[1]
                break
    for member in members:
        if type(member) in _arrays:
            if samples < 0:
                samples = _first_and_all(member)[0]
        elif depth > 1:
            inner, inner_tokens = sizes(member, depth - 1)
            samples = inner if samples < 0 else samples
            tokens = inner_tokens if tokens < 0 else tokens
    return samples, tokens


def _look_around() -> None:
    global _trains
    for module, name in (("torch", "Tensor"), ("numpy", "ndarray")):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            _arrays.add(kind)
    _trains = getattr(sys.modules.get("torch"), "is_grad_enabled", _yes)


def _first_and_all(array: Any) -> Tuple[int, int]:
    """Return the first dimension and the number of elements; -1 where it will not say them."""
    try:
        shape = array.shape
    except RuntimeError:  # a nested tensor, whose rows have lengths of their own
        return _NOTHING
    count = 1
    for length in shape:
        count *= length
    return (shape[0], count) if shape and type(shape[0]) is type(count) is int else _NOTHING


def _members(data: Any) -> Tuple[Sequence[Any], Any]:
    """Return what a plain container holds, and the dict in it if it is one."""
    kind = type(data)
    if kind is list or kind is tuple:
        return data[:_WIDTH], None
    mapping = None
    if issubclass(kind, dict):
        mapping = data
    elif issubclass(kind, UserDict):  # BatchEncoding of Hugging Face
        mapping = getattr(data, "__dict__", {}).get("data")
    elif issubclass(kind, list):
        return list.__getitem__(data, slice(_WIDTH)), None
    elif issubclass(kind, tuple):
        return tuple.__getitem__(data, slice(_WIDTH)), None
    if mapping is None or not issubclass(type(mapping), dict):
        return (), None
    return list(dict.values(mapping))[:_WIDTH], mapping
