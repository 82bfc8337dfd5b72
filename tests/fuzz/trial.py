"""One input to an importer: recognised, read, every record taken; and what came of it."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutate import mutated

from clusterprof.errors import ClusterprofError
from clusterprof.importers.base import Account, Importer
from clusterprof.importers.registry import IMPORTERS
from clusterprof.importers.sources import sources_of

SEEDS = Path(__file__).parents[1] / "importers" / "seeds"
REGRESSIONS = Path(__file__).parents[1] / "importers" / "fuzzed"
READ, REFUSED, UNKNOWN = "read", "refused", "not recognised"


@dataclass(frozen=True)
class Case:
    """Files that are read in one call: one, or those of a folder."""

    name: str
    files: tuple[tuple[str, bytes], ...]


def importer_named(name: str) -> Importer:
    """Return the importer of a format."""
    return next(one for one in IMPORTERS if one.name == name)


def cases_in(folder: Path) -> list[Case]:
    """Return what lies in a folder: each file is a case, each folder too."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        found.append(Case(path.name, tuple((file.name, file.read_bytes()) for file in files)))
    return found


def changed(cases: Sequence[Case], number: int, name: str) -> Case:
    """Return the input of a number: one case with one of its files mutated."""
    rng = random.Random(f"{name}:{number}")
    case = rng.choice(cases)
    others = [data for one in cases for _, data in one.files]
    files = list(case.files)
    at = rng.randrange(len(files))
    files[at] = files[at][0], mutated(files[at][1], others, rng)
    return Case(case.name, tuple(files))


def try_one(importer: Importer, case: Case, folder: Path) -> str:
    """Read a case as the analysis would. Raises whatever the importer must not raise."""
    paths = []
    for name, data in case.files:
        path = folder / name
        path.write_bytes(data)
        paths.append(path)
    try:
        sources = [
            source for path in paths for source in sources_of(path)
            if importer.recognises(source.head, source.path)
        ]  # fmt: skip
        if not sources:
            return UNKNOWN
        for some in [sources] if importer.together else [[source] for source in sources]:
            accounts = [Account(source.path, importer.title) for source in some]
            for node in importer.nodes(some, accounts):
                node.header()
                for _ in node.records():
                    pass
            for account in accounts:
                account.said()
    except ClusterprofError:
        return REFUSED
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    return READ


def signature(error: BaseException) -> str:
    """Return what tells one defect from another: the kind of error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "clusterprof" in one.filename] or frames
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {where}"
