"""Drawing with rich, and the tables and details of the terminal report below its first screen.

Every cause in full, the ledger to the nanosecond, and always *Unattributed* with its
reasons and *Not seen*. The matrix of ranks by causes takes two lines per rank. Numbers are
shown in full, text is cut to the remaining width. rich receives safe text only (`escape_text`),
always as `Text` and never as markup.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text
from rich.theme import Theme

from clusterprof.output.renderers.text import advice, code, culprits, impact, life, summary, wording
from clusterprof.output.renderers.text.safety import (
    convert_to_ascii,
    count_columns,
    escape_text,
    fit_to_width,
    wrap_text,
)
from clusterprof.output.renderers.text.tables import (
    TextTable,
    build_cause_matrix,
    build_ledger_columns,
    build_ledger_rows,
    format_cell,
    format_exact_seconds,
    sort_by_lost_time,
)
from clusterprof.report.aggregate import name_full_list
from clusterprof.report.model import Finding, Report
from clusterprof.units import format_quantity

THEME = Theme({"good": "green", "bad": "bold red", "warn": "bold yellow", "heading": "bold cyan"})
_MIN_TEXT_COLUMNS = 8  # a column of text is not cut further before other columns are left out
_MATRIX_ROWS = 6
_MATRIX_LABEL_COLUMNS = 8 + 7 + 10  # of ranks, of the words lost and caused, of the sum
_MIN_CAUSE_COLUMNS, _MAX_CAUSE_COLUMNS = 15, 18  # with the blank before a column
_AMOUNT_COLUMNS = 18  # one exact number: 999,999.999999999 and two blanks
_LEDGER_LABEL_COLUMNS = 25
_FIELD_COLUMNS = 11  # of the labels of a cause
_MAX_CULPRITS = 3  # culprits whose amounts are written
_RANKS_WHEN_MANY = 2  # ranks in the ledger if there are more than `most_ranks`
_MAX_SINGLE_NODES = 4  # with more nodes, those without damage share a line
_LEDGER_HEADING = "LEDGER, in seconds, exact to the nanosecond"
_MIN_WIDE_SCREEN = 72  # a narrower screen has fewer columns in its tables
_MAX_NAME_COLUMNS = 16  # the first column has at most this width, or a quarter of the screen


# --- drawing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prose:
    """A safe text that `wrap_text` wraps, so that commands and amounts stay on one line."""

    text: str
    style: str = ""
    max_lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = wrap_text(self.text, options.max_width)
        if self.max_lines is not None and len(lines) > self.max_lines:
            last = fit_to_width(f"{lines[self.max_lines - 1]} …", options.max_width)
            lines = [*lines[: self.max_lines - 1], last]
        if lines:
            yield Text("\n".join(lines), self.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(count_columns(self.text), 1))


def make_line(text: str, style: str = "") -> Text:
    """Make one line of a safe text; it is cut with an ellipsis where it does not fit."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def indent(renderable: RenderableType, left: int = 1, right: int = 1) -> Padding:
    """Leave blank columns on both sides."""
    return Padding(renderable, (0, right, 0, left))


def make_masthead(left: str, right: str, width: int) -> RenderableType:
    """Make the top line of a screen; two lines where one has no room."""
    if count_columns(left) + count_columns(right) + 4 > width:
        return indent(Group(make_line(left, "bold"), Prose(right, "dim")), right=0)
    grid = Grid.grid(expand=True)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_row(Text(left, "bold"), Text(right, "dim"))
    return indent(grid)


def render_labeled(
    rows: Iterable[tuple[str, RenderableType]],
    left: int,
    columns: int,
    right: int = 0,
    label_style: str = "",
) -> RenderableType:
    """Put texts next to labels that take this many columns, and a blank."""
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=columns, style=label_style)
    for label, text in rows:
        grid.add_row(Text(label), text)
    return indent(grid, left, right)


def make_grid(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Collection[int],
    width: int,
    droppable: Iterable[int] = (),
    gap: int = 2,
) -> Grid:
    """Make a table with one line per row: numbers stay whole, the columns `texts` may be cut.

    Columns of `droppable` are left out, in this order, until the rest fits into `width`.
    """
    sizes = [max(map(count_columns, cells)) for cells in zip(heads, *rows)]
    least = [min(size, _MIN_TEXT_COLUMNS) if i in texts else size for i, size in enumerate(sizes)]
    columns_shown = list(range(len(heads)))
    for i in droppable:
        if sum(least[k] + gap for k in columns_shown) - gap <= width:
            break
        columns_shown.remove(i)
    grid = Grid(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="heading")
    for i in columns_shown:
        justify: JustifyMethod = "left" if i in texts else "right"
        grid.add_column(make_line(heads[i]), justify=justify, no_wrap=i not in texts)
    # A column is one text of many lines: rich draws these much faster than as many cells.
    grid.add_row(*(make_line("\n".join(row[i] for row in rows)) for i in columns_shown))
    return grid


