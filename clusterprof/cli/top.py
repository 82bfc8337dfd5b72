"""`clusterprof top [RUN...]`: the last minute of a running job, refreshed while it is recorded."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clusterprof.cli import common
from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.cli.screen import Screen
    from clusterprof.engine.live import LiveJob
    from clusterprof.live import Live
    from clusterprof.renderers.live import View

_SHORTEST_S, _LONGEST_S = 0.2, 3600.0
_SHORTEST_WINDOW_S = 10.0
_KEYS = "| q quit | sort: l)ost c)aused b)usy s)tep n)ame | v)iew"
_SORT_KEYS = {"l": "lost", "c": "caused", "b": "busy", "s": "step", "n": "name"}
_NEXT_BY = {"auto": "node", "node": "rank", "rank": "auto"}


def top(
    run: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(metavar="[RUN...]", help="A recording; without it the newest here."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
    interval: Annotated[str, typer.Option(help="Time between two looks.")] = "2s",
    window: Annotated[str, typer.Option(help="How much of the end is looked at.")] = "1min",
    sort: Annotated[str, typer.Option(help="lost, caused, busy, step or name.")] = "lost",
    by: Annotated[str, typer.Option(help="rank, node, or auto: what fits.")] = "auto",
    format_: Annotated[str, typer.Option("--format", help="terminal or plain.")] = "terminal",
    profile: Annotated[
        Optional[str], typer.Option(help="Shipped profile, or a file.")  # noqa: UP045
    ] = None,
    width: Annotated[int, typer.Option(min=0, help="Columns; 0 = the terminal's.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Without colours.")] = False,
) -> None:
    """Watch a job while it is recorded: who is busy, what is lost to what, and who is late now."""
    from clusterprof.engine.limits import known_limits
    from clusterprof.engine.live import LiveJob
    from clusterprof.profiles import bind_limits
    from clusterprof.renderers.live import View
    from clusterprof.renderers.live_rows import SORTS

    plain = common.chosen_format(format_, False, ("terminal", "plain")) == "plain"
    for option, word, known in (("--sort", sort, SORTS), ("--by", by, tuple(_NEXT_BY))):
        if word not in known:
            raise UsageError(f"{option} {word}: choose {', '.join(known)}")
    interval_s = _seconds("--interval", interval, _SHORTEST_S)
    window_ns = round(_seconds("--window", window, _SHORTEST_WINDOW_S) * 1e9)
    limits = bind_limits(common.load_profile(profile), known_limits())
    job = LiveJob(run or [newest_recording(Path.cwd())], limits, window_ns)
    view = View(width or common.columns(), common.lines(), sort, by)
    color = common.has_color() and not no_color
    if once:
        common.write_result(_text(job.look(time.time_ns()), view, plain, color), None)
        return
    out, keys = common.is_terminal(sys.stdout), common.is_terminal(sys.stdin)
    if plain or not (out and keys) or os.environ.get("TERM") == "dumb":
        _stream(job, view, plain or not out, color, interval_s)
        return
    _watch(job, view, width, color, interval_s)


def newest_recording(folder: Path) -> Path:
    """Return the recording in a folder, or in its `clusterprof-out`, that was written to last."""
    from clusterprof.errors import NoRecording
    from clusterprof.trace.reader import node_folders

    newest, found = -1.0, None
    for path in (folder, *_folders(folder), *_folders(folder / "clusterprof-out")):
        try:
            written = max(_written(node) for node in node_folders(path))
        except NoRecording:
            continue
        if written > newest:
            newest, found = written, path
    if found is None:
        raise NoRecording(
            "no recording in this folder, nor in its clusterprof-out",
            "give the folder that `clusterprof record` writes",
        )
    return found if found == folder else found.relative_to(folder)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(Path(one.path) for one in os.scandir(folder) if one.is_dir())
    except OSError:
        return []


def _written(node: Path) -> float:
    """When a node's newest file was written."""
    try:
        return max(one.stat().st_mtime for one in os.scandir(node))
    except (OSError, ValueError):
        return 0.0


def _seconds(option: str, text: str, least: float) -> float:
    from clusterprof.units import parse_quantity

    try:
        value, unit = parse_quantity(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    seconds = value / 1e9 if unit == "ns" else value
    if unit not in ("ns", "") or not least <= seconds <= _LONGEST_S:
        raise UsageError(f"{option} {text!r} is not a time from {least:g} s to 1 h", "write 5s")
    return seconds


def _text(live: Live, view: View, plain: bool, color: bool) -> str:
    if plain:
        from clusterprof.renderers.live_plain import sentences

        return sentences(live, view.sort, view.by)
    from clusterprof.renderers.live import screen

    return "\n".join(screen(live, view, color)) + "\n"


def _stream(job: LiveJob, view: View, plain: bool, color: bool, interval_s: float) -> None:
    """Print a screen below the other, until nobody reads or the recording has ended."""
    while True:
        began = time.monotonic()
        live = job.look(time.time_ns())
        common.write_result(_text(live, view, plain, color) + "\n", None)
        if live.ended:
            return
        time.sleep(_rest_s(time.monotonic() - began, interval_s))


def _rest_s(cost_s: float, interval_s: float) -> float:
    """How long to rest after a look: half of a processor at most is taken from the job's node."""
    return max(interval_s - cost_s, cost_s)


class _Looker(threading.Thread):
    """Looks at the job again and again, so that keys are answered while it does."""

    def __init__(self, job: LiveJob, interval_s: float, screen: Screen) -> None:
        super().__init__(daemon=True, name="look")
        self._job, self._interval_s, self._screen = job, interval_s, screen
        self._now = threading.Event()
        self.live: Live | None = None
        self.told = ""
        self.error: BaseException | None = None

    def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.live = self._job.look(time.time_ns())
            except BaseException as error:
                self.error = error
                self._screen.wake()
                return
            cost_s = time.monotonic() - began
            rest_s = _rest_s(cost_s, self._interval_s)
            self.told = f"{time.strftime('%H:%M:%S')} every {cost_s + rest_s:.3g} s"
            self._screen.wake()
            self._now.wait(rest_s)
            self._now.clear()

    def again(self) -> None:
        """Look at once."""
        self._now.set()


def _watch(job: LiveJob, view: View, width: int, color: bool, interval_s: float) -> None:
    from clusterprof.cli.screen import Interrupted, Screen

    try:
        with Screen() as screen:
            looker = _Looker(job, interval_s, screen)
            looker.start()
            _until_quit(screen, looker, view, width, color)
    except Interrupted as signalled:
        raise typer.Exit(128 + signalled.number) from None


def _until_quit(screen: Screen, looker: _Looker, view: View, width: int, color: bool) -> None:
    from dataclasses import replace

    from clusterprof.renderers import live as drawing

    while True:
        if looker.error is not None:
            raise looker.error
        columns, lines = screen.size()
        view = replace(view, width=width or columns, height=lines)
        if looker.live is None:
            screen.draw([" clusterprof top: reading the recording …"])
        else:
            foot = f"{looker.told} {_KEYS}"
            screen.draw(drawing.screen(looker.live, view, color, foot)[:lines])
        key = screen.key(60.0)
        if key == "q":
            return
        if key == " ":
            looker.again()
        view = turned(view, key)


def turned(view: View, key: str) -> View:
    """Return the view that a key asks for."""
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
