"""Metrics as OpenMetrics text, for GitLab's metrics reports and whoever else reads them.

GitLab compares values as strings, so numbers are rounded to four digits: what differs by noise in
the fifth is no change. Only what is known is written.
"""

from __future__ import annotations

import math
import re

from clusterprof.findings import Report
from clusterprof.gate import Verdict

DIGITS = 4


def metrics(report: Report, verdict: Verdict) -> str:
    """Return every metric that has a value, in base units, and the rules by outcome."""
    values: dict[str, float] = {}
    for metric in report.metrics:
        if metric.value is not None and math.isfinite(metric.value) and metric.bound == "exact":
            name, value = _named(metric.name, metric.value)
            values.setdefault(name, value)
    lines = []
    for name, value in values.items():
        lines += [f"# TYPE {name} gauge", f"{name} {rounded(value)}"]
    lines.append("# TYPE clusterprof_gate_rules gauge")
    for outcome in ("pass", "fail", "cannot tell"):
        count = sum(result.outcome == outcome for result in verdict.results)
        lines.append(f'clusterprof_gate_rules{{outcome="{outcome}"}} {count}')
    return "\n".join((*lines, "# EOF")) + "\n"


def rounded(value: float) -> str:
    """Return a number to four digits, always written alike: 0.6103, 812300000, 1.2e+15."""
    if value == 0:
        return "0"
    exact = float(f"{value:.{DIGITS}g}")
    return f"{exact:.0f}" if exact == int(exact) and abs(exact) < 1e15 else f"{exact:.{DIGITS}g}"


def _named(name: str, value: float) -> tuple[str, float]:
    """Return the name in Prometheus' letters, and seconds for nanoseconds."""
    flat = "clusterprof_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
    if flat.endswith("_ns"):
        return flat.removesuffix("_ns") + "_seconds", value / 1e9
    return flat, value
