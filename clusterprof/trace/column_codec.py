"""Pack int64 and float64 columns into byte planes with the standard library alone.

A column is a sequence of lanes of 8 bytes. Each lane is replaced by its difference to
its predecessor (integers: subtraction modulo 2**64; floats: XOR of the bits, which
preserves every NaN). The lanes are cut into 8 planes (all lowest bytes, all second
bytes, …). A plane is left out when it is zero or equals the plane above it, stored raw
when it looks random, and otherwise compressed together with the others of its frame.

All lanes of a block are processed at once: a Python integer of 64 * n bits is a vector
of n lanes, and its `-`, `^`, `&` and `<<` run in C. This makes numpy unnecessary here.

It also chooses a storage strategy per column: a common divisor, and the order of columns.

Kernels count in ticks, drivers in milliwatts; the nanoseconds and watts computed from
these carry no more information. Planes also compress better when columns with similar
changes are adjacent. Both are decided from the first rows of a collector (one row at
first, if there are no more), hold until they prove wrong or until the next segment, and
are written in its layout, so that a reader need not guess.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from clusterprof.trace import frame
from clusterprof.trace.frame import CODEC_NONE, CODEC_ZLIB, ColumnBlock

LANE_BYTES = 8
INT = 0
FLOAT = 1

# How a plane is stored: two bits each, plane 0 in the lowest.
PLANE_ZERO = 0
PLANE_PACKED = 1
PLANE_RAW = 2
PLANE_AS_ABOVE = 3

_SAMPLE_BYTES = 48  # bytes sampled to recognize a random plane
# of 48 random bytes about 44 are distinct; with 36, zlib would save a tenth
_MIN_RANDOM_DISTINCT = 36
_MIN_RANDOM_PLANE_BYTES = 64  # shorter planes are not worth the check
_ROUNDING_CONSTANT = 1.5 * 2.0**52
_MAX_CACHED_LANES = (
    1 << 13
)  # masks of wider blocks are not cached: each second of an import differs


class PlaneSink:
    """Collects the planes of one frame and compresses those that are worth it."""

    __slots__ = ("packed", "raw")

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.packed: list[bytes] = []

    def add_lanes(self, lanes: bytes) -> int:
        """Cut lanes into planes, store each, and return the eight storage codes as one number."""
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
                n >= _MIN_RANDOM_PLANE_BYTES
                # too few nonzero bytes to be random
                and n - plane.count(0) >= _MIN_RANDOM_DISTINCT - 1
                and len(set(plane[:: n // _SAMPLE_BYTES][:_SAMPLE_BYTES])) >= _MIN_RANDOM_DISTINCT
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
        """Return the number of raw bytes, of unpacked bytes, the codec, and the parts of the
        frame's body.
        """
        plain = b"".join(self.packed)
        raw_bytes = sum(map(len, self.raw))
        deflate = zlib.compressobj(1, zlib.DEFLATED, -14, 7, strategy)
        packed = deflate.compress(plain) + deflate.flush()
        if len(packed) < len(plain):
            return raw_bytes, len(plain), CODEC_ZLIB, [*self.raw, packed]
        return raw_bytes, len(plain), CODEC_NONE, [*self.raw, plain]


def pack_block(sink: PlaneSink, kind: int, data: bytes, columns: int, lag: int) -> ColumnBlock:
    """Pack columns of equal type and length, each value as its difference to `lag` rows
    before.
    """
    lanes = len(data) // LANE_BYTES
    rows = lanes // columns
    lag = min(lag, rows)
    if rows <= lag:
        return ColumnBlock(kind, columns, rows, lag, 0, sink.add_lanes(data), 0)
    values = int.from_bytes(data, "little")
    before = values << 64 * lag & _build_masks(lanes)[2]
    if kind == FLOAT:
        changes, zigzag = values ^ before, 0
    else:
        changes, zigzag = encode_zigzag(subtract_lanes(values, before, lanes), lanes)
    firsts, later_values = _split_first_values(
        data, changes.to_bytes(len(data), "little"), rows, lag
    )
    return ColumnBlock(
        kind, columns, rows, lag, zigzag, sink.add_lanes(firsts), sink.add_lanes(later_values)
    )


def scale_integers(data: bytes, factor: int) -> bytes | None:
    """Divide every lane by a factor; None when a lane is not a multiple.

    If the one large integer is a multiple and all lanes of the quotient are so small that
    multiplying carries nothing into the next lane, every lane was a multiple: the digits of
    a number to the base 2**64 are unique.
    """
    quotient, remainder = divmod(int.from_bytes(data, "little"), factor)
    lanes = len(data) // LANE_BYTES
    if remainder or quotient & _build_top_bits(lanes, factor.bit_length()):
        return None
    return quotient.to_bytes(len(data), "little")


def scale_floats(data: bytes) -> bytes | None:
    """Convert float lanes to integers of which each is exactly 1000 times the float, or None.

    Percentages, milliwatts and megahertz become floats by a division, and a reader that
    divides by 1000 gets identical bits. That is verified here, so -0.0 and NaN are refused.
    """
    # Added to _ROUND, a float has its nearest integer in its lowest bits: 4 times round()'s speed.
    shifted = array("d", [value * 1000.0 + _ROUNDING_CONSTANT for value in array("d", data)])
    lanes = len(data) // LANE_BYTES
    constant = int.from_bytes(array("d", [_ROUNDING_CONSTANT]).tobytes() * lanes, "little")
    scaled = subtract_lanes(int.from_bytes(shifted.tobytes(), "little"), constant, lanes)
    thousandths_lanes = scaled.to_bytes(len(data), "little")
    restored = array("d", [value / 1000.0 for value in array("q", thousandths_lanes)])
    return thousandths_lanes if restored.tobytes() == data else None


def pack_plain(sink: PlaneSink, lanes: bytes, zigzag: int = 0) -> ColumnBlock:
    """Pack one int64 column without differences: for small numbers and for prepared columns."""
    return ColumnBlock(INT, 1, len(lanes) // LANE_BYTES, 0, zigzag, 0, sink.add_lanes(lanes))


def subtract_lanes(left: int, right: int, lanes: int) -> int:
    """Subtract lane by lane modulo 2**64; the top bits are masked so that no borrow crosses
    lanes.
    """
    high, low, _ = _build_masks(lanes)
    return ((left | high) - (right & low)) ^ ((left ^ right ^ high) & high)


def encode_zigzag(values: int, lanes: int) -> tuple[int, int]:
    """Map -1, 1, -2, 2 … to 1, 2, 3, 4 … if any lane is negative; the second value is then 1."""
    high = _build_masks(lanes)[0]
    negative = values & high
    if not negative:
        return values, 0
    negative >>= 63
    all_ones = (negative << 64) - negative  # in the negative lanes
    return (values ^ all_ones) << 1 | negative, 1


def _build_masks(lanes: int) -> tuple[int, int, int]:
    return (
        _build_cached_masks(lanes)
        if lanes <= _MAX_CACHED_LANES
        else _build_cached_masks.__wrapped__(lanes)
    )


@lru_cache(maxsize=64)
def _build_cached_masks(lanes: int) -> tuple[int, int, int]:
    high = int.from_bytes(b"\0\0\0\0\0\0\0\x80" * lanes, "little")
    all_bits = (1 << 64 * lanes) - 1
    return high, all_bits - high, all_bits


def _build_top_bits(lanes: int, bits: int) -> int:
    build = (
        _build_cached_top_bits if lanes <= _MAX_CACHED_LANES else _build_cached_top_bits.__wrapped__
    )
    return build(lanes, bits)


@lru_cache(maxsize=64)
def _build_cached_top_bits(lanes: int, bits: int) -> int:
    top = (1 << bits) - 1 << 64 - bits
    return int.from_bytes(top.to_bytes(LANE_BYTES, "little") * lanes, "little")


def _split_first_values(data: bytes, changes: bytes, rows: int, lag: int) -> tuple[bytes, bytes]:
    """Split into the first values, without a predecessor, and the changes of the others."""
    if lag == 1:
        values, later_values = array("q", data), array("q", changes)
        del later_values[::rows]
        return values[::rows].tobytes(), later_values.tobytes()
    column = rows * LANE_BYTES
    head = lag * LANE_BYTES
    starts = range(0, len(data), column)
    firsts = b"".join([data[start : start + head] for start in starts])
    return firsts, b"".join([changes[start + head : start + column] for start in starts])


def pack_mask(mask: bytes) -> bytes:
    """Pack one byte per row into one bit per row; if all are missing, into b""."""
    if 0 not in mask:
        return b""
    bits = mask.translate(_ASCII_BITS) + b"0" * (-len(mask) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


_ASCII_BITS = b"0" + b"1" * 255


class RecordColumns(NamedTuple):
    """The columns of one record."""

    name: str
    rows: int
    typecodes: str
    """q or d per column."""
    columns: Sequence[array]
    times: tuple[array, ...] = ()
    """Columns that every record of this kind has, outside its layout: when rows were sampled."""


class ColumnStrategy(NamedTuple):
    """How the columns of a collector are stored."""

    typecodes: str
    stored: str
    """One of frame.STORED_TYPES per column."""
    order: dict[str, list[int]]
    """Columns by storage code, those with small changes first."""
    flat_order: tuple[int, ...]
    """All columns in storage order."""
    settled: bool
    """False when made from a single row, which shows nothing about how columns change."""


class StrategyPlanner:
    """Caches the strategy of each collector."""

    def __init__(self) -> None:
        self._plans: dict[str, ColumnStrategy] = {}

    def reset(self) -> None:
        """Discard all strategies; they are chosen again when next needed."""
        self._plans.clear()

    def pack(
        self, sink: PlaneSink, tables: Sequence[RecordColumns], lag: int
    ) -> tuple[list[ColumnStrategy], list[frame.ColumnBlock]]:
        """Pack tables; return the strategy of each, and the blocks: equal lengths share blocks."""
        plans = [self._plan(table) for table in tables]
        blocks = []
        for rows in dict.fromkeys(table.rows for table in tables):
            if not rows:
                continue
            members = [n for n, table in enumerate(tables) if table.rows == rows]
            lanes = self._lanes(tables, plans, members)
            floats = lanes.pop("d", b"")
            for kind, data in ((INT, b"".join(lanes.values())), (FLOAT, floats)):
                if data:
                    columns = len(data) // LANE_BYTES // rows
                    blocks.append(pack_block(sink, kind, data, columns, lag))
        return plans, blocks

    def _plan(self, table: RecordColumns) -> ColumnStrategy:
        plan = self._plans.get(table.name)
        if (
            plan is not None
            and plan.typecodes == table.typecodes
            and (plan.settled or table.rows <= 1)
        ):
            return plan
        return self._remember(table, "".join(map(choose_storage, table.columns)))

    def _lanes(
        self, tables: Sequence[RecordColumns], plans: list[ColumnStrategy], members: Sequence[int]
    ) -> dict[str, bytes]:
        """Return the lanes of all members by storage code; correct strategies that prove wrong."""
        lanes = {}
        for code in frame.STORED_TYPES:
            columns = [column for n in members for column in tables[n].times] if code == "q" else []
            for n in members:
                if code in plans[n].order:
                    record_columns = tables[n].columns
                    columns += [record_columns[index] for index in plans[n].order[code]]
            if columns:
                stored = encode_columns(columns, code)
                if stored is None:
                    for n in members:
                        plans[n] = self._correct(tables[n], plans[n], code)
                    return self._lanes(tables, plans, members)
                lanes[code] = stored
        return lanes

    def _correct(self, table: RecordColumns, plan: ColumnStrategy, code: str) -> ColumnStrategy:
        if code not in plan.order:
            return plan
        stored = "".join(
            choose_storage(column) if its == code else its
            for column, its in zip(table.columns, plan.stored)
        )
        return self._remember(table, stored)

    def _remember(self, table: RecordColumns, stored: str) -> ColumnStrategy:
        order: dict[str, list[int]] = {}
        for code in frame.STORED_TYPES:
            if code in stored:
                columns = [n for n, column_code in enumerate(stored) if column_code == code]
                order[code] = sorted(
                    columns, key=lambda n: _measure_spread(table.columns[n], stored[n])
                )
        flat = tuple(index for indices in order.values() for index in indices)
        plan = ColumnStrategy(table.typecodes, stored, order, flat, settled=table.rows > 1)
        self._plans[table.name] = plan
        return plan


def choose_storage(column: array) -> str:
    """Choose the storage code of a column, one of frame.STORED_TYPES."""
    if column.typecode == "d":
        return "d" if encode_columns([column], "m") is None else "m"
    common = gcd(*column)
    if common:
        for code in "tikuq":
            if (
                not common % frame.INTEGER_FACTORS[code]
                and encode_columns([column], code) is not None
            ):
                return code
    return "q"


def encode_columns(columns: Sequence[array], code: str) -> bytes | None:
    """Encode columns with a storage code as lanes, or None when that is not exact."""
    data = b"".join(columns)
    if code == "m":
        return scale_floats(data)
    return data if code in "qd" else scale_integers(data, frame.INTEGER_FACTORS[code])


def _measure_spread(column: array, code: str) -> int:
    """Return how many bits the stored values of a column differ in."""
    if code == "d" or not column:
        return 0
    spread = max(column) - min(column)
    return round(
        1000 * spread if code == "m" else spread // frame.INTEGER_FACTORS[code]
    ).bit_length()
