"""What an output is: a report in, a string out. Options of a renderer go to its constructor."""

from __future__ import annotations

from typing import ClassVar, Protocol

from clusterprof.findings import Report


class Renderer(Protocol):
    """One output format."""

    name: ClassVar[str]
    """The word after `--format`."""
    suffix: ClassVar[str]
    """File suffix, with the dot."""

    def render(self, report: Report) -> str:
        """Return the whole output, ending with a newline."""
        ...
