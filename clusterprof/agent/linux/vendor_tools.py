"""Command-line tools that run next to the recorder: they may hang, die or print anything.

A tool is a process group of its own. It is terminated when it is no longer wanted, and killed by
the kernel when the thread that started it ends (`prctl(PR_SET_PDEATHSIG)`, prctl(2)), so it ends
with the recorder in every case. Its output is limited. A tool that cannot be killed (it hangs
inside a driver) is abandoned, and no second one is started.

It also finds the path of a command-line tool.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from clusterprof.errors import Unavailable

MAX_OUTPUT_BYTES = 4 << 20
"""Limit of one answer or one line, in bytes."""
_PR_SET_PDEATHSIG = 1
_TERM_SECONDS = 1.0
_POLL_SECONDS = 0.01
_READ_BYTES = 65536
_MAX_MESSAGE_CHARS = 200
_LIBC = ctypes.CDLL(None)
_unkillable: list[subprocess.Popen[bytes]] = []


def start_tool(argv: Sequence[str], keep_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a tool from the thread that reads its output.

    The thread must outlive the tool: the kernel kills the tool when the thread ends. Raises:
    Unavailable when the tool cannot be started or an earlier instance still hangs.
    """
    parent = os.getpid()
    name = os.path.basename(argv[0])
    if any(process.args[0] == argv[0] and process.poll() is None for process in _unkillable):  # type: ignore[index]
        raise Unavailable("failed", f"an earlier {name} still hangs in the driver")
    _unkillable[:] = [process for process in _unkillable if process.poll() is None]

    def die_with_us() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl() took effect
            os._exit(127)

    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_us,
            pass_fds=tuple(keep_fds),
            bufsize=0,
        )
    except FileNotFoundError:
        raise Unavailable("absent", f"{name} was not found") from None
    except PermissionError:
        raise Unavailable(
            "denied", f"{name} is not executable", "run chmod +x on it, or ask its owner to"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable("failed", f"{name} cannot be started: {error}") from None


def stop_tool(process: subprocess.Popen[bytes]) -> bool:
    """Terminate a tool and its children; return False when it does not end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _has_ended(process, 0.0):
            _send_signal(process, number)
        if _has_ended(process, _TERM_SECONDS):
            break
    if process.stdout is not None:
        process.stdout.close()
    if not _has_ended(process, 0.0):
        _unkillable.append(process)
        return False
    # its remaining children; the group id stays reserved until the process is reaped
    _send_signal(process, signal.SIGKILL)
    process.wait()
    return True


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a tool ends within a time; its exit status stays to be collected."""
    end = time.monotonic() + seconds
    while process.returncode is None:
        try:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _send_signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.returncode is None:
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def run_tool(argv: Sequence[str], seconds: float) -> str:
    """Run a tool to its end and return its output.

    Raises: Unavailable when it cannot be started, exits with an error, takes longer than `seconds`
    or prints more than `MAX_OUTPUT_BYTES`.
    """
    name = os.path.basename(argv[0])
    process = start_tool(argv)
    assert process.stdout is not None
    end, output = time.monotonic() + seconds, b""
    try:
        while True:
            data = read_output(process, end - time.monotonic())
            if data is None:
                raise Unavailable("failed", f"{name} has not answered within {seconds:g} s")
            if not data:
                break
            output += data
            if len(output) > MAX_OUTPUT_BYTES:
                raise Unavailable(
                    "failed", f"{name} printed more than {MAX_OUTPUT_BYTES >> 20} MiB"
                )
        if not _has_ended(process, end - time.monotonic()):
            raise Unavailable("failed", f"{name} does not end")
    finally:
        stop_tool(process)
    text = output.decode("utf-8", "replace")
    if process.returncode:
        raise Unavailable(
            "failed", f"{name} failed ({_describe_exit(process)}){_format_first_line(text)}"
        )
    return text


def read_output(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Return a tool's next output, b"" at its end, None when none arrives within `seconds`."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    # select() takes no descriptor above 1023, and the recorder holds many files open
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(1000 * max(0.0, seconds)):
        return None
    return os.read(descriptor, _READ_BYTES)


def run_streaming_tool(
    argv: Sequence[str],
    handle_line: Callable[[bytes], None],
    wanted: Callable[[], bool],
    keep_fds: Sequence[int] = (),
    look_seconds: float = 0.2,
    silent_seconds: float = 30.0,
) -> None:
    """Run a tool that prints line by line until it ends or is no longer `wanted`.

    The tool is always stopped on return.
    Raises: Unavailable when it ended by itself, or printed an endless line or nothing for
    `silent_seconds`.
    """
    name = os.path.basename(argv[0])
    process = start_tool(argv, keep_fds)
    partial_line, heard = b"", time.monotonic()
    try:
        while wanted():
            data = read_output(process, look_seconds)
            if data is None:
                if time.monotonic() - heard > silent_seconds:
                    raise Unavailable("failed", f"{name} hangs: {silent_seconds:g} s of silence")
                continue
            heard = time.monotonic()
            if not data:
                if not _has_ended(process, _TERM_SECONDS):
                    raise Unavailable("failed", f"{name} has closed its output")
                stop_tool(process)
                raise Unavailable("failed", f"{name} has ended ({_describe_exit(process)})")
            *lines, partial_line = (partial_line + data).split(b"\n")
            for line in lines:
                handle_line(line)
            if len(partial_line) > MAX_OUTPUT_BYTES:
                message = f"{name} printed {MAX_OUTPUT_BYTES >> 20} MiB without the end of a line"
                raise Unavailable("failed", message)
    finally:
        stop_tool(process)


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"


def _format_first_line(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f": {first[:_MAX_MESSAGE_CHARS]}" if first else ""


def find_program(name: str, environ: Mapping[str, str], default_path: str = "") -> str | None:
    """Return the path of a tool: on PATH, else its default path; None when it is at neither."""
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    for path in (*(f"{folder}/{name}" for folder in folders if folder), default_path):
        if path and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None
