"""Build the page of a cause, which `clusterprof explain` prints and `docs/causes/` holds."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import fields

from clusterprof.analysis.detectors.base import Detector
from clusterprof.analysis.detectors.cross_rank import NETWORK_LIMITS, PEER_CAUSES, build_peer_page
from clusterprof.analysis.detectors.registry import DETECTORS


def build_page(cause_id: str) -> str:
    """Build the page of one cause as Markdown.

    Raises: KeyError when the id is unknown.
    """
    for cause in PEER_CAUSES:
        if cause.id == cause_id:
            limits = NETWORK_LIMITS.get(cause_id)
            return build_peer_page(cause) + (
                f"\n{_build_limits_table(cause_id, limits)}" if limits else ""
            )
    detector = {registered.cause.id: registered for registered in DETECTORS}[cause_id]
    title, _, body = _get_docstring(detector).partition("\n")
    table = _build_limits_table(cause_id, detector.Limits)
    return f"# {cause_id}: {title.rstrip('.')}\n{body.rstrip()}\n\n{table}"


def _get_docstring(detector: Detector) -> str:
    return inspect.cleandoc(sys.modules[type(detector).__module__].__doc__ or "")


def _build_limits_table(cause_id: str, limits: type) -> str:
    """Build the table of limits that a profile may change, with their descriptions."""
    lines = [
        f"A profile changes limits under `limits: {{{cause_id}: {{…}}}}`.",
        "",
        "| limit | default | meaning |",
        "|---|---|---|",
    ]
    meanings = _parse_meanings(limits)
    for limit in fields(limits):
        default = 0 if limit.default == 0 else limit.default
        lines.append(f"| `{limit.name}` | {default} | {meanings.get(limit.name, '')} |")
    return "\n".join(lines) + "\n"


def _parse_meanings(limits: type) -> dict[str, str]:
    """Parse the description under each field of a class from its source."""

    tree = ast.parse(textwrap.dedent(inspect.getsource(limits)))
    meanings: dict[str, str] = {}
    name = ""
    for node in tree.body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            meanings[name] = " ".join(str(node.value.value).split())
    return meanings
