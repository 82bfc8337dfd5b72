"""Foreign files as byte streams: plain, gzip, zstd, or members of a zip; in memory only.

    for source in open_sources(Path("rank0.pt.trace.json.gz")):
        source.head, source.blocks()

A damaged or truncated file is read up to the damage. A file that unpacks to more than `BOMB_RATIO`
times its size is refused once `BOMB_BYTES` bytes have been unpacked: traces compress by a factor of
10 to 50.

Streaming decompression in bounded blocks, whatever the compression ratio.

    packed = PackedFile(open(path, "rb"))
    plain = unpack_stream(packed)        # gzip and zstd: known by their magic bytes
    plain.read(1 << 20), packed.bytes_read, plain.unfinished

Zip members as bounded streams, stored or deflated.

Python's own reader unpacks bzip2 and LZMA without a bound and parses the whole
central directory again for each member that is opened. Here Python parses the
directory once, and the members are read by this module.
"""

from __future__ import annotations

import codecs
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from clusterprof.analysis.importers.core.base import HEAD_BYTES
from clusterprof.errors import UsageError

_READ_BYTES = 1 << 16
_BOMS_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF_16_SAMPLE_BYTES = 66
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_WINDOW_BYTES = 1 << 27  # the window that `zstd --long` and `--ultra -22` need


class DamagedError(Exception):
    """The bytes cannot be unpacked from here on; everything before is good."""


class PlainReader(Protocol):
    """Reader of unpacked bytes."""

    @property
    def unfinished(self) -> bool:
        """True if more bytes should have followed."""
        ...

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end.

        Raises: DamagedError when the data cannot be unpacked.
        """
        ...


class PackedReader(PlainReader, Protocol):
    """Reader of bytes as stored on disk or in an archive."""

    @property
    def bytes_read(self) -> int:
        """Number of bytes read from disk so far."""
        ...

    def peek(self, size: int) -> bytes:
        """Return the first bytes without consuming them."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class PackedFile:
    """Reader of a whole file."""

    unfinished = False

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self.bytes_read = 0

    def peek(self, size: int) -> bytes:
        """Return the first bytes without consuming them."""
        first = self._file.read(size)
        self._file.seek(0)
        return first

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end."""
        data = self._file.read(size)
        self.bytes_read += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def unpack_stream(packed: PackedReader) -> PlainReader:
    """Return a reader of the plain bytes behind a packed stream: gzip, zstd, UTF-16, or unchanged.

    Raises: UsageError when the file is zstd and the library is not installed.
    """
    magic = packed.peek(4)
    if magic[:2] == _GZIP:
        return _Utf16Reader(InflateReader(packed, 31))
    if magic == _ZSTD:
        return _Utf16Reader(_ZstdReader(packed))
    return _Utf16Reader(packed)


class _Utf16Reader:
    """Reader of UTF-16 text as UTF-8, as a redirection of PowerShell writes it; else unchanged."""

    def __init__(self, plain: PlainReader) -> None:
        self._plain = plain
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_started = False

    @property
    def unfinished(self) -> bool:
        """True if more bytes should have followed."""
        return self._plain.unfinished

    def read(self, size: int, /) -> bytes:
        """Return at most twice `size` bytes, none at the end.

        Raises: DamagedError when the data cannot be unpacked.
        """
        data = self._plain.read(size)
        if not self._is_started:
            self._is_started = True
            if _is_utf_16(data):
                self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        if self._decoder is None:
            return data
        text = self._decoder.decode(data, final=not data)
        while data and not text:  # half a character
            data = self._plain.read(size)
            text = self._decoder.decode(data, final=not data)
        return text.encode("utf-8", "replace")


class InflateReader:
    """Reader of zlib or gzip data, also concatenated streams; bits < 0: no header."""

    def __init__(self, packed: Any, bits: int) -> None:
        self._packed, self._bits = packed, bits
        self._decompressor = zlib.decompressobj(bits)
        self._rest = b""
        self._started = False

    @property
    def unfinished(self) -> bool:
        """True if the stream ended before its end marker."""
        return self._started and not self._decompressor.eof

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end.

        Raises: DamagedError when the data cannot be unpacked.
        """
        while True:
            data = self._rest or self._packed.read(min(size, _READ_BYTES))
            if self._decompressor.eof:
                if not data or self._bits < 0:
                    return b""
                self._decompressor, self._started = zlib.decompressobj(self._bits), False
            try:
                out = self._decompressor.decompress(data, size)
            except zlib.error as error:
                raise DamagedError(str(error)) from error
            self._started = self._started or bool(data)
            self._rest = (
                self._decompressor.unused_data
                if self._decompressor.eof
                else self._decompressor.unconsumed_tail
            )
            if out or not data:
                return out


