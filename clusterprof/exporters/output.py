"""Where an export goes: stdout, one file, or a folder of files; whole files or none.

A file is written beside its name and renamed when it is complete, so that whoever reads it (the
textfile collector of node_exporter) never sees half of one.
"""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from clusterprof.errors import UsageError
from clusterprof.renderers.text_safety import safe_text


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
                raise _cannot(Path("standard output"), error) from None
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
            raise _cannot(self.path, error) from None
        with written(self.path / (file_name(name) + suffix)) as file:
            yield file


def file_name(name: str) -> str:
    """Return a name as one part of a path: no separator, nothing hidden, nothing that controls."""
    safe = safe_text(name, 150).replace("/", "_").replace("\\", "_").strip()
    return "_" + safe if safe.startswith(".") or not safe else safe


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Give a file that gets its name when all of it is there; raises UsageError, leaves nothing.

    What is no plain file (a device, a pipe) is written to as it is. `*.gz` is compressed.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            with target.open("wb") as file:
                yield file
            return
        beside = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
        try:
            with beside.open("wb") as file, _squeezed(file, target) as into:
                yield into
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _cannot(path, error) from None


@contextmanager
def _squeezed(file: BinaryIO, target: Path) -> Iterator[BinaryIO]:
    if target.suffix != ".gz":
        yield file
        return
    with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        yield cast(BinaryIO, packed)


def _cannot(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path}: {(error.strerror or type(error).__name__).lower()}")
