"""Sentences of a report are for people: code asks the fields beside them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "clusterprof"
PACKAGES = ("analysis", "report", "output", "gate", "fleet", "cli")
SENTENCES = {
    *("note", "remedy", "message", "because", "change", "why", "why_missing", "withheld_text"),
    *("warning", "sentence", "answer"),
}
SEARCHES = {"startswith", "endswith", "find", "index", "partition", "rpartition", "split"}
ALLOWED = {
    # Where a sentence is broken or put: no meaning is taken from it.
    "output/renderers/text/advice.py: change.partition",
    "output/renderers/text/first_screen.py: note.split",
    "output/renderers/text/first_screen.py: note.startswith",
}


def get_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def iterate_searches(tree: ast.AST) -> Iterator[str]:
    """Yield the searches in values that are called as sentences are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = get_name(node.func.value)
            if name in SENTENCES and node.func.attr in SEARCHES:
                yield f"{name}.{node.func.attr}"
            if node.func.attr in ("search", "match", "fullmatch", "findall", "finditer"):
                yield from (f"re {get_name(a)}" for a in node.args if get_name(a) in SENTENCES)
        elif isinstance(node, ast.Compare):
            left, *right = (node.left, *node.comparators)
            for operator, value in zip(node.ops, right):
                is_in = isinstance(operator, ast.In | ast.NotIn)
                if is_in and isinstance(left, ast.Constant) and get_name(value) in SENTENCES:
                    yield f"{left.value!r} in {get_name(value)}"


@pytest.mark.parametrize(
    ("code", "searches"),
    [
        ("item.note.startswith('of ')", ["note.startswith"]),
        ("'idle' in item.note", ["'idle' in note"]),
        ("PATTERN.search(item.note)", ["re note"]),
        ("item.sign == 'port-unused'", []),
        ("name.startswith('gpu.')", []),
    ],
)
def test_a_search_in_a_sentence_is_noticed(code: str, searches: list[str]) -> None:
    assert list(iterate_searches(ast.parse(code))) == searches


def test_no_code_searches_a_sentence() -> None:
    searches = {
        f"{path.relative_to(ROOT)}: {search}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for search in iterate_searches(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert searches == ALLOWED
