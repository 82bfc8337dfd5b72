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

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ["## Source", "## Privilege", "## Cost", "## Where it is blind"]
COST_TABLE = "== collector_cost"
_COST = re.compile(r"^  (\w+) +(\S.*?) {2,}([\d.,]+) +([\d.,]+) +([\d.]+) *$", re.MULTILINE)


def make_collector_pages(mark: str) -> dict[str, str]:
    """Return path -> text of every page and of their index."""
    from clusterprof.agent.collectors.registry import COLLECTORS

    costs = parse_costs((ROOT / "bench/README.md").read_text(encoding="utf-8"))
    pages = {}
    index = [
        mark + "# Collectors\n\nWhere samples come from, in the order in which they are taken.\n"
    ]
    for collector in COLLECTORS:
        page = make_collector_page(collector, costs.get(collector.name, []))
        pages[f"docs/collectors/{collector.name}.md"] = mark + page
        doc = collector.__doc__ or find_page_text(collector)
        first_line = re.split(r"(?<=\.)\s", doc.strip(), maxsplit=1)[0]
        index.append(f"* [{collector.name}]({collector.name}.md): {' '.join(first_line.split())}")
    pages["docs/collectors/README.md"] = "\n".join(index) + "\n"
    return pages


def make_collector_page(collector: Any, costs: list[tuple[str, str, str, str]]) -> str:
    """Return the page of one collector."""
    before, *sections = re.split(r"^(?=## )", find_page_text(collector), flags=re.MULTILINE)
    interval_ms = collector.interval_ns / 1_000_000
    where = "in a helper process that can be abandoned" if collector.isolated else "in the recorder"
    parts = [
        f"# {collector.name}",
        before.strip(),
        f"Sampled every {interval_ms:g} ms {where}.",
        make_signals_section(collector),
    ]
    for section in sections:
        parts.append(section.strip())
        if section.startswith("## Cost") and costs:
            parts.append(make_cost_table(costs))
    return "\n\n".join(parts) + "\n"


def find_page_text(collector: Any) -> str:
    """Return the page: the docstring of the class if it has sections, else of the module."""
    module = sys.modules[collector.__module__]
    if "## " in (collector.__doc__ or ""):
        return inspect.cleandoc(collector.__doc__)
    return inspect.cleandoc(module.__doc__ or collector.__doc__ or "")


def make_signals_section(collector: Any) -> str:
    """Return the table of what a collector writes, with units."""
    module = vars(sys.modules[collector.__module__])
    columns = next((module[name] for name in module if _is_column_list(name)), None)
    if hasattr(collector, "strings") and columns:
        rows = [f"| `{name}` | {_find_unit(name)} |" for name in columns]
        return "\n".join(["## Columns", "", "| column | unit |", "|---|---|", *rows])
    rows = [f"| `{item.name}` | {item.unit} | {item.doc} |" for item in list_signals(collector)]
    return "\n".join(["## Signals", "", "| signal | unit | meaning |", "|---|---|---|", *rows])


def _is_column_list(name: str) -> bool:
    """Return whether a constant names the columns of a table: COLUMNS, PROCESS_COLUMNS, …"""
    return name in ("COLUMNS", "PROCESS_COLUMNS", "THREAD_COLUMNS", "PLACEMENT_COLUMNS")


def _find_unit(column: str) -> str:
    from clusterprof.units import infer_unit

    try:
        return infer_unit(column)
    except ValueError:
        return ""


def list_signals(collector: Any) -> list[Any]:
    """Return the signals that a collector may write, in the order of the catalog."""
    from clusterprof import signals

    nodes = list_reachable_nodes(collector)
    names: set[str] = set()
    for node in (inner for reached in nodes for inner in ast.walk(reached)):
        if isinstance(node, ast.Attribute) and _is_signals(node.value):
            names.add(_find_name(getattr(signals, node.attr, None)))
        elif isinstance(node, ast.Name):
            names.add(_find_name(getattr(signals, node.id, None)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return [signal for signal in signals.BY_NAME.values() if signal.name in names]


def list_reachable_nodes(collector: Any) -> list[ast.stmt]:
    """Return the class, what it uses of its module, and the vendor bindings that it imports."""
    tree = _parse_module(collector.__module__)
    by_name = {name: node for node in tree.body for name in _list_defined_names(node)}
    pending, reached, bindings = [collector.__name__], [], set()
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        node = by_name[name]
        if isinstance(node, ast.Import | ast.ImportFrom):
            bindings |= _list_binding_modules(node)
            continue
        reached.append(node)
        pending += [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom):
                bindings |= _list_binding_modules(inner)
    done: set[str] = set()
    while bindings - done:
        module = (bindings - done).pop()
        done.add(module)
        body = _parse_module(module).body
        reached += body
        for node in (inner for stmt in body for inner in ast.walk(stmt)):
            if isinstance(node, ast.ImportFrom):
                bindings |= _list_binding_modules(node)
    return reached


def _parse_module(name: str) -> ast.Module:
    path = ROOT / (name.replace(".", "/") + ".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _list_defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def _list_binding_modules(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Modules beside the GPU collectors that an import names: bindings of vendor libraries."""
    room = "clusterprof.agent.collectors.gpu"
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(room):
        return set()
    if node.module == room:
        return {f"{room}.{alias.name}" for alias in node.names}
    return {node.module or ""}


def _is_signals(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "signals"


def _find_name(document: Any) -> str:
    return getattr(document, "name", "") if type(document).__name__ == "Signal" else ""


def parse_costs(text: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """Return collector -> (where, µs per sample, samples/s, % of a core) of the saved results."""
    table = text.partition(COST_TABLE)[2].partition("\n== ")[0]
    collected: dict[str, list[tuple[str, str, str, str]]] = {}
    for name, where, cost_us, rate, percent in _COST.findall(table):
        collected.setdefault(name, []).append((where.strip(), cost_us, rate, percent))
    return collected


def make_cost_table(costs: list[tuple[str, str, str, str]]) -> str:
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
