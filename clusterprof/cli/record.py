"""The help of `clusterprof record`; options.py reads its options, recording.py does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clusterprof.recorder import options


def _shown(option: options.Option) -> Any:
    return typer.Option(*option.flags, metavar=option.metavar, help=option.help)


def record(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="CMD", help="The job; without it the whole node."),
    ] = None,
    out: Annotated[Path | None, _shown(options.OUT)] = None,
    profile: Annotated[str | None, _shown(options.PROFILE)] = None,
    duration: Annotated[str | None, _shown(options.DURATION)] = None,
    hz: Annotated[float | None, _shown(options.HZ)] = None,
    inject: Annotated[str, _shown(options.INJECT)] = "auto",
    pid: Annotated[int | None, _shown(options.PID)] = None,
    gpu_events: Annotated[
        bool, typer.Option(help="Let the probe record events on the job's CUDA streams.")
    ] = True,
    keep_free: Annotated[str | None, _shown(options.KEEP_FREE)] = None,
) -> None:
    """Record a job: `record -- CMD` starts a recorder beside CMD and becomes CMD.

    CMD keeps its process, signals, terminal and exit status. Without CMD the node is recorded
    until Ctrl-C, SIGTERM or --duration; with --pid until that process ends.
    """
    from clusterprof.cli.recording import run

    values = (out, profile, duration, hz, inject, pid, gpu_events, keep_free)
    run(options.Asked(command or (), *values))
