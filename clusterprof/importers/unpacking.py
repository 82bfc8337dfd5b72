"""Packed bytes as plain ones, never more at a time than is asked for, whatever they unfold to.

packed = PackedFile(open(path, "rb"))
plain = unpacked(packed)        # gzip and zstd are told by their first bytes
plain.read(1 << 20), packed.taken, plain.unfinished
"""

from __future__ import annotations

import io
import zlib
from typing import Any, Protocol

from clusterprof.errors import UsageError

_READ_BYTES = 1 << 16
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_WINDOW_BYTES = 1 << 27  # what `zstd --long` and `--ultra -22` ask for


class DamagedError(Exception):
    """The bytes cannot be unpacked from here on; what came before is good."""


class Plain(Protocol):
    """Unpacked bytes."""

    @property
    def unfinished(self) -> bool:
        """True when more was to come."""
        ...

    def read(self, size: int, /) -> bytes:
        """Return some bytes, at most so many; none at the end. Raises DamagedError."""
        ...


class Packed(Plain, Protocol):
    """Bytes as they lie on the disk, or as they stand in an archive."""

    @property
    def taken(self) -> int:
        """How many bytes of the disk were read so far."""
        ...

    def look(self, size: int) -> bytes:
        """Return the first bytes; they are read again."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class PackedFile:
    """A whole file."""

    unfinished = False

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self.taken = 0

    def look(self, size: int) -> bytes:
        """Return the first bytes; they are read again."""
        first = self._file.read(size)
        self._file.seek(0)
        return first

    def read(self, size: int, /) -> bytes:
        """Return some bytes, at most so many; none at the end."""
        data = self._file.read(size)
        self.taken += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def unpacked(packed: Packed) -> Plain:
    """Return the plain bytes of packed ones. Raises UsageError where a library is missing."""
    magic = packed.look(4)
    if magic[:2] == _GZIP:
        return Inflated(packed, 31)
    if magic == _ZSTD:
        return _Zstd(packed)
    return packed


class Inflated:
    """What zlib or gzip packed, several one after the other too; without a head with bits < 0."""

    def __init__(self, packed: Any, bits: int) -> None:
        self._packed, self._bits = packed, bits
        self._now = zlib.decompressobj(bits)
        self._rest = b""
        self._begun = False

    @property
    def unfinished(self) -> bool:
        """True when more was to come."""
        return self._begun and not self._now.eof

    def read(self, size: int, /) -> bytes:
        """Return some bytes, at most so many; none at the end. Raises DamagedError."""
        while True:
            data = self._rest or self._packed.read(min(size, _READ_BYTES))
            if self._now.eof:
                if not data or self._bits < 0:
                    return b""
                self._now, self._begun = zlib.decompressobj(self._bits), False
            try:
                out = self._now.decompress(data, size)
            except zlib.error as error:
                raise DamagedError(str(error)) from error
            self._begun = self._begun or bool(data)
            self._rest = self._now.unused_data if self._now.eof else self._now.unconsumed_tail
            if out or not data:
                return out


class _Zstd:
    """What zstd packed."""

    def __init__(self, packed: Packed) -> None:
        zstandard = _zstandard()
        self._error = zstandard.ZstdError
        self._out = 0
        try:
            told = zstandard.get_frame_parameters(packed.look(18)).content_size
        except zstandard.ZstdError:
            told = 0
        self._told = told if told < 1 << 62 else 0  # else it is not known
        unpack = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        self._reader = unpack.stream_reader(packed, _READ_BYTES, read_across_frames=True)

    @property
    def unfinished(self) -> bool:
        """True when more was to come, as far as the file tells how much it is."""
        return self._out < self._told

    def read(self, size: int, /) -> bytes:
        """Return some bytes, at most so many; none at the end. Raises DamagedError."""
        try:
            data: bytes = self._reader.read(size)
        except self._error as error:
            raise DamagedError(str(error)) from error
        self._out += len(data)
        return data


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(
            "this file is packed with zstd, and the package zstandard is not installed",
            "pip install zstandard, or unpack it: zstd -d FILE",
        ) from error
    return zstandard
