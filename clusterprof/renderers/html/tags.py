"""HTML put together so that no foreign string can become markup.

`tag` takes text and markup as its children. Text passes `safe_text` and is escaped, always; only
what `tag` and `raw` return is markup, and `raw` is for our own files.
"""

from __future__ import annotations

import html
import re
from typing import Union

from clusterprof.renderers.text_safety import safe_text

_LONGEST = 4096  # characters of one text
_EMPTY = frozenset({"meta", "br"})  # in SVG nothing is empty without saying so
_NAME = re.compile(r"[a-z][a-z0-9-]*", re.IGNORECASE)


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = Union[Markup, str, None]  # noqa: UP007  (a value, not an annotation)


def raw(text: str) -> Markup:
    """Return our own HTML as it stands; nothing from a recording may come this way."""
    return Markup(text)


def text(value: str) -> Markup:
    """Return foreign text as HTML that shows it."""
    return Markup(html.escape(safe_text(value, _LONGEST), quote=True))


def tag(element: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """Return an element; `class_` and `data_x` name the attributes class and data-x.

    An attribute that is None or False is left out, one that is True has no value.
    """
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if element in _EMPTY:
        return Markup(f"<{element}{said}>")
    return Markup(f"<{element}{said}>{join(*children)}</{element}>")


def join(*children: Child) -> Markup:
    """Return children one after another; None is nothing."""
    parts = (
        child if isinstance(child, Markup) else text(child)
        for child in children
        if child is not None
    )
    return Markup("".join(parts))


def slug(name: str) -> str:
    """Return a name as it may stand in an id, a class or a link: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name[:80].lower()).strip("-") or "x"


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of an attribute")
    return f" {name}" if value is True else f' {name}="{text(str(value))}"'
