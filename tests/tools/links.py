"""Links of Markdown pages: where they lead, and the anchors that headings make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def list_dead_links(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere on this disk; those to the web are not asked."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(_CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        known = target.exists() and (
            not anchor or (target.is_file() and anchor in list_anchors(target))
        )
        if not known:
            yield link


def list_anchors(page: Path) -> set[str]:
    """Return what a heading is called in a link, as code hosts make it."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    collected: dict[str, int] = {}
    names = set()
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        seen = collected.get(name, 0)
        collected[name] = seen + 1
        names.add(f"{name}-{seen}" if seen else name)
    return names
