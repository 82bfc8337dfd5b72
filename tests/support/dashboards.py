"""Checks of Grafana dashboards that need no Grafana."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs/grafana"
ADDED = {"job", "instance"}
"""Labels that the scraper adds."""
_KEYS = {"uid", "title", "panels", "templating", "schemaVersion", "time", "timezone", "tags"}
_PANEL_TYPES = {"row", "stat", "bargauge", "timeseries", "table"}


def load_dashboard(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / name).read_text(encoding="utf-8")))


def list_expressions(board: dict[str, Any]) -> list[str]:
    """List the queries of all panels and variables."""
    panels = [target["expr"] for p in board["panels"] for target in p.get("targets", [])]
    return panels + [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]


def check_layout(board: dict[str, Any]) -> None:
    """Check that variables exist, panels stand apart, and each panel has what Grafana needs."""
    assert board.keys() >= _KEYS
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__all"}
    assert used == variables
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        assert panel["type"] in _PANEL_TYPES and panel["title"]
        if panel["type"] != "row":
            assert panel["targets"] and panel["fieldConfig"]["defaults"] and panel["description"]
            assert panel["targets"][0]["refId"] == "A"
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} over {taken.get((x, y))}"
                taken[x, y] = panel["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
