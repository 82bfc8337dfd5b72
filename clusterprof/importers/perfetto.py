"""Perfetto's own traces (protobuf), which are not read: a way to get there is said instead.

## What is read

Nothing. Such a file is told apart from others, so that the answer is clear.

## How it is understood

Perfetto's `traceconv json FILE out.json` writes the Chrome JSON that is read here.

## Where it is blind

Everywhere: reading one needs Perfetto's trace processor, a program of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.tables import NodeTables

_SUFFIXES = (".pftrace", ".perfetto-trace", ".perfetto", ".pftrace.gz")


class Perfetto:
    """Perfetto traces, refused by name."""

    name: ClassVar[str] = "perfetto"
    title: ClassVar[str] = "Perfetto trace (protobuf)"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether a file looks like one: a packet comes first, and the name says so."""
        return head[:1] == b"\x0a" and path.name.endswith(_SUFFIXES)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Raise CannotImportError, which says what to do."""
        raise CannotImportError(
            "Perfetto's binary traces are not read; write it as JSON: traceconv json FILE out.json",
            "traceconv is part of Perfetto",
        )
        yield  # a generator, as all importers are
