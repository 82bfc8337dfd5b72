"""Prepare the pages of the documentation for the site: folders in the navigation, links to files.

A page links to files of the repository that are not part of the site. There is no address that
they could be read at, so the site shows the text of such a link without it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_WEB = re.compile(r"[a-z][a-z0-9+.-]*:")


def on_config(config: Any) -> Any:
    """List the pages of a folder that the navigation names."""
    config.nav = _expand(config.nav, Path(config.docs_dir))
    return config


def _expand(items: list[Any], docs: Path) -> list[Any]:
    expanded = []
    for item in items:
        ((title, value),) = item.items()
        if isinstance(value, list):
            value = _expand(value, docs)
        elif (docs / value).is_dir():
            value = _list_pages(docs / value, docs)
        expanded.append({title: value})
    return expanded


def _list_pages(folder: Path, docs: Path) -> list[Any]:
    """List the pages of a folder with the beginning of their headings; first its introduction."""
    first = [name for name in ("README.md", "overview.md") if (folder / name).exists()]
    others = sorted(page.name for page in folder.glob("*.md") if page.name not in first)
    pages: list[Any] = [(folder / name).relative_to(docs).as_posix() for name in first]
    for name in others:
        text = (folder / name).read_text(encoding="utf-8")
        heading = re.search(r"^# (.+)$", text, re.MULTILINE)
        title = heading[1].partition(": ")[0] if heading else name
        pages.append({title: (folder / name).relative_to(docs).as_posix()})
    return pages


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Take the links off that lead out of the site, and name the others as the site does."""
    folder = Path(page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if _WEB.match(target):
            return match[0]
        path = Path(config.docs_dir, folder, target).resolve()
        docs = Path(config.docs_dir).resolve()
        inside = path.is_relative_to(docs) and files.get_file_from_path(
            path.relative_to(docs).as_posix()
        )
        # a link to a file that does not exist stays, and the build fails
        is_kept = (inside and inside.inclusion.is_included()) or not path.exists()
        return match[0] if is_kept else text

    return _LINK.sub(replace, markdown)