def draw_lines(renderable: RenderableType, width: int) -> list[Text]:
    """Draw into lines of at most `width` columns, without blanks at their ends."""
    lines = []
    for segments in _make_console(width).render_lines(renderable, pad=False):
        parts = Segment.simplify(segments)
        line = Text.assemble(*((part.text, part.style or "") for part in parts))
        line.rstrip()
        lines.append(line)
    return lines


def format_lines(lines: Iterable[Text], color: bool, plain_letters: bool = False) -> str:
    """Format drawn lines as a string; no other code writes escape sequences."""
    console = _make_console(1, color)
    console.print(Text("\n").join(lines), soft_wrap=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return convert_to_ascii(text) if plain_letters else text


def _make_console(width: int, color: bool = False) -> Console:
    """Make a console into memory whose output no variable of the environment changes."""
    return Console(
        file=StringIO(),
        width=width,
        height=1,
        color_system="standard" if color else None,
        no_color=not color,
        force_terminal=color,
        force_jupyter=False,
        legacy_windows=False,
        theme=THEME,
    )


# --- the details --------------------------------------------------------------------------------


SECTION_NAMES = (
    "causes",
    "life",
    "impact",
    "matrix",
    "ranks",
    "ledger",
    "utilization",
    "slow-steps",
    "unattributed",
    "not-seen",
    "measures",
    "recording",
    "notes",
)
"""Names of the sections of the full report, in their order."""


def render_details(
    report: Report, width: int, most_ranks: int, section: str = ""
) -> Iterator[Text]:
    """Yield the lines of every section below the first screen, or of one (`SECTION_NAMES`)."""
    ledger = _LEDGER_HEADING if width >= _MIN_WIDE_SCREEN else "LEDGER, in seconds"
    notes = [escape_text(note, 600) for note in report.notes]
    sections: list[tuple[str, Iterable[RenderableType]]] = [
        ("CAUSES IN FULL", _render_causes(report, width)),
        (life.LIFE_HEADING, _render_life(report, width)),
        (impact.IMPACT_HEADING, _render_items(impact.describe_impact(report))),
        ("RANKS BY CAUSE", _render_matrix(report, width)),
        ("RANKS", _render_ranks(report, width, most_ranks)),
        (ledger, _render_ledger(report, width, most_ranks)),
        (impact.UTILIZATION_HEADING, _render_items(impact.describe_utilization(report))),
        ("SLOW STEPS", _render_items(culprits.describe_slow_steps(report))),
        ("UNATTRIBUTED", _render_unattributed(report)),
        ("NOT SEEN", _render_coverage_gaps(report)),
        ("MEASURES", _render_metrics(report, width)),
        ("RECORDING", _render_items(summary.describe_recordings(report, _MAX_SINGLE_NODES))),
        ("NOTES", _render_items(notes)),
    ]
    for name, (heading, parts) in zip(SECTION_NAMES, sections, strict=True):
        body = list(parts) if section in ("", name) else []
        if body:
            yield from draw_lines(Group(Text(), _render_heading(heading), *body), width)


def render_table(table: TextTable, width: int) -> list[Text]:
    """Draw title, headings, rows and remark of a table.

    Columns that do not fit are dropped, starting with the rightmost number.
    """
    parts: list[RenderableType] = [_render_heading(table.title)]
    if table.rows:
        count = len(table.heads)
        texts = range(count - table.texts, count)
        numbers = range(2, texts.start)
        droppable = (*reversed(numbers), *reversed(texts))
        grid = make_grid(table.heads, table.rows, (0, *texts), width - 1, droppable)
        part = 2 if table.has_long_names else 4
        grid.columns[0].max_width = max(_MAX_NAME_COLUMNS, width // part)
        parts.append(indent(grid, right=0))
    if table.rest:
        parts.append(indent(Prose(f"{'… ' if table.rows else ''}{table.rest}")))
    return draw_lines(Group(*parts), width)


def _render_heading(text: str) -> RenderableType:
    return indent(Rule(Text(text, "heading"), style="dim", align="left"))


def _render_life(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield the waterfall of the job's life and its attempts; nothing without a life."""
    yield from (indent(Prose(text)) for text in life.describe_life(report))
    for table in life.build_life_tables(report, bars=width >= _MIN_WIDE_SCREEN):
        texts = (0, *range(len(table.heads) - table.texts, len(table.heads)))
        droppable = (3, 1, 2) if len(table.heads) > 4 else ()
        grid = make_grid(table.heads, table.rows, texts, width - 1, droppable)
        yield indent(grid, right=0)
        if table.rest:
            yield indent(Prose(table.rest))


def _render_items(texts: Iterable[str]) -> Iterator[RenderableType]:
    rows = [("-", Prose(text)) for text in texts]
    if rows:
        yield render_labeled(rows, 1, 1, right=1)


def _render_causes(report: Report, width: int) -> Iterator[RenderableType]:
    names = code.build_file_names(report)
    for finding in report.findings:
        name = f"{escape_text(finding.cause.id, 60)}: {wording.format_title(finding)}"
        yield indent(make_line(name, "bold"), right=0)
        yield render_labeled(_list_fields(report, finding, width, names), 3, _FIELD_COLUMNS)
    small = wording.list_small_causes(report)
    if small:
        named = [f"{escape_text(cause, 60)} {format_quantity(ns, 'ns')}" for cause, ns in small]
        yield indent(Prose(f"Too small for a finding: {', '.join(named)}."))
    if report.findings:
        yield indent(Prose(wording.LEGEND))


def _list_fields(
    report: Report, finding: Finding, width: int, names: code.FileNames
) -> Iterator[tuple[str, RenderableType]]:
    """Yield label and text of what is known about a cause."""
    period = "the recorded time, outside steps" if finding.outside_steps else "the time in steps"
    size = (
        f"{wording.format_lost_time(finding)},"
        f" {format_quantity(finding.share_ratio, 'ratio')} of {period}"
    )
    caused = culprits.describe_caused_loss(finding, _MAX_CULPRITS, report.in_step_ns)
    fields = [
        ("lost", size),
        ("confidence", wording.describe_confidence(finding)),
        ("gain", wording.describe_savings(finding)),
        ("where", culprits.format_culprits(finding, 3)),
        *(("caused", line) for line in caused),
        ("compared", culprits.describe_peer_comparison(finding)),
        ("since", culprits.describe_onset(finding)),
        ("over time", culprits.describe_persistence(finding)),
        *(("evidence", wording.format_evidence(item)) for item in finding.evidence),
    ]
    yield from ((label, Prose(text)) for label, text in fields if text.strip())
    if finding.lines:
        yield from _render_lines(finding, width - _FIELD_COLUMNS - 4, names)
    yield "try next", Prose(advice.describe_first_step(finding))
    if finding.advice:
        how = advice.wrap_change(finding.advice[0], width - _FIELD_COLUMNS - 4)
        yield "change", Text("\n".join(line.text for line in how))
    for label, text in (
        ("effort", advice.describe_effort(finding)),
        ("not advised", "; ".join(advice.list_withheld_advice(finding))),
    ):
        if text.strip():
            yield label, Prose(text)


def _render_lines(
    finding: Finding, width: int, names: code.FileNames
) -> Iterator[tuple[str, RenderableType]]:
    """Yield the table of a finding's lines, and what it leaves out."""
    lines = finding.lines[: code.MAX_SHOWN_LINES]
    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="heading")
    with_amounts = width >= _MIN_WIDE_SCREEN // 2
    for head in ("share", *(("lost",) if with_amounts else ())):
        grid.add_column(head, justify="right", no_wrap=True)
    grid.add_column("line")
    for line in lines:
        amounts = (make_line(format_quantity(line.lost_ns, "ns")),) if with_amounts else ()
        text = Prose(code.describe_line_in_full(line, names))
        grid.add_row(make_line(code.format_line_share(line)), *amounts, text)
    yield "lines", grid
    remainder = code.describe_lines_rest(finding, len(lines))
    if remainder:
        yield "", Prose(remainder)


def _render_matrix(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield the matrix; nothing if ranks were not compared."""
    widest = 16 if width >= _MIN_WIDE_SCREEN else 9
    names = [count_columns(escape_text(node.name)) for node in report.nodes]
    room = width - 1 - _MATRIX_LABEL_COLUMNS - min(max(names, default=0) + 1, widest)
    count = max(room // _MIN_CAUSE_COLUMNS, 1)
    matrix = build_cause_matrix(report, _MATRIX_ROWS, count)
    if matrix is None:
        return
    heads = ["rank", "node", "", *(escape_text(cause, 60) for cause in matrix.causes), "all"]
    rows: list[tuple[str, ...]] = []
    for line in matrix.lines:
        label = line.label if len(line.label) < 8 or line.ranks == 1 else f"{line.ranks} ranks"
        node = escape_text(line.node)
        if matrix.rest and line is matrix.lines[-1]:
            label = node = ""
        rows.append((label, node, "lost", *map(format_cell, line.victim_ns)))
        rows.append(("", "", "caused", *map(format_cell, line.culprit_ns)))
    grid = make_grid(heads, rows, range(3), width - 1, gap=1)
    grid.columns[1].max_width = widest
    for column in grid.columns[3:-1]:
        column.max_width = min(room // count, _MAX_CAUSE_COLUMNS)
    lines = draw_lines(indent(grid, right=0), width)
    if matrix.rest:
        lines.insert(-2, make_line(f" … {matrix.rest}:"))
    yield from lines


def _render_ranks(report: Report, width: int, most_ranks: int) -> Iterator[RenderableType]:
    if not report.ranks:
        return
    rows = [
        (
            str(rank.pid if rank.rank is None else rank.rank),
            escape_text(rank.node),
            escape_text(rank.device) or "none",
            f"{rank.steps:,}",
            format_quantity(rank.in_step_ns, "ns"),
            ("≤" if rank.source == "host-spans" and rank.lost_ns else "")
            + format_quantity(rank.lost_ns, "ns"),
            wording.format_rank_share(rank),
            escape_text(rank.source, 15),
        )
        for rank in sort_by_lost_time(report.ranks)[:most_ranks]
    ]
    heads = ("rank", "node", "device", "steps", "in steps", "lost", "share", "measured by")
    grid = make_grid(heads, rows, (0, 1, 2, 7), width - 1, droppable=(7, 3, 4, 2))
    yield indent(grid, right=0)
    hidden = len(report.ranks) - most_ranks
    if hidden > 0:
        options = name_full_list(report)
        yield indent(Prose(f"… and {hidden:,} ranks that lost less: {options} lists them all"))


def _render_ledger(report: Report, width: int, most_ranks: int) -> Iterator[RenderableType]:
    if len(report.ranks) > most_ranks:
        most_ranks = min(most_ranks, _RANKS_WHEN_MANY)  # the ledgers of many ranks look alike
    columns = build_ledger_columns(report, most_ranks)
    rows = build_ledger_rows(columns)
    per_block = max((width - 1 - _LEDGER_LABEL_COLUMNS) // _AMOUNT_COLUMNS, 1)
    for start in range(0, len(columns), per_block):
        block = slice(start, start + per_block)
        if start:
            yield Text()
        heads = ["", *(column.heading for column in columns[block])]
        cells = [
            ("  " * row.depth + row.label, *map(format_exact_seconds, row.ns[block]))
            for row in rows
        ]
        yield indent(make_grid(heads, cells, (0,), width - 1), right=0)


def _render_unattributed(report: Report) -> Iterator[RenderableType]:
    if not report.lost_ns:
        yield indent(Prose("Nothing: no time inside steps was lost."))
        return
    if not report.unattributed_ns:
        yield indent(Prose("Nothing: every lost nanosecond inside steps has a cause."))
        return
    part = wording.format_share(report.unattributed_ns, report.lost_ns)
    amount = format_quantity(report.unattributed_ns, "ns")
    yield indent(Prose(f"{amount}, {part} of the loss, without sufficient evidence:"))
    yield from _render_items(
        f"{format_quantity(ns, 'ns')}: {wording.describe_unattributed_reason(reason)}"
        for reason, ns in report.unattributed_reasons
    )


def _render_coverage_gaps(report: Report) -> Iterator[RenderableType]:
    if not report.coverage_gaps:
        yield indent(Prose("Nothing is known to be missing."))
    yield from _render_items(wording.list_coverage_gaps(report))


def _render_metrics(report: Report, width: int) -> Iterator[RenderableType]:
    known_rows, unknown = [], dict[str, list[str]]()
    for metric in report.metrics:
        name = escape_text(metric.name, 60)
        if metric.value is None:
            unknown.setdefault(metric.why_missing, []).append(name)
            continue
        bound = "" if metric.bound == "exact" else f"{metric.bound} "
        known_rows.append((name, bound + format_quantity(metric.value, metric.unit)))
    if known_rows:
        grid = make_grid(("", ""), known_rows, (0, 1), width - 2)
        grid.show_header = False
        yield indent(grid)
    yield from _render_items(
        f"not known: {', '.join(names)}: {escape_text(why, 300)}" for why, names in unknown.items()
    )