class _ZstdReader:
    """Reader of zstd data."""

    def __init__(self, packed: PackedReader) -> None:
        zstandard = _import_zstandard()
        self._error = zstandard.ZstdError
        self._unpacked_bytes = 0
        try:
            declared = zstandard.get_frame_parameters(packed.peek(18)).content_size
        except zstandard.ZstdError:
            declared = 0
        self._declared_bytes = declared if declared < 1 << 62 else 0  # larger: not declared
        unpack = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        self._reader = unpack.stream_reader(packed, _READ_BYTES, read_across_frames=True)

    @property
    def unfinished(self) -> bool:
        """True if fewer bytes came out than the frame declares, where it declares a size."""
        return self._unpacked_bytes < self._declared_bytes

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end.

        Raises: DamagedError when the data cannot be unpacked.
        """
        try:
            data: bytes = self._reader.read(size)
        except self._error as error:
            raise DamagedError(str(error)) from error
        self._unpacked_bytes += len(data)
        return data


def _is_utf_16(data: bytes) -> bool:
    """Return whether bytes begin as UTF-16 text of mostly ASCII: every second byte is 0."""
    if data[:2] not in _BOMS_UTF_16:
        return False
    high = data[2:_UTF_16_SAMPLE_BYTES][1 if data[:2] == codecs.BOM_UTF16_LE else 0 :: 2]
    low = data[2:_UTF_16_SAMPLE_BYTES][0 if data[:2] == codecs.BOM_UTF16_LE else 1 :: 2]
    return high.count(0) > len(high) // 2 and not low.count(0)


def _import_zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(
            "this file is packed with zstd, and the package zstandard is not installed",
            "pip install zstandard, or unpack it: zstd -d FILE",
        ) from error
    return zstandard


ZIP_MAGIC = b"PK\x03\x04"
MAX_MEMBERS = 4096
MAX_DIRECTORY_BYTES = 4 << 20
"""Largest size of the central directory in bytes: 1 KiB for each member."""
_END_MAGIC, _END_64_MAGIC = b"PK\x05\x06", b"PK\x06\x06"
_END_BYTES, _END_64_BYTES, _LOCATOR_BYTES, _COMMENT_BYTES = 22, 56, 20, 65_535
_LOCAL_HEADER_BYTES = 30
_MAX_OFFSET = 1 << 62
_ENCRYPTED = 0x1


def list_members(file: io.BufferedIOBase, path: Path) -> list[zipfile.ZipInfo]:
    """List the file members of a zip archive.

    Raises: UsageError when the archive is damaged, encrypted, too large, or uses a compression
    method other than stored and deflate.
    """
    size = _read_directory_size(file)
    if size > MAX_DIRECTORY_BYTES:
        raise UsageError(
            f"{path}: its list of members is {size:,} bytes: more than"
            f" {MAX_MEMBERS:,} members, or implausibly long names",
            "unpack it and pass the folder instead",
        )
    try:
        with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
            members = [member for member in archive.infolist() if not member.filename.endswith("/")]
    except (
        zipfile.BadZipFile,
        ValueError,
        OverflowError,
        NotImplementedError,
        OSError,
        struct.error,
    ) as error:
        raise UsageError(f"{path}: damaged zip ({error})", "copy it again") from error
    if len(members) > MAX_MEMBERS:
        raise UsageError(f"{path}: {len(members):,} members exceed {MAX_MEMBERS:,}")
    for member in members:
        if member.flag_bits & _ENCRYPTED:
            raise UsageError(f"{path}: {member.filename} is encrypted", "unpack it yourself")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UsageError(
                f"{path}: {member.filename} uses compression method {member.compress_type}, which"
                f" is not"
                " supported",
                "compress it with deflate, or unpack it yourself",
            )
    return members


def _read_directory_size(file: io.BufferedIOBase) -> int:
    """Return the declared size of the central directory in bytes; 0 if no end record is found."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - _COMMENT_BYTES - _END_BYTES - _LOCATOR_BYTES - _END_64_BYTES))
    tail = file.read()
    file.seek(0)
    offset = tail.rfind(_END_MAGIC)
    if offset < 0 or len(tail) - offset < _END_BYTES:
        return 0
    size: int = struct.unpack_from("<I", tail, offset + 12)[0]
    large = offset - _LOCATOR_BYTES - _END_64_BYTES
    if large >= 0 and tail[large : large + 4] == _END_64_MAGIC:
        size = struct.unpack_from("<Q", tail, large + 40)[0]
    return size


