"""Lines of a stream that may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator

from clusterprof.importers.base import Account, Source

LINE_BYTES_AT_MOST = 1 << 20


def lines_of(source: Source, account: Account, block_bytes: int = 1 << 20) -> Iterator[bytes]:
    """Yield the lines of a file without their ends; those beyond a MiB are only counted."""
    rest = b""
    skipping = False
    for block in source.blocks(block_bytes):
        first, *more = block.split(b"\n")
        if not more:
            skipping = skipping or len(rest) + len(first) > LINE_BYTES_AT_MOST
            rest = b"" if skipping else rest + first
            continue
        if skipping or len(rest) + len(first) > LINE_BYTES_AT_MOST:
            account.skipped["lines longer than a MiB"] += 1
            skipping = False
        else:
            yield (rest + first).rstrip(b"\r")
        rest = more.pop()
        for line in more:
            yield line.rstrip(b"\r")
    if skipping:
        account.skipped["lines longer than a MiB"] += 1
    elif rest:
        yield rest.rstrip(b"\r")
