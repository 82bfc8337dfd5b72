"""Importer protocol: recognize a foreign file by its first bytes, turn it into records.

    class Kineto:
        name, title = "kineto", "PyTorch profiler (Kineto) trace"
        combines_files = False
        def recognizes(self, head: bytes, path: Path) -> bool: ...
        def nodes(self, sources, accounts) -> Iterator[NodeTables]: ...

An importer never unpickles, evaluates or extracts anything. It reads files that may
be larger than memory in blocks. In its account it counts what it understood and what
it left out, with the reason. It adds nothing that the file does not show: unknown
stays unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.errors import UsageError

HEAD_BYTES = 64 << 10
"""Number of unpacked bytes from the start of a file that an importer sees to recognize it."""
_MAX_REASONS_SHOWN = 6


@dataclass(slots=True)
class Account:
    """Account of one imported file: what was understood, what was left out, and why."""

    path: Path
    format: str = ""
    """Title of the importer that read the file."""
    read: Counter[str] = field(default_factory=Counter)
    """Number of items understood, by kind: `kernels`, `scrapes`, `steps`."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of items left out, by reason: `without a duration`."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader of the report: a window that was inferred, a definition that was chosen.
    """
    answers: list[str] = field(default_factory=list)
    """What the file says about the question it is made for, printed at the top of the report. An
    equal note is not printed again.
    """
    answered_notes: list[str] = field(default_factory=list)
    """Notes that an answer states in fewer words; they are not printed."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the whole job. They are written into the header of every imported node."""
    cut: str = ""
    """Where and why the file ended too early; everything before that point was read."""
    refused: bool = False
    """True if nothing of the file was used, for the reason in `cut`."""

    remedy: str = ""
    """What to do so that a refused file can be used; empty if its format has no special advice."""

    def refuse(self, why: str, remedy: str = "") -> None:
        """Mark the whole file as unused and keep the first reason."""
        if not self.cut:
            self.cut, self.remedy = why, remedy
        self.refused = True

    def format_line(self) -> str:
        """Format the account as one line of text."""
        if not self.format:
            return f"{self.path.name}: left out: {self.cut}"
        read = ", ".join(f"{n:,} {unit}" for unit, n in self.read.items() if n) or "nothing"
        line = f"{self.path.name}: {self.format}: {read}"
        if self.skipped:
            top_reasons = self.skipped.most_common(_MAX_REASONS_SHOWN)
            line += "; left out: " + ", ".join(f"{n:,} {why}" for why, n in top_reasons)
            if len(self.skipped) > len(top_reasons):
                line += f" and {len(self.skipped) - len(top_reasons)} more reasons"
        if self.cut:
            line += f"; {self.cut}"
        return line


def sum_accounts(accounts: Sequence[Account]) -> Account:
    """Sum the accounts of several files of one format."""
    if len(accounts) == 1:
        return accounts[0]
    first = accounts[0]
    name = f"{first.path.name} and {len(accounts) - 1:,} more"
    total = Account(first.path.with_name(name), first.format)
    if all(account.refused for account in accounts):
        total.cut = first.cut.removeprefix(f"{first.path.name}: ")
    for account in accounts:
        total.read.update(account.read)
        total.skipped.update(account.skipped)
    return total


class Source(Protocol):
    """One foreign file, or one member of an archive."""

    @property
    def path(self) -> Path:
        """Path of the file; for an archive member, the archive's path and its name."""
        ...

    @property
    def file(self) -> Path:
        """Path of the file on disk, of a member its archive; formats that must seek open it."""
        ...

    @property
    def head(self) -> bytes:
        """First bytes of the file, unpacked; at most HEAD_BYTES."""
        ...

    def blocks(self, block_bytes: int = 4 << 20) -> Iterator[bytes]:
        """Yield the unpacked bytes in blocks; stops early where damaged (see `damage`)."""
        ...

    @property
    def damage(self) -> str:
        """Why the bytes ended too early; empty if they did not."""
        ...


class Importer(Protocol):
    """One foreign format."""

    name: ClassVar[str]
    """Short name, like `kineto`, used in a recording's versions and in the documentation."""
    title: ClassVar[str]
    """Name for people, like `PyTorch profiler (Kineto) trace`."""
    combines_files: ClassVar[bool]
    """True if the files of this format are parts of one job and are read in one call. A format of
    windows of a job, such as a few steps in a profiler, also sets `reads_windows` to true.
    """

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file has this format, by its first bytes; its name is a hint."""
        ...

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the tables of each node that the files describe.

        sources: one file, or all files of the format if `combines_files` is true. Raises:
        CannotImportError when the files hold nothing usable.
        """
        ...


class CannotImportError(UsageError):
    """A file has a known format but holds nothing that can be used."""
