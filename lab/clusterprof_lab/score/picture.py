"""The reliability curve as a picture: SVG written by hand, for light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof_lab.score.figures import compute_wilson

_LEFT, _TOP, _SIDE = 64, 24, 320
_WIDTH, _HEIGHT = 700, 400
_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.axis { stroke: #57606a; fill: none; } .grid { stroke: #d0d7de; }
.ideal { stroke: #57606a; stroke-dasharray: 5 4; }
.c0 { stroke: #0550ae; fill: #0550ae; } .c1 { stroke: #bc4c00; fill: #bc4c00; }
.c2 { stroke: #1a7f37; fill: #1a7f37; } .c3 { stroke: #8250df; fill: #8250df; }
.c4 { stroke: #9a6700; fill: #9a6700; } .c5 { stroke: #bf3989; fill: #bf3989; }
.line { fill: none; stroke-width: 2; } .bar { stroke-width: 1.5; }
.page { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .axis { stroke: #8b949e; } .grid { stroke: #30363d; }
.ideal { stroke: #8b949e; } .page { fill: #0d1117; }
.c0 { stroke: #79c0ff; fill: #79c0ff; } .c1 { stroke: #ffa657; fill: #ffa657; }
.c2 { stroke: #7ee787; fill: #7ee787; } .c3 { stroke: #d2a8ff; fill: #d2a8ff; }
.c4 { stroke: #d29922; fill: #d29922; } .c5 { stroke: #f778ba; fill: #f778ba; }
.line { fill: none; } }
</style>"""
_COLOURS = 6


def draw_reliability(curves: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Draw curves of (name, bins): stated confidence on the x axis, share of right answers on the y
    axis."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-label="Confidence said against part that was right">',
        _STYLE,
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
        *_draw_frame(),
    ]
    for number, (name, bins) in enumerate(curves):
        out += _draw_curve(f"c{number % _COLOURS}", bins)
        y = _TOP + 24 + 22 * number
        x = _LEFT + _SIDE + 24
        out.append(f'<circle class="c{number % _COLOURS}" cx="{x}" cy="{y - 4}" r="5"/>')
        claims = sum(bin_["n"] for bin_ in bins)
        out.append(f'<text x="{x + 14}" y="{y}">{_escape_text(name)} ({claims} claims)</text>')
    if not curves:
        out.append(f'<text x="{_LEFT + 24}" y="{_TOP + 40}">no score has been stored yet</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _draw_frame() -> list[str]:
    out = []
    for tenth in range(0, 11, 2):
        at = tenth / 10
        x, y = _scale_x(at), _scale_y(at)
        out.append(
            f'<path class="grid" d="M{x} {_scale_y(0)}V{_scale_y(1)}'
            f'M{_scale_x(0)} {y}H{_scale_x(1)}"/>'
        )
        out.append(f'<text x="{x}" y="{_scale_y(0) + 18}" text-anchor="middle">{at:.1f}</text>')
        out.append(f'<text x="{_scale_x(0) - 8}" y="{y + 4}" text-anchor="end">{at:.1f}</text>')
    out.append(
        f'<rect class="axis" x="{_scale_x(0)}" y="{_scale_y(1)}" width="{_SIDE}" height="{_SIDE}"/>'
    )
    out.append(
        f'<path class="ideal" d="M{_scale_x(0)} {_scale_y(0)}L{_scale_x(1)} {_scale_y(1)}"/>'
    )
    middle = _TOP + _SIDE // 2
    out.append(
        f'<text x="{_scale_x(0.5)}" y="{_scale_y(0) + 38}" text-anchor="middle">'
        "confidence said</text>"
    )
    out.append(
        f'<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">'
        "part that was right</text>"
    )
    return out


def _draw_curve(color: str, bins: Sequence[Mapping[str, Any]]) -> list[str]:
    points = " ".join(f"{_scale_x(bin_['said'])},{_scale_y(bin_['right'])}" for bin_ in bins)
    out = [f'<polyline class="{color} line" points="{points}"/>']
    for bin_ in bins:
        sure = compute_wilson(round(bin_["right"] * bin_["n"]), bin_["n"])
        x = _scale_x(bin_["said"])
        low, high = _scale_y(sure.low or 0.0), _scale_y(sure.high if sure.high is not None else 1.0)
        out.append(f'<path class="{color} bar" d="M{x} {low}V{high}"/>')
        out.append(f'<circle class="{color}" cx="{x}" cy="{_scale_y(bin_["right"])}" r="4"/>')
    return out


def _scale_x(value: float) -> float:
    return round(_LEFT + _SIDE * value, 1)


def _scale_y(value: float) -> float:
    return round(_TOP + _SIDE * (1 - value), 1)


def _escape_text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
