"""Copy recordings to an object store while they are written, and once more at the end.

    clusterprof-upload FOLDER s3://bucket/prefix [SECONDS]

A file that has changed is copied again every SECONDS (30). SIGTERM, with which Kubernetes ends a
sidecar after the job, starts the last pass. What cannot be copied is reported and tried again; only
the last pass decides the exit status. `clusterprof analyze s3://bucket/prefix` reads the copy.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec

State = dict[Path, tuple[int, int]]
"""File -> its size in bytes and time of the last change (ns) when it was copied."""


def list_files(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Yield the plain files of a recording with size (bytes) and time of change (ns)."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if name.startswith(".") or path.is_symlink() or not path.is_file():
                continue  # temporary files, and files that were removed meanwhile
            info = path.stat()
            yield path, (info.st_size, info.st_mtime_ns)


def copy_changes(folder: Path, store: fsspec.AbstractFileSystem, prefix: str, copied: State) -> int:
    """Copy the files that have changed since they were copied; returns how many failed."""
    failures = 0
    for path, state in list_files(folder):
        if copied.get(path) == state:
            continue
        try:
            store.put_file(str(path), f"{prefix}/{path.relative_to(folder).as_posix()}")
            copied[path] = state
        except FileNotFoundError:
            continue  # the recorder has removed its oldest segment
        except Exception as error:  # each store has errors of its own
            failures += 1
            print(f"clusterprof-upload: {path}: {error}; trying again", file=sys.stderr, flush=True)
    return failures


def main(arguments: list[str]) -> int:
    """Copy until SIGTERM or SIGINT; returns 0 if everything was copied in the end."""
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    interval_s = float(arguments[2]) if len(arguments) == 3 else 30.0
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    store, prefix = fsspec.core.url_to_fs(arguments[1].rstrip("/"))
    copied: State = {}
    while not ended.wait(interval_s):
        copy_changes(folder, store, prefix, copied)
    # Files that change while they are copied are copied again: now nobody writes any more.
    for _ in range(3):
        if not copy_changes(folder, store, prefix, copied):
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
