"""The file that holds one node's settled window: written by the node, read by viewers.

    4s magic · u16 format · 8s release · 16s settings · i64 end_ns · i64 window_ns
    · u32 payload bytes · u32 crc32 of the payload · payload (msgpack)

It is read with the types of the classes below and never executed: what does not fit is
damage. Arrays are (dtype, shape, bytes). `end_ns` is the common end of the window by the
node's wall clock, `settings` a digest of the limits with which it was settled.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin

import msgspec
import numpy as np

from clusterprof import __version__
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.timeline.collectives.int_table import pack_table, unpack_table
from clusterprof.analysis.timeline.collectives.rows import (
    CHANNEL,
    HEAD_ROWS,
    NO_NUMBER,
    SEQUENCE,
    RankOperationBlock,
    RankOperations,
)
from clusterprof.report.live import RankStatus
from clusterprof.trace.live_files import TEMPORARY_NAME

FORMAT = 1
MAX_BYTES = 16 << 20
"""Largest file that is written or read, bytes: 8 ranks with 1,000 operations a second each."""
Problem = Literal["missing", "old", "version", "settings", "damaged"]
_MAGIC = b"CPW\x01"
_HEAD = struct.Struct("<4sH8s16sqqII")
_ROWS_PER_BLOCK = 128  # a viewer reads a block of every rank at a time
_DTYPES = {
    name: np.dtype(name)
    for name in ("<i8", "<i4", "<i2", "<u8", "<u4", "<u2", "<f8", "<f4", "|b1", "|i1", "|u1")
}


@dataclass(frozen=True, slots=True)
class SettledNode:
    """One node's settled window, and the state of its recorder when it was settled."""

    name: str
    """Display name of the node."""
    period_ns: int
    """Time until the next one."""
    latest_ns: int
    """Time of the newest record by the node's wall clock, ns since 1970."""
    damaged_bytes: int
    result: NodeResult
    ranks: Mapping[int, RankStatus]
    """By process id."""


class SettledHead(NamedTuple):
    """What is known of a file before its payload is read."""

    path: Path
    end_ns: int
    payload_bytes: int
    crc: int
    written_at: float
    """Modification time, seconds since 1970 by the clock of the file system."""


class UnusableWindowError(Exception):
    """A settled window cannot be used; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        """Take the reason."""
        super().__init__(problem)
        self.problem: Problem = problem


def make_settings_key(limits: Mapping[str, Any]) -> bytes:
    """Make the digest of limits: windows of other limits are not merged, bytes[16]."""
    text = repr(sorted((cause, repr(limit)) for cause, limit in limits.items()))
    return blake2b(text.encode(), digest_size=16).digest()


def write_settled(
    folder: Path, name: str, settled: SettledNode, end_ns: int, window_ns: int, settings: bytes
) -> int:
    """Write the window into a node's folder under a name, atomically; return its size in bytes.

    Raises: OSError when it cannot be written, or is larger than MAX_BYTES.
    """
    small = replace(settled, result=_with_small_blocks(settled.result))
    payload = msgspec.msgpack.encode(small, enc_hook=_encode_value)
    if len(payload) + _HEAD.size > MAX_BYTES:
        raise OSError(f"a settled window of {len(payload)} bytes")
    crc = zlib.crc32(payload)
    head = _HEAD.pack(
        _MAGIC, FORMAT, _make_release_key(), settings, end_ns, window_ns, len(payload), crc
    )
    temporary = folder / TEMPORARY_NAME
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(head)
        file.write(payload)
    os.replace(temporary, folder / name)
    return len(head) + len(payload)


def read_settled_head(path: Path, window_ns: int, settings: bytes) -> SettledHead:
    """Read the head of a file.

    Raises: UnusableWindowError when there is none, or it does not fit the window and the settings.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError:
        raise UnusableWindowError("missing") from None
    try:
        status, head = os.fstat(descriptor), os.read(descriptor, _HEAD.size)
    except OSError:
        raise UnusableWindowError("missing") from None
    finally:
        os.close(descriptor)
    if len(head) < _HEAD.size or head[:4] != _MAGIC or status.st_size > MAX_BYTES:
        raise UnusableWindowError("damaged")
    _, format_, release, own_settings, end_ns, own_window_ns, size, crc = _HEAD.unpack(head)
    if format_ != FORMAT or release != _make_release_key():
        raise UnusableWindowError("version")
    if own_settings != settings or own_window_ns != window_ns:
        raise UnusableWindowError("settings")
    if status.st_size != _HEAD.size + size:
        raise UnusableWindowError("damaged")
    return SettledHead(path, end_ns, size, crc, status.st_mtime)


def read_settled(head: SettledHead) -> SettledNode:
    """Read the window behind a head.

    Raises: UnusableWindowError when it is damaged, or was replaced since the head was read.
    """
    try:
        with open(head.path, "rb", buffering=0) as file:
            own_head, payload = file.read(_HEAD.size), file.read(MAX_BYTES)
    except OSError:
        raise UnusableWindowError("missing") from None
    if len(payload) != head.payload_bytes or zlib.crc32(payload) != head.crc:
        is_unchanged = len(own_head) == _HEAD.size and _HEAD.unpack(own_head)[4] == head.end_ns
        raise UnusableWindowError("damaged" if is_unchanged else "old")
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, ValueError, TypeError):
        raise UnusableWindowError("damaged") from None


def _make_release_key() -> bytes:
    return blake2b(__version__.encode(), digest_size=8).digest()


def _encode_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, range):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


def _decode_value(kind: Any, value: Any) -> Any:
    if not _is_array(kind):
        raise TypeError(str(kind))
    name, shape, data = value
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ValueError("no array")
    size = dtype.itemsize
    for n in shape:
        if not isinstance(n, int) or n < 0:
            raise ValueError("no array")
        size *= n
    if size != len(data):
        raise ValueError("no array")
    array = np.frombuffer(data, dtype)
    return array if len(shape) == 1 else array.reshape(shape)


@cache
def _is_array(kind: Any) -> bool:
    return get_origin(kind) is np.ndarray


_DECODER = msgspec.msgpack.Decoder(SettledNode, dec_hook=_decode_value)


def _with_small_blocks(result: NodeResult) -> NodeResult:
    """Return the result with its operations in small blocks."""
    ranks = (
        rank if rank.operations is None else replace(rank, operations=split_blocks(rank.operations))
        for rank in result.ranks
    )
    return replace(result, ranks=tuple(ranks))


def split_blocks(
    operations: RankOperations, rows_per_block: int = _ROWS_PER_BLOCK
) -> RankOperations:
    """Split the blocks of operations that are in memory, so that a reader holds fewer rows.

    Others are returned unchanged.
    """
    blocks: list[RankOperationBlock] = []
    lowest: list[Any] = []
    for block in operations.blocks:
        if not isinstance(block.location, bytes):
            return operations
        table = unpack_table(block.location)
        for begin in range(0, table.shape[1], rows_per_block):
            part = np.ascontiguousarray(table[:, begin : begin + rows_per_block])
            data = pack_table(part)
            blocks.append(replace(block, rows=part.shape[1], location=data, length=len(data)))
            numbers = np.full(operations.counts.size, NO_NUMBER)
            np.minimum.at(numbers, part[CHANNEL], part[SEQUENCE])
            lowest.append(numbers)
    if not blocks:
        return operations
    assert table.shape[0] >= HEAD_ROWS
    lowest.append(np.full(operations.counts.size, NO_NUMBER))
    from_here = np.minimum.accumulate(np.stack(lowest)[::-1])[::-1].copy()
    return replace(operations, blocks=tuple(blocks), lowest=from_here)
