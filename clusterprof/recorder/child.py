"""The helper process as the recorder holds it: started, spoken to, noticed when dead, left alone.

It is never waited for and never killed: killing a process inside the driver has frozen GPUs until
a reboot. Closing its pipe is how it is told to go.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from clusterprof.recorder import marker, wire

_START = (
    "import sys; sys.path += sys.argv.pop(1).split(':'); "
    "from clusterprof.recorder.helper import main; main(sys.argv[1:])"
)
_DECODER = msgspec.msgpack.Decoder()
_READ_BYTES = 65536
ASK_AT_MOST = 64
"""Questions of about 40 bytes."""


class Child:
    """One running helper."""

    def __init__(
        self, python: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Start it; raises OSError when the system will not."""
        self.exit_signal = 0
        """The signal that ended it, once `ended()`; 0 = it exited by itself."""
        self._buffer = bytearray()
        self._reaped = self._at_end = False
        self._fds: list[int] = []
        try:
            their_in, self._out = self._pipe()
            self._in, their_out = self._pipe()
            self._marker = _high(marker.create())
            self._fds.append(self._marker)
            self._page = marker.attach(self._marker)
            self.pid = _spawn(python, arguments, environment, (their_in, their_out, self._marker))
        except OSError:
            self._close_all()
            raise
        for fd in (their_in, their_out):
            os.close(fd)
            self._fds.remove(fd)
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def send(self, questions: Sequence[list[Any]]) -> bool:
        """Send at most `ASK_AT_MOST` without waiting; False when the pipe is full or nobody reads.

        At once: the helper wakes up once and not for each.
        """
        try:
            # short of PIPE_BUF: all of it or nothing
            os.write(self._out, b"".join(map(wire.frame, questions)))
        except OSError:
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the messages that have arrived, without waiting."""
        try:
            while data := os.read(self._in, _READ_BYTES):
                self._buffer += data
            self._at_end = True
        except BlockingIOError:
            pass
        try:
            return [_DECODER.decode(payload) for payload in wire.frames(self._buffer)]
        except (ValueError, msgspec.DecodeError):
            self._at_end = True  # it writes nonsense: as good as dead
            return []

    def wait_readable(self, seconds: float) -> None:
        """Sleep until something arrives or the time is over."""
        import select

        asked = select.poll()  # select() takes no descriptor above 1023
        asked.register(self._in, select.POLLIN)
        asked.poll(1000 * max(0.0, seconds))

    def ended(self) -> bool:
        """True once it has closed its end and is no more a process."""
        return self._at_end and self.reap()

    def reap(self) -> bool:
        """Collect its exit status if it has one; True when it is gone."""
        if not self._reaped:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else collected it
                self._reaped = True
                return True
            if pid:
                self._reaped = True
                self.exit_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return self._reaped

    def in_call(self, index: int) -> marker.InCall | None:
        """Return the call that device `index` (-1: the library) is inside now."""
        for call in marker.in_calls(self._page):
            if call.device == index:
                return call
        return None

    def culprits(self) -> list[marker.InCall]:
        """Return the call that killed it, or those it may have been."""
        return marker.culprits(self._page, self._marker)

    def close(self) -> None:
        """Close the pipe and be done with it; a helper that hangs is left to itself."""
        self._page.close()
        self._close_all()
        self.reap()

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        moved = _high(ends[0]), _high(ends[1])
        self._fds += moved
        return moved

    def _close_all(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _high(fd: int) -> int:
    """Move a descriptor away from 0 to 3, which are given new meanings in the child."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return int(moved)


def _spawn(
    python: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
) -> int:
    # -I -S: neither the job's sitecustomize nor its working directory has a say; what we can
    # import, the helper can.
    path = ":".join(entry for entry in sys.path if entry and ":" not in entry)
    return os.posix_spawn(
        python,
        [python, "-I", "-S", "-c", _START, path, *arguments],
        {**environment, "CLUSTERPROF_DISABLE": "1"},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, fds[0], 0),
            (os.POSIX_SPAWN_DUP2, fds[1], 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, fds[2], 3),
        ],
        setpgroup=0,  # a Ctrl-C is for the job
        setsigmask=(),  # the recorder may read signals from a descriptor
    )
