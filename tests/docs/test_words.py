"""Texts of the project, comments and docstrings included, use plain words."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.manual_pages import ROOT

FOLDERS = ("clusterprof", "bench", "docs", "lab", "tests")
FIXTURES = (ROOT / "tests/hosts", ROOT / "tests/recordings")
VAGUE_PHRASES = re.compile(
    r"\b(whoever|borne out|laid|(is|are|be|been|was|were) told|told( \w+)? apart)\b", re.IGNORECASE
)
"""Write `any rank`, `confirmed`, `placed`, `is configured`, `distinguished`."""


def list_texts() -> list[Path]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    texts = [path for path in [*paths, *ROOT.glob("*.md")] if path.suffix in {".c", ".md", ".py"}]
    own = Path(__file__).resolve()
    return [
        path
        for path in sorted(texts)
        if path != own and not any(path.is_relative_to(folder) for folder in FIXTURES)
    ]


def test_no_text_uses_a_vague_phrase() -> None:
    texts = list_texts()
    assert len(texts) > 1000
    offenders = [
        f"{path.relative_to(ROOT)}: {phrase[0]}"
        for path in texts
        for phrase in VAGUE_PHRASES.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert offenders == []
