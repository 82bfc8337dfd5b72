"""Interface of a renderer: it turns a report into a string.

Options of a renderer are passed to its constructor.

Registry of the report formats, in the order in which help and documentation list them.

A key is the word after `--format`. Each renderer's module is imported only when it is
needed, because a report is written in one format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import ClassVar, Protocol, overload

from clusterprof.report.model import Report


class Renderer(Protocol):
    """One output format."""

    name: ClassVar[str]
    """The word after `--format`."""
    suffix: ClassVar[str]
    """File suffix, with the dot."""

    def render(self, report: Report) -> str:
        """Return the complete output, ending with a newline."""
        ...


_RENDERER_CLASSES = {
    "terminal": "terminal:Terminal",
    "plain": "plain:Plain",
    "brief": "brief:Brief",
    "json": "json:Json",
    "markdown": "markdown:Markdown",
    "html": "html.page:Html",
    "openmetrics": "openmetrics:OpenMetrics",
}
"""Format name -> module in this folder, and class in it."""


def load_renderer(name: str) -> type[Renderer]:
    """Load the renderer class of a format.

    Raises: KeyError when there is no such format.
    """
    module, _, word = _RENDERER_CLASSES[name].partition(":")
    renderer: type[Renderer] = getattr(
        import_module(f"clusterprof.output.renderers.{module}"), word
    )
    return renderer


class _Renderers(Sequence[type[Renderer]]):
    """All renderer classes; each is imported when it is accessed."""

    def __len__(self) -> int:
        return len(_RENDERER_CLASSES)

    def __iter__(self) -> Iterator[type[Renderer]]:
        return map(load_renderer, _RENDERER_CLASSES)

    @overload
    def __getitem__(self, at: int) -> type[Renderer]: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[type[Renderer], ...]: ...

    def __getitem__(self, at: int | slice) -> type[Renderer] | tuple[type[Renderer], ...]:
        return tuple(self)[at]


RENDERERS: Sequence[type[Renderer]] = _Renderers()
