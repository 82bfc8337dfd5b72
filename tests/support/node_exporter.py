"""The fixture tree of node_exporter's own tests, and the table of metrics that both read."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/agreement.md"
SHARED = Path(__file__).parents[2].parent / "shared/data/node-exporter-fixtures"


def list_values(theirs: dict, metric: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {labels: value for (name, labels), value in theirs.items() if name == metric}
