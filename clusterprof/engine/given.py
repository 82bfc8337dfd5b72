"""What is to be analysed of the paths on the command line: recordings, as a rule.

    with given([Path("my-run/")]) as found:
        found.paths, found.notes

Readers of foreign formats take time to load, so nobody loads them who has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusterprof.errors import NoRecording
from clusterprof.trace.reader import node_folders


@dataclass(frozen=True, slots=True)
class Given:
    """Recordings, and what a report says of files that became some."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()


@contextmanager
def given(paths: Sequence[Path], jobs: int = 1, leave_unknown: bool = False) -> Iterator[Given]:
    """Hand recordings on, and have foreign files read (`engine.imported`), by `jobs` processes.

    Raises NoRecording for files of no format that is known, unless these are to be left out.
    """
    if all(map(_is_ours, paths)):
        yield Given(tuple(paths))
        return
    from clusterprof.engine.imported import brought_in

    with brought_in(paths, jobs, leave_unknown) as found:
        yield Given(found.paths, found.notes)


def _is_ours(path: Path) -> bool:
    """True of a recording, and of what is not there at all: whoever looks for it says so."""
    try:
        return not path.exists() or bool(node_folders(path))
    except NoRecording:
        return False
