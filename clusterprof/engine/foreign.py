"""Which of the paths that were given are recordings, which foreign files, which nobody can read.

    found = sorted_out([Path("traces/"), Path("rank3.json.gz"), Path("my-run/")])
    found.own, found.foreign, found.unread, found.passed_over

A file that was given by its name is asked for: when nobody reads it, that is said, or refused. So
is a file in a folder that is damaged or must not be unpacked: it may be one of the traces. Whatever
else lies in a folder (a README, a log) is passed over, and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterprof.errors import ClusterprofError, NoRecording, UsageError
from clusterprof.importers.base import Account, Importer
from clusterprof.importers.registry import IMPORTERS, importer_of
from clusterprof.importers.sources import FileSource, sources_of
from clusterprof.trace.reader import node_folders
from clusterprof.trace.segments import SUFFIX

FILES_AT_MOST = 65_536
_UNKNOWN = "neither a recording nor of a format that is known"
_DEPTH = 4  # folders below the one that was given
_NAMED_AT_MOST = 3


@dataclass(slots=True)
class Found:
    """What was given, by what it is."""

    own: list[Path] = field(default_factory=list)
    """Recordings, and what is not there at all (`find_nodes` says so)."""
    foreign: list[Path] = field(default_factory=list)
    unread: dict[Path, ClusterprofError] = field(default_factory=dict)
    """Files that were asked for and that nobody reads, and why."""
    passed_over: list[Path] = field(default_factory=list)
    """What else lies in the folders."""

    def refuse(self, anyway: bool = False) -> None:
        """Raise for the first file that nobody reads, unless it may be left out beside others."""
        for why in self.unread.values():
            if not (self.own or self.foreign):
                raise why
            if not anyway:
                raise judged_in_part(why, len(self.unread) - 1)

    def left_out(self) -> tuple[Account, ...]:
        """Return an account of every file that is left out."""
        return tuple(
            Account(path, cut=why.message.removeprefix(f"{path}: "))
            for path, why in self.unread.items()
        )

    def notes(self) -> tuple[str, ...]:
        """Return what a report says of the rest."""
        if not self.passed_over:
            return ()
        names = ", ".join(path.name for path in self.passed_over[:_NAMED_AT_MOST])
        more = len(self.passed_over) - _NAMED_AT_MOST
        names += f" and {more:,} more" if more > 0 else ""
        return (f"passed over, of no format that is known: {names}",)


def judged_in_part(why: ClusterprofError, others: int = 0) -> NoRecording:
    """Return the refusal of a file beside others: what is judged by a part of it would be wrong."""
    more = f" (and {others:,} more like it)" if others else ""
    return NoRecording(
        f"{why.message}{more}",
        "nothing was judged; take it out of what is given to have the others judged alone, or"
        f" mend it: {why.remedy}",
    )


def sorted_out(paths: Sequence[Path]) -> Found:
    """Look at what was given."""
    found = Found()
    for path in paths:
        if path.is_file() and not path.name.endswith(SUFFIX):
            _look(path, found, asked=True)
        elif path.is_dir() and not is_recording(path):
            before = len(found.foreign) + len(found.unread)
            for file in _files_in(path):
                _look(file, found, asked=False)
            if len(found.foreign) > FILES_AT_MOST:
                what = f"{path}: more than {FILES_AT_MOST:,} files of known formats"
                raise UsageError(what, "give fewer at once")
            if len(found.foreign) + len(found.unread) == before:
                found.own.append(path)
        else:
            found.own.append(path)
    found.foreign = list(dict.fromkeys(found.foreign))
    return found


def _look(path: Path, found: Found, asked: bool) -> None:
    sound = False
    try:
        sources = list(sources_of(path))
        if any(importer_of(one.head, one.path) is not None for one in sources):
            found.foreign.append(path)
            return
        why = _why_unknown(path, sources)
        sound = not any(one.head_damage for one in sources)
    except ClusterprofError as error:
        why = error
    except OSError as error:
        what = f"{path}: cannot be read: {(error.strerror or str(error)).lower()}"
        why = NoRecording(what, "check its permissions and its disk, or leave it out")
    if sound and not asked:
        found.passed_over.append(path)
    else:
        found.unread[path] = why


def _why_unknown(path: Path, sources: Sequence[FileSource]) -> ClusterprofError:
    damage = next((one.head_damage for one in sources if one.head_damage), "")
    if damage:
        return NoRecording(f"{path}: {damage}", "copy or export it again")
    if not path.stat().st_size:
        return NoRecording(f"{path}: it is empty: {_UNKNOWN}", "copy or export it again")
    known = ", ".join(one.title for one in IMPORTERS)
    return NoRecording(f"{path}: {_UNKNOWN}", f"known formats: {known}")


def is_recording(path: Path) -> bool:
    """True of a folder or segment that we wrote."""
    try:
        return bool(node_folders(path))
    except NoRecording:
        return False


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and those below it, by name."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if len(Path(here).relative_to(folder).parts) >= _DEPTH:
            folders.clear()
        for name in sorted(names):
            path = Path(here) / name
            if not name.startswith(".") and path.is_file():
                yield path


def importer_for(path: Path) -> Importer | None:
    """Return who reads a file, by what stands at its beginning; None: nobody."""
    try:
        some = (importer_of(source.head, source.path) for source in sources_of(path))
        return next((one for one in some if one is not None), None)
    except (ClusterprofError, OSError):
        return None
