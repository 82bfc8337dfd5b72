"""The outputs, in the order in which people should read them; the word after `--format`.

Each is loaded when it is asked for: a report is written in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import overload

from clusterprof.renderers.base import Renderer

_PLACES = {
    "terminal": "terminal:Terminal",
    "plain": "plain:Plain",
    "json": "json_:Json",
    "markdown": "markdown:Markdown",
    "html": "html.page:Html",
    "openmetrics": "openmetrics:OpenMetrics",
}
"""Name, module in this folder, and class in it."""


def renderer_named(name: str) -> type[Renderer]:
    """Return an output by its name. Raises KeyError when there is none."""
    module, _, word = _PLACES[name].partition(":")
    found: type[Renderer] = getattr(import_module(f"clusterprof.renderers.{module}"), word)
    return found


class _Renderers(Sequence[type[Renderer]]):
    """All of them, each loaded when it is come to."""

    def __len__(self) -> int:
        return len(_PLACES)

    def __iter__(self) -> Iterator[type[Renderer]]:
        return map(renderer_named, _PLACES)

    @overload
    def __getitem__(self, at: int) -> type[Renderer]: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[type[Renderer], ...]: ...

    def __getitem__(self, at: int | slice) -> type[Renderer] | tuple[type[Renderer], ...]:
        return tuple(self)[at]


RENDERERS: Sequence[type[Renderer]] = _Renderers()
