"""The ledger as metrics: OpenMetrics, and into a file `*.prom` the text format of Prometheus.

The textfile collector of node_exporter reads `*.prom`, and no OpenMetrics. The file is replaced at
once (`output`), so that no scrape sees half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof.exporters.base import Run
from clusterprof.exporters.output import Output
from clusterprof.renderers.openmetrics import OpenMetrics as Renderer

_TEXTFILE = ".prom"


class OpenMetrics:
    """The ledger as metrics."""

    name: ClassVar[str] = "openmetrics"
    suffix: ClassVar[str] = Renderer.suffix

    def check(self, output: Output) -> None:
        """Text may go anywhere."""

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write one exposition."""
        textfile = output.path is not None and output.path.suffix == _TEXTFILE
        text = Renderer(prometheus=textfile).render(run.report)
        opened = output.part("clusterprof", self.suffix) if output.is_folder else output.whole()
        with opened as file:
            file.write(text.encode("utf-8", "backslashreplace"))
        return ()
