"""The size of a batch: samples, and tokens where it is text.

Only plain tensors and arrays inside plain containers are inspected, which is cheap and
has no side effects. A subclass might run code of the job when its shape is read.
"""

import sys
from _thread import get_ident
from collections import UserDict
from typing import Any, Callable, Sequence, Set, Tuple

from .. import annotations
from . import outermost_calls

UNKNOWN = -1
_MAX_DEPTH = 3  # containers within containers
_MAX_MEMBERS = 16  # members of a container that are inspected
# keys of arrays whose every element is a token, padding included
_TOKEN_KEYS = ("input_ids", "tokens")
_UNKNOWN_SIZES = UNKNOWN, UNKNOWN

_array_types: Set[Any] = set()  # the classes of plain tensors and arrays that are loaded so far


def _is_always_training() -> bool:
    return True


_is_training: Callable[[], bool] = _is_always_training  # torch.is_grad_enabled


def record_batch(data: Any) -> None:
    """Add a batch to the current step, unless it is for an evaluation."""
    if len(_array_types) < 2:
        _find_array_types()
    if not _is_training() or (
        outermost_calls.evaluating_threads and get_ident() in outermost_calls.evaluating_threads
    ):
        return
    annotations.count_samples(*measure_batch(data))


def measure_batch(data: Any, depth: int = _MAX_DEPTH) -> Tuple[int, int]:
    """Return the samples and tokens of a batch, each -1 where unknown.

    Samples: the first dimension of the first array. Tokens: the number of elements of
    `input_ids` or `tokens`.
    """
    if type(data) in _array_types:
        return _measure_array(data)[0], UNKNOWN
    members, mapping = _list_members(data)
    samples = tokens = UNKNOWN
    if mapping is not None:
        for name in _TOKEN_KEYS:
            if type(dict.get(mapping, name)) in _array_types:
                tokens = _measure_array(dict.get(mapping, name))[1]
                break
    for member in members:
        if type(member) in _array_types:
            if samples < 0:
                samples = _measure_array(member)[0]
        elif depth > 1:
            inner, inner_tokens = measure_batch(member, depth - 1)
            samples = inner if samples < 0 else samples
            tokens = inner_tokens if tokens < 0 else tokens
    return samples, tokens


def _find_array_types() -> None:
    global _is_training
    for module, name in (("torch", "Tensor"), ("numpy", "ndarray")):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            _array_types.add(kind)
    _is_training = getattr(sys.modules.get("torch"), "is_grad_enabled", _is_always_training)


def _measure_array(array: Any) -> Tuple[int, int]:
    """Return the first dimension and the number of elements of an array; -1 where unknown."""
    try:
        shape = array.shape
    except RuntimeError:  # a nested tensor, whose rows differ in length
        return _UNKNOWN_SIZES
    count = 1
    for length in shape:
        count *= length
    return (shape[0], count) if shape and type(shape[0]) is type(count) is int else _UNKNOWN_SIZES


def _list_members(data: Any) -> Tuple[Sequence[Any], Any]:
    """Return the members of a plain container, and its dict if it has one."""
    kind = type(data)
    if kind is list or kind is tuple:
        return data[:_MAX_MEMBERS], None
    mapping = None
    if issubclass(kind, dict):
        mapping = data
    elif issubclass(kind, UserDict):  # BatchEncoding of Hugging Face
        mapping = getattr(data, "__dict__", {}).get("data")
    elif issubclass(kind, list):
        return list.__getitem__(data, slice(_MAX_MEMBERS)), None
    elif issubclass(kind, tuple):
        return tuple.__getitem__(data, slice(_MAX_MEMBERS)), None
    if mapping is None or not issubclass(type(mapping), dict):
        return (), None
    return list(dict.values(mapping))[:_MAX_MEMBERS], mapping
