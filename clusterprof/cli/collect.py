"""`clusterprof collect RUN... --metrics TARGET`: metrics of a whole job while it is recorded."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from clusterprof.agent.options import METRICS
from clusterprof.cli import common
from clusterprof.cli.common import PROFILE, declare_option
from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.analysis.live.incremental import JobSettler
    from clusterprof.output.exporters.live_metrics import LiveExporter

_MIN_INTERVAL_S = 1.0


def collect(
    run: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            readable=False,
            help="One or more recordings that are still being written.",
        ),
    ],
    metrics: Annotated[Optional[list[str]], declare_option(METRICS)] = None,  # noqa: UP045
    interval: Annotated[str, typer.Option(help="Time between two values.")] = "15s",
    linger: Annotated[
        str, typer.Option(help="How long the last values stay published after the job has ended.")
    ] = "30s",
    once: Annotated[
        bool, typer.Option("--once", help="Print the metrics of the last minute and exit.")
    ] = False,
    job: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the job. Default: that in the recording.")
    ] = "",
    profile: Annotated[
        Optional[str], declare_option(PROFILE)  # noqa: UP045
    ] = None,
) -> None:
    """Publish live metrics of a whole job: lost time by cause and culprit, over all its nodes.

    It reads the recordings where they lie and compares the ranks of all nodes. It ends with the
    job.
    """
    from clusterprof.analysis.detectors.registry import list_limit_classes
    from clusterprof.analysis.live.incremental import JobSettler
    from clusterprof.config import build_limits
    from clusterprof.output.exporters.live_metrics import LiveExporter

    if not metrics and not once:
        raise UsageError("no target", "add --metrics 9641, or --once to print the metrics")
    interval_s = _parse_seconds("--interval", interval, _MIN_INTERVAL_S)
    linger_s = _parse_seconds("--linger", linger, 0.0)
    limits = build_limits(common.load_profile(profile), list_limit_classes())
    parts = JobSettler(run, limits, True, job=job)
    exporter = LiveExporter(
        parts, "job", metrics or (), os.environ, common.print_note, period_s=interval_s
    )
    parts.poll()  # a wrong path is an error before anything is offered
    # As Ctrl-C: a textfile must not outlive us.
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for error in exporter.open_targets():
            raise error
        if once:
            exporter.export_part()
            _print_metrics(exporter)
            return
        _export_until_end(exporter, parts)
        time.sleep(linger_s)
    finally:
        exporter.close()
        signal.signal(signal.SIGTERM, handler)


def _print_metrics(exporter: LiveExporter) -> None:
    from clusterprof.output.renderers.openmetrics import render_families

    families = () if exporter.series is None else exporter.series.build_families()
    common.write_result(render_families(families), None)


def _export_until_end(exporter: LiveExporter, parts: JobSettler) -> None:
    """Export a part every period until no recorder is left."""
    while True:
        began_s = time.monotonic()
        exporter.export_part()
        if parts.has_ended or parts.is_abandoned:
            return
        # At most half of a core, however large the job is.
        cost_s = time.monotonic() - began_s
        time.sleep(max(exporter.period_s - cost_s, cost_s))


def _parse_seconds(option: str, text: str, minimum_s: float) -> float:
    """Parse a time of at least `minimum_s`, seconds."""
    from clusterprof.agent.options import parse_duration

    if minimum_s == 0 and text.strip(" 0s") == "" and text.strip():
        return 0.0
    seconds = parse_duration(text) / 1e9
    if seconds < minimum_s:
        raise UsageError(f"{option} {text!r} is less than {minimum_s:g} s", "write 15s")
    return seconds
