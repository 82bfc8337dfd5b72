"""Tables and a picture of what analyses of clusters cost. Not a bench itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_MIB = 1 << 20
_LEFT, _TOP, _SIDE_X, _SIDE_Y = 70, 30, 480, 260
_WIDTH, _HEIGHT = 760, 360
_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.axis { stroke: #57606a; fill: none; } .grid { stroke: #d0d7de; }
.target { stroke: #57606a; stroke-dasharray: 5 4; }
.c0 { stroke: #0550ae; fill: #0550ae; } .c1 { stroke: #bc4c00; fill: #bc4c00; }
.c2 { stroke: #1a7f37; fill: #1a7f37; }
.line { fill: none; stroke-width: 2; } .page { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .axis { stroke: #8b949e; } .grid { stroke: #30363d; }
.target { stroke: #8b949e; } .page { fill: #0d1117; }
.c0 { stroke: #79c0ff; fill: #79c0ff; } .c1 { stroke: #ffa657; fill: #ffa657; }
.c2 { stroke: #7ee787; fill: #7ee787; } .line { fill: none; } }
</style>"""
_COLORS = 3


def sum_parts(row: Row) -> dict[str, tuple[float, int]]:
    """Return client CPU-s and peak bytes of the map, the passes over all ranks, report, output."""
    sums: dict[str, tuple[float, int]] = {}
    for part in row["parts"]:
        name = "blame"
        if part["name"] == "map over nodes":
            name = "map"
        elif part["name"] in ("build_report", "after"):
            name = "report"
        elif part["name"].startswith("render"):
            name = "output"
        cpu_s, peak = sums.get(name, (0.0, 0))
        sums[name] = cpu_s + part["own_cpu_s"], max(peak, part["peak_bytes"])
    return sums


def compute_total_s(row: Row) -> float:
    """Return the CPU seconds of a run, all processes."""
    return float(sum(part["own_cpu_s"] + part["workers_cpu_s"] for part in row["parts"]))


def compute_rank_hours(row: Row) -> float:
    """Return the size of a run in rank-hours."""
    return float(row["ranks"] * row["seconds"] / 3600)


def format_parts(row: Row) -> str:
    """Return the parts of one run that took time, a line each."""
    lines = [f"{row['topology']}, {row['ranks']} ranks, {row['seconds']} s: {row['causes'][:3]}"]
    for part in row["parts"]:
        if part["own_cpu_s"] + part["workers_cpu_s"] >= 0.05:
            lines.append(
                f"  {part['name']:24} {part['own_cpu_s']:8.2f} CPU-s here, "
                f"{part['workers_cpu_s']:8.2f} in workers, {part['wall_s']:7.1f} s, "
                f"{part['peak_bytes'] / _MIB:6.0f} MiB"
            )
    return "\n".join(lines)


def format_table(rows: Sequence[Row]) -> str:
    """Return a table in Markdown."""
    head = (
        "topology",
        "ranks",
        "minutes",
        "rank-hours",
        "M operations",
        "MB",
        "CPU-s",
        "CPU-s per rank-hour",
        "map, client CPU-s",
        "blame",
        "report",
        "output",
        "client MiB",
        "all MiB",
        "sums exact",
        "fault named",
        "lost, of truth",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        parts, check = sum_parts(row), row["check"]
        total = compute_total_s(row)
        cells = [
            row["topology"],
            f"{row['ranks']:,}",
            f"{row['seconds'] / 60:g}",
            f"{compute_rank_hours(row):.1f}",
            f"{row['operations'] / 1e6:.1f}",
            f"{row['bytes'] / 1e6:.0f}",
            f"{total:.1f}",
            f"{total / compute_rank_hours(row):.3f}",
            *(f"{parts.get(n, (0.0, 0))[0]:.1f}" for n in ("map", "blame", "report", "output")),
            f"{max(peak for _, peak in parts.values()) / _MIB:.0f}",
            "-" if row["most_bytes"] is None else f"{row['most_bytes'] / _MIB:.0f}",
            "yes" if not check["residual_ns"] and not check["steps_residual_ns"] else "no",
            "yes" if all(fault["right"] for fault in check["faults"]) else "no",
            f"{check['lost_ratio']:.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_curve(rows: Sequence[Row], target_s: float) -> str:
    """Draw CPU seconds per rank-hour over the number of ranks, a line for each topology."""
    most = max([target_s, *(compute_total_s(r) / compute_rank_hours(r) for r in rows)]) * 1.1
    sizes = sorted({row["ranks"] for row in rows})
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-label="CPU seconds per rank-hour by number of ranks">',
        _STYLE,
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
    ]
    places = {
        size: _LEFT + 20 + (_SIDE_X - 40) * i / max(1, len(sizes) - 1)
        for i, size in enumerate(sizes)
    }
    for size, x in places.items():
        out.append(
            f'<text x="{x:.1f}" y="{_TOP + _SIDE_Y + 20}" text-anchor="middle">{size:,}</text>'
        )
    for part in range(5):
        value = most * part / 4
        y = _scale_y(value, most)
        out.append(f'<path class="grid" d="M{_LEFT} {y}H{_LEFT + _SIDE_X}"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{value:.2f}</text>')
    y = _scale_y(target_s, most)
    out.append(f'<path class="target" d="M{_LEFT} {y}H{_LEFT + _SIDE_X}"/>')
    out.append(f'<text x="{_LEFT + _SIDE_X + 6}" y="{y + 4}">goal {target_s:g}</text>')
    middle = _LEFT + _SIDE_X / 2
    out.append(f'<text x="{middle}" y="{_TOP + _SIDE_Y + 44}" text-anchor="middle">ranks</text>')
    out.append(f'<text x="{_LEFT}" y="{_TOP - 12}">CPU seconds per rank-hour</text>')
    for number, topology in enumerate(dict.fromkeys(row["topology"] for row in rows)):
        out += _draw_line(number, topology, rows, places, most)
    return "\n".join([*out, "</svg>"]) + "\n"


def _draw_line(
    number: int, topology: str, rows: Sequence[Row], places: Mapping[int, float], most: float
) -> list[str]:
    color = f"c{number % _COLORS}"
    longest: dict[int, Row] = {}
    for row in rows:
        if row["topology"] == topology:
            known = longest.get(row["ranks"])
            if known is None or row["seconds"] > known["seconds"]:
                longest[row["ranks"]] = row
    points = [
        (places[r], _scale_y(compute_total_s(row) / compute_rank_hours(row), most))
        for r, row in sorted(longest.items())
    ]
    out = [
        f'<polyline class="{color} line" points="{" ".join(f"{x:.1f},{y}" for x, y in points)}"/>'
    ]
    out += [f'<circle class="{color}" cx="{x:.1f}" cy="{y}" r="4"/>' for x, y in points]
    y = _TOP + 20 + 20 * number
    out.append(f'<circle class="{color}" cx="{_LEFT + _SIDE_X + 16}" cy="{y - 4}" r="5"/>')
    out.append(f'<text x="{_LEFT + _SIDE_X + 28}" y="{y}">{topology}</text>')
    return out


def _scale_y(value: float, most: float) -> float:
    return round(_TOP + _SIDE_Y * (1 - value / most), 1)
