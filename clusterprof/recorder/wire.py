"""Messages between recorder and helper: length-prefixed msgpack.

    u32 little-endian length · msgpack array

The helper has 15 MB for everything, the driver's library included, and `msgspec` alone takes five;
so its side is these few lines. The recorder decodes with `msgspec`, which it has anyway.
https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

LENGTH = struct.Struct("<I")
MOST_BYTES = 1 << 20  # a longer message is damage

_INT = struct.Struct(">Bq")
_UINT = struct.Struct(">BQ")
_FLOAT = struct.Struct(">Bd")
_SIZED = struct.Struct(">BI")
_NIL, _FALSE, _TRUE = 0xC0, 0xC2, 0xC3
_FLOAT64, _UINT64, _INT64, _STR32, _ARRAY32, _MAP32 = 0xCB, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF


def frame(message: list[Any]) -> bytes:
    """Return a message of None, bool, int, float, str, list, tuple and dict as it is sent."""
    parts: list[bytes] = []
    _pack(message, parts.append)
    payload = b"".join(parts)
    return LENGTH.pack(len(payload)) + payload


def frames(buffer: bytearray) -> Iterator[bytes]:
    """Take the payload of every whole message off the front of `buffer`.

    Raises ValueError at a length that no message has.
    """
    while len(buffer) >= LENGTH.size:
        (size,) = LENGTH.unpack_from(buffer)
        if size > MOST_BYTES:
            raise ValueError(f"a message of {size} bytes")
        if len(buffer) < LENGTH.size + size:
            return
        payload = bytes(buffer[LENGTH.size : LENGTH.size + size])
        del buffer[: LENGTH.size + size]
        yield payload


def decode(payload: bytes) -> Any:
    """Decode what `frame` made; other encodings of msgpack are refused with ValueError."""
    value, end = _unpack(payload, 0)
    if end != len(payload):
        raise ValueError("bytes behind the message")
    return value


def _pack(value: Any, add: Callable[[bytes], None]) -> None:
    if isinstance(value, float):
        add(_FLOAT.pack(_FLOAT64, value))
    elif value is None or isinstance(value, bool):
        add(bytes((_NIL if value is None else _TRUE if value else _FALSE,)))
    elif isinstance(value, int):
        add(_UINT.pack(_UINT64, value) if value >= 1 << 63 else _INT.pack(_INT64, value))
    elif isinstance(value, str):
        text = value.encode("utf-8", "replace")
        add(_SIZED.pack(_STR32, len(text)))
        add(text)
    elif isinstance(value, list | tuple):
        add(_SIZED.pack(_ARRAY32, len(value)))
        for item in value:
            _pack(item, add)
    elif isinstance(value, dict):
        add(_SIZED.pack(_MAP32, len(value)))
        for key, item in value.items():
            _pack(key, add)
            _pack(item, add)
    else:
        raise TypeError(f"cannot send {type(value).__name__}")


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    code = data[at] if at < len(data) else -1
    if code in (_NIL, _FALSE, _TRUE):
        return (None if code == _NIL else code == _TRUE), at + 1
    try:
        if code == _FLOAT64:
            return _FLOAT.unpack_from(data, at)[1], at + 9
        if code in (_INT64, _UINT64):
            return (_INT if code == _INT64 else _UINT).unpack_from(data, at)[1], at + 9
        if code not in (_STR32, _ARRAY32, _MAP32):
            raise ValueError(f"unknown code {code:#x}")
        size = _SIZED.unpack_from(data, at)[1]
    except struct.error as error:
        raise ValueError("cut short") from error
    at += _SIZED.size
    if code == _STR32:
        if at + size > len(data):
            raise ValueError("cut short")
        return data[at : at + size].decode("utf-8", "replace"), at + size
    items = []
    for _ in range(size * (2 if code == _MAP32 else 1)):
        item, at = _unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2])) if code == _MAP32 else items), at
