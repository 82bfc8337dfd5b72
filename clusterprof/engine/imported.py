"""Foreign files on the command line become recordings before anything is analysed.

    with brought_in([Path("rank0.pt.trace.json.gz"), Path("my-run/")]) as brought:
        brought.paths          # recordings, those of foreign files in a folder for the time being
        brought.notes          # what each file gave, and what was left out

A file is recognised by its content. A folder without a recording is searched for files that are.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clusterprof.engine.foreign import importer_for, is_recording, judged_in_part, sorted_out
from clusterprof.engine.refined import refined
from clusterprof.errors import ClusterprofError, NoRecording, UsageError
from clusterprof.importers import heap
from clusterprof.importers.base import Account, CannotImportError, Importer, together
from clusterprof.importers.registry import importer_named
from clusterprof.importers.sources import FileSource, sources_of
from clusterprof.trace.reader import node_folders
from clusterprof.trace.sources import find_nodes
from clusterprof.trace.whole import write_node

_SIDE_BY_SIDE_BYTES = 16 << 20  # of files that are worth a second process


@dataclass(frozen=True, slots=True)
class Brought:
    """What is to be analysed."""

    paths: tuple[Path, ...]
    """Recordings, in the order in which they were given; imported ones last."""
    accounts: tuple[Account, ...] = ()
    """Of every foreign file."""
    more: tuple[str, ...] = ()
    """What else the report says about them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report says about foreign files."""
        lines = []
        for some in _alike(self.accounts):
            lines.append(together(some).said())
        whose: dict[str, list[str]] = {}
        for account in self.accounts:
            for note in dict.fromkeys(account.notes):
                whose.setdefault(note, []).append(account.path.name)
        for note, names in whose.items():
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            lines.append(f"{names[0]}{more}: {note}")
        return (*lines, *self.more)


def _alike(accounts: Sequence[Account]) -> list[list[Account]]:
    """Files of one format are told together; those that are damaged each for themselves."""
    groups: dict[object, list[Account]] = {}
    for account in accounts:
        groups.setdefault(account.path if account.cut else account.format, []).append(account)
    return list(groups.values())


@contextmanager
def brought_in(
    paths: Sequence[Path], jobs: int = 1, leave_unknown: bool = False
) -> Iterator[Brought]:
    """Read the foreign files among some paths; `jobs` processes share them.

    `leave_unknown`: a file of no format we know is left out, and said to be, where there is
    something else. Raises NoRecording for it otherwise, CannotImportError when the only one says
    nothing.
    """
    found = sorted_out(paths)
    found.refuse(anyway=leave_unknown)
    own, left_out, beside = found.own, found.left_out(), found.notes()
    if not found.foreign:
        yield Brought(tuple(own), left_out, beside)
        return
    with tempfile.TemporaryDirectory(prefix="clusterprof-import-") as folder:
        accounts = (*write_all(found.foreign, Path(folder), jobs), *left_out)
        there = any(Path(folder).iterdir())
        if not there and not own:
            raise NoRecording(
                "; ".join(Brought((), accounts).notes),
                "record or export again; docs/importers.md says what each format needs",
            )
        if not leave_unknown:
            _refuse_what_said_nothing(accounts)
        if not there or not own:
            yield Brought((*own, *([Path(folder)] if there else ())), accounts, beside)
            return
        nodes = find_nodes(own)
        with tempfile.TemporaryDirectory(prefix="clusterprof-refined-") as place:
            mine, left, notes = refined(nodes.folders, node_folders(Path(folder)), Path(place))
            yield Brought((*mine, *left), accounts, (*notes, *beside))


def _refuse_what_said_nothing(accounts: Sequence[Account]) -> None:
    """Raise for a file that is of a known format and of no use: who judges needs all of them."""
    refused = [account for account in accounts if account.refused]
    if refused:
        one = refused[0]
        why = NoRecording(
            f"{one.path}: {one.cut.removeprefix(f'{one.path.name}: ')}", "export it again"
        )
        raise judged_in_part(why, len(refused) - 1)


def write_all(files: Sequence[Path], folder: Path, jobs: int = 1) -> tuple[Account, ...]:
    """Write what foreign files say as recordings of their nodes below a folder."""
    batches = _batches(files)
    size = sum(file.stat().st_size for file in files)
    if size > _SIDE_BY_SIDE_BYTES:
        jobs = max(jobs, min(_cores(), len(batches)))
    numbered = list(enumerate(batches))
    telling = {name for name, _ in batches if _tells(name)}
    first = [_write(item, folder, {}) for item in numbered if item[1][0] in telling]
    work = [item for item in numbered if item[1][0] not in telling]
    facts: dict[str, Any] = {}
    for some in first:
        for account in some:
            facts.update(account.facts)
    write = partial(_write, folder=folder, facts=facts)
    if jobs > 1 and len(work) > 1:
        from multiprocessing import get_context  # one process has no use for it

        with get_context("spawn").Pool(min(jobs, len(work))) as pool:
            done = pool.map(write, work, chunksize=1)
    else:
        done = [write(item) for item in work]
    return tuple(account for some in (*first, *done) for account in some)


def _tells(name: str) -> bool:
    """True of a format that says something of the whole job (`Account.facts`): it is read first."""
    return bool(getattr(importer_named(name), "tells", False))


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def foreign_files(paths: Sequence[Path]) -> tuple[list[Path], Brought]:
    """Return the foreign files among some paths, and what is said of others that are left out.

    Raises UsageError for a recording among them, NoRecording when there is nothing else.
    """
    found = sorted_out(paths)
    for path in found.own:
        if not path.exists():
            raise NoRecording(f"{path}: no such file or directory", "give the files of a trace")
        what = "a recording already" if is_recording(path) else "no file of a known format in it"
        raise UsageError(f"{path}: {what}")
    found.refuse(anyway=True)
    return found.foreign, Brought((), found.left_out(), found.notes())


Batch = tuple[str, tuple[Path, ...]]


def _batches(files: Sequence[Path]) -> list[Batch]:
    """What is read in one call: each file alone, or all of a format whose files belong together."""
    batches: dict[object, Batch] = {}
    for file in files:
        one = importer_for(file)
        name = one.name if one else ""
        key: object = name if one and one.together else file
        known = batches.get(key, (name, ()))[1]
        batches[key] = (name, (*known, file))
    return list(batches.values())


def _write(item: tuple[int, Batch], folder: Path, facts: Mapping[str, Any]) -> list[Account]:
    """Read some files and write their nodes: what one process does."""
    number, (name, files) = item
    one = importer_named(name)
    accounts: list[Account] = []
    try:
        sources = [
            source for file in files for source in sources_of(file)
            if one and one.recognises(source.head, source.path)
        ]  # fmt: skip
    except (ClusterprofError, OSError) as error:
        return [Account(file, cut=str(error), refused=True) for file in files]
    if one is None or not sources:
        nothing = "nothing was read"
        return [Account(file, "unknown format", cut=nothing, refused=True) for file in files]
    batches = [sources] if one.together else [[source] for source in sources]
    for part, some in enumerate(batches):
        mine = [Account(source.path, one.title) for source in some]
        accounts += mine
        _write_nodes(one, some, mine, folder, f"{number:05d}-{part:03d}", facts)
    return accounts


def _write_nodes(
    one: Importer,
    sources: Sequence[FileSource],
    accounts: list[Account],
    folder: Path,
    name: str,
    facts: Mapping[str, Any],
) -> None:
    try:
        for number, node in enumerate(one.nodes(sources, accounts)):
            node.job = node.job or "imported"
            if node.key != one.name:  # the file's name: better than none where no host is told
                node.shown = node.shown or node.key
            node.key = f"{node.key}-{name}-{number}"
            node.host = {**facts, **node.host}
            write_node(folder / f"{name}-{number:04d}", node.header(), node.records())
            del node  # before the next one is made
    except CannotImportError as error:
        for account in accounts:
            account.refuse(error.message)
    heap.keep_again()
    for source, account in zip(sources, accounts):
        account.cut = account.cut or source.damage
