"""List the export formats, in the order of `export --to`."""

from __future__ import annotations

from clusterprof.output.exporters.metrics import OpenMetrics, Otlp
from clusterprof.output.exporters.perfetto.trace import Perfetto
from clusterprof.output.exporters.stacks import Collapsed, Speedscope
from clusterprof.output.exporters.tabular import Csv, JsonLines, Parquet

EXPORTERS: tuple[
    type[Perfetto]
    | type[Speedscope]
    | type[Collapsed]
    | type[Parquet]
    | type[Csv]
    | type[JsonLines]
    | type[OpenMetrics]
    | type[Otlp],
    ...,
] = (Perfetto, Speedscope, Collapsed, Parquet, Csv, JsonLines, OpenMetrics, Otlp)
