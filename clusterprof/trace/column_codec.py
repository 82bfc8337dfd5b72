"""Packs int64 and float64 columns into byte planes with the standard library alone.

A column is seen as lanes of 8 bytes. Each lane is replaced by its difference to its predecessor
(integers: subtraction modulo 2**64; floats: XOR of the bits, so every NaN survives), the lanes are
cut into 8 planes (all lowest bytes, all second bytes, …) and each plane is stored as cheaply as it
can be: not at all when it is zero or repeats the plane above it, as it is when it looks random,
else compressed together with the others of its frame.

All lanes of a block are worked on at once: a Python integer of 64 * n bits is a vector of n
lanes, and its `-`, `^`, `&` and `<<` run in C. That is what makes numpy dispensable here.
"""

from __future__ import annotations

import zlib
from array import array
from functools import lru_cache

from clusterprof.trace.frame import CODEC_NONE, CODEC_ZLIB, Block

LANE_BYTES = 8
INT = 0
FLOAT = 1

# How a plane is stored: two bits each, plane 0 in the lowest.
PLANE_ZERO = 0
PLANE_PACKED = 1
PLANE_RAW = 2
PLANE_AS_ABOVE = 3

_SAMPLE = 48  # bytes looked at to tell a random plane
_RANDOM_DISTINCT = 36  # of 48 random bytes about 44 differ; with 36, zlib would save a tenth
_RANDOM_FROM = 64  # shorter planes are not worth the question
_ROUND = 1.5 * 2.0**52
_KEPT_LANES = 1 << 13  # masks of wider blocks are made anew: an imported second has its own width


