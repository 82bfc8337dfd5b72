"""The page docs/peers.md from what the tools said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEAD = """# Beside other tools

<!-- written by `make peers`; do not edit -->

The same traces read by other tools and by `clusterprof`, each in an environment of its own, one
trace at a time. Numbers differ where definitions do:

* **window**: clusterprof takes the profiler's steps from the first's start to the last's end (or,
  without any, from the first to the last work of the device); HTA the first to the last kernel, and
  drops the last profiler step where there are several; TraceLens the first to the last device
  event; torch-tb-profiler the mean step; nsys-ai the first to the last kernel or copy.
* **idle**: the complement of *all* device activity for clusterprof and TraceLens; HTA leaves copies
  and memory sets out of idle too, and counts them as non-compute; nsys-ai's bubbles count copies as
  activity, its overlap breakdown does not.
* **exposed**: time in communication kernels during which the device did nothing else.
"""
_TOOLS = ("clusterprof", "HTA", "TraceLens", "torch-tb-profiler", "nsys-ai")


def page(known: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the page: a table of versions, one of numbers, and what failed."""
    parts = [_HEAD, "## Versions\n", _versions(known), "## Idle time of the device\n"]
    parts.append(_table(known, _idle))
    parts += ["## Exposed communication\n", _table(known, _exposed)]
    parts += ["## Waiting for data, of the step\n", _table(known, _data)]
    parts += ["## CPU time of the whole run, start of the tool included\n", _table(known, _cpu)]
    failed = [
        f"* {tool}, `{trace}`: {said[tool]['error']}"
        for trace, said in sorted(known.items())
        for tool in _TOOLS
        if "error" in said.get(tool, {})
    ]
    parts += ["## What could not be read, and by whom\n", "\n".join(failed) or "Nothing.", ""]
    return "\n".join(parts)


def _versions(known: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    lines = []
    for tool in _TOOLS:
        found = {str(said.get(tool, {}).get("version") or "") for said in known.values()} - {""}
        lines.append(f"* {tool} {', '.join(sorted(found)) or '(from its sources)'}")
    return "\n".join(lines) + "\n"


def _table(known: Mapping[str, Mapping[str, Mapping[str, Any]]], cell: Any) -> str:
    lines = ["| trace | " + " | ".join(_TOOLS) + " |", "|---|" + "---:|" * len(_TOOLS)]
    for trace, said in sorted(known.items()):
        cells = []
        for tool in _TOOLS:
            one = said.get(tool)
            cells.append("" if one is None else "fails" if "error" in one else cell(one))
        if any(cells):
            lines.append(f"| {trace} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ms(one: Mapping[str, Any], name: str) -> str:
    value, window = one.get(name), one.get("window_ms")
    if value is None:
        return ""
    return f"{value:,.3f} ms ({value / window:.1%})" if window else f"{value:,.3f} ms"


def _idle(one: Mapping[str, Any]) -> str:
    return _ms(one, "idle_ms")


def _exposed(one: Mapping[str, Any]) -> str:
    return _ms(one, "exposed_comm_ms")


def _data(one: Mapping[str, Any]) -> str:
    value = one.get("dataloader_pct")
    return "" if value is None else f"{value:.1f} %"


def _cpu(one: Mapping[str, Any]) -> str:
    return f"{one['cpu_s']:.1f} s" if "cpu_s" in one else ""
