"""The terminal while a live screen has it: one screen at a time, keys, and everything put back."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

_ENTER = "\x1b[?1049h\x1b[?25l"  # the other screen, and no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_SPECIAL = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end",
    "\x1b": "q",
}  # fmt: skip


class Interrupted(BaseException):
    """A signal asked the process to end; the terminal is put back on its way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Screen:
    """A context in which stdout shows one screen and stdin gives single keys."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin, sys.stdout
        self._before: Any = None
        self._handlers: dict[int, Any] = {}
        self._pipe = (-1, -1)

    def __enter__(self) -> Screen:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._enter()
        for number, handler in (
            (signal.SIGWINCH, self._woken),
            (signal.SIGCONT, self._continued),
            (signal.SIGTSTP, self._stopped),
            (signal.SIGTERM, self._ended),
            (signal.SIGHUP, self._ended),
        ):
            self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        try:
            self._leave()
        finally:
            for end in self._pipe:
                os.close(end)
            self._pipe = (-1, -1)

    def size(self) -> tuple[int, int]:
        """Return columns and lines as they are now."""
        size = shutil.get_terminal_size((80, 24))
        try:
            size = os.get_terminal_size(self._out.fileno())
        except OSError:
            pass
        return size.columns, size.lines

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines from the top, and nothing else."""
        text = "\r\n".join(f"{line}\x1b[K" for line in lines)
        self._write(f"\x1b[H{text}\x1b[J")

    def wake(self) -> None:
        """Let `key` return; may be called by another thread."""
        try:
            os.write(self._pipe[1], b"\0")
        except OSError:
            pass  # it is full, and will be read, or closed: nobody waits any more

    def key(self, timeout_s: float) -> str:
        """Return the next key, or "" when there was none, the size changed or somebody woke us."""
        try:
            ready, _, _ = select.select([self._in.fileno(), self._pipe[0]], [], [], timeout_s)
        except InterruptedError:
            return ""
        if self._pipe[0] in ready:
            os.read(self._pipe[0], 4096)
        if self._in.fileno() not in ready:
            return ""
        data = os.read(self._in.fileno(), 64)
        if not data:
            return "q"  # the terminal is gone
        text = data.decode("utf-8", "replace")
        return _SPECIAL.get(text, text[0])

    def _enter(self) -> None:
        import termios
        import tty

        self._before = termios.tcgetattr(self._in.fileno())
        tty.setcbreak(self._in.fileno(), termios.TCSADRAIN)
        self._write(_ENTER)

    def _leave(self) -> None:
        import termios

        if self._before is not None:
            termios.tcsetattr(self._in.fileno(), termios.TCSADRAIN, self._before)
            self._before = None
        self._write(_LEAVE)

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        self._out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._out.flush()

    # --- signals --------------------------------------------------------------------------------

    def _woken(self, number: int, frame: object) -> None:
        self.wake()

    def _ended(self, number: int, frame: object) -> None:
        raise Interrupted(number)

    def _stopped(self, number: int, frame: object) -> None:
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)

    def _continued(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTSTP, self._stopped)
        if self._before is None:
            self._enter()
        self.wake()
