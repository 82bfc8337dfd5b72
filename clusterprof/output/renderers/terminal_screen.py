"""Drawing of the first screen: at most 40 lines of 80 columns, in color, plain or ASCII.

Texts get as many lines as the screen holds; a command is never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from clusterprof.output.renderers.terminal_tables import (
    Prose,
    draw_lines,
    indent,
    make_grid,
    make_line,
    make_masthead,
    render_labeled,
)
from clusterprof.output.renderers.text import advice, trend
from clusterprof.output.renderers.text.first_screen import LABELS, FirstScreen, ScreenRow
from clusterprof.output.renderers.text.safety import count_columns
from clusterprof.units import format_quantity

SCREEN_LINES = 40
LABEL_COLUMNS = max(map(len, LABELS)) + 3
"""Columns before the texts: a blank, the longest label, and two blanks."""
_BOLD_LABELS = ("Lost", "Main cause", "Try next")
_DENSITIES = ((6, True), (4, True), (3, True), (3, False), (2, False), (1, False))
"""(lines of each text, blank lines between parts), the first that fits is used."""
_MAX_BAR_COLUMNS = 40
_TREND_LABEL_COLUMNS = 8
_BAR_SCALE = "(full height: all time lost)"


def draw_screen(
    screen: FirstScreen, width: int, answers: Sequence[str] = (), nodes: str = ""
) -> list[Text]:
    """Draw the first screen in lines of at most `width` columns."""
    lines: list[Text] = []
    for max_lines, blank in _DENSITIES:
        gap = [Text()] if blank else []
        parts = [
            _draw_head(screen, width, answers, nodes),
            draw_lines(Group(*_draw_rows(screen.rows, width, max_lines)), width),
            draw_lines(Group(*_draw_causes(screen, width)), width),
            draw_lines(Group(*_draw_trend(screen, width)), width),
            draw_lines(Group(*_draw_pointers(screen, width)), width),
        ]
        lines = [line for part in parts if part for line in (*gap, *part)][len(gap) :]
        if len(lines) < SCREEN_LINES:  # one line for the prompt
            break
    return lines


def _draw_head(screen: FirstScreen, width: int, answers: Sequence[str], nodes: str) -> list[Text]:
    parts: list[RenderableType] = [
        make_masthead(f"clusterprof  {screen.title}", screen.scope, width)
    ]
    parts += [indent(Prose(nodes, "dim", 2), right=0)] if nodes else []
    parts += [indent(Prose(answer, "bold", 2), right=0) for answer in answers]
    parts += [indent(Prose(warning, "warn", 3), right=0) for warning in screen.warnings]
    return draw_lines(Group(*parts), width)


def _draw_rows(rows: Sequence[ScreenRow], width: int, max_lines: int) -> Iterator[RenderableType]:
    room = width - LABEL_COLUMNS - 1
    shown: list[tuple[str, RenderableType]] = []
    for row in rows:
        if row.change is not None:
            wrapped = advice.wrap_change(row.change, room)
            limited = advice.limit_lines(wrapped, max(max_lines, 2), room)
            shown.append(("", Text("\n".join(line.text for line in limited))))
        else:
            style = "bold" if row.label in _BOLD_LABELS else ""
            shown.append((row.label, Prose(row.text, style, max_lines)))
    yield render_labeled(shown, 1, LABEL_COLUMNS - 2, right=1, label_style="heading")


def _draw_causes(screen: FirstScreen, width: int) -> Iterator[RenderableType]:
    """Draw the causes with their shares as bars."""
    if not screen.causes:
        return
    room = min(max(width - 48, 8), _MAX_BAR_COLUMNS)
    largest = max(cause.share_ratio for cause in screen.causes) or 1.0
    rows = [
        (
            cause.name,
            format_quantity(cause.share_ratio, "ratio"),
            "█" * round(room * cause.share_ratio / largest),
        )
        for cause in screen.causes
    ]
    yield indent(make_grid((f"Lost, of {screen.whole}", "", ""), rows, (0, 2), width - 1), right=0)


def _draw_trend(screen: FirstScreen, width: int) -> Iterator[RenderableType]:
    """Draw the loss over the run as small bars with the times of its ends below."""
    bins = screen.bins
    if len(bins) < 2:
        return
    room = width - _TREND_LABEL_COLUMNS - 1
    if len(bins) > room:
        return
    _, lost = trend.draw_sparklines(bins)
    lost = "".join(bar * max(room // len(bins), 1) for bar in lost)
    last_ns = bins[-1].end_ns
    begin, end = (trend.format_time_in_run(ns, last_ns) for ns in (bins[0].start_ns, last_ns))
    spare_columns = len(lost) - count_columns(begin) - count_columns(end)
    middles = (f"{screen.trend} {_BAR_SCALE}".strip(), screen.trend, "")
    middle = next(text for text in middles if count_columns(text) + 4 <= max(spare_columns, 4))
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=_TREND_LABEL_COLUMNS - 2)
    grid.add_row("lost", make_line(lost, "bad"))
    grid.add_row("", make_line(f"{begin}{middle.center(max(spare_columns, 1))}{end}", "dim"))
    yield indent(grid)


def _draw_pointers(screen: FirstScreen, width: int) -> Iterator[RenderableType]:
    yield indent(Prose(f"Not measured: {screen.gaps}", "dim", 3))
    yield indent(make_line(_join_whole(screen.more, width - 2), "dim"))


def _join_whole(commands: Sequence[str], room: int) -> str:
    """Join commands in lines of at most `room` columns, without a break within a command."""
    lines = [f"More: {commands[0]}"]
    for command in commands[1:]:
        longer = f"{lines[-1]} | {command}"
        if count_columns(longer) <= room:
            lines[-1] = longer
        else:
            lines.append(f"      {command}")
    return "\n".join(lines)
