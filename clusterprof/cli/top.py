"""`clusterprof top [RUN...]`: show the last minute of a running job, updated while it is
recorded.

Control the terminal of a live screen: full-screen output, single keys, and restoring
the state.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clusterprof.cli import common
from clusterprof.cli.common import NO_COLOR, PROFILE, WIDTH, declare_option
from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

    from clusterprof.analysis.live.job import LiveJob
    from clusterprof.output.renderers.top_screen import View
    from clusterprof.report.live import LiveView


_MIN_INTERVAL_S, _MAX_DURATION_S = 0.2, 3600.0
_MIN_WINDOW_S = 10.0
_KEY_HELP = "| q quit | sort: l)ost c)aused b)usy s)tep n)ame | v)iew | ? keys"
_KEY_LINES = (
    " clusterprof top: keys",
    "",
    "  l c b s n       sort by lost time, caused loss, busy time, step time, name",
    "  v               view: ranks, nodes, or automatic",
    "  up down j k     one row up or down",
    "  page up, down   one page up or down",
    "  home g          the first row",
    "  space           read the recording now",
    "  ?               show these keys, and hide them",
    "  q Esc Ctrl-C    quit; the job continues",
)
_SORT_KEYS = {"l": "lost", "c": "caused", "b": "busy", "s": "step", "n": "name"}
_NEXT_BY = {"auto": "node", "node": "rank", "rank": "auto"}


def top(
    run: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(
            metavar="[RUN...]",
            readable=False,
            help="A recording; default: the newest in this folder.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
    interval: Annotated[str, typer.Option(help="Time between two updates.")] = "2s",
    window: Annotated[str, typer.Option(help="Length of the window that is shown.")] = "1min",
    sort: Annotated[str, typer.Option(help="lost, caused, busy, step or name.")] = "lost",
    by: Annotated[str, typer.Option(help="rank, node, or auto: the one that fits.")] = "auto",
    format_: Annotated[str, typer.Option("--format", help="terminal or plain.")] = "terminal",
    profile: Annotated[
        Optional[str], declare_option(PROFILE)  # noqa: UP045
    ] = None,
    width: Annotated[int, declare_option(WIDTH)] = 0,
    no_color: Annotated[bool, declare_option(NO_COLOR)] = False,
) -> None:
    """Watch a job while it is recorded: busy devices, lost time by cause, and late ranks."""
    from clusterprof.analysis.detectors.registry import list_limit_classes
    from clusterprof.analysis.live.job import LiveJob
    from clusterprof.config import build_limits
    from clusterprof.output.renderers.top_screen import SORT_KEYS, View

    plain = common.choose_format(format_, False, ("terminal", "plain")) == "plain"
    for option, word, known in (("--sort", sort, SORT_KEYS), ("--by", by, tuple(_NEXT_BY))):
        if word not in known:
            raise UsageError(f"{option} {word}: choose {', '.join(known)}")
    interval_s = _parse_seconds("--interval", interval, _MIN_INTERVAL_S)
    window_ns = round(_parse_seconds("--window", window, _MIN_WINDOW_S) * 1e9)
    limits = build_limits(common.load_profile(profile), list_limit_classes())
    job = LiveJob(run or [common.find_newest_recording(Path.cwd())], limits, window_ns)
    view = View(
        width or common.measure_terminal_columns(), common.measure_terminal_lines(), sort, by
    )
    color = common.has_color() and not no_color
    if once:
        job.wait_for_settled()
        common.write_result(_render_live(job.update(time.time_ns()), view, plain, color), None)
        return
    is_output_terminal, is_input_terminal = (
        common.is_terminal(sys.stdout),
        common.is_terminal(sys.stdin),
    )
    if plain or not (is_output_terminal and is_input_terminal) or os.environ.get("TERM") == "dumb":
        _print_stream(job, view, plain or not is_output_terminal, color, interval_s)
        return
    _show_screen(job, view, width, color, interval_s)


def _parse_seconds(option: str, text: str, minimum: float) -> float:
    from clusterprof.units import parse_quantity

    try:
        value, unit = parse_quantity(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    seconds = value / 1e9 if unit == "ns" else value
    if unit not in ("ns", "") or not minimum <= seconds <= _MAX_DURATION_S:
        raise UsageError(f"{option} {text!r} is not a time from {minimum:g} s to 1 h", "write 5s")
    return seconds


def _render_live(live: LiveView, view: View, plain: bool, color: bool) -> str:
    if plain:
        from clusterprof.output.renderers.top_screen import describe_screen

        return describe_screen(live, view.sort, view.by)
    from clusterprof.output.renderers.top_screen import draw_screen

    return "\n".join(draw_screen(live, view, color)) + "\n"


def _print_stream(job: LiveJob, view: View, plain: bool, color: bool, interval_s: float) -> None:
    """Print one screen below the other until the reader exits or the recording has ended."""
    job.wait_for_settled()
    while True:
        began = time.monotonic()
        live = job.update(time.time_ns())
        common.write_result(_render_live(live, view, plain, color) + "\n", None)
        if live.ended:
            return
        time.sleep(_compute_rest_s(time.monotonic() - began, interval_s))


def _compute_rest_s(cost_s: float, interval_s: float) -> float:
    """Return the pause after an update: at most half of a CPU is taken from the job's node."""
    return max(interval_s - cost_s, cost_s)


