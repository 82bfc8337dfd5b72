"""The live screen as sentences: for a screen reader, a log, or a terminal without a cursor."""

from __future__ import annotations

from clusterprof.live import Live
from clusterprof.renderers import header
from clusterprof.renderers.live import causes, numbers, scope, verdict, warnings
from clusterprof.renderers.live_rows import Row, many_ranks, rows_of, span
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

_MOST_ROWS = 50


def sentences(live: Live, sort: str = "lost", by: str = "auto") -> str:
    """Return what the screen shows, a line for each thing."""
    by_node = by == "node" or (by == "auto" and many_ranks(live) > _MOST_ROWS)
    rows = rows_of(live, by_node, sort)
    lines = [
        f"Recording: {safe_text(live.title)}",
        f"Recorded: {scope(live)}; the last {span(live.window_ns)} of it is shown",
        f"Verdict: {verdict(live)}",
    ]
    if live.report.in_step_ns:
        lines += [f"Numbers: {numbers(live)}", f"Lost to: {', '.join(causes(live))}"]
    lines += [f"Warning: {one}" for one in warnings(live)]
    lines += [_sentence(row, by_node) for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        lines.append(f"{header.count(len(rows) - _MOST_ROWS, 'more line')} not shown")
    return "\n".join(lines) + "\n"


def _sentence(row: Row, by_node: bool) -> str:
    who = f"{row.node}, {row.ranks} ranks" if by_node else f"{row.node} rank {row.ranks}"
    if row.ranks == "-":
        who = row.node
    parts = [f"on {row.device}"] if row.device else []
    if row.busy_ratio is not None:
        parts.append(f"busy {human(row.busy_ratio, 'ratio')}")
    if row.sm_active_ratio is not None:
        parts.append(f"SM activity {human(row.sm_active_ratio, 'ratio')}")
    if row.step_ns is not None:
        parts.append(f"step {human(row.step_ns, 'ns')}")
    if row.lost_ratio is not None:
        parts.append(f"lost {human(row.lost_ratio, 'ratio')}, most to {row.lost_to}")
    else:
        parts.append(row.lost_to)
    if row.caused_ns is not None:
        parts.append(f"caused {human(row.caused_ns, 'ns')}")
    return f"{who}: {', '.join([*parts, f'recorder {row.recorder}'])}"
