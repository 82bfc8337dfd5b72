"""One recorder per node and job, decided by two file locks in the run directory.

The recorder holds `lock` for its whole life, on an inherited file description, so that
the lock is released even when the recorder is killed. `gate` is held for moments:
shared by a joining process, exclusively by an exiting recorder. So no process can
register with a recorder that has just decided that none is left.

The run directory: node-local, private, one per node and job (docs/design/recording-format.md).

The processes of a job and their recorder communicate through files in it, so owner and
mode are checked before any content is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from clusterprof.agent.launch import identity
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import CannotStart

_SHARED_MEMORY = "/dev/shm"
RUN_DIR_PREFIX = "clusterprof-"
FOLDER_FILE = "recording"
"""File of the run directory with the path of the recording's folder."""
RUN_DIR_FOLDERS = ("register", "rings", "groups", "devices")
MAX_SMALL_FILE_BYTES = 4096
PID_FILE = "agent.pid"
"""File of the run directory with pid and start (clock ticks) of the recorder."""
_STEP_OF_JOB = re.compile(r"(\d+)\.\w+((?:-restart\d+)?)")


def choose_base(environ: Mapping[str, str], shared_memory: str = _SHARED_MEMORY) -> Path:
    """Choose the node-local folder that holds run directories."""
    for name in (shared_memory, environ.get("XDG_RUNTIME_DIR", "")):
        if name and os.path.isdir(name) and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path(tempfile.gettempdir())


def build_run_dir_path(base: Path, boot8: str, job: str) -> Path:
    """Build the path of the run directory of this user, boot and job."""
    return base / f"{RUN_DIR_PREFIX}{os.geteuid()}-{boot8}-{job}"


def find_run_dir(environ: Mapping[str, str], job: str) -> Path:
    """Find the run directory of a job on this node.

    A Slurm step that runs inside a recorded batch script belongs to the recording of the script:
    one recorder per node is enough, and that one lives as long as the job.
    """
    base, boot8 = choose_base(environ), identity.read_short_boot_id(Roots())
    step = _STEP_OF_JOB.fullmatch(job)
    if step is not None:
        batch = build_run_dir_path(base, boot8, step[1] + step[2])
        if is_recorder_running(batch):
            return batch
    return build_run_dir_path(base, boot8, job)


def is_recorder_running(run_dir: Path) -> bool:
    """Return whether the recorder of a run directory of ours runs. It takes no lock."""
    try:
        private = os.lstat(run_dir).st_uid == os.geteuid()
    except OSError:
        return False
    return private and find_recorder(run_dir) is not None


def find_recorder(run_dir: Path) -> int | None:
    """Return the pid of the recorder of a run directory; None when none runs."""
    try:
        # Never waits, not even for a FIFO that another user has planted.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(run_dir / PID_FILE, flags)
        try:
            pid, ticks = map(int, os.read(descriptor, MAX_SMALL_FILE_BYTES).split())
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
    fields = identity.read_stat_fields("/proc", pid)  # state first: Z has ended
    is_same = fields is not None and int(fields[19]) == ticks and fields[0] != b"Z"
    return pid if is_same else None


def list_recorders(base: Path) -> list[tuple[int, str]]:
    """Return (pid, job) of each recorder on this node whose run directory is readable, by pid.

    A process that the owner of the directory does not own is left out: a file can name any pid.
    """
    recorders = []
    for run_dir in base.glob(f"{RUN_DIR_PREFIX}*"):
        parts = run_dir.name.split("-", 3)  # clusterprof-<uid>-<boot>-<job>
        pid = find_recorder(run_dir) if len(parts) == 4 else None
        with contextlib.suppress(OSError):
            if pid and os.lstat(run_dir).st_uid == os.stat(f"/proc/{pid}").st_uid:
                recorders.append((pid, parts[3]))
    return sorted(recorders)


def ensure_run_dir(path: Path) -> None:
    """Create the run directory and its folders, or accept existing private ones of ours.

    Raises: CannotStart for a symbolic link, another owner or a wider mode.
    """
    for folder in (path, *(path / name for name in RUN_DIR_FOLDERS)):
        make_private_folder(folder)


