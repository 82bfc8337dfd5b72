"""The outputs, in the order in which people should read them; the word after `--format`."""

from __future__ import annotations

from clusterprof.renderers.base import Renderer
from clusterprof.renderers.html.page import Html
from clusterprof.renderers.json_ import Json
from clusterprof.renderers.markdown import Markdown
from clusterprof.renderers.openmetrics import OpenMetrics
from clusterprof.renderers.plain import Plain
from clusterprof.renderers.terminal import Terminal

RENDERERS: tuple[type[Renderer], ...] = (
    Terminal,
    Plain,
    Json,
    Markdown,
    Html,
    OpenMetrics,
)
