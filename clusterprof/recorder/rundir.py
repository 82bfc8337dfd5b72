"""The run directory: node-local, private, one per node and job (docs/design.md, section 3).

Everything that the processes of a job and their recorder tell each other is a file in it, so its
owner and mode are checked before anything in it is believed.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterprof.errors import CannotStart

_SHARED_MEMORY = "/dev/shm"
RUN_DIR_PREFIX = "clusterprof-"
FOLDERS = ("register", "rings", "groups", "devices")
FILE_BYTES_AT_MOST = 4096


def choose_base(environ: Mapping[str, str], shared_memory: str = _SHARED_MEMORY) -> Path:
    """Return the node-local folder in which run directories live."""
    for name in (shared_memory, environ.get("XDG_RUNTIME_DIR", "")):
        if name and os.path.isdir(name) and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path(tempfile.gettempdir())


def run_dir_path(base: Path, boot8: str, job: str) -> Path:
    """Return the path of the run directory of this user, boot and job."""
    return base / f"{RUN_DIR_PREFIX}{os.geteuid()}-{boot8}-{job}"


def ensure_run_dir(path: Path) -> None:
    """Create the run directory and its folders, or accept one that is ours and private.

    A symbolic link, another owner or a wider mode raises `CannotStart`: somebody else put it there.
    """
    for folder in (path, *(path / name for name in FOLDERS)):
        make_private(folder)


def make_private(folder: Path) -> None:
    """Create a folder 0700, or accept an existing one only if it is ours, real and 0700."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise CannotStart(f"{folder}: {error.strerror}", "choose another folder") from error
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise CannotStart(
            f"{folder}: not a folder of ours with mode 0700", "somebody else made it: remove it"
        )


def write_private(path: Path, content: bytes) -> None:
    """Put a file with mode 0600 in place at once: written under a temporary name, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    os.rename(temporary, path)


def read_small_json(path: str, bytes_at_most: int = FILE_BYTES_AT_MOST) -> dict[str, Any] | None:
    """Return the JSON object in a small private file of ours, None for anything else.

    The file was written by a process of the job: size, owner, kind and content are all checked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        private = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
        if not private or info.st_size > bytes_at_most:
            return None
        content = os.read(descriptor, bytes_at_most + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