def make_private_folder(folder: Path) -> None:
    """Create a folder with mode 0700, or accept an existing real one of ours with mode 0700.

    Raises: CannotStart when it cannot be created, or when the existing one is not accepted.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise CannotStart(f"{folder}: {error.strerror}", "choose another folder") from error
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise CannotStart(
            f"{folder}: not a folder of ours with mode 0700", "another program made it: remove it"
        )


def write_private_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file with a mode atomically: under a temporary name, then renamed.

    Raises: OSError, with the path, when the file cannot be written whole.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode)
    try:
        remaining = memoryview(content)
        while remaining:
            # a second write only to learn the error
            remaining = remaining[os.write(descriptor, remaining) :]
    except OSError as error:
        os.unlink(temporary)
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
    os.rename(temporary, path)


def read_small_json(path: str, max_bytes: int = MAX_SMALL_FILE_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in a small private file of ours, None for anything else.

    A process of the job wrote the file: size, owner, type and content are all checked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        private = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
        if not private or info.st_size > max_bytes:
            return None
        content = os.read(descriptor, max_bytes + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_MAX_ATTEMPTS = 50
_PAUSE_S = 0.01


def join_recorder(run_dir: Path, register: Callable[[], None]) -> int | None:
    """Register with the job's recorder; return the lock's descriptor if we must start one.

    None means that another recorder runs. Waits at most about half a second for an exiting
    recorder.
    Raises: CannotStart when the run directory cannot be used, or the recorder does not exit
    in time.
    """
    for _ in range(_MAX_ATTEMPTS):
        ensure_run_dir(run_dir)
        gate = _open_lock_file(run_dir / "gate")
        if gate is None:
            continue  # an exiting recorder removed the folder
        try:
            if not _take_file_lock(gate, fcntl.LOCK_SH) or not _is_same_file(
                gate, run_dir / "gate"
            ):
                time.sleep(_PAUSE_S)
                continue
            register()
            return take_recorder_lock(run_dir)
        finally:
            os.close(gate)
    raise CannotStart(f"{run_dir}: the previous recorder does not exit", "try again")


def take_recorder_lock(run_dir: Path) -> int | None:
    """Take the recorder's lock; return its descriptor, None when another process holds it.

    Raises: CannotStart when the lock file cannot be opened.
    """
    descriptor = _open_lock_file(run_dir / "lock")
    if descriptor is None:
        raise CannotStart(f"{run_dir}: the lock cannot be opened", "try again")
    if _take_file_lock(descriptor, fcntl.LOCK_EX):
        return descriptor
    os.close(descriptor)
    return None


def remove_unused_run_dir(run_dir: Path, has_processes: Callable[[], bool]) -> bool:
    """Remove the run directory unless a process is registered; return whether it was removed.

    Called by the recorder while it holds the lock. The callback reads the registrations
    once more while no process can join.
    Raises: CannotStart when the gate file exists but cannot be opened.
    """
    gate = _open_lock_file(run_dir / "gate")
    if gate is None:
        return True
    try:
        if not _take_file_lock(gate, fcntl.LOCK_EX):
            return False  # a process is joining at this moment
        if has_processes():
            return False
        removed = run_dir.with_name(f".{run_dir.name}.gone-{os.getpid()}")
        os.rename(run_dir, removed)
    except OSError:
        return True
    finally:
        os.close(gate)
    shutil.rmtree(removed, ignore_errors=True)
    return True


def _open_lock_file(path: Path) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}", "remove it") from error


def _take_file_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), info)


def remove_stale_run_dirs(
    base: Path, prefix: str, has_live_process: Callable[[Path], bool]
) -> None:
    """Remove this user's run directories that a killed recorder and an ended job left behind.

    The callback returns whether a process registered in a run directory is still alive.
    """
    for run_dir in base.glob(f"{prefix}*"):
        try:
            ours = not run_dir.is_symlink() and run_dir.stat().st_uid == os.geteuid()
            if ours and (run_dir / "lock").is_file() and (run_dir / "register").is_dir():
                remove_unused_run_dir(run_dir, partial(_is_in_use, run_dir, has_live_process))
        except (OSError, CannotStart):
            continue


def _is_in_use(run_dir: Path, has_live_process: Callable[[Path], bool]) -> bool:
    lock = take_recorder_lock(run_dir)
    if lock is None:
        return True
    os.close(lock)
    return has_live_process(run_dir)
