"""Lines of a foreign file, one at a time, however long the file or a line is."""

from __future__ import annotations

from collections.abc import Iterator

from clusterprof.importers.base import Source

LINE_BYTES_AT_MOST = 1 << 20


def lines_of(source: Source) -> Iterator[bytes]:
    """Yield the lines of a file without their ends; of a longer one its first megabyte."""
    rest = b""
    skipping = False
    for block in source.blocks():
        *whole, last = (rest + block).split(b"\n")
        for line in whole:
            if not skipping:
                yield line[:LINE_BYTES_AT_MOST]
            skipping = False
        rest = b"" if skipping else last
        if len(rest) > LINE_BYTES_AT_MOST:
            yield rest[:LINE_BYTES_AT_MOST]
            rest, skipping = b"", True
    if rest:
        yield rest
