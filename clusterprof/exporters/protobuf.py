"""Protocol buffers as far as an exporter needs them: fields out, nothing in.

field_number << 3 | 0    varint: seven bits a byte, the lowest first, the high bit = more follow
field_number << 3 | 1    eight bytes, little-endian
field_number << 3 | 2    length as a varint, then so many bytes
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Int

_NINE_BYTES = 1 << 56  # from here to 2**63 a varint has nine bytes


def varint(value: int) -> bytes:
    """Return a whole number of any size up to 64 bits; negative ones as their two's complement."""
    return _SHORT[value] if 0 <= value < _SHORT_ONES else _long(value)


def _long(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SHORT_ONES = 1 << 14  # of up to two bytes: tags, lengths, most values
_SHORT = [_long(value) for value in range(_SHORT_ONES)]


def number(field: int, value: int) -> bytes:
    """Return a field of type int, uint, bool or enum."""
    return varint(field << 3) + varint(value)


def double(field: int, value: float) -> bytes:
    """Return a field of type double."""
    return varint(field << 3 | 1) + struct.pack("<d", value)


def fixed(field: int, value: int) -> bytes:
    """Return a field of type fixed64."""
    return varint(field << 3 | 1) + struct.pack("<Q", value & (1 << 64) - 1)


def message(field: int, *parts: bytes) -> bytes:
    """Return a field that holds a message made of fields, or bytes."""
    body = b"".join(parts)
    return varint(field << 3 | 2) + varint(len(body)) + body


def text(field: int, value: str) -> bytes:
    """Return a field of type string."""
    return message(field, value.encode("utf-8", "replace"))


def varints(values: Int) -> list[bytes]:
    """Return many whole numbers, each as `varint` does; times of our days at once."""
    if not values.size:
        return []
    if int(values.min()) < _NINE_BYTES:
        return [varint(value) for value in values.tolist()]
    data = nine_bytes(values).tobytes()
    return [data[at : at + 9] for at in range(0, len(data), 9)]


def nine_bytes(values: Int) -> NDArray[np.uint8]:
    """Return uint8[n, 9]: varints of numbers from 2**56 on, below 2**63."""
    shifts = np.arange(0, 63, 7, dtype=np.int64)
    out = (values[:, None] >> shifts & 0x7F).astype(np.uint8)
    out[:, :8] |= 0x80
    return out
