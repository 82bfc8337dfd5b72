"""Foreign files as streams of bytes: plain, gzip, zstd, or members of a zip; nothing goes to disk.

    for source in sources_of(Path("rank0.pt.trace.json.gz")):
        source.head, source.blocks()

What is damaged or cut off is read up to there. A file that unpacks to more than `BOMB_RATIO` times
its size is refused once `BOMB_BYTES` have come out of it: traces shrink ten- to fiftyfold.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from clusterprof.errors import UsageError
from clusterprof.importers.base import HEAD_BYTES
from clusterprof.importers.unpacking import DamagedError, Packed, PackedFile, unpacked
from clusterprof.importers.zips import ZIP, PackedMember, members_of

BOMB_RATIO = 250
BOMB_BYTES = 64 << 20
HEADS_BYTES = 64 << 20
"""The heads of all members of one archive are not longer than this together."""


class FileSource:
    """One file, or one member of a zip, unpacked as it is read."""

    def __init__(
        self, path: Path, opened: Callable[[], Packed], shown: str = "", most: int = HEAD_BYTES
    ) -> None:
        """`opened` returns the packed bytes from the start; `shown` is how the member is called;
        `most` is how long its head may be."""
        self.path = Path(f"{path}:{shown}") if shown else path
        self.file = path
        self.damage = ""
        self._opened = opened
        self.head = b"".join(self._unpacked(most, most))[:most]
        self.head_damage = self.damage
        """Why so little could be unpacked; "" where nothing is wrong so far."""
        self.damage = ""

    def blocks(self, block_bytes: int = 4 << 20) -> Iterator[bytes]:
        """Yield the bytes, unpacked, in blocks of at most this size."""
        return self._unpacked(block_bytes, None)

    def _unpacked(self, block_bytes: int, most: int | None) -> Iterator[bytes]:
        self.damage = ""
        out = 0
        with closing(self._opened()) as packed:
            plain = unpacked(packed)
            while True:
                try:
                    block = plain.read(block_bytes)
                except DamagedError as error:
                    self.damage = f"damaged after {out:,} bytes ({error})"
                    return
                if not block:
                    break
                out += len(block)
                if out > BOMB_BYTES and out > BOMB_RATIO * packed.taken:
                    raise UsageError(
                        f"{self.path}: unpacks to more than {BOMB_RATIO} times its size:"
                        " no trace does", "leave it out, or unpack it yourself",
                    )  # fmt: skip
                yield block
                if most is not None and out >= most:
                    return
            if plain.unfinished:
                self.damage = f"cut off after {out:,} bytes"


def sources_of(path: Path, content: bytes | None = None) -> Iterator[FileSource]:
    """Yield a file, or what stands in it when it is a zip; `content`: what it holds, where that
    is in memory already. Raises OSError, UsageError.
    """
    with _file(path, content) as file:
        members = members_of(file, path) if file.read(4) == ZIP else None
    if members is None:
        yield FileSource(path, lambda: PackedFile(_file(path, content)))
        return
    most = max(4096, min(HEAD_BYTES, HEADS_BYTES // max(len(members), 1)))
    for member in members:
        opened = partial(_member, path, content, member)
        yield FileSource(path, opened, member.filename, most)


def _file(path: Path, content: bytes | None) -> io.BufferedIOBase:
    return open(path, "rb") if content is None else io.BytesIO(content)


def _member(path: Path, content: bytes | None, member: object) -> Packed:
    return PackedMember(_file(path, content), member)  # type: ignore[arg-type]
