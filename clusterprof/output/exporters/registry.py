"""The formats, as `export --to` lists them; the word after `--to`."""

from __future__ import annotations

from clusterprof.exporters.csv_ import Csv
from clusterprof.exporters.json_ import JsonLines
from clusterprof.exporters.openmetrics import OpenMetrics
from clusterprof.exporters.otlp import Otlp
from clusterprof.exporters.parquet import Parquet
from clusterprof.exporters.perfetto import Perfetto

EXPORTERS: tuple[
    type[Perfetto] | type[Parquet] | type[Csv] | type[JsonLines] | type[OpenMetrics] | type[Otlp],
    ...,
] = (Perfetto, Parquet, Csv, JsonLines, OpenMetrics, Otlp)
