"""Sort input paths into recordings, foreign files and unreadable files.

    inputs = sort_inputs([Path("traces/"), Path("rank3.json.gz"), Path("my-run/")])
    inputs.recordings, inputs.foreign, inputs.unread, inputs.skipped

A file that was given by its name must be readable: if no importer reads it, it is
reported or refused. So is a file in a folder that is damaged or must not be unpacked:
it may be one of the traces. Any other file in a folder (a README, a log) is skipped and
counted.

It also imports the foreign files of the command line as recordings before the analysis.

    with import_inputs([Path("rank0.pt.trace.json.gz"), Path("my-run/")]) as imported:
        imported.paths     # recordings; those of foreign files in a temporary folder
        imported.notes     # contents of each file, and what was left out

A file is recognized by its content. A folder without a recording is searched for known
files.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from clusterprof.analysis.importers.core import text
from clusterprof.analysis.importers.core.base import (
    Account,
    CannotImportError,
    Importer,
    sum_accounts,
)
from clusterprof.analysis.importers.core.byte_sources import FileSource, open_sources
from clusterprof.analysis.importers.registry import find_importers, get_importer
from clusterprof.analysis.inputs.file_kinds import guess_file_kind
from clusterprof.analysis.inputs.profiler_traces import merge_device_traces
from clusterprof.errors import ClusterprofError, NoRecording, UsageError
from clusterprof.trace.encoder import write_node
from clusterprof.trace.reader import (
    SkippedInput,
    find_nodes,
    list_node_folders,
    list_recordings_inside,
)
from clusterprof.trace.segments import SUFFIX

MAX_FILES = 65_536
_UNKNOWN = "neither a recording nor a file of a known format"
_MAX_DEPTH = 4  # folders below the given one
_MAX_NAMED_FILES = 3
_MAX_GUESSED_FILES = 64  # of a folder without a known file


@dataclass(slots=True)
class SortedInputs:
    """Input paths by kind."""

    recordings: list[Path] = field(default_factory=list)
    """Recordings, and missing paths (`find_nodes` reports these)."""
    foreign: list[Path] = field(default_factory=list)
    unread: dict[Path, ClusterprofError] = field(default_factory=dict)
    """Files that must be readable and that no importer reads, with the reason."""
    skipped: list[Path] = field(default_factory=list)
    """Other files in the folders."""
    copies: list[tuple[Path, Path]] = field(default_factory=list)
    """Files that are left out, each with the file that has the same content."""

    def raise_for_unread(self, anyway: bool = False) -> None:
        """Refuse the input if a file that must be readable is not.

        anyway: accept unreadable files next to readable ones.

        Raises: NoRecording, or the error of the file when there is no other input.
        """
        for why in self.unread.values():
            if not (self.recordings or self.foreign):
                raise why
            if not anyway:
                raise build_partial_input_error(why, len(self.unread) - 1)

    def left_out(self) -> tuple[Account, ...]:
        """Return an account of every file that is left out."""
        return tuple(
            Account(path, cut=why.message.removeprefix(f"{path}: "))
            for path, why in self.unread.items()
        )

    def notes(self) -> tuple[str, ...]:
        """Return notes on the copies and on the skipped files."""
        notes = []
        for copy, original in self.copies[:1]:
            suffix = f", and {len(self.copies) - 1:,} more" if len(self.copies) > 1 else ""
            notes.append(f"{copy.name} is a copy of {original.name}{suffix}: each is counted once")
        if not self.skipped:
            return tuple(notes)
        names = ", ".join(path.name for path in self.skipped[:_MAX_NAMED_FILES])
        count = len(self.skipped) - _MAX_NAMED_FILES
        names += f" and {count:,} more" if count > 0 else ""
        return (*notes, f"skipped, not of a known format: {names}")


def build_partial_input_error(why: ClusterprofError, other_count: int = 0) -> NoRecording:
    """Build the error for an unreadable file next to others: a partial result would be wrong."""
    suffix = f" (and {other_count:,} more like it)" if other_count else ""
    return NoRecording(
        f"{why.message}{suffix}",
        "nothing was analyzed; leave it out to analyze the other files alone, or"
        f" repair it: {why.remedy}",
    )


def sort_inputs(paths: Sequence[Path]) -> SortedInputs:
    """Sort input paths into recordings, foreign files, unreadable and skipped files.

    Raises: UsageError for more than MAX_FILES files.
    """
    inputs = SortedInputs()
    for path in paths:
        if path.is_file() and not path.name.endswith(SUFFIX):
            _sort_file(path, inputs, is_required=True)
        elif path.is_dir() and not is_recording(path) and not list_recordings_inside(path):
            before, skipped = len(inputs.foreign) + len(inputs.unread), len(inputs.skipped)
            for file in _list_files(path):
                _sort_file(file, inputs, is_required=False)
            if len(inputs.foreign) > MAX_FILES:
                message = f"{path}: more than {MAX_FILES:,} files of known formats"
                raise UsageError(message, "give fewer at once")
            if len(inputs.foreign) + len(inputs.unread) > before:
                continue
            if inputs.skipped[skipped:]:
                inputs.unread[path] = _explain_unknown_folder(path, inputs.skipped[skipped:])
                del inputs.skipped[skipped:]
            else:
                inputs.recordings.append(path)
        else:
            inputs.recordings.append(path)
    _drop_copies(inputs)
    return inputs


def _drop_copies(inputs: SortedInputs) -> None:
    """Drop the foreign files whose bytes are those of an earlier file: a copy is no second node.

    Files of a format that are parts of one job are kept: its importer knows what they mean.
    """
    files = list(dict.fromkeys(inputs.foreign))
    sizes = Counter(file.stat().st_size for file in files)
    inputs.foreign, originals = [], dict[bytes, Path]()
    for file in files:
        importers = find_file_importers(file) if sizes[file.stat().st_size] > 1 else ()
        if importers and not importers[0].combines_files:
            original = originals.setdefault(_compute_digest(file), file)
            if original is not file:
                inputs.copies.append((file, original))
                continue
        inputs.foreign.append(file)


def _compute_digest(file: Path) -> bytes:
    digest = blake2b()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _sort_file(path: Path, inputs: SortedInputs, is_required: bool) -> None:
    is_intact = False
    try:
        sources = list(open_sources(path))
        if any(find_importers(source) for source in sources):
            inputs.foreign.append(path)
            return
        why = _explain_unknown_file(path, sources)
        is_intact = not any(source.head_damage for source in sources)
    except ClusterprofError as error:
        why = error
    except OSError as error:
        message = f"{path}: cannot be read: {(error.strerror or str(error)).lower()}"
        why = NoRecording(message, "check its permissions and its disk, or leave it out")
    if is_intact and not is_required:
        inputs.skipped.append(path)
    else:
        inputs.unread[path] = why


def _explain_unknown_file(path: Path, sources: Sequence[FileSource]) -> ClusterprofError:
    damage = next((source.head_damage for source in sources if source.head_damage), "")
    if damage:
        return NoRecording(f"{path}: {damage}", "copy or export it again")
    if not path.stat().st_size:
        return NoRecording(f"{path}: the file is empty", "copy or export it again")
    kind = guess_file_kind(path, sources[0].head if sources else b"")
    return NoRecording(f"{path}: {_UNKNOWN}: it seems to be {kind.title}", kind.remedy)


def _explain_unknown_folder(folder: Path, files: Sequence[Path]) -> NoRecording:
    """Explain what the files of a folder seem to be, none of which is known."""
    if len(files) == 1:
        why = _explain_unknown_file(files[0], list(open_sources(files[0])))
        return NoRecording(why.message, why.remedy)
    heads = {file: next(iter(open_sources(file))).head for file in files[:_MAX_GUESSED_FILES]}
    kinds = [guess_file_kind(file, head) for file, head in heads.items()]
    titles = Counter(kind.title for kind in kinds)
    listed = ", ".join(f"{title} ({count:,})" for title, count in titles.most_common(4))
    remedies = Counter(kind.remedy for kind in kinds)
    return NoRecording(
        f"{folder}: neither a recording nor files of a known format: its {len(files):,}"
        f" files, such as {files[0].name}, seem to be {listed}",
        remedies.most_common(1)[0][0],
    )


def is_recording(path: Path) -> bool:
    """Return whether a path is a folder or segment of a recording."""
    try:
        return bool(list_node_folders(path))
    except NoRecording:
        return False


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below it, by name."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if len(Path(parent).relative_to(folder).parts) >= _MAX_DEPTH:
            folders.clear()
        for name in sorted(names):
            path = Path(parent) / name
            if not name.startswith(".") and path.is_file():
                yield path


def find_file_importers(path: Path) -> tuple[Importer, ...]:
    """Find the importers of a file by its content, those of its first known member."""
    try:
        importers = (find_importers(source) for source in open_sources(path))
        return next(filter(None, importers), ())
    except (ClusterprofError, OSError):
        return ()


_PARALLEL_IMPORT_BYTES = 16 << 20  # of files, from which further processes pay off


@dataclass(frozen=True, slots=True)
class ImportedInputs:
    """Recordings to analyze, with accounts of the imported files."""

    paths: tuple[Path, ...]
    """Recordings in the order in which they were given; imported ones last."""
    accounts: tuple[Account, ...] = ()
    """One account per foreign file."""
    further_notes: tuple[str, ...] = ()
    """Further notes on the inputs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes on foreign files for the report."""
        lines = []
        for group in _group_accounts(self.accounts):
            lines.append(sum_accounts(group).format_line())
        files_by_note: dict[str, list[str]] = {}
        for account in self.accounts:
            stated = {*account.answers, *account.answered_notes}
            for note in dict.fromkeys(account.notes):
                if note not in stated:
                    files_by_note.setdefault(note, []).append(account.path.name)
        for note, names in files_by_note.items():
            suffix = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            lines.append(f"{names[0]}{suffix}: {note}")
        return (*lines, *self.further_notes)

    @property
    def answers(self) -> tuple[str, ...]:
        """Return what the files say about the question they are made for."""
        answering = [account for account in self.accounts if account.answers]
        order = list(dict.fromkeys(account.path for account in answering))
        answering.sort(key=lambda account: order.index(account.path))  # of one log two formats
        files = Counter(account.format for account in answering)
        return tuple(
            f"{account.path.name}: {answer}"
            if files[account.format] > 1
            else f"{answer[:1].upper()}{answer[1:]}"
            for account in answering
            for answer in account.answers
        )

    def list_left_out(self) -> tuple[SkippedInput, ...]:
        """List the files of which something was not read: with `--strict` they are an error."""
        return tuple(
            SkippedInput(account.path, account.cut, "give it alone, or leave it out", is_copy=False)
            for account in self.accounts
            if account.cut
        )


def _group_accounts(accounts: Sequence[Account]) -> list[list[Account]]:
    """Group accounts by format, which are summarized together; a damaged file stands alone."""
    groups: dict[object, list[Account]] = {}
    for account in accounts:
        key: object = account.path if account.cut else account.format
        if account.refused and not account.read:  # one reason is stated once
            key = account.format, account.cut.removeprefix(f"{account.path.name}: ")
        groups.setdefault(key, []).append(account)
    return list(groups.values())


@contextmanager
def import_inputs(
    paths: Sequence[Path], jobs: int = 1, leave_unknown: bool = False
) -> Iterator[ImportedInputs]:
    """Import the foreign files among some paths, with `jobs` processes.

    leave_unknown: leave files of no known format out, and note it, where there is other
    input.

    Raises: NoRecording for a file of no known format, and when no file gave anything;
    UsageError for too many files.
    """
    inputs = sort_inputs(paths)
    inputs.raise_for_unread(anyway=leave_unknown)
    recordings, left_out, notes_on_files = inputs.recordings, inputs.left_out(), inputs.notes()
    if not inputs.foreign:
        yield ImportedInputs(tuple(recordings), left_out, notes_on_files)
        return
    with tempfile.TemporaryDirectory(prefix="clusterprof-import-") as folder:
        accounts = (*import_files(inputs.foreign, Path(folder), jobs), *left_out)
        has_recordings = any(Path(folder).iterdir())
        if not has_recordings and not recordings:
            imported = ImportedInputs((), accounts, notes_on_files)
            if imported.answers:
                yield imported
                return
            raise NoRecording(
                "; ".join(ImportedInputs((), accounts).notes),
                "; ".join(dict.fromkeys(account.remedy for account in accounts if account.remedy))
                or "record or export again; docs/importers describes what each format needs",
            )
        if not leave_unknown:
            _require_useful_files(accounts)
        if not has_recordings or not recordings:
            yield ImportedInputs(
                (*recordings, *([Path(folder)] if has_recordings else ())), accounts, notes_on_files
            )
            return
        nodes = find_nodes(recordings)
        with tempfile.TemporaryDirectory(prefix="clusterprof-refined-") as refined_folder:
            refined_nodes, other_nodes, notes = merge_device_traces(
                nodes.folders, list_node_folders(Path(folder)), Path(refined_folder)
            )
            yield ImportedInputs(
                (*refined_nodes, *other_nodes), accounts, (*notes, *notes_on_files)
            )


def _require_useful_files(accounts: Sequence[Account]) -> None:
    """Check that every file of a known format gave data: a partial result would be wrong.

    Raises: NoRecording for the first file that gave none.
    """
    refused = [account for account in accounts if account.refused]
    if refused:
        account = refused[0]
        why = NoRecording(
            f"{account.path}: {account.cut.removeprefix(f'{account.path.name}: ')}",
            account.remedy or "export it again",
        )
        raise build_partial_input_error(why, len(refused) - 1)


def import_files(files: Sequence[Path], folder: Path, jobs: int = 1) -> tuple[Account, ...]:
    """Import foreign files: write the recordings of their nodes below a folder.

    Returns one account per file.
    """
    batches = _build_batches(files)
    size = sum(file.stat().st_size for file in files)
    if size > _PARALLEL_IMPORT_BYTES:
        jobs = max(jobs, min(_count_cores(), len(batches)))
    numbered = list(enumerate(batches))
    fact_formats = {name for name, _ in batches if _has_job_facts(name)}
    first = [_import_batch(item, folder, {}) for item in numbered if item[1][0] in fact_formats]
    work = [item for item in numbered if item[1][0] not in fact_formats]
    facts: dict[str, Any] = {}
    for batch_accounts in first:
        for account in batch_accounts:
            facts.update(account.facts)
    write = partial(_import_batch, folder=folder, facts=facts)
    if jobs > 1 and len(work) > 1:
        from multiprocessing import get_context  # not needed in a single process

        with get_context("spawn").Pool(min(jobs, len(work))) as pool:
            results = pool.map(write, work, chunksize=1)
    else:
        results = [write(item) for item in work]
    all_accounts = [account for accounts in (*first, *results) for account in accounts]
    useful = {account.path for account in all_accounts if not account.refused}
    return tuple(
        account
        for account in all_accounts
        if not account.refused or account.path not in useful  # of two formats of a log one will do
    )


def _has_job_facts(name: str) -> bool:
    """Return whether a format has facts of the whole job (`Account.facts`); it is read first."""
    return bool(getattr(get_importer(name), "tells", False))


def _count_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def select_foreign_files(paths: Sequence[Path]) -> tuple[list[Path], ImportedInputs]:
    """Return the foreign files among some paths, and accounts of the files that are left out.

    Raises: UsageError for a recording among them; NoRecording for a missing file, or when
    there is nothing else.
    """
    inputs = sort_inputs(paths)
    for path in inputs.recordings:
        if not path.exists():
            raise NoRecording(f"{path}: no such file or directory", "give the files of a trace")
        reason = "a recording already" if is_recording(path) else "no file of a known format in it"
        raise UsageError(f"{path}: {reason}")
    inputs.raise_for_unread(anyway=True)
    return inputs.foreign, ImportedInputs((), inputs.left_out(), inputs.notes())


Batch = tuple[str, tuple[Path, ...]]


def _build_batches(files: Sequence[Path]) -> list[Batch]:
    """Group files into batches for one call: each file alone, or all files of a joint format."""
    batches: dict[object, Batch] = {}
    for file in files:
        for importer in find_file_importers(file) or (None,):
            name = importer.name if importer else ""
            key: object = name if importer and importer.combines_files else (name, file)
            batch_files = batches.get(key, (name, ()))[1]
            batches[key] = (name, (*batch_files, file))
    return list(batches.values())


def _import_batch(item: tuple[int, Batch], folder: Path, facts: Mapping[str, Any]) -> list[Account]:
    """Read the files of one batch and write their nodes; runs in a worker process."""
    number, (name, files) = item
    importer = get_importer(name)
    accounts: list[Account] = []
    try:
        sources = [
            source
            for file in files
            for source in open_sources(file)
            if importer in find_importers(source)
        ]
    except (ClusterprofError, OSError) as error:
        return [Account(file, cut=str(error), refused=True) for file in files]
    if importer is None or not sources:
        nothing = "nothing was read"
        return [Account(file, "unknown format", cut=nothing, refused=True) for file in files]
    batches = [sources] if importer.combines_files else [[source] for source in sources]
    for part, batch in enumerate(batches):
        batch_accounts = [Account(source.path, importer.title) for source in batch]
        accounts += batch_accounts
        _write_nodes(importer, batch, batch_accounts, folder, f"{number:05d}-{part:03d}", facts)
    return accounts


def _write_nodes(
    importer: Importer,
    sources: Sequence[FileSource],
    accounts: list[Account],
    folder: Path,
    name: str,
    facts: Mapping[str, Any],
) -> None:
    try:
        for number, node in enumerate(importer.nodes(sources, accounts)):
            node.job = node.job or "imported"
            node.is_window = node.is_window or bool(getattr(importer, "reads_windows", False))
            if node.key != importer.name:  # file name, where no host is known
                node.display_name = node.display_name or node.key
            elif len(sources) == 1:
                node.display_name = node.display_name or text.name_trace(sources[0].path)
            node.key = f"{node.key}-{name}-{number}"
            node.host = {**facts, **node.host}
            write_node(folder / f"{name}-{number:04d}", node.header(), node.records())
            del node  # before the next one is made
    except CannotImportError as error:
        for account in accounts:
            account.refuse(error.message, error.remedy)
    text.restore_default_retention()
    for source, account in zip(sources, accounts):
        account.cut = account.cut or source.damage
