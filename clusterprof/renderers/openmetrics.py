"""OpenMetrics 1.0, and the older text format of Prometheus that textfile collectors still read.

# TYPE clusterprof_lost_gpu_seconds counter                 # TYPE …_lost_gpu_seconds_total counter
# UNIT clusterprof_lost_gpu_seconds seconds
# HELP clusterprof_lost_gpu_seconds Device time lost …       # HELP …_lost_gpu_seconds_total …
clusterprof_lost_gpu_seconds_total{cause="storage-local",node="gpu-a04",rank="3"} 31.0
# EOF
"""

from __future__ import annotations

from typing import ClassVar

from clusterprof.findings import Report
from clusterprof.renderers.metric_families import families
from clusterprof.renderers.metric_names import Described, Family


class OpenMetrics:
    """The ledger as metrics, for Prometheus and what speaks its language."""

    name: ClassVar[str] = "openmetrics"
    suffix: ClassVar[str] = ".om"

    def __init__(self, prometheus: bool = False) -> None:
        """`prometheus`: its text format 0.0.4, without what it does not know."""
        self._prometheus = prometheus

    def render(self, report: Report) -> str:
        """Return the whole exposition."""
        lines = []
        for family in families(report):
            lines += self._head(family.described)
            lines += _samples(family)
        if not self._prometheus:
            lines.append("# EOF")
        return "\n".join(lines) + "\n"

    def _head(self, described: Described) -> list[str]:
        if self._prometheus:
            kind = "gauge" if described.kind == "info" else described.kind
            name = described.sample
            return [f"# HELP {name} {_help(described.help)}", f"# TYPE {name} {kind}"]
        unit = [f"# UNIT {described.name} {described.unit}"] if described.unit else []
        return [
            f"# TYPE {described.name} {described.kind}",
            *unit,
            f"# HELP {described.name} {_help(described.help)}",
        ]


def _samples(family: Family) -> list[str]:
    lines = []
    for point in family.points:
        labels = ",".join(f'{name}="{_label(text)}"' for name, text in point.labels)
        shown = f"{{{labels}}}" if labels else ""
        lines.append(f"{family.described.sample}{shown} {float(point.value)!r}")
    return lines


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
