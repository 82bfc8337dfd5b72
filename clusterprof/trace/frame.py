"""Define the frame: the smallest part of a recording that can be read on its own.

Little-endian (docs/design/recording-format.md):

    0   magic b"CPF" and the byte 1
    4   u32 payload bytes
    8   u32 crc32 of everything after it: last 4 bytes of the head, and the payload
    12  u8 kind · u8 schema · u8 codec of the body · u8 reserved (0)
    16  payload: u32 header bytes · msgpack header · body

Nothing here touches a file or a column; trace.encoder and trace.decoder interpret
payloads.

It also keeps column names out of most frames.

What rarely changes is written as a *layout* in the first two frames that need it and
then ever more rarely. Other frames refer to it by a key computed from its content, so a
reader that lost one definition can use any other, from any segment.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAGIC = b"CPF\x01"
HEAD = struct.Struct("<4sIIBBBB")
HEAD_BYTES = HEAD.size
CRC_OFFSET = 12  # the checksum covers everything from here on
_HEAD_END = struct.Struct("<BBBBI")
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

FRAME_SCHEMA = 1

INTEGER_FACTORS = {"q": 1, "u": 1_000, "i": 1_000_000, "t": 10_000_000, "k": 1024}
"""Divisors of int64 columns whose values are all multiples: µs, ms and ticks in ns, KiB in
bytes.
"""
STORED_TYPES = "quitkmd"
"""Storage codes of a column: int64 divided by its factor, m float64 as int64 thousandths,
d float64. Blocks hold columns in this order, and within a code record by record; all
but d share blocks.
"""

MAX_PAYLOAD_BYTES = 16 << 20
"""A greater length counts as damage; the writer splits or refuses earlier."""
MAX_UNPACKED_BYTES = 64 << 20
"""Memory that one frame may decode to."""


class FrameError(ValueError):
    """A frame with a valid checksum whose content is invalid."""


class UnknownFrameError(FrameError):
    """A kind, schema or codec of a version newer than this reader."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame with a valid checksum; `header` is msgpack, `body` is still compressed by its
    codec.
    """

    kind: int
    schema: int
    codec: int
    header: bytes
    body: bytes


def pack_frame(
    kind: int, header: bytes, body: Sequence[bytes] = (), codec: int = CODEC_NONE
) -> bytes:
    """Pack one frame; `header` is msgpack, the parts of `body` are joined."""
    payload_bytes = 4 + len(header) + sum(map(len, body))
    tail = _HEAD_END.pack(kind, FRAME_SCHEMA, codec, 0, len(header))
    covered = b"".join((tail, header, *body))
    head = MAGIC + _LENGTH.pack(payload_bytes) + _LENGTH.pack(zlib.crc32(covered))
    return head + covered


def read_payload_length(data: Any, offset: int) -> int | None:
    """Return the payload bytes announced by the head at `offset`; None when it is not a valid
    head.

    data: at least HEAD_BYTES bytes from `offset` on.
    """
    magic, payload_bytes, _, _, _, _, reserved = HEAD.unpack_from(data, offset)
    if magic != MAGIC or reserved or not 4 <= payload_bytes <= MAX_PAYLOAD_BYTES:
        return None
    return int(payload_bytes)


def has_valid_checksum(data: Any, offset: int, payload_bytes: int) -> bool:
    """Return whether the checksum of the frame at `offset`, wholly in `data`, is right."""
    crc = _LENGTH.unpack_from(data, offset + 8)[0]
    with memoryview(data) as view:
        covered = view[offset + CRC_OFFSET : offset + HEAD_BYTES + payload_bytes]
        return bool(zlib.crc32(covered) == crc)


def unpack_frame(data: Any, offset: int, payload_bytes: int) -> Frame:
    """Split a frame with a valid checksum into its fields.

    Raises: FrameError when the header's length exceeds the frame.
    """
    kind, schema, codec, _, header_bytes = _HEAD_END.unpack_from(data, offset + CRC_OFFSET)
    start = offset + HEAD_BYTES + 4
    end = offset + HEAD_BYTES + payload_bytes
    if header_bytes > end - start:
        raise FrameError("the header does not fit into its frame")
    body = start + header_bytes
    view = memoryview(data)
    return Frame(kind, schema, codec, view[start:body].tobytes(), view[body:end].tobytes())


# --- headers: they precede the body in the kinds that carry columns -----------------------------
# Arrays instead of maps: a name per field and frame would cost more than the field.


class ColumnBlock(msgspec.Struct, array_like=True, frozen=True):
    """Columns of one type and length, stored together (see `columns`)."""

    kind: int
    """0 int64, 1 float64."""
    columns: int
    rows: int
    lag: int
    """Rows between a value and its predecessor; 0 = stored without differences."""
    zigzag: int
    """1 when differences were zigzag-encoded, so that small negative ones stay small."""
    firsts: int
    """Two bits per byte plane of the values without a predecessor (see `columns`)."""
    planes: int
    """Two bits per byte plane of the other values."""


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
    blocks: list[ColumnBlock]
    parts: list[ColumnsPart]
    layouts: list[bytes]
    """Definitions that other frames may refer to by their `layout_key`."""


class ColumnsLayout(msgspec.Struct, array_like=True, frozen=True):
    """Names and storage of a collector's columns; almost constant, so not in every frame."""

    collector: str
    signals: list[str]
    devices: list[str]
    types: str
    """One of STORED_TYPES per column."""
    order: list[int]
    """The columns in the order in which blocks hold them."""


class RowsLayout(msgspec.Struct, array_like=True, frozen=True):
    """Names and storage of a table's columns, and the strings its indices refer to."""

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
    blocks: list[ColumnBlock]
    parts: list[SpansPart]
    base_ns: int
    """Start of the first span."""
    constants: dict[str, int]
    """Fields that have one value throughout the frame."""


def compute_layout_key(definition: bytes) -> int:
    """Compute a layout's key from its content: equal definitions have equal keys in every
    segment.
    """
    return zlib.crc32(definition) | len(definition) << 32


_DEFINITION_INTERVAL = 64  # uses between two definitions of an established layout


@dataclass(slots=True)
class _Layout:
    identity: tuple[Any, ...]
    key: int
    definition: bytes
    uses: int = 0


class LayoutTable:
    """The layouts in use, one per collector or table."""

    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode
        self._layouts: dict[tuple[type, str], _Layout] = {}

    def reset(self) -> None:
        """Write every layout again: at the start of a segment, and after frames were lost."""
        for layout in self._layouts.values():
            layout.uses = 0

    def refer(self, kind: type, identity: tuple[Any, ...], definitions: list[bytes]) -> int:
        """Return the key of `kind(*identity)`, and append its definition to the frame's when it is
        due.

        identity: begins with the name of the collector or table.
        """
        name = (kind, identity[0])
        layout = self._layouts.get(name)
        if layout is None or layout.identity != identity:
            definition = self._encode(kind(*identity))
            layout = _Layout(identity, compute_layout_key(definition), definition)
            self._layouts[name] = layout
        uses = layout.uses
        # Defined at uses 0, 1, 3, 7, 15, 31, 63, then every 64: damage never destroys the only
        # copy.
        if (
            uses & (uses + 1) == 0
            if uses < _DEFINITION_INTERVAL
            else (uses + 1) % _DEFINITION_INTERVAL == 0
        ):
            definitions.append(layout.definition)
        layout.uses += 1
        return layout.key
