"""Where an export goes: stdout, one file, or a folder of files; whole files or none.

A file is written beside its name and renamed when it is complete, so that whoever reads it (the
textfile collector of node_exporter) never sees half of one.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from clusterprof.renderers.text_safety import safe_text
from clusterprof.wholefile import failed, replacing


class Output:
    """The parts of an export; parts that may follow each other can share one file."""

    def __init__(self, path: Path | None, stdout: BinaryIO, folder: bool = False) -> None:
        """Write to `path` (None = `stdout`); `folder`: it is one, or will be."""
        self.path = path
        self._stdout = stdout
        self.is_folder = path is not None and (folder or path.is_dir())

    @property
    def is_terminal(self) -> bool:
        """True when a person would have to read what is written."""
        return self.path is None and self._stdout.isatty()

    @contextmanager
    def whole(self) -> Iterator[BinaryIO]:
        """Give the one file that all parts go to; raises UsageError when it cannot be written."""
        if self.path is None:
            try:
                yield self._stdout
                self._stdout.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise failed("to stdout", error) from None
            return
        with written(self.path) as file:
            yield file

    @contextmanager
    def part(self, name: str, suffix: str) -> Iterator[BinaryIO]:
        """Give a file of its own in the folder, named after a part."""
        assert self.path is not None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failed(str(self.path), error) from None
        with written(self.path / (file_name(name) + suffix)) as file:
            yield file


def file_name(name: str) -> str:
    """Return a name as one part of a path: no separator, nothing hidden, nothing that controls."""
    safe = safe_text(name, 150).replace("/", "_").replace("\\", "_").strip()
    return "_" + safe if safe.startswith(".") or not safe else safe


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Give a file that gets its name when all of it is there (`wholefile.replacing`).

    `*.gz` is compressed.
    """
    with replacing(path) as file, _squeezed(file, path) as into:
        yield into


@contextmanager
def _squeezed(file: BinaryIO, target: Path) -> Iterator[BinaryIO]:
    if target.suffix != ".gz":
        yield file
        return
    with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        yield cast(BinaryIO, packed)
