"""The live screen: the last minute of a job, what it lost and to whom, and how its recorders are.

No line is wider, and a screen no longer, than was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from clusterprof.live import Live, NodeLive
from clusterprof.renderers import header, whose, words
from clusterprof.renderers.live_rows import (
    Row,
    many_ranks,
    named_nodes,
    recorder_state,
    rows_of,
    span,
)
from clusterprof.renderers.paint import Paint
from clusterprof.renderers.text_safety import columns, fit, safe_text, wrap
from clusterprof.units import human

NARROWEST = 40
_WORTH_RATIO = 0.0005  # less would read 0.0 %
_UNKNOWN = "-"
_LATE = "* others waited for it most, because of what cost most"


@dataclass(frozen=True, slots=True)
class View:
    """What a person has chosen to see."""

    width: int = 80
    height: int = 24
    sort: str = "lost"
    """A word of `live_rows.SORTS`."""
    by: str = "auto"
    """"rank", "node", or "auto": nodes when there are more ranks than lines."""
    first: int = 0
    """The row at the top."""


def screen(live: Live, view: View, color: bool, foot: str = "") -> list[str]:
    """Return the lines of one screen; `foot` is the last of them."""
    width, paint = max(view.width, NARROWEST), Paint(color)
    head = _head(live, width, paint)
    foot_lines = [paint("dim", fit(f" {foot}", width).rstrip())] if foot else []
    room = max(view.height - len(head) - 2 - len(foot_lines), 3)
    by_node = view.by == "node" or (view.by == "auto" and many_ranks(live) > room)
    rows = rows_of(live, by_node, view.sort)
    first = min(max(view.first, 0), max(len(rows) - room, 0))
    shown = rows[first : first + room]
    if len(rows) > room:
        shown = shown[: room - 1]
    lines = [*head, "", *_table(shown, by_node, width, paint)]
    if len(rows) > room:
        what = "nodes" if by_node else "ranks"
        told = f" {first + 1}-{first + len(shown)} of {len(rows):,} {what}"
        lines.append(paint("dim", fit(told, width).rstrip()))
    if any(row.late for row in shown) and len(lines) + len(foot_lines) + 1 < view.height:
        lines += ["", paint("dim", fit(f" {_LATE}", width).rstrip())]
    if foot_lines:
        lines += [""] * (view.height - len(lines) - len(foot_lines)) + foot_lines
    return lines


def _head(live: Live, width: int, paint: Paint) -> list[str]:
    report = live.report
    left = f" clusterprof top  {safe_text(live.title)}"
    right = f"{scope(live)}, last {span(live.window_ns)}"
    if columns(left) + columns(right) + 3 <= width:
        gap = " " * (width - 1 - columns(left) - columns(right))
        lines = [paint("bold", left) + gap + paint("dim", right)]
    else:
        lines = [paint("bold", fit(left, width).rstrip())]
        lines += [paint("dim", fit(f" {right}", width).rstrip())]
    lines += [paint("bold", line) for line in _text(verdict(live), width)[:3]]
    if report.in_step_ns:
        lines.append(fit(f" {numbers(live)}", width).rstrip())
        lines.append(" " + _as_many(causes(live), "Lost to: ", width - 2))
    lines += [
        paint("warn", line) for one in warnings(live) for line in _text(f"! {one}", width)[:2]
    ]
    return lines


def verdict(live: Live) -> str:
    """Say in one sentence what cost most in the window, and whose it was."""
    report = live.report
    for finding in report.findings:
        if finding.outside_steps and finding.cause.family != "startup":
            who = whose.culprits(finding, 2)
            by = f", by {who}" if who else ""
            return f"{safe_text(finding.cause.id, 60)}: {words.title(finding)}{by}."
    if not live.nodes or all(one.age_ns is None for one in live.nodes):
        return "Nothing has been recorded yet."
    if not report.ranks:
        return "No training process was seen in this time."
    if not report.in_step_ns:
        return "No step ended in this time."
    return words.verdict(report)


def causes(live: Live) -> list[str]:
    """Name what the window was lost to, with shares of the time inside steps, most first."""
    report = live.report
    sums = sorted(words.summed(report).items(), key=lambda one: (-one[1], one[0]))
    told = [
        f"{safe_text(cause, 60)} {words.share(ns, report.in_step_ns)}"
        for cause, ns in sums
        if ns >= _WORTH_RATIO * report.in_step_ns
    ]
    return told or ["nothing"]


def warnings(live: Live) -> list[str]:
    """Say what a person at the screen must know: emulation, recorders in trouble, the end."""
    out = []
    if live.report.emulated:
        out.append("EMULATED accelerators: no GPU was measured")
    if live.ended:
        ago = "" if live.age_ns is None else f" {span(live.age_ns)} ago"
        reasons = dict.fromkeys(safe_text(one.why, 80) for one in live.nodes if one.why)
        why = f" ({'; '.join(list(reasons)[:2])})" if reasons else ""
        out.append(f"This recording has ended{ago}{why}: its last {span(live.window_ns)}")
    else:
        out += _recorders(live.nodes)
    damaged = sum(one.damaged_bytes for one in live.nodes)
    if damaged:
        out.append(f"{human(damaged, 'bytes')} could not be read")
    if live.trouble:
        out.append(safe_text(live.trouble))
    return out


def _recorders(nodes: Sequence[NodeLive]) -> list[str]:
    sick = [one for one in nodes if one.state != "recording" or one.why]
    if sick and len(sick) == len(nodes) and all(one.state == "silent" for one in nodes):
        newest = min(nodes, key=lambda one: one.age_ns or 0)
        return [f"No recorder writes any more: {recorder_state(newest)}"]
    return [f"Recorders: {named_nodes(sick, 3)}"] if sick else []


def scope(live: Live) -> str:
    """Say how many nodes and ranks there are."""
    ranks, size = len(live.report.ranks), None
    if live.report.job is not None:
        size = live.report.job.world_size
    told = header.count(ranks, "rank")
    if size is not None and size > ranks:
        told = f"{ranks:,} of {header.count(size, 'rank')}"
    return f"{header.count(len(live.nodes), 'node')}, {told}"


def numbers(live: Live) -> str:
    """Say how busy the devices are, how long steps take and how much is lost."""
    parts = []
    busy = [one.busy_ratio for one in live.ranks.values() if one.busy_ratio is not None]
    filled = [one.sm_active_ratio for one in live.ranks.values() if one.sm_active_ratio is not None]
    steps = [one.step_ns for one in live.ranks.values() if one.step_ns is not None]
    if busy:
        parts.append(f"Busy {human(fmean(busy), 'ratio')} (least {human(min(busy), 'ratio')})")
    if filled:
        parts.append(f"SM activity {human(fmean(filled), 'ratio')}")
    if steps:
        parts.append(f"step {human(sorted(steps)[len(steps) // 2], 'ns')}")
    at_most = "at most " if words.bounded(live.report) else ""
    parts.append(f"lost {at_most}{words.share(live.report.lost_ns, live.report.in_step_ns)}")
    return ", ".join(parts) + "."


def _as_many(parts: Sequence[str], before: str, width: int) -> str:
    """Say as many parts as a line holds, and how many more there are."""
    for shown in range(len(parts), 0, -1):
        rest = len(parts) - shown
        more = [f"{rest} more"] if rest else []
        line = before + ", ".join([*parts[:shown], *more])
        if columns(line) <= width:
            return line
    return fit(before + parts[0], width).rstrip()


def _text(text: str, width: int) -> list[str]:
    return [f" {line}" for line in wrap(text, width - 2)]


# --- the table ----------------------------------------------------------------------------------

_Cells = tuple[str, ...]


def _table(rows: Sequence[Row], by_node: bool, width: int, paint: Paint) -> list[str]:
    headings = _headings(rows, by_node)
    cells = [_cells(row, headings) for row in rows]
    wide = [
        max([columns(h), *(columns(one[at]) for one in cells)]) for at, h in enumerate(headings)
    ]
    keep = _kept(headings, wide, width - 1)
    top = " ".join(_cell(headings[at], wide[at], headings[at]) for at in keep)
    lines = [paint("heading", fit(f" {top}", width).rstrip())]
    for row, one in zip(rows, cells):
        text = " ".join(_cell(one[at], wide[at], headings[at]) for at in keep)
        line = fit(f"{'*' if row.late else ' '}{text}", width).rstrip()
        brush = "bad" if row.late else "" if row.well else "warn"
        lines.append(paint(brush, line) if brush else line)
    return lines


_LEFT = frozenset(("NODE", "DEVICE", "LOST TO", "RECORDER"))
# What is cut to how many columns, or goes (0), one after the other until the rest fits.
_GIVES_WAY = (
    ("DEVICE", 12), ("NODE", 20), ("DEVICE", 0), ("RECORDER", 14), ("LOST TO", 18), ("NODE", 12),
    ("SM", 0), ("CAUSED", 0), ("LOST TO", 12), ("RANKS", 0), ("BUSY", 0), ("STEP", 0),
)  # fmt: skip


def _headings(rows: Sequence[Row], by_node: bool) -> _Cells:
    out = ["NODE", "RANKS"] if by_node else ["RANK", "NODE", "DEVICE"]
    out.append("BUSY")
    if any(row.sm_active_ratio is not None for row in rows):
        out.append("SM")
    out += ["STEP", "LOST", "LOST TO"]
    if any(row.caused_ns is not None for row in rows):
        out.append("CAUSED")
    return (*out, "RECORDER")


def _cells(row: Row, headings: _Cells) -> _Cells:
    cells = {
        "RANK": row.ranks,
        "RANKS": row.ranks,
        "NODE": row.node,
        "DEVICE": row.device or _UNKNOWN,
        "BUSY": _ratio(row.busy_ratio),
        "SM": _ratio(row.sm_active_ratio),
        "STEP": _UNKNOWN if row.step_ns is None else _length(row.step_ns),
        "LOST": _ratio(row.lost_ratio),
        "LOST TO": row.lost_to,
        "CAUSED": _UNKNOWN if row.caused_ns is None else human(row.caused_ns, "ns"),
        "RECORDER": row.recorder.removesuffix(" ago").replace("silent for", "silent"),
    }
    return tuple(cells[heading] for heading in headings)


def _ratio(value: float | None) -> str:
    return _UNKNOWN if value is None else human(value, "ratio")


def _length(ns: int) -> str:
    """Write a step time in few letters: 74.0 ms, 740 ms, 7.40 s."""
    return f"{ns / 1e6:.0f} ms" if 99_950_000 <= ns < 999_500_000 else human(ns, "ns")


def _cell(text: str, wide: int, heading: str) -> str:
    if heading in _LEFT or columns(text) > wide:
        return fit(text, wide)
    return " " * (wide - columns(text)) + text


def _kept(headings: _Cells, wide: list[int], room: int) -> list[int]:
    """Return the columns that fit, and cut `wide` of some."""
    keep = list(range(len(headings)))
    for name, least in _GIVES_WAY:
        over = sum(wide[at] + 1 for at in keep) - 1 - room
        at = headings.index(name) if name in headings else -1
        if over <= 0 or at not in keep:
            continue
        if least:
            wide[at] = max(min(wide[at], least), wide[at] - over)
        else:
            keep.remove(at)
    return keep
