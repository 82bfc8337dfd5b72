"""The page of a cause: what `clusterprof explain` prints and `docs/causes/` holds."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import fields

from clusterprof.detectors.base import Detector
from clusterprof.detectors.network import LIMITS
from clusterprof.detectors.peers import PEER_CAUSES, peer_page
from clusterprof.detectors.registry import DETECTORS


def page(cause_id: str) -> str:
    """Return the page of one cause as Markdown; raises KeyError for an id that is none."""
    for cause in PEER_CAUSES:
        if cause.id == cause_id:
            limits = LIMITS.get(cause_id)
            return peer_page(cause) + (f"\n{_limits(cause_id, limits)}" if limits else "")
    detector = {one.cause.id: one for one in DETECTORS}[cause_id]
    title, _, body = _docstring(detector).partition("\n")
    table = _limits(cause_id, detector.Limits)
    return f"# {cause_id}: {title.rstrip('.')}\n{body.rstrip()}\n\n{table}"


def _docstring(detector: Detector) -> str:
    return inspect.cleandoc(sys.modules[type(detector).__module__].__doc__ or "")


def _limits(cause_id: str, limits: type) -> str:
    """The table of limits a profile may change, with what is written under each."""
    lines = [
        f"A profile changes limits under `limits: {{{cause_id}: {{…}}}}`.",
        "",
        "| limit | default | meaning |",
        "|---|---|---|",
    ]
    meanings = _meanings(limits)
    for one in fields(limits):
        default = 0 if one.default == 0 else one.default
        lines.append(f"| `{one.name}` | {default} | {meanings.get(one.name, '')} |")
    return "\n".join(lines) + "\n"


def _meanings(limits: type) -> dict[str, str]:
    """The string under each field of a class, read from its source."""

    tree = ast.parse(textwrap.dedent(inspect.getsource(limits)))
    found: dict[str, str] = {}
    name = ""
    for node in tree.body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
    return found
