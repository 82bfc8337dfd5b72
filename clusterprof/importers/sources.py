"""Foreign files as streams of bytes: plain, gzip, zstd, or members of a zip; nothing goes to disk.

    for source in sources_of(Path("rank0.pt.trace.json.gz")):
        source.head, source.blocks()

What is damaged or cut off is read up to there. A file that unpacks to more than `BOMB_RATIO` times
its size is refused once `BOMB_BYTES` have come out of it: traces shrink ten- to fiftyfold.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from clusterprof.errors import UsageError
from clusterprof.importers.base import HEAD_BYTES

BOMB_RATIO = 250
BOMB_BYTES = 64 << 20
MEMBERS_AT_MOST = 4096
_READ_BYTES = 1 << 20
_GZIP, _ZSTD, _ZIP = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"


class FileSource:
    """One file, or one member of a zip, unpacked as it is read."""

    def __init__(self, path: Path, opened: Callable[[], IO[bytes]], shown: str = "") -> None:
        """`opened` returns the packed bytes from the start; `shown` is how the member is called."""
        self.path = Path(f"{path}:{shown}") if shown else path
        self.file = path
        self.damage = ""
        self._opened = opened
        self.head = b"".join(self._unpacked(HEAD_BYTES, HEAD_BYTES))[:HEAD_BYTES]
        self.damage = ""

    def blocks(self, block_bytes: int = 4 << 20) -> Iterator[bytes]:
        """Yield the bytes, unpacked, in blocks of about this size."""
        return self._unpacked(block_bytes, None)

    def _unpacked(self, block_bytes: int, most: int | None) -> Iterator[bytes]:
        self.damage = ""
        packed = unpacked = 0
        with closing(self._opened()) as file:
            step = _Unpack(file.read(4))
            file.seek(0)
            while data := file.read(min(block_bytes, _READ_BYTES) if step.packs else block_bytes):
                packed += len(data)
                try:
                    for block in step.blocks(data, block_bytes):
                        unpacked += len(block)
                        if unpacked > BOMB_BYTES and unpacked > BOMB_RATIO * packed:
                            raise UsageError(
                                f"{self.path}: unpacks to more than {BOMB_RATIO} times its size:"
                                " no trace does", "leave it out, or unpack it yourself",
                            )  # fmt: skip
                        yield block
                        if most is not None and unpacked >= most:
                            return
                except step.errors as error:
                    self.damage = f"damaged after {unpacked:,} bytes ({error})"
                    return
            if step.unfinished:
                self.damage = f"cut off after {unpacked:,} bytes"


class _Unpack:
    """Turns packed bytes into plain ones; what packs them is told by the first four."""

    def __init__(self, magic: bytes) -> None:
        self.packs = True
        self.errors: tuple[type[Exception], ...] = (zlib.error, zipfile.BadZipFile, EOFError)
        self._make: Callable[[], Any]
        if magic[:2] == _GZIP:
            self._make = lambda: zlib.decompressobj(31)
        elif magic[:4] == _ZSTD:
            zstandard = _zstandard()
            self.errors += (zstandard.ZstdError,)
            self._make = lambda: zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        else:
            self.packs = False
            return
        self._now = self._make()
        self._begun = False

    @property
    def unfinished(self) -> bool:
        """True when more was to come."""
        return self.packs and self._begun and not self._now.eof

    def blocks(self, data: bytes, block_bytes: int) -> Iterator[bytes]:
        """Yield what some packed bytes unpack to, no more than a block at a time."""
        if not self.packs:
            yield data
            return
        bounded = hasattr(self._now, "unconsumed_tail")  # zlib's can be told to stop
        while data:
            self._begun = True
            out = self._now.decompress(data, block_bytes) if bounded else self._now.decompress(data)
            if out:
                yield out
            if self._now.eof:  # files may be packed one after the other
                data = self._now.unused_data
                self._now, self._begun = self._make(), False
            else:
                data = self._now.unconsumed_tail if bounded else b""


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(
            "this file is packed with zstd, and the package zstandard is not installed",
            "pip install zstandard, or unpack it: zstd -d FILE",
        ) from error
    return zstandard


def sources_of(path: Path) -> Iterator[FileSource]:
    """Yield a file, or what stands in it when it is a zip. Raises OSError, UsageError."""
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != _ZIP:
        yield FileSource(path, lambda: open(path, "rb"))  # noqa: SIM115 - closed by its reader
        return
    try:
        with zipfile.ZipFile(path) as archive:
            members = [one for one in archive.infolist() if not one.is_dir()]
    except (zipfile.BadZipFile, ValueError) as error:
        raise UsageError(f"{path}: a damaged zip ({error})", "copy it again") from error
    if len(members) > MEMBERS_AT_MOST:
        raise UsageError(f"{path}: {len(members):,} members are more than {MEMBERS_AT_MOST:,}")
    for member in members:
        yield FileSource(path, _opener(path, member.filename), member.filename)


def _opener(path: Path, member: str) -> Callable[[], IO[bytes]]:
    def opened() -> IO[bytes]:
        archive = zipfile.ZipFile(path)
        return _Member(archive, archive.open(member))

    return opened


class _Member(io.BufferedReader):
    """A member of a zip that closes its archive, too."""

    def __init__(self, archive: zipfile.ZipFile, member: IO[bytes]) -> None:
        super().__init__(member)  # type: ignore[arg-type]
        self._archive = archive

    def close(self) -> None:
        super().close()
        self._archive.close()
