"""Starts the recorder as a process of its own: nobody's child, in its own session.

A double fork, so that the workload that `record` becomes never has a child it did not start; a
pipe, so that it is known within moments whether recording began and what cannot be seen.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

import clusterprof
from clusterprof.errors import CannotStart

_REPLY_BYTES_AT_MOST = 65536
LOG_NAME = "agent.err"

# Isolated mode: neither PYTHONPATH nor the job's working directory may decide what code runs in
# the recorder. Where we ourselves were loaded from stands behind the standard library, but before
# installed packages, among which there may be another clusterprof.
_BOOT = (
    "import sys; at = [p.endswith('-packages') for p in sys.path + ['-packages']].index(True); "
    "sys.path[at:at] = sys.argv.pop(1).split(chr(58)); "
    "from clusterprof.agent import main; sys.exit(main())"
)


def python_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs `clusterprof.agent` with these arguments."""
    roots = [str(Path(module.__file__ or "").parent.parent) for module in (clusterprof, msgspec)]
    return [sys.executable, "-I", "-c", _BOOT, ":".join(dict.fromkeys(roots)), *arguments]


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment the agent is started with.

    The C library reserves 64 MiB of address space for the small allocations of every thread, and
    the recorder's address space is bounded: with a thread for each of eight GPUs little is left.
    """
    return {"MALLOC_ARENA_MAX": "2", **environ, "CLUSTERPROF_DISABLE": "1"}


def start_detached(
    arguments: Sequence[str], run_dir: Path, lock: int, timeout_s: float
) -> dict[str, Any]:
    """Start the agent and return its answer, {} when it gives none in time.

    lock: descriptor of the recorder's lock, which the agent keeps. Raises `CannotStart` when the
    agent says that it cannot record, or ends without a word.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        command = [*python_command(arguments), f"--lock-fd={lock}", f"--ready-fd={writer}"]
        child = os.fork()
        if child == 0:
            _become(command, run_dir, (lock, writer))
    finally:
        os.close(writer)
    try:
        os.waitpid(child, 0)
        reply = _reply(reader, timeout_s)
    finally:
        os.close(reader)
    if reply is None:
        return {}
    if not reply:
        raise CannotStart("the recorder ended: " + _last_words(run_dir), "try clusterprof doctor")
    answer: dict[str, Any] = json.loads(reply)
    if "error" in answer:
        raise CannotStart(str(answer["error"]), str(answer.get("remedy", "")))
    return answer


def _become(command: list[str], run_dir: Path, kept: Sequence[int]) -> NoReturn:
    """In the forked child: leave everything of the workload behind and become the agent."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        os.umask(0o077)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        errors = os.open(run_dir / LOG_NAME, flags, 0o600)
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (null, 1), (errors, 2)):
            os.dup2(source, target)
        low = 3
        for descriptor in sorted(kept):
            os.closerange(low, descriptor)
            os.set_inheritable(descriptor, True)
            low = descriptor + 1
        os.closerange(low, os.sysconf("SC_OPEN_MAX"))
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                pass  # reserved by the C library
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(command[0], command, agent_environment(os.environ))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(127)


def _reply(reader: int, timeout_s: float) -> bytes | None:
    """Return what came before the other end was closed, None when it stayed open too long."""
    deadline = time.monotonic() + timeout_s
    reply = b""
    while True:
        rest = deadline - time.monotonic()
        if rest <= 0 or not select.select([reader], (), (), rest)[0]:
            return None
        chunk = os.read(reader, _REPLY_BYTES_AT_MOST)
        if not chunk or len(reply) > _REPLY_BYTES_AT_MOST:
            return reply
        reply += chunk


def _last_words(run_dir: Path) -> str:
    try:
        lines = (run_dir / LOG_NAME).read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][:300] if lines else "it left no message"
