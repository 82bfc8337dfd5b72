"""Colour with a pattern, as SVG: the bar of a whole and its parts, and the square in a legend."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.renderers.html.palette import FAMILIES
from clusterprof.renderers.html.tags import Markup, join, tag

BAR_WIDTH = 1000
_HEIGHT = 22
_LEAST = 3  # of a bar: what is there is seen
# how the tile of a family's pattern is drawn (8 by 8), the same as in assets/paint.js
_STROKES = {
    "cpu": "M-2,10L10,-2M-2,2L2,-2M6,10L10,6",
    "input": "M0,0h1M4,0h1M2,2h1M6,2h1M0,4h1M4,4h1M2,6h1M6,6h1",
    "h2d": "M0,2H8M0,6H8",
    "launch": "M2,0V8M6,0V8",
    "network": "M1,2h2M5,6h2",
    "synchronization": "M-2,-2L10,10M-2,6L2,10M6,-2L10,2",
    "checkpoint": "M0,4H8M4,0V8",
    "eval": "M4,4h1",
    "startup": "M0,4H8",
    "device": "M0,0L8,8M8,0L0,8",
    "fail": "M0,1H8M0,5H8M2,0V8",
    "waiting": "M-2,6L6,-2M2,10L10,2",
}


def patterns() -> Markup:
    """Return the patterns of all families, once for the page."""
    made = [
        tag(
            "pattern",
            tag("path", d=_STROKES[family], class_="stroke"),
            id=f"p-{family}", width=8, height=8, patternUnits="userSpaceOnUse",
        )
        for family in FAMILIES
        if family in _STROKES
    ]  # fmt: skip
    return tag("svg", tag("defs", *made), class_="hidden", width=0, height=0, aria_hidden="true")


def swatch(colour: str) -> Markup:
    """Return the square of a legend; `colour` is from `palette.css_class`."""
    return tag(
        "svg", *_filled(colour, 0, 14, 14), class_="swatch",
        viewBox="0 0 14 14", width=14, height=14, aria_hidden="true",
    )  # fmt: skip


def bar(parts: Sequence[tuple[str, int]], whole: int, label: str, width: int) -> Markup:
    """Draw (colour, amount) beside each other, in proportion; small ones can still be seen."""
    cells = []
    at = 0.0
    for colour, amount in parts:
        size = max(width * amount / whole, _LEAST if amount else 0)
        size = min(size, width - at)
        if size > 0:
            cells.append(join(*_filled(colour, at, size, _HEIGHT)))
        at += size
    return tag(
        "svg", *cells, class_="bar", viewBox=f"0 0 {width} {_HEIGHT}", role="img",
        preserveAspectRatio="none", aria_label=label,
    )  # fmt: skip


def _filled(colour: str, x: float, width: float, height: float) -> list[Markup]:
    shape: dict[str, str | float] = {
        "x": f"{x:.1f}",
        "y": 0,
        "width": f"{width:.1f}",
        "height": height,
    }
    family = colour.split()[0].removeprefix("k-")
    drawn = [tag("rect", class_=colour, **shape)]
    if family in _STROKES:
        drawn.append(tag("rect", fill=f"url(#p-{family})", **shape))
    return drawn
