"""The members of a zip, read by themselves: nothing is unfolded beyond what is asked for.

Python's own reader unfolds bzip2 and LZMA without a bound, and reads the whole list of members
again for each that is opened. The list is its; the members are read here: as they are, or deflated.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

from clusterprof.errors import UsageError
from clusterprof.importers.unpacking import DamagedError, Inflated

ZIP = b"PK\x03\x04"
MEMBERS_AT_MOST = 4096
LIST_BYTES_AT_MOST = 4 << 20
"""Of the list of members: a kilobyte for each."""
_END, _END_64 = b"PK\x05\x06", b"PK\x06\x06"
_END_BYTES, _END_64_BYTES, _LOCATOR_BYTES, _COMMENT_BYTES = 22, 56, 20, 65_535
_LOCAL_BYTES = 30
_FARTHEST = 1 << 62
_ENCRYPTED = 0x1


def members_of(file: io.BufferedIOBase, path: Path) -> list[zipfile.ZipInfo]:
    """Return the members of an archive. Raises UsageError for a damaged one, and for too many."""
    size = _list_bytes(file)
    if size > LIST_BYTES_AT_MOST:
        raise UsageError(
            f"{path}: its list of members is {size:,} bytes: more than"
            f" {MEMBERS_AT_MOST:,} members, or names of a length that nobody gives",
            "unpack it, and give the folder",
        )
    try:
        with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
            members = [one for one in archive.infolist() if not one.filename.endswith("/")]
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, OSError,
            struct.error) as error:  # fmt: skip
        raise UsageError(f"{path}: a damaged zip ({error})", "copy it again") from error
    if len(members) > MEMBERS_AT_MOST:
        raise UsageError(f"{path}: {len(members):,} members are more than {MEMBERS_AT_MOST:,}")
    for one in members:
        if one.flag_bits & _ENCRYPTED:
            raise UsageError(f"{path}: {one.filename} is encrypted", "unpack it yourself")
        if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UsageError(
                f"{path}: {one.filename} is packed by method {one.compress_type}, which is not"
                " read", "pack it with zip's usual method, or unpack it yourself",
            )  # fmt: skip
    return members


def _list_bytes(file: io.BufferedIOBase) -> int:
    """How long the list of members is said to be; 0 where no end of an archive is found."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - _COMMENT_BYTES - _END_BYTES - _LOCATOR_BYTES - _END_64_BYTES))
    tail = file.read()
    file.seek(0)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_BYTES:
        return 0
    size: int = struct.unpack_from("<I", tail, at + 12)[0]
    large = at - _LOCATOR_BYTES - _END_64_BYTES
    if large >= 0 and tail[large : large + 4] == _END_64:
        size = struct.unpack_from("<Q", tail, large + 40)[0]
    return size


class PackedMember:
    """One member: its plain bytes, with how much of the archive they took."""

    def __init__(self, file: io.BufferedIOBase, member: zipfile.ZipInfo) -> None:
        self._file, self._member = file, member
        self._part = _Part(file, member)
        deflated = member.compress_type == zipfile.ZIP_DEFLATED
        self._plain = Inflated(self._part, -zlib.MAX_WBITS) if deflated else self._part
        self._again = b""
        self._sum = 0

    @property
    def taken(self) -> int:
        """How many bytes of the archive were read so far."""
        return self._part.taken

    @property
    def unfinished(self) -> bool:
        """True when more was to come."""
        return self._plain.unfinished

    def look(self, size: int) -> bytes:
        """Return the first bytes; they are read again. Fewer where the member is damaged."""
        while len(self._again) < size:
            try:
                more = self._plain.read(size - len(self._again))
            except DamagedError:
                break
            if not more:
                break
            self._again += more
        return self._again

    def read(self, size: int, /) -> bytes:
        """Return some bytes, at most so many; none at the end. Raises DamagedError."""
        if self._again:
            data, self._again = self._again[:size], self._again[size:]
        else:
            data = self._plain.read(size)
        self._sum = zlib.crc32(data, self._sum)
        if not data and not self.unfinished and self._sum != self._member.CRC:
            raise DamagedError("its checksum is another")
        return data

    def close(self) -> None:
        """Close the archive."""
        self._file.close()


class _Part:
    """The packed bytes of a member."""

    def __init__(self, file: io.BufferedIOBase, member: zipfile.ZipInfo) -> None:
        self._file = file
        self._left = member.compress_size
        self.taken = 0
        sensible = 0 <= member.header_offset < _FARTHEST
        file.seek(member.header_offset if sensible else 0)
        head = file.read(_LOCAL_BYTES) if sensible else b""
        self._found = len(head) == _LOCAL_BYTES and head[:4] == ZIP
        if self._found:
            name, extra = struct.unpack_from("<HH", head, 26)
            file.seek(name + extra, io.SEEK_CUR)

    @property
    def unfinished(self) -> bool:
        """True when the archive ends within the member."""
        return self._left > 0

    def read(self, size: int, /) -> bytes:
        if not self._found:
            raise DamagedError("no member where the list says")
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        self.taken += len(data)
        return data
