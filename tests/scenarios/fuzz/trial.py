"""One input to a reader: recognised, read, every record taken; and what came of it."""

from __future__ import annotations

import random
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clusterprof.analysis.importers.core.base import Account, Importer
from clusterprof.analysis.importers.core.byte_sources import FileSource, open_sources
from clusterprof.analysis.importers.registry import IMPORTERS
from clusterprof.analysis.pipeline import analyze_with_details
from clusterprof.errors import ClusterprofError
from tests.scenarios.fuzz.mutate import mutated

SEEDS = Path(__file__).parents[2] / "analysis" / "importers" / "seeds"
REGRESSIONS = Path(__file__).parents[2] / "analysis" / "importers" / "fuzzed"
READ, REFUSED, UNKNOWN = "read", "refused", "not recognised"


@dataclass(frozen=True)
class Case:
    """Files that are read in one call: one, or those of a folder."""

    name: str
    files: tuple[tuple[str, bytes], ...]


class Format(Protocol):
    """A format that a campaign mutates."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def cases(self) -> Sequence[Case]:
        """The good files."""

    def make_generator(self) -> Callable[[int], Case]:
        """Return what gives the input of a number."""

    def read(self, case: Case, folder: Path, on_disk: bool) -> str:
        """Read an input; files lie in the folder for as long as it takes."""

    def analyze(self, case: Case, folder: Path) -> str | None:
        """Put an input through the whole analysis; None where there is no such analysis."""


@dataclass(frozen=True)
class ImportedFormat:
    """A format of another tool."""

    importer: Importer
    cases: Sequence[Case]

    @property
    def name(self) -> str:
        """Name of its importer."""
        return self.importer.name

    def make_generator(self) -> Callable[[int], Case]:
        """Return what gives the input of a number: a good file, mutated."""
        return Inputs(self.cases, self.name).of

    def read(self, case: Case, folder: Path, on_disk: bool) -> str:
        """Read an input from memory, or from the disk."""
        return try_on_disk(self.importer, case, folder) if on_disk else try_one(self.importer, case)

    def analyze(self, case: Case, folder: Path) -> str:
        """Put an input through the whole analysis."""
        return try_whole(case, folder)


def list_imported_formats() -> list[ImportedFormat]:
    """Return the formats of all importers, also of those without seeds."""
    return [ImportedFormat(importer, cases_in(SEEDS / importer.name)) for importer in IMPORTERS]


def importer_named(name: str) -> Importer:
    """Return the importer of a format."""
    return next(importer for importer in IMPORTERS if importer.name == name)


def cases_in(folder: Path) -> list[Case]:
    """Return what lies in a folder: each file is a case, each folder too."""
    collected = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        collected.append(Case(path.name, tuple((file.name, file.read_bytes()) for file in files)))
    return collected


class Inputs:
    """The inputs of a format by their numbers: one case with one of its files mutated."""

    def __init__(self, cases: Sequence[Case], name: str) -> None:
        self._cases = cases
        self._others = [data for case in cases for _, data in case.files]
        self._first = zlib.crc32(name.encode()) << 64
        self._rng = random.Random()

    def of(self, number: int) -> Case:
        """Return the input of a number."""
        rng = self._rng
        rng.seed(self._first + number)
        case = rng.choice(self._cases)
        files = list(case.files)
        at = rng.randrange(len(files))
        files[at] = files[at][0], mutated(files[at][1], self._others, rng)
        return Case(case.name, tuple(files))


def try_one(importer: Importer, case: Case) -> str:
    """Read a case from memory, as the analysis would read it from the disk.

    Raises whatever the importer must not raise.
    """
    return _tried(importer, ((Path(name), data) for name, data in case.files))


def try_on_disk(importer: Importer, case: Case, folder: Path) -> str:
    """Write a case as files, and read those. Raises whatever the importer must not raise."""
    paths = [folder / name for name, _ in case.files]
    for path, (_, data) in zip(paths, case.files):
        path.write_bytes(data)
    try:
        return _tried(importer, ((path, None) for path in paths))
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def try_whole(case: Case, folder: Path) -> str:
    """Write a case as files, and analyse those. Raises whatever the analysis must not raise."""
    for name, data in case.files:
        (folder / name).write_bytes(data)
    try:
        analyze_with_details([folder])
    except ClusterprofError:
        return REFUSED
    finally:
        for name, _ in case.files:
            (folder / name).unlink(missing_ok=True)
    return READ


def _tried(importer: Importer, files: Iterable[tuple[Path, bytes | None]]) -> str:
    try:
        sources = [
            source
            for path, data in files
            for source in open_sources(path, data)
            if importer.recognizes(source.head, source.path)
        ]
        if not sources:
            return UNKNOWN
        for batch in [sources] if importer.combines_files else [[source] for source in sources]:
            _read(importer, batch)
    except ClusterprofError:
        return REFUSED
    return READ


def _read(importer: Importer, rows: Sequence[FileSource]) -> None:
    accounts = [Account(source.path, importer.title) for source in rows]
    for node in importer.nodes(rows, accounts):
        node.header()
        for _ in node.records():
            pass
    for account in accounts:
        account.format_line()


def signature(error: BaseException) -> str:
    """Return what tells one defect from another: the kind of error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "clusterprof" in frame.filename] or frames
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {where}"