class PackedMember:
    """Reader of one member: its plain bytes, and how many bytes of the archive they took."""

    def __init__(self, file: io.BufferedIOBase, member: zipfile.ZipInfo) -> None:
        self._file, self._member = file, member
        self._packed_bytes = _MemberBytes(file, member)
        deflated = member.compress_type == zipfile.ZIP_DEFLATED
        self._plain = (
            InflateReader(self._packed_bytes, -zlib.MAX_WBITS) if deflated else self._packed_bytes
        )
        self._peeked = b""
        self._checksum = 0

    @property
    def bytes_read(self) -> int:
        """Number of bytes read from the archive so far."""
        return self._packed_bytes.bytes_read

    @property
    def unfinished(self) -> bool:
        """True if more bytes should have followed."""
        return self._plain.unfinished

    def peek(self, size: int) -> bytes:
        """Return the first bytes without consuming them; fewer if the member is damaged."""
        while len(self._peeked) < size:
            try:
                further_bytes = self._plain.read(size - len(self._peeked))
            except DamagedError:
                break
            if not further_bytes:
                break
            self._peeked += further_bytes
        return self._peeked

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end.

        Raises: DamagedError when the data cannot be unpacked or the checksum does not match.
        """
        if self._peeked:
            data, self._peeked = self._peeked[:size], self._peeked[size:]
        else:
            data = self._plain.read(size)
        self._checksum = zlib.crc32(data, self._checksum)
        if not data and not self.unfinished and self._checksum != self._member.CRC:
            raise DamagedError("its checksum does not match")
        return data

    def close(self) -> None:
        """Close the archive."""
        self._file.close()


class _MemberBytes:
    """Reader of the packed bytes of a member."""

    def __init__(self, file: io.BufferedIOBase, member: zipfile.ZipInfo) -> None:
        self._file = file
        self._remaining_bytes = member.compress_size
        self.bytes_read = 0
        is_valid_offset = 0 <= member.header_offset < _MAX_OFFSET
        file.seek(member.header_offset if is_valid_offset else 0)
        head = file.read(_LOCAL_HEADER_BYTES) if is_valid_offset else b""
        self._has_header = len(head) == _LOCAL_HEADER_BYTES and head[:4] == ZIP_MAGIC
        if self._has_header:
            name, extra = struct.unpack_from("<HH", head, 26)
            file.seek(name + extra, io.SEEK_CUR)

    @property
    def unfinished(self) -> bool:
        """True when the archive ends within the member."""
        return self._remaining_bytes > 0

    def read(self, size: int, /) -> bytes:
        if not self._has_header:
            raise DamagedError("no member at the offset in the directory")
        data = self._file.read(min(size, self._remaining_bytes))
        self._remaining_bytes -= len(data)
        self.bytes_read += len(data)
        return data


_SAMPLE_BYTES = 4 << 20
_WINDOWS = 64
BOMB_RATIO = 250
BOMB_BYTES = 64 << 20
MAX_TOTAL_HEAD_BYTES = 64 << 20
"""Largest total size of the heads of all members of one archive, in bytes."""


class FileSource:
    """One file, or one member of a zip, unpacked while it is read."""

    def __init__(
        self,
        path: Path,
        open_packed: Callable[[], PackedReader],
        member_name: str = "",
        max_head_bytes: int = HEAD_BYTES,
    ) -> None:
        """Open the file and unpack its head.

        open_packed: returns the packed bytes from the start.
        member_name: name of the member in its archive, empty for a plain file. max_head_bytes:
        largest length of the head.
        """
        self.path = Path(f"{path}:{member_name}") if member_name else path
        self.file = path
        self.damage = ""
        self._open_packed = open_packed
        self.head = b"".join(self._read_unpacked(max_head_bytes, max_head_bytes))[:max_head_bytes]
        self.head_damage = self.damage
        """Why so little could be unpacked; "" where nothing is wrong so far."""
        self.damage = ""

    def blocks(self, block_bytes: int = 4 << 20) -> Iterator[bytes]:
        """Yield the unpacked bytes in blocks of at most `block_bytes`.

        Raises: UsageError when the file unpacks to far more than its size.
        """
        return self._read_unpacked(block_bytes, None)

    def sample_text(self) -> bytes:
        """Return text from the whole file, at most 4 MiB: of a longer file windows spread over it.

        Of a packed file these are its first bytes; of a file that is not text nothing.
        """
        if b"\x00" in self.head:
            return b""
        with open(self.file, "rb") as file:
            is_plain = self.path == self.file and file.read(len(self.head)) == self.head
            size = self.file.stat().st_size
            if not is_plain:
                sample = b"".join(self._read_unpacked(_SAMPLE_BYTES, _SAMPLE_BYTES))
                self.damage = ""
                return sample[:_SAMPLE_BYTES]
            if size <= _SAMPLE_BYTES:
                return self.head + file.read()
            window_bytes = _SAMPLE_BYTES // _WINDOWS
            windows = []
            for number in range(_WINDOWS):
                file.seek((size - window_bytes) * number // (_WINDOWS - 1))
                windows.append(file.read(window_bytes))
            return b"\n".join(windows)

    def _read_unpacked(self, block_bytes: int, max_bytes: int | None) -> Iterator[bytes]:
        self.damage = ""
        unpacked_bytes = 0
        with closing(self._open_packed()) as packed:
            plain = unpack_stream(packed)
            while True:
                try:
                    block = plain.read(block_bytes)
                except DamagedError as error:
                    self.damage = f"damaged after {unpacked_bytes:,} bytes ({error})"
                    return
                if not block:
                    break
                unpacked_bytes += len(block)
                if unpacked_bytes > BOMB_BYTES and unpacked_bytes > BOMB_RATIO * packed.bytes_read:
                    raise UsageError(
                        f"{self.path}: unpacks to more than {BOMB_RATIO} times its size:"
                        " no trace compresses that well",
                        "leave it out, or unpack it yourself",
                    )
                yield block
                if max_bytes is not None and unpacked_bytes >= max_bytes:
                    return
            if plain.unfinished:
                self.damage = f"cut off after {unpacked_bytes:,} bytes"


def open_sources(path: Path, content: bytes | None = None) -> Iterator[FileSource]:
    """Yield a source for a file, or one for each member if it is a zip.

    content: the bytes of the file if they are in memory already, else None.
    Raises: OSError when the file cannot be read; UsageError for a damaged or unsupported archive.
    """
    with _open_file(path, content) as file:
        members = list_members(file, path) if file.read(4) == ZIP_MAGIC else None
    if members is None:
        yield FileSource(path, lambda: PackedFile(_open_file(path, content)))
        return
    max_head_bytes = max(4096, min(HEAD_BYTES, MAX_TOTAL_HEAD_BYTES // max(len(members), 1)))
    for member in members:
        open_packed = partial(_open_member, path, content, member)
        yield FileSource(path, open_packed, member.filename, max_head_bytes)


def _open_file(path: Path, content: bytes | None) -> io.BufferedIOBase:
    return open(path, "rb") if content is None else io.BytesIO(content)


def _open_member(path: Path, content: bytes | None, member: object) -> PackedReader:
    return PackedMember(_open_file(path, content), member)  # type: ignore[arg-type]
