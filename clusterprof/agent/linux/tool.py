"""Command-line tools that are run beside us: they may hang, die or print anything.

A tool is a process group of its own, told to end when it is no longer wanted, and killed by the
kernel when the thread that started it is gone (`prctl(PR_SET_PDEATHSIG)`, prctl(2)): so it ends
with us however we end. What it prints is bounded. One that cannot be killed (it hangs inside a
driver) is left alone, and no second one is sent after it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from clusterprof.errors import Unavailable

MOST_BYTES = 4 << 20
"""Of one answer, or one line."""
_PR_SET_PDEATHSIG = 1
_TERM_SECONDS = 1.0
_LOOK_SECONDS = 0.01
_READ_BYTES = 65536
_WORDS_AT_MOST = 200
_LIBC = ctypes.CDLL(None)
_left: list[subprocess.Popen[bytes]] = []


def start(argv: Sequence[str], keep_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a tool from the thread that will read it; raises Unavailable when it cannot be.

    The thread must outlive the tool: the kernel kills the tool when the thread ends.
    """
    parent = os.getpid()
    name = os.path.basename(argv[0])
    if any(one.args[0] == argv[0] and one.poll() is None for one in _left):  # type: ignore[index]
        raise Unavailable("failed", f"an earlier {name} still hangs in the driver")
    _left[:] = [one for one in _left if one.poll() is None]

    def die_with_us() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it was too late to be told
            os._exit(127)

    try:
        return subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_us,
            pass_fds=tuple(keep_fds), bufsize=0,
        )  # fmt: skip
    except FileNotFoundError:
        raise Unavailable("absent", f"{name} was not found") from None
    except PermissionError:
        raise Unavailable(
            "denied", f"{name} may not be run", "chmod +x, or ask who owns it"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable("failed", f"{name} cannot be started: {error}") from None


def stop(process: subprocess.Popen[bytes]) -> bool:
    """End a tool and all it has started; False when it does not end, and is left alone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _ended(process, 0.0):
            _signal_all(process, number)
        if _ended(process, _TERM_SECONDS):
            break
    if process.stdout is not None:
        process.stdout.close()
    if not _ended(process, 0.0):
        _left.append(process)
        return False
    _signal_all(process, signal.SIGKILL)  # what it has left; the group is its own until reaped
    process.wait()
    return True


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """True when a tool has ended, within a time; its exit status stays to be collected."""
    end = time.monotonic() + seconds
    while process.returncode is None:
        try:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    if process.returncode is None:
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def run(argv: Sequence[str], seconds: float) -> str:
    """Run a tool to its end and return what it printed.

    Raises Unavailable when it cannot be started, exits with an error, takes longer than `seconds`
    or prints more than `MOST_BYTES`.
    """
    name = os.path.basename(argv[0])
    process = start(argv)
    assert process.stdout is not None
    end, output = time.monotonic() + seconds, b""
    try:
        while True:
            data = read_within(process, end - time.monotonic())
            if data is None:
                raise Unavailable("failed", f"{name} has not answered within {seconds:g} s")
            if not data:
                break
            output += data
            if len(output) > MOST_BYTES:
                raise Unavailable("failed", f"{name} printed more than {MOST_BYTES >> 20} MiB")
        if not _ended(process, end - time.monotonic()):
            raise Unavailable("failed", f"{name} does not end")
    finally:
        stop(process)
    text = output.decode("utf-8", "replace")
    if process.returncode:
        raise Unavailable("failed", f"{name} failed ({_ending(process)}){_said(text)}")
    return text


def read_within(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Return what a tool has printed, b"" at its end, None when nothing came in time."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    asked = select.poll()  # select() takes no descriptor above 1023, and the recorder holds files
    asked.register(descriptor, select.POLLIN)
    if not asked.poll(1000 * max(0.0, seconds)):
        return None
    return os.read(descriptor, _READ_BYTES)


def follow(
    argv: Sequence[str],
    on_line: Callable[[bytes], None],
    wanted: Callable[[], bool],
    keep_fds: Sequence[int] = (),
    look_seconds: float = 0.2,
    silent_seconds: float = 30.0,
) -> None:
    """Run a tool that prints line after line, until it ends or is no longer `wanted`.

    Always ends it. Raises Unavailable, why, when it ended by itself, printed no end of a line or
    nothing at all for `silent_seconds`.
    """
    name = os.path.basename(argv[0])
    process = start(argv, keep_fds)
    rest, heard = b"", time.monotonic()
    try:
        while wanted():
            data = read_within(process, look_seconds)
            if data is None:
                if time.monotonic() - heard > silent_seconds:
                    raise Unavailable("failed", f"{name} hangs: {silent_seconds:g} s of silence")
                continue
            heard = time.monotonic()
            if not data:
                if not _ended(process, _TERM_SECONDS):
                    raise Unavailable("failed", f"{name} has closed its output")
                stop(process)
                raise Unavailable("failed", f"{name} has ended ({_ending(process)})")
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                on_line(line)
            if len(rest) > MOST_BYTES:
                message = f"{name} printed {MOST_BYTES >> 20} MiB without the end of a line"
                raise Unavailable("failed", message)
    finally:
        stop(process)


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"


def _said(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f": {first[:_WORDS_AT_MOST]}" if first else ""
