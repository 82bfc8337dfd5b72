"""How much a batch holds: samples, and tokens where it is text.

Only what certainly costs nothing and has no effect is looked at: plain tensors and arrays inside
plain containers. A subclass might run code of the job when it is asked for its shape.
"""

import sys
from _thread import get_ident
from collections import UserDict
from itertools import islice
from typing import Any, Sequence

from .. import steps
from . import marks

UNKNOWN = -1
_DEPTH = 3  # containers within containers
_WIDTH = 16  # members of one that are looked at
_TOKENS = ("input_ids", "tokens")  # whose every element is a token, padding too


def handed_over(data: Any) -> None:
    """Count a batch to the step under way, unless it is for an evaluation."""
    if marks.evaluating and get_ident() in marks.evaluating:
        return
    torch = sys.modules.get("torch")
    if torch is not None and not getattr(torch, "is_grad_enabled", _yes)():
        return
    steps.brought(samples_of(data), tokens_of(data))


def samples_of(data: Any, depth: int = _DEPTH) -> int:
    """Return the first dimension of the first array in a batch; -1 when there is none."""
    if _is_array(data):
        return next(iter(_shape(data)), UNKNOWN)
    if depth:
        for member in _members(data):
            found = samples_of(member, depth - 1)
            if found >= 0:
                return found
    return UNKNOWN


def tokens_of(data: Any, depth: int = _DEPTH) -> int:
    """Return the elements of the batch's `input_ids` (or `tokens`); -1 when it has none."""
    mapping = _mapping(data)
    if mapping is not None:
        for name in _TOKENS:
            ids = dict.get(mapping, name)
            if _is_array(ids):
                lengths = _shape(ids)
                count = 1 if lengths else UNKNOWN
                for length in lengths:
                    count *= length
                return count
    if depth:
        for member in _members(data):
            if not _is_array(member):
                found = tokens_of(member, depth - 1)
                if found >= 0:
                    return found
    return UNKNOWN


def _yes() -> bool:
    return True


def _is_array(data: Any) -> bool:
    kind = type(data)
    for module, name in (("torch", "Tensor"), ("numpy", "ndarray")):
        if kind.__name__ == name:
            return kind is getattr(sys.modules.get(module), name, None)
    return False


def _shape(array: Any) -> Sequence[int]:
    """Return the dimensions of an array; none when it has none, or will not say them."""
    try:
        shape = tuple(array.shape)
    except RuntimeError:  # a nested tensor, whose rows have lengths of their own
        return ()
    return shape if all([type(length) is int for length in shape]) else ()


def _mapping(data: Any) -> Any:
    kind = type(data)
    if issubclass(kind, dict):
        return data
    if issubclass(kind, UserDict):  # BatchEncoding of Hugging Face
        inner = getattr(data, "__dict__", {}).get("data")
        return inner if type(inner) is dict else None
    return None


def _members(data: Any) -> Sequence[Any]:
    mapping = _mapping(data)
    if mapping is not None:
        return tuple(islice(dict.values(mapping), _WIDTH))
    kind = type(data)
    if issubclass(kind, list):
        return tuple(list.__getitem__(data, slice(_WIDTH)))
    if issubclass(kind, tuple):
        return tuple(tuple.__getitem__(data, slice(_WIDTH)))
    return ()
