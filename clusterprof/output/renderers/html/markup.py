"""HTML building blocks through which no foreign string can become markup.

`build_element` takes text and markup as children. Text always passes
`escape_text` and is escaped; only the results of
`build_element` and `mark_trusted` are markup, and the
latter is for our own files only.

The color of a cause: its family color in its own tone, equal in every report.

The colors are custom properties, one set for each theme, and every family also has a
pattern: no reader has to distinguish colors. Both come from `report.families`.

Color with pattern as SVG: stacked bars, and the squares of legends.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Union

from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.families import BUCKET_OF, BUCKETS, FAMILIES, Family
from clusterprof.report.model import Report

_MAX_TEXT_CHARACTERS = 4096  # limit of one text
_VOID_ELEMENTS = frozenset({"meta", "br"})  # SVG elements always need an end tag
_ATTRIBUTE_NAME = re.compile(r"[a-z][a-z0-9-]*", re.IGNORECASE)


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


Child = Union[Markup, str, None]  # noqa: UP007  (a value, not an annotation)


def mark_trusted(text: str) -> Markup:
    """Mark our own HTML as markup; text from a recording must never be passed here."""
    return Markup(text)


def escape_html(value: str) -> Markup:
    """Escape foreign text for HTML."""
    return Markup(html.escape(escape_text(value, _MAX_TEXT_CHARACTERS), quote=True))


def build_element(
    element: str, /, *children: Child, **attributes: str | int | float | bool | None
) -> Markup:
    """Build an element; `class_` and `data_x` set the attributes class and data-x.

    An attribute that is None or False is left out; one that is True has no value.
    Raises: ValueError when an attribute name is not valid.
    """
    attribute_text = "".join(_format_attribute(key, value) for key, value in attributes.items())
    if element in _VOID_ELEMENTS:
        return Markup(f"<{element}{attribute_text}>")
    return Markup(f"<{element}{attribute_text}>{join_markup(*children)}</{element}>")


def join_markup(*children: Child) -> Markup:
    """Join children in order; None is skipped, text is escaped."""
    parts = (
        child if isinstance(child, Markup) else escape_html(child)
        for child in children
        if child is not None
    )
    return Markup("".join(parts))


def make_slug(name: str) -> str:
    """Make a name safe for an id, a class or a link: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name[:80].lower()).strip("-") or "x"


def _format_attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if _ATTRIBUTE_NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of an attribute")
    return f" {name}" if value is True else f' {name}="{escape_html(str(value))}"'


_COLORED: tuple[Family, ...] = (*FAMILIES, *BUCKETS)
"""What has a color of its own; anything else has the color of "other"."""


def get_color(cause_id: str, report: Report) -> tuple[str, int]:
    """Get (family, tone) of a cause; "other" if neither the cause nor its family is known."""
    if cause_id in BUCKET_OF:
        return BUCKET_OF[cause_id], 0
    cause = next(
        (finding.cause for finding in report.findings if finding.cause.id == cause_id),
        report.causes.get(cause_id),
    )
    if cause is None or cause.family not in {family.name for family in _COLORED}:
        return "other", 0
    return cause.family, cause.tone


def get_css_classes(cause_id: str, report: Report) -> str:
    """Get the CSS classes that set the color of a cause as `--k`."""
    name, tone = get_color(cause_id, report)
    return f"k-{name} tone{tone}"


def build_family_style() -> str:
    """Build the part of the style sheet that has the colors of the families."""
    light = " ".join(f"--{family.name}: {family.light};" for family in _COLORED)
    dark = " ".join(f"--{family.name}: {family.dark};" for family in _COLORED)
    return "\n".join(
        (
            f":root {{ {light} }}",
            "@media (prefers-color-scheme: dark) {",
            f'  :root:not([data-theme="light"]) {{ {dark} }}',
            "}",
            f':root[data-theme="dark"] {{ {dark} }}',
            *(f".k-{family.name} {{ --b: var(--{family.name}); }}" for family in _COLORED),
        )
    )


def build_family_script() -> str:
    """Build the part of the script that has the patterns of the families."""
    tiles = {family.name: family.tile for family in _COLORED if family.tile}
    return f"const TILES = {json.dumps(tiles)};"


BAR_WIDTH = 1000
_BAR_HEIGHT = 22
_MIN_SEGMENT_WIDTH = 3  # of a bar: a segment is never too small to see
_STROKES = {family.name: family.strokes for family in _COLORED if family.strokes}


def render_patterns() -> Markup:
    """Render the patterns of all families, once for the page."""
    patterns = [
        build_element(
            "pattern",
            build_element("path", d=strokes, class_="stroke"),
            id=f"p-{family}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for family, strokes in _STROKES.items()
    ]
    return build_element(
        "svg",
        build_element("defs", *patterns),
        class_="hidden",
        width=0,
        height=0,
        aria_hidden="true",
    )


def render_swatch(color: str) -> Markup:
    """Render the square of a legend.

    color: from `get_css_classes`.
    """
    return build_element(
        "svg",
        *_render_filled_rect(color, 0, 14, 14),
        class_="swatch",
        viewBox="0 0 14 14",
        width=14,
        height=14,
        aria_hidden="true",
    )


def render_bar(parts: Sequence[tuple[str, int]], total: int, label: str, width: int) -> Markup:
    """Render (color, amount) segments side by side, in proportion; small ones remain visible."""
    cells = []
    offset = 0.0
    for color, amount in parts:
        size = max(width * amount / total, _MIN_SEGMENT_WIDTH if amount else 0)
        size = min(size, width - offset)
        if size > 0:
            cells.append(join_markup(*_render_filled_rect(color, offset, size, _BAR_HEIGHT)))
        offset += size
    return build_element(
        "svg",
        *cells,
        class_="bar",
        viewBox=f"0 0 {width} {_BAR_HEIGHT}",
        role="img",
        preserveAspectRatio="none",
        aria_label=label,
    )


def _render_filled_rect(color: str, x: float, width: float, height: float) -> list[Markup]:
    shape: dict[str, str | float] = {
        "x": f"{x:.1f}",
        "y": 0,
        "width": f"{width:.1f}",
        "height": height,
    }
    family = color.split()[0].removeprefix("k-")
    drawn = [build_element("rect", class_=color, **shape)]
    if family in _STROKES:
        drawn.append(build_element("rect", fill=f"url(#p-{family})", **shape))
    return drawn
