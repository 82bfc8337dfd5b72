"""The first screen as a fragment of HTML, for notebooks: no script, no style sheet, no colors of
its own but those of the bars, so that it fits light and dark pages.
"""

from __future__ import annotations

from clusterprof.output.renderers.html.markup import Markup, build_element, join_markup
from clusterprof.output.renderers.text.first_screen import FirstScreen, build_first_screen
from clusterprof.report.model import Report
from clusterprof.units import format_quantity

_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0;white-space:pre-wrap"
_BAR = "display:inline-block;height:0.8em;background:#3b82c4;width:{:.1f}em"
_BAR_EM = 20.0


def render_fragment(report: Report) -> str:
    """Render the first screen of a report as one HTML element."""
    screen = build_first_screen(report)
    notes = [
        build_element("div", text, style="opacity:0.75")
        for text in (*screen.warnings, f"Not measured: {screen.gaps}")
    ]
    page = build_element(
        "div",
        build_element("b", f"clusterprof {screen.title}"),
        build_element("div", screen.scope, style="opacity:0.75"),
        *notes[:-1],
        _render_rows(screen),
        _render_causes(screen),
        notes[-1],
        style="max-width:52em;line-height:1.4",
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _render_rows(screen: FirstScreen) -> Markup:
    rows = [
        build_element(
            "tr",
            build_element("th", row.label, scope="row", style=f"{_CELL};white-space:nowrap"),
            build_element("td", row.text, style=_CELL),
        )
        for row in screen.rows
    ]
    return build_element("table", *rows, style="margin:0.6em 0;border-collapse:collapse")


def _render_causes(screen: FirstScreen) -> Markup:
    if not screen.causes:
        return join_markup()
    largest = max(cause.share_ratio for cause in screen.causes) or 1.0
    rows = [
        build_element(
            "tr",
            build_element("td", cause.name, style=_CELL),
            build_element(
                "td", format_quantity(cause.share_ratio, "ratio"), style=f"{_CELL};text-align:right"
            ),
            build_element(
                "td",
                build_element("span", "", style=_BAR.format(_BAR_EM * cause.share_ratio / largest)),
                style=_CELL,
            ),
        )
        for cause in screen.causes
    ]
    caption = build_element("caption", f"Lost, of {screen.whole}", style="text-align:left")
    return build_element("table", caption, *rows, style="margin:0.6em 0;border-collapse:collapse")