class _Poller(threading.Thread):
    """Updates the view of the job in the background, so that keys are answered meanwhile."""

    def __init__(self, job: LiveJob, interval_s: float, screen: Screen) -> None:
        super().__init__(daemon=True, name="look")
        self._job, self._interval_s, self._screen = job, interval_s, screen
        self._now = threading.Event()
        self.live: LiveView | None = None
        self.status = ""
        self.error: BaseException | None = None

    def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                if self.live is None:
                    self._job.wait_for_settled()
                self.live = self._job.update(time.time_ns())
            except BaseException as error:
                self.error = error
                self._screen.wake()
                return
            cost_s = time.monotonic() - began
            rest_s = _compute_rest_s(cost_s, self._interval_s)
            self.status = f"{time.strftime('%H:%M:%S')} every {cost_s + rest_s:.3g} s"
            self._screen.wake()
            self._now.wait(rest_s)
            self._now.clear()

    def poll_now(self) -> None:
        """Update at once."""
        self._now.set()


def _show_screen(job: LiveJob, view: View, width: int, color: bool, interval_s: float) -> None:
    try:
        with Screen(color) as screen:
            looker = _Poller(job, interval_s, screen)
            looker.start()
            _run_until_quit(screen, looker, view, width)
    except Interrupted as signalled:
        raise typer.Exit(128 + signalled.number) from None


def _run_until_quit(screen: Screen, looker: _Poller, view: View, width: int) -> None:
    from dataclasses import replace

    from rich.text import Text

    from clusterprof.output.renderers.top_screen import draw_screen_lines

    shows_keys = False
    while True:
        if looker.error is not None:
            raise looker.error
        columns, lines = screen.size()
        view = replace(view, width=width or columns, height=lines)
        if shows_keys:
            screen.draw([Text(line) for line in _KEY_LINES[:lines]])
        elif looker.live is None:
            screen.draw([Text(" clusterprof top: reading the recording …")])
        else:
            foot = f"{looker.status} {_KEY_HELP}"
            screen.draw(draw_screen_lines(looker.live, view, foot))
        key = screen.key(60.0)
        if key == "q":
            return
        if key == " ":
            looker.poll_now()
        if key:
            shows_keys = key == "?" and not shows_keys
        view = update_view(view, key)


def update_view(view: View, key: str) -> View:
    """Return the view after a key press."""
    from dataclasses import replace

    if key in _SORT_KEYS:
        return replace(view, sort=_SORT_KEYS[key], first=0)
    if key == "v":
        return replace(view, by=_NEXT_BY[view.by], first=0)
    page = max(view.height - 12, 1)
    moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
    if key in moves:
        return replace(view, first=max(view.first + moves[key], 0))
    if key in ("home", "g"):
        return replace(view, first=0)
    return view


_SPECIAL_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b": "q",
}


class Interrupted(BaseException):
    """A signal asked the process to end; the terminal is restored on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Screen:
    """A context in which stdout shows one screen and stdin gives single keys."""

    def __init__(self, color: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        from clusterprof.output.renderers.terminal_tables import THEME

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        self._console = Console(
            color_system="standard" if color else None, force_terminal=True, theme=THEME
        )
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._saved_terminal: Any = None
        self._is_stop_requested = False
        self._handlers: dict[int, Any] = {}
        self._pipe = (-1, -1)

    def __enter__(self) -> Screen:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._enter()
        for number, handler in (
            (signal.SIGWINCH, self._on_wake),
            (signal.SIGCONT, self._on_wake),
            (signal.SIGTSTP, self._on_stop),
            (signal.SIGTERM, self._on_end),
            (signal.SIGHUP, self._on_end),
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
        """Return the current columns and lines, whatever COLUMNS and LINES say."""
        from rich.console import ConsoleDimensions

        try:
            self._console.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))
        except OSError:
            pass  # the terminal is closed: `key` notices
        return self._console.size

    def draw(self, lines: Sequence[Text]) -> None:
        """Show only these lines, from the top."""
        from rich.text import Text

        text = Text("\n", no_wrap=True, overflow="crop").join(lines)
        self._live.update(text, refresh=True)

    def wake(self) -> None:
        """Make `key` return; may be called by another thread."""
        try:
            os.write(self._pipe[1], b"\0")
        except OSError:
            pass  # it is full and will be read, or it is closed and no thread waits

    def key(self, timeout_s: float) -> str:
        """Return the next key, or "" after the timeout, a resize or a call of `wake`."""
        try:
            ready, _, _ = select.select([sys.stdin.fileno(), self._pipe[0]], [], [], timeout_s)
        except InterruptedError:
            return ""
        if self._pipe[0] in ready:
            os.read(self._pipe[0], 4096)
        if self._is_stop_requested:
            self._suspend()
            return ""
        if sys.stdin.fileno() not in ready:
            return ""
        data = os.read(sys.stdin.fileno(), 64)
        if not data:
            return "q"  # the terminal is closed
        text = data.decode("utf-8", "replace")
        return _SPECIAL_KEYS.get(text, text[0])

    def _enter(self) -> None:
        import termios
        import tty

        self._saved_terminal = termios.tcgetattr(sys.stdin.fileno())
        tty.setcbreak(sys.stdin.fileno(), termios.TCSADRAIN)
        self._live.start()

    def _leave(self) -> None:
        import termios

        try:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved_terminal)
        finally:
            self._live.stop()

    def _suspend(self) -> None:
        """Stop the process with the terminal as it was; take it again when continued."""
        self._is_stop_requested = False
        self._leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._enter()

    # --- signals --------------------------------------------------------------------------------

    def _on_wake(self, number: int, frame: object) -> None:
        self.wake()

    def _on_end(self, number: int, frame: object) -> None:
        raise Interrupted(number)

    def _on_stop(self, number: int, frame: object) -> None:
        self._is_stop_requested = True  # not here: a screen may be half drawn
        self.wake()
