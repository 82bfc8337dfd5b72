"""The outputs, in the order in which people should read them; the word after `--format`."""

from __future__ import annotations

from clusterprof.renderers.json_ import Json
from clusterprof.renderers.markdown import Markdown
from clusterprof.renderers.openmetrics import OpenMetrics
from clusterprof.renderers.plain import Plain
from clusterprof.renderers.terminal import Terminal

RENDERERS: tuple[
    type[Terminal] | type[Plain] | type[Json] | type[Markdown] | type[OpenMetrics], ...
] = (
    Terminal,
    Plain,
    Json,
    Markdown,
    OpenMetrics,
)
