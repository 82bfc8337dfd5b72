"""What an importer is: recognises a foreign file by its first bytes, and says in records of ours
what stands in it.

    class Kineto:
        name, title, together = "kineto", "PyTorch profiler (Kineto) trace", False
        def recognises(self, head: bytes, path: Path) -> bool: ...
        def nodes(self, sources, accounts) -> Iterator[NodeTables]: ...

An importer never unpickles, evaluates or extracts; it reads what may be larger than memory in
pieces, and counts in its account what it understood and what it left out, with the reason. It adds
nothing that the file does not show: what is not known stays unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from clusterprof.errors import UsageError
from clusterprof.importers.tables import NodeTables

HEAD_BYTES = 64 << 10
"""So much of a file, unpacked, an importer is shown to recognise it."""
_REASONS_AT_MOST = 6


@dataclass(slots=True)
class Account:
    """What one file gave: things understood, things left out, and why."""

    path: Path
    format: str = ""
    """Title of the importer that read it."""
    read: Counter[str] = field(default_factory=Counter)
    """How many of what was understood: `kernels`, `scrapes`, `steps`."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many things were left out, by reason: `without a duration`."""
    notes: list[str] = field(default_factory=list)
    """Sentences a reader should know: a window that was inferred, a definition that was chosen."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a file says of the whole job: put into the header of all nodes that are imported."""
    cut: str = ""
    """Where and why the file ended too early; what came before was read."""
    refused: bool = False
    """Nothing of it was used, for the reason in `cut`."""

    def refuse(self, why: str) -> None:
        """Say that nothing of the file was used."""
        self.cut = self.cut or why
        self.refused = True

    def said(self) -> str:
        """Return the account in one line."""
        if not self.format:
            return f"{self.path.name}: left out: {self.cut}"
        read = ", ".join(f"{n:,} {what}" for what, n in self.read.items() if n) or "nothing"
        line = f"{self.path.name}: {self.format}: {read}"
        if self.skipped:
            some = self.skipped.most_common(_REASONS_AT_MOST)
            line += "; left out: " + ", ".join(f"{n:,} {why}" for why, n in some)
            if len(self.skipped) > len(some):
                line += f" and {len(self.skipped) - len(some)} more reasons"
        if self.cut:
            line += f"; {self.cut}"
        return line


def together(accounts: Sequence[Account]) -> Account:
    """Return the sum of the accounts of files of one format."""
    if len(accounts) == 1:
        return accounts[0]
    first = accounts[0]
    name = f"{first.path.name} and {len(accounts) - 1:,} more"
    total = Account(first.path.with_name(name), first.format)
    for one in accounts:
        total.read.update(one.read)
        total.skipped.update(one.skipped)
    return total


class Source(Protocol):
    """One foreign file, or one member of an archive."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def file(self) -> Path:
        """What lies on the disk: the archive, of a member. Formats that must seek open this."""
        ...

    @property
    def head(self) -> bytes:
        """Its first bytes, unpacked: at most HEAD_BYTES."""
        ...

    def blocks(self, block_bytes: int = 4 << 20) -> Iterator[bytes]:
        """Yield its bytes, unpacked, in blocks; ends early where it is damaged (`damage`)."""
        ...

    @property
    def damage(self) -> str:
        """Why the bytes ended too early; "" when they did not."""
        ...


class Importer(Protocol):
    """One foreign format."""

    name: ClassVar[str]
    """`kineto`: in a recording's versions, and in the documentation."""
    title: ClassVar[str]
    """`PyTorch profiler (Kineto) trace`."""
    together: ClassVar[bool]
    """True when the files of this format are parts of one thing and are read in one call."""

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether a file is of this format, by its first bytes; its name is a hint at most."""
        ...

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield what some files say of each node; one file, unless `together`.

        Raises `CannotImportError` when they say nothing.
        """
        ...


class CannotImportError(UsageError):
    """A file is of a known format, and there is nothing in it that could be used."""