class PlaneSink:
    """Collects the planes of one frame and compresses those that are worth it."""

    __slots__ = ("packed", "raw")

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.packed: list[bytes] = []

    def add_lanes(self, lanes: bytes) -> int:
        """Cut lanes into planes, store each, and return the eight answers as one number."""
        n = len(lanes) // LANE_BYTES
        above = zero = bytes(n)
        code = 0
        small = array("I", lanes)[1::2].tobytes() == bytes(4 * n)  # the upper half is zero
        for k in range(3 if small else 7, -1, -1):
            plane = lanes[k::LANE_BYTES]
            if plane == zero:
                stored = PLANE_ZERO
            elif plane == above:
                stored = PLANE_AS_ABOVE
            elif (
                n >= _RANDOM_FROM
                and n - plane.count(0) >= _RANDOM_DISTINCT - 1  # too few to differ so often
                and len(set(plane[:: n // _SAMPLE][:_SAMPLE])) >= _RANDOM_DISTINCT
            ):
                self.raw.append(plane)
                stored = PLANE_RAW
            else:
                self.packed.append(plane)
                stored = PLANE_PACKED
            code = code << 2 | stored
            above = plane
        return code

    def body(self, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> tuple[int, int, int, list[bytes]]:
        """Return raw bytes, unpacked bytes, codec and the parts of the frame's body."""
        plain = b"".join(self.packed)
        raw_bytes = sum(map(len, self.raw))
        deflate = zlib.compressobj(1, zlib.DEFLATED, -14, 7, strategy)
        packed = deflate.compress(plain) + deflate.flush()
        if len(packed) < len(plain):
            return raw_bytes, len(plain), CODEC_ZLIB, [*self.raw, packed]
        return raw_bytes, len(plain), CODEC_NONE, [*self.raw, plain]


def pack_block(sink: PlaneSink, kind: int, data: bytes, columns: int, lag: int) -> Block:
    """Store columns of equal type and length, each value as its difference to `lag` rows before."""
    lanes = len(data) // LANE_BYTES
    rows = lanes // columns
    lag = min(lag, rows)
    if rows <= lag:
        return Block(kind, columns, rows, lag, 0, sink.add_lanes(data), 0)
    values = int.from_bytes(data, "little")
    before = values << 64 * lag & _masks(lanes)[2]
    if kind == FLOAT:
        changes, zigzag = values ^ before, 0
    else:
        changes, zigzag = fold(difference(values, before, lanes), lanes)
    firsts, rest = _split(data, changes.to_bytes(len(data), "little"), rows, lag)
    return Block(kind, columns, rows, lag, zigzag, sink.add_lanes(firsts), sink.add_lanes(rest))


def divided(data: bytes, factor: int) -> bytes | None:
    """Divide every lane; None when a lane is no multiple.

    If the one big number is a multiple and all lanes of the quotient are so small that multiplying
    carries nothing into the next, the lanes were multiples: numbers to the base 2**64 are unique.
    """
    quotient, left = divmod(int.from_bytes(data, "little"), factor)
    lanes = len(data) // LANE_BYTES
    if left or quotient & _top_bits(lanes, factor.bit_length()):
        return None
    return quotient.to_bytes(len(data), "little")


def thousandths(data: bytes) -> bytes | None:
    """Return float lanes as integers of which each is exactly 1000 times the float, or None.

    Percentages, milliwatts and megahertz become floats by a division, and a reader that divides
    by 1000 gets the very same bits; that is tried out here, so -0.0 and NaN are refused.
    """
    # Added to _ROUND, a float has its nearest integer in its lowest bits: 4 times round()'s speed.
    shifted = array("d", [value * 1000.0 + _ROUND for value in array("d", data)])
    lanes = len(data) // LANE_BYTES
    constant = int.from_bytes(array("d", [_ROUND]).tobytes() * lanes, "little")
    scaled = difference(int.from_bytes(shifted.tobytes(), "little"), constant, lanes)
    lanes_of = scaled.to_bytes(len(data), "little")
    back = array("d", [value / 1000.0 for value in array("q", lanes_of)])
    return lanes_of if back.tobytes() == data else None


def pack_plain(sink: PlaneSink, lanes: bytes, zigzag: int = 0) -> Block:
    """Store one int64 column as it is: for small numbers and for what was prepared elsewhere."""
    return Block(INT, 1, len(lanes) // LANE_BYTES, 0, zigzag, 0, sink.add_lanes(lanes))


def difference(left: int, right: int, lanes: int) -> int:
    """Subtract lane by lane modulo 2**64: the top bits are kept out of the borrow's way."""
    high, low, _ = _masks(lanes)
    return ((left | high) - (right & low)) ^ ((left ^ right ^ high) & high)


def fold(lanes_of: int, lanes: int) -> tuple[int, int]:
    """Map -1, 1, -2, 2 … to 1, 2, 3, 4 …, and say so by 1, if any lane is negative."""
    high = _masks(lanes)[0]
    negative = lanes_of & high
    if not negative:
        return lanes_of, 0
    negative >>= 63
    all_ones = (negative << 64) - negative  # in the negative lanes
    return (lanes_of ^ all_ones) << 1 | negative, 1


def _masks(lanes: int) -> tuple[int, int, int]:
    return _kept_masks(lanes) if lanes <= _KEPT_LANES else _kept_masks.__wrapped__(lanes)


@lru_cache(maxsize=64)
def _kept_masks(lanes: int) -> tuple[int, int, int]:
    high = int.from_bytes(b"\0\0\0\0\0\0\0\x80" * lanes, "little")
    every = (1 << 64 * lanes) - 1
    return high, every - high, every


def _top_bits(lanes: int, bits: int) -> int:
    made = _kept_top_bits if lanes <= _KEPT_LANES else _kept_top_bits.__wrapped__
    return made(lanes, bits)


@lru_cache(maxsize=64)
def _kept_top_bits(lanes: int, bits: int) -> int:
    top = (1 << bits) - 1 << 64 - bits
    return int.from_bytes(top.to_bytes(LANE_BYTES, "little") * lanes, "little")


def _split(data: bytes, changes: bytes, rows: int, lag: int) -> tuple[bytes, bytes]:
    """Return the values without a predecessor, and the changes of those that have one."""
    if lag == 1:
        values, rest = array("q", data), array("q", changes)
        del rest[::rows]
        return values[::rows].tobytes(), rest.tobytes()
    column = rows * LANE_BYTES
    head = lag * LANE_BYTES
    starts = range(0, len(data), column)
    firsts = b"".join([data[start : start + head] for start in starts])
    return firsts, b"".join([changes[start + head : start + column] for start in starts])


def pack_mask(mask: bytes) -> bytes:
    """Pack one byte per row into one bit per row; all missing becomes nothing."""
    if 0 not in mask:
        return b""
    bits = mask.translate(_ASCII_BITS) + b"0" * (-len(mask) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


_ASCII_BITS = b"0" + b"1" * 255
