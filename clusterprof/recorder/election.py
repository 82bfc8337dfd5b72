"""One recorder per node and job: two file locks in the run directory decide.

`lock` is held by the recorder for its whole life, on a file description it inherits, so that a
killed recorder gives it up by dying. `gate` is held for moments: shared by a process that joins,
alone by a recorder that leaves. So nobody can register with a recorder that has just decided
that nobody is left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from clusterprof.errors import CannotStart
from clusterprof.recorder.rundir import ensure_run_dir

_ATTEMPTS = 50
_PAUSE_S = 0.01


def join(run_dir: Path, register: Callable[[], None]) -> int | None:
    """Register with the job's recorder; return the lock's descriptor if we must start one.

    None means that another recorder lives. Waits at most about half a second for a recorder that
    is leaving; raises `CannotStart` when the run directory cannot be had.
    """
    for _ in range(_ATTEMPTS):
        ensure_run_dir(run_dir)
        gate = _open(run_dir / "gate")
        if gate is None:
            continue  # a leaving recorder took the folder away
        try:
            if not _try(gate, fcntl.LOCK_SH) or not _is_at(gate, run_dir / "gate"):
                time.sleep(_PAUSE_S)
                continue
            register()
            return try_lead(run_dir)
        finally:
            os.close(gate)
    raise CannotStart(f"{run_dir}: a recorder is leaving and does not finish", "try again")


def try_lead(run_dir: Path) -> int | None:
    """Return the descriptor of the recorder's lock, None when another process holds it."""
    descriptor = _open(run_dir / "lock")
    if descriptor is None:
        raise CannotStart(f"{run_dir}: the lock cannot be opened", "try again")
    if _try(descriptor, fcntl.LOCK_EX):
        return descriptor
    os.close(descriptor)
    return None


def leave(run_dir: Path, somebody_left: Callable[[], bool]) -> bool:
    """Remove the run directory unless somebody registered meanwhile; return True if removed.

    Called by the recorder while it holds the lock. `somebody_left` looks at the registrations
    once more while nobody can join.
    """
    gate = _open(run_dir / "gate")
    if gate is None:
        return True
    try:
        if not _try(gate, fcntl.LOCK_EX):
            return False  # somebody is joining at this moment
        if somebody_left():
            return False
        gone = run_dir.with_name(f".{run_dir.name}.gone-{os.getpid()}")
        os.rename(run_dir, gone)
    except OSError:
        return True
    finally:
        os.close(gate)
    shutil.rmtree(gone, ignore_errors=True)
    return True


def _open(path: Path) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CannotStart(f"{path}: {error.strerror}", "remove it") from error


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def sweep(base: Path, prefix: str, alive: Callable[[Path], bool]) -> None:
    """Remove run directories of ours that a killed recorder and an ended job have left behind.

    `alive` says of a run directory whether a process registered in it still lives.
    """
    for run_dir in base.glob(f"{prefix}*"):
        try:
            ours = not run_dir.is_symlink() and run_dir.stat().st_uid == os.geteuid()
            if ours and (run_dir / "lock").is_file() and (run_dir / "register").is_dir():
                leave(run_dir, partial(_in_use, run_dir, alive))
        except (OSError, CannotStart):
            continue


def _in_use(run_dir: Path, alive: Callable[[Path], bool]) -> bool:
    lock = try_lead(run_dir)
    if lock is None:
        return True
    os.close(lock)
    return alive(run_dir)
