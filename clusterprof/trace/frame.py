"""One frame: the smallest piece of a recording that can be read on its own.

Little-endian (docs/design.md, section 8):

    0   magic b"CPF\\x01"
    4   u32 payload bytes
    8   u32 crc32 of everything that follows: the last 4 bytes of the head and the payload
    12  u8 kind · u8 schema · u8 codec of the body · u8 reserved (0)
    16  payload: u32 header bytes · msgpack header · body

Nothing here touches a file or a column; `encode` and `decode` know what a payload means.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAGIC = b"CPF\x01"
HEAD = struct.Struct("<4sIIBBBB")
HEAD_BYTES = HEAD.size
CRC_OFFSET = 12  # the checksum covers everything from here on
_HEAD_TAIL = struct.Struct("<BBBBI")
_LENGTH = struct.Struct("<I")

KIND_HEADER = 1
KIND_CLOCK = 2
KIND_COLUMNS = 3
KIND_ROWS = 4
KIND_SPANS = 5
KIND_EVENT = 6
KIND_GAP = 7
KINDS = frozenset(range(KIND_HEADER, KIND_GAP + 1))

CODEC_NONE = 0
CODEC_ZLIB = 1
CODEC_ZSTD = 2  # reserved: every Python that reads must be able to read every recording

SCHEMA = 1

FACTORS = {"q": 1, "u": 1_000, "i": 1_000_000, "t": 10_000_000, "k": 1024}
"""int64 columns whose values all are multiples: of µs, ms and ticks in ns, of KiB in bytes."""
STORED_TYPES = "quitkmd"
"""How a column is stored: int64 divided by its factor, m float64 as int64 thousandths, d float64.
Blocks hold columns in this order, within it record by record; all but d share their blocks."""

MAX_PAYLOAD_BYTES = 16 << 20
"""A length above this is damage; the writer splits or refuses before it gets there."""
MAX_UNPACKED_BYTES = 64 << 20
"""What one frame may grow to in memory."""


class FrameError(ValueError):
    """The bytes of a frame with a valid checksum mean nothing to this reader."""


class UnknownFrameError(FrameError):
    """A kind, schema or codec of a version that is newer than this reader."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame whose checksum was right; `header` is msgpack, `body` as its codec left it."""

    kind: int
    schema: int
    codec: int
    header: bytes
    body: bytes


def pack(kind: int, header: bytes, body: Sequence[bytes] = (), codec: int = CODEC_NONE) -> bytes:
    """Return the bytes of one frame; `header` is msgpack, the parts of `body` are joined."""
    payload_bytes = 4 + len(header) + sum(map(len, body))
    tail = _HEAD_TAIL.pack(kind, SCHEMA, codec, 0, len(header))
    covered = b"".join((tail, header, *body))
    head = MAGIC + _LENGTH.pack(payload_bytes) + _LENGTH.pack(zlib.crc32(covered))
    return head + covered


def payload_length(data: Any, offset: int) -> int | None:
    """Return the payload bytes that the head at `offset` announces; None when it is no head.

    `data` needs HEAD_BYTES bytes from `offset` on.
    """
    magic, payload_bytes, _, _, _, _, reserved = HEAD.unpack_from(data, offset)
    if magic != MAGIC or reserved or not 4 <= payload_bytes <= MAX_PAYLOAD_BYTES:
        return None
    return int(payload_bytes)


def checksum_holds(data: Any, offset: int, payload_bytes: int) -> bool:
    """Say whether the frame at `offset`, wholly in `data`, is what was written."""
    crc = _LENGTH.unpack_from(data, offset + 8)[0]
    with memoryview(data) as view:
        covered = view[offset + CRC_OFFSET : offset + HEAD_BYTES + payload_bytes]
        return bool(zlib.crc32(covered) == crc)


def unpack(data: Any, offset: int, payload_bytes: int) -> Frame:
    """Take apart a frame whose checksum holds; raise FrameError when its header's length lies."""
    kind, schema, codec, _, header_bytes = _HEAD_TAIL.unpack_from(data, offset + CRC_OFFSET)
    start = offset + HEAD_BYTES + 4
    end = offset + HEAD_BYTES + payload_bytes
    if header_bytes > end - start:
        raise FrameError("the header is longer than its frame")
    body = start + header_bytes
    view = memoryview(data)
    return Frame(kind, schema, codec, view[start:body].tobytes(), view[body:end].tobytes())


# --- headers: what stands before the body of the kinds that carry columns -----------------------
# Arrays instead of maps: a name per field and frame would cost more than the field.


class Block(msgspec.Struct, array_like=True, frozen=True):
    """Columns of one type and length, stored together (see `columns`)."""

    kind: int
    """0 int64, 1 float64."""
    columns: int
    rows: int
    lag: int
    """Rows between a value and its predecessor; 0 = stored as it is."""
    zigzag: int
    """1 when differences were folded so that small negative ones stay small."""
    firsts: int
    """Two bits per byte plane of the values without a predecessor (see `columns`)."""
    planes: int
    """Two bits per byte plane of the others."""


class ColumnsPart(msgspec.Struct, array_like=True, frozen=True):
    """One `Columns` or `Rows` record in a frame."""

    layout: int
    rows: int
    masks: dict[int, bytes]
    """By column: a bit per row, most significant first, 1 = missing; b"" = all missing."""


class ColumnsHeader(msgspec.Struct, array_like=True, frozen=True):
    """Header of a `columns` or `rows` frame."""

    raw_bytes: int
    unpacked_bytes: int
    blocks: list[Block]
    parts: list[ColumnsPart]
    layouts: list[bytes]
    """Definitions that other frames may refer to by their `layout_key`."""


class ColumnsLayout(msgspec.Struct, array_like=True, frozen=True):
    """What a collector's columns are; as good as constant, so not in every frame."""

    collector: str
    signals: list[str]
    devices: list[str]
    types: str
    """One of STORED_TYPES per column."""
    order: list[int]
    """The columns in the order in which blocks hold them."""


class RowsLayout(msgspec.Struct, array_like=True, frozen=True):
    """What a table's columns are, and the strings its indices point to."""

    table: str
    names: list[str]
    types: str
    order: list[int]
    strings: dict[str, list[str]]


class SpansPart(msgspec.Struct, array_like=True, frozen=True):
    """One `Spans` record in a frame."""

    pid: int
    started_ticks: int
    first_sequence: int
    dropped: int
    names: dict[int, str]
    rows: int


class SpansHeader(msgspec.Struct, array_like=True, frozen=True):
    """Header of a `spans` frame; blocks: gap, duration, then the fields that vary."""

    raw_bytes: int
    unpacked_bytes: int
    blocks: list[Block]
    parts: list[SpansPart]
    base_ns: int
    """Start of the first span."""
    constants: dict[str, int]
    """Fields that have one value throughout the frame."""


def layout_key(definition: bytes) -> int:
    """Name a layout by its content: equal definitions have equal keys in every segment."""
    return zlib.crc32(definition) | len(definition) << 32
