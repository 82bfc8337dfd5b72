"""Protobuf read field by field: values by hand, and what damaged bytes are refused with."""

from __future__ import annotations

import struct

import pytest

from clusterprof.analysis.importers.core.wire import (
    WireError,
    convert_signed,
    decode_text,
    read_fields,
    read_varint,
)


def test_protobuf_fields_of_every_type_are_read() -> None:
    data = b"\x08\x96\x01" + b"\x12\x02hi" + b"\x19" + struct.pack("<d", 1.5) + b"\x25\x07\0\0\0"
    fields = [(n, v if isinstance(v, int) else bytes(v)) for n, v in read_fields(memoryview(data))]
    assert fields[:2] == [(1, 150), (2, b"hi")]
    assert fields[2] == (3, int.from_bytes(struct.pack("<d", 1.5), "little"))
    assert fields[3] == (4, 7)
    assert read_varint(memoryview(b"\xff" * 9 + b"\x01"), 0) == (2**64 - 1, 10)
    assert convert_signed(2**64 - 5) == -5
    assert decode_text(memoryview(b"a\xff")) == "a\ufffd"
    assert decode_text(3) == ""


@pytest.mark.parametrize(
    "data", [b"\x08", b"\x08\x80", b"\x12\x05hi", b"\x19\0\0", b"\x0b", b"\x08" + b"\xff" * 11]
)
def test_damaged_protobuf_messages_raise_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        list(read_fields(memoryview(data)))
