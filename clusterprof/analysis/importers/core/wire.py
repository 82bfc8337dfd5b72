"""Protobuf messages read field by field, without a schema compiler and without a library.

    for number, value in read_fields(memoryview(data)):
        ...                          # int for varint and fixed fields, memoryview for the others

The formats that need it (XSpace, Chakra) have few fields. A library would build every message of
a large file at once; this reader holds the bytes and one message, and needs no package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from clusterprof.analysis.importers.core.base import CannotImportError, Source

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_MESSAGE_BYTES = 512 << 20
"""Largest file that is read, in bytes: it is kept in memory."""
_MAX_VARINT_BYTES = 10
_FIXED64, _FIXED32 = struct.Struct("<Q"), struct.Struct("<I")
Field = tuple[int, "int | memoryview"]


class WireError(ValueError):
    """The bytes are not a protobuf message from here on."""


def read_message_bytes(source: Source) -> memoryview:
    """Read a whole file of protobuf.

    Raises: CannotImportError when it is larger than 512 MiB.
    """
    data = bytearray()
    for block in source.blocks(1 << 20):
        data += block
        if len(data) > MAX_MESSAGE_BYTES:
            raise CannotImportError(
                f"{source.path.name}: more than {MAX_MESSAGE_BYTES >> 20} MiB; profile fewer steps"
            )
    return memoryview(data)


def read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    """Read an unsigned integer of up to 64 bits; return it and the offset behind it.

    Raises: WireError when it is cut off or longer than ten bytes.
    """
    value = shift = 0
    for index in range(offset, min(offset + _MAX_VARINT_BYTES, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, index + 1
        shift += 7
    raise WireError("an integer is cut off")


def read_fields(data: memoryview) -> Iterator[Field]:
    """Yield number and value of each field: an unsigned integer, or the bytes of a message or text.

    Raises: WireError when the message is damaged; the fields before were yielded.
    """
    offset, size = 0, len(data)
    while offset < size:
        tag = data[offset]
        if tag < 0x80:
            offset += 1
        else:
            tag, offset = read_varint(data, offset)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value = data[offset] if offset < size else 0x80
            if value < 0x80:
                offset += 1
            else:
                value, offset = read_varint(data, offset)
            yield number, value
        elif kind == BYTES:
            length, offset = read_varint(data, offset)
            if length > size - offset:
                raise WireError("a field is cut off")
            yield number, data[offset : offset + length]
            offset += length
        elif kind in (FIXED64, FIXED32):
            fixed = _FIXED64 if kind == FIXED64 else _FIXED32
            if fixed.size > size - offset:
                raise WireError("a field is cut off")
            yield number, fixed.unpack_from(data, offset)[0]
            offset += fixed.size
        else:
            raise WireError(f"a field has the unknown type {kind}")


def convert_signed(value: int) -> int:
    """Convert an unsigned integer of 64 bits to the signed one that it stands for."""
    return value - (1 << 64) if value >> 63 else value


def decode_text(value: int | memoryview) -> str:
    """Decode a field of text; empty for another type."""
    return "" if isinstance(value, int) else bytes(value).decode("utf-8", "replace")
