"""docs/collectors: a page per collector out of its docstring, its signals and its measured cost.

Which signals a collector writes is read off its source and that of its binding: names out of
`clusterprof.signals`, and strings that are names of signals. Tables say their columns themselves.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SECTIONS = ["## Source", "## Privilege", "## Cost", "## Where it is blind"]
COST_TABLE = "== collector_cost"
_COST = re.compile(r"^  (\w+) +(\S.*?) {2,}([\d.,]+) +([\d.,]+) +([\d.]+) *$", re.MULTILINE)


def collector_pages(mark: str) -> dict[str, str]:
    """Return path -> text of every page and of their index."""
    from clusterprof.collectors.registry import COLLECTORS

    costs = measured((ROOT / "bench/README.md").read_text(encoding="utf-8"))
    pages = {}
    index = [
        mark + "# Collectors\n\nWhere samples come from, in the order in which they are taken.\n"
    ]
    for collector in COLLECTORS:
        page = one_page(collector, costs.get(collector.name, []))
        pages[f"docs/collectors/{collector.name}.md"] = mark + page
        doc = collector.__doc__ or module_doc(collector)
        first_line = re.split(r"(?<=\.)\s", doc.strip(), maxsplit=1)[0]
        index.append(f"* [{collector.name}]({collector.name}.md): {' '.join(first_line.split())}")
    pages["docs/collectors/README.md"] = "\n".join(index) + "\n"
    return pages


def one_page(collector: Any, costs: list[tuple[str, str, str, str]]) -> str:
    """Return the page of one collector."""
    before, *sections = re.split(r"^(?=## )", module_doc(collector), flags=re.MULTILINE)
    interval_ms = collector.interval_ns / 1_000_000
    where = "in a helper process that can be abandoned" if collector.isolated else "in the recorder"
    parts = [
        f"# {collector.name}",
        before.strip(),
        f"Sampled every {interval_ms:g} ms {where}.",
        signals_section(collector),
    ]
    for section in sections:
        parts.append(section.strip())
        if section.startswith("## Cost") and costs:
            parts.append(cost_table(costs))
    return "\n\n".join(parts) + "\n"


def module_doc(collector: Any) -> str:
    module = sys.modules[collector.__module__]
    return inspect.cleandoc(module.__doc__ or collector.__doc__ or "")


def signals_section(collector: Any) -> str:
    """Return the table of what a collector writes, with units."""
    columns = getattr(sys.modules[collector.__module__], "COLUMNS", None)
    if hasattr(collector, "strings") and columns:
        rows = [f"| `{name}` | {_unit(name)} |" for name in columns]
        return "\n".join(["## Columns", "", "| column | unit |", "|---|---|", *rows])
    rows = [f"| `{one.name}` | {one.unit} | {one.doc} |" for one in signals_of(collector)]
    return "\n".join(["## Signals", "", "| signal | unit | meaning |", "|---|---|---|", *rows])


def _unit(column: str) -> str:
    from clusterprof.units import unit_of

    try:
        return unit_of(column)
    except ValueError:
        return ""


def signals_of(collector: Any) -> list[Any]:
    """Return the signals that a collector may write, in the order of the catalogue."""
    from clusterprof import signals

    path = Path(sys.modules[collector.__module__].__file__ or "")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    trees = [tree]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT / node.module.replace(".", "/")
            if node.module.startswith("clusterprof.collectors.") and folder.is_dir():
                trees += [ast.parse(one.read_text(encoding="utf-8")) for one in folder.glob("*.py")]
    names: set[str] = set()
    for one in trees:
        for node in ast.walk(one):
            if isinstance(node, ast.Attribute) and _is_signals(node.value):
                names.add(_name(getattr(signals, node.attr, None)))
            elif isinstance(node, ast.ImportFrom) and node.module == "clusterprof.signals":
                names |= {_name(getattr(signals, alias.name, None)) for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return [signal for signal in signals.CATALOGUE if signal.name in names]


def _is_signals(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "signals"


def _name(found: Any) -> str:
    return getattr(found, "name", "") if type(found).__name__ == "Signal" else ""


def measured(text: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """Return collector -> (where, µs per sample, samples/s, % of a core) of the saved results."""
    table = text.partition(COST_TABLE)[2].partition("\n== ")[0]
    found: dict[str, list[tuple[str, str, str, str]]] = {}
    for name, where, cost_us, rate, percent in _COST.findall(table):
        found.setdefault(name, []).append((where.strip(), cost_us, rate, percent))
    return found


def cost_table(costs: list[tuple[str, str, str, str]]) -> str:
    rows = [f"| {where} | {us} | {rate} | {percent} |" for where, us, rate, percent in costs]
    return "\n".join(
        [
            "Measured (`bench/collector_cost.py`; the machine is named in `bench/README.md`):",
            "",
            "| where | µs of CPU per sample | samples per second | % of one core |",
            "|---|---|---|---|",
            *rows,
        ]
    )
