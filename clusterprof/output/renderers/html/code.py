"""Lines of code and stacks of lost time on the page: tables as HTML, stacks as data of a chart.

The chart is a flame graph that `assets/flame.js` draws. Its data are a tree of frames: stacks share
their outer frames, so that the size hardly grows with their depth.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from clusterprof.output.renderers.html.markup import Markup, build_element, join_markup
from clusterprof.output.renderers.text import code
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.code import CodeLine, CodeProfile
from clusterprof.report.model import Finding, Report
from clusterprof.units import format_quantity

_MAX_LINES = 30  # rows of the table of all causes
_MAX_CHARACTERS = 400_000  # of the data of the chart
_MAX_STACKS = 5000  # drawn in full
_MAX_PATH_CHARACTERS = 200
_UNKNOWN_PLACE, _SMALLER_STACKS = -1, -2  # in the place of a place


def render_lines(finding: Finding, names: code.FileNames) -> Markup | None:
    """Render the table of a finding's lines; None if none is known."""
    if not finding.lines:
        return None
    rows = [_render_line(line, names) for line in finding.lines]
    remainder = code.describe_lines_rest(finding, len(finding.lines))
    caption = f"Lines of code: {remainder}" if remainder else "Lines of code"
    heads = [build_element("th", head, scope="col", class_="n") for head in ("share", "lost")]
    heads.append(build_element("th", "line", scope="col"))
    return build_element(
        "table",
        build_element("caption", caption),
        build_element("thead", build_element("tr", *heads)),
        build_element("tbody", *rows),
        class_="lines-of-code",
    )


def _render_line(line: CodeLine, names: code.FileNames) -> Markup:
    below = [code.format_called_line(line, names), code.describe_stage(line)]
    text = ", ".join(part for part in (f"→ {below[0]}" if below[0] else "", below[1]) if part)
    return build_element(
        "tr",
        build_element("td", code.format_line_share(line), class_="n"),
        build_element("td", format_quantity(line.lost_ns, "ns"), class_="n"),
        build_element(
            "td",
            build_element("code", code.format_file_line(line.place, names), title=line.place.file),
            f" in {code.format_function(line.place)}",
            build_element("span", text, class_="below") if text else None,
        ),
    )


def render_code(report: Report, script_note: Markup) -> Markup | None:
    """Render the section of the flame graph and of lost time by line; None without stacks."""
    if report.code is None:
        return None
    why = code.explain_missing_lines(report)
    totals = code.sum_lines(report.code)
    rows = code.list_total_rows(totals, code.build_file_names(report), _MAX_LINES)
    notes = code.list_code_notes(report)
    return build_element(
        "section",
        build_element("h2", "Lines of code in which device time was lost"),
        build_element("p", f"Not known: {why}.", class_="note") if why else None,
        None if why else build_element("div", script_note, id="where-body"),
        _render_totals(rows, code.describe_totals_rest(totals, len(rows))) if rows else None,
        *(build_element("p", note, class_="note") for note in notes),
        id="where",
        class_="card",
    )


def _render_totals(rows: Sequence[tuple[str, ...]], remainder: str) -> Markup:
    """Render lost time by line, over all causes and ranks."""
    heads = ("line", "lost", "share", "function", "mainly")
    numbers = (1, 2)
    head = [
        build_element("th", text, scope="col", class_="n" if column in numbers else None)
        for column, text in enumerate(heads)
    ]
    body = [
        build_element(
            "tr",
            build_element("th", build_element("code", row[0]), scope="row"),
            *(
                build_element("td", cell, class_="n" if column in numbers else None)
                for column, cell in enumerate(row[1:], 1)
            ),
        )
        for row in rows
    ]
    table = build_element(
        "table",
        build_element("caption", "Lost device time by line of your code, all causes and ranks"),
        build_element("thead", build_element("tr", *head)),
        build_element("tbody", *body),
        class_="by-line",
    )
    note = build_element("p", f"… {remainder}", class_="note") if remainder else None
    return join_markup(build_element("div", table, class_="scroll"), note)


# --- the data of the flame graph ------------------------------------------------------------------


def build_code_document(report: Report, causes: Sequence[str]) -> dict[str, Any] | None:
    """Build the data of the flame graph; None if there are no stacks.

    causes: ids of causes, whose positions stand for them. Where the data would be too large,
    smaller stacks are reduced to their outermost frame.
    """
    profile = report.code
    if profile is None or code.explain_missing_lines(report):
        return None
    names = code.build_file_names(report)
    max_stacks = min(len(profile.stacks), _MAX_STACKS)
    while True:
        document = _build_tree(report, profile, causes, names, max_stacks)
        if max_stacks <= 1 or len(json.dumps(document)) <= _MAX_CHARACTERS:
            return document
        max_stacks //= 2


def _build_tree(
    report: Report,
    profile: CodeProfile,
    causes: Sequence[str],
    names: code.FileNames,
    max_stacks: int,
) -> dict[str, Any]:
    """Build the tree of frames, with the frames of the first `max_stacks` stacks in full."""
    number_of = {cause: index for index, cause in enumerate(causes)}
    frames: dict[tuple[int, int], int] = {}  # (number of the parent, place) -> number, from 1
    times: dict[tuple[int, int, int], list[int]] = {}
    for index, stack in enumerate(profile.stacks):
        if not stack.lost_ns or not 0 <= stack.rank < len(report.ranks):
            continue
        frame = 0
        places = stack.places or (_UNKNOWN_PLACE,)
        if index >= max_stacks:  # its outermost frame, if a larger stack has it, too
            places = places[:1] if (0, places[0]) in frames else (_SMALLER_STACKS,)
        for place in places:
            frame = frames.setdefault((frame, place), len(frames) + 1)
        time = times.setdefault((frame, number_of[stack.cause], stack.rank), [0, 0])
        time[0] += stack.lost_ns
        time[1] += stack.samples
    used = sorted({place for _, place in frames if place >= 0})
    new_place = {place: number for number, place in enumerate(used)}
    files = list(dict.fromkeys(profile.places[place].file for place in used))
    file_number = {file: number for number, file in enumerate(files)}
    return {
        "files": [code.format_file(file, names) for file in files],
        "paths": [escape_text(file, _MAX_PATH_CHARACTERS) for file in files],
        "places": [
            [
                file_number[profile.places[place].file],
                profile.places[place].line,
                code.format_function(profile.places[place]),
                int(profile.is_library[place]),
            ]
            for place in used
        ],
        "frames": [[parent, new_place.get(place, place)] for parent, place in frames],
        "times": [[*key, *time] for key, time in times.items()],
        "reduced": max(len(profile.stacks) - max_stacks, 0),
    }
