"""Processes of a fault; each ends with the process that started it, even after a crash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_DIE_WITH_PARENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL


def list_missing_commands(*commands: str) -> str:
    """Return which commands are not installed, "" when all are."""
    none = [command for command in commands if shutil.which(command) is None]
    return f"not installed: {', '.join(none)}" if none else ""


@contextmanager
def keep_running(command: Sequence[str], **popen: Any) -> Iterator[subprocess.Popen[Any]]:
    """Keep a process running; it is killed and waited for at the end."""
    process = subprocess.Popen(command, **popen)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def run_until_stdin_ends(command: Sequence[str], wait_for: bytes = b"") -> Iterator[Any]:
    """Keep a process running that ends when its standard input does; yield it.

    `wait_for`: the first line it must say. RuntimeError with what it said when it says another.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        if wait_for and process.stdout.readline() != wait_for:
            process.stdin.close()
            message = process.stderr.read().decode(errors="replace").strip()
            raise RuntimeError(f"{command[0]} did not start: {message[-500:]}")
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()


@contextmanager
def wait_until_listening(command: Sequence[str]) -> Iterator[subprocess.Popen[Any]]:
    """Keep a process running from when it has printed a line."""
    with keep_running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{command[0]} ended before it was ready")
        yield process


@contextmanager
def run_at_end(shell: str, *words: str) -> Iterator[None]:
    """Run a shell script ($0, $1, …) at the end, also when this process is killed."""
    guard = subprocess.Popen(
        ["sh", "-c", f"cat >/dev/null; {shell}", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait()


def make_python_command(code: str, *words: str) -> list[str]:
    """Make the command line of Python code that dies with its parent."""
    return [sys.executable, "-I", "-c", _DIE_WITH_PARENT + code, *words]


def run_command(*command: str) -> str:
    """Run a command to its end; return what it printed, RuntimeError when it failed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
