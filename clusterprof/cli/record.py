"""Declare `clusterprof record` for typer's help; agent.options parses it,
cli.recording runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clusterprof.agent import options
from clusterprof.cli.common import declare_option


def record(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="The command of the job.")
    ] = None,
    out: Annotated[Path | None, declare_option(options.OUT)] = None,
    profile: Annotated[str | None, declare_option(options.PROFILE)] = None,
    duration: Annotated[str | None, declare_option(options.DURATION)] = None,
    hz: Annotated[float | None, declare_option(options.HZ)] = None,
    inject: Annotated[str, declare_option(options.INJECT)] = "auto",
    pid: Annotated[int | None, declare_option(options.PID)] = None,
    gpu_events: Annotated[bool, declare_option(options.GPU_EVENTS)] = True,
    keep_free: Annotated[str | None, declare_option(options.KEEP_FREE)] = None,
    stacks: Annotated[str | None, declare_option(options.STACKS)] = None,
    mode: Annotated[str | None, declare_option(options.MODE)] = None,
    metrics: Annotated[list[str] | None, declare_option(options.METRICS)] = None,
    nccl: Annotated[str, declare_option(options.NCCL)] = "auto",
    on_hang: Annotated[str | None, declare_option(options.ON_HANG)] = None,
    hang_after: Annotated[str | None, declare_option(options.HANG_AFTER)] = None,
    redact: Annotated[bool, declare_option(options.REDACT)] = False,
    export: Annotated[str | None, declare_option(options.EXPORT)] = None,
    dive: Annotated[str, declare_option(options.DIVE)] = "off",
) -> None:
    """Record this node while CMD runs unchanged: record -- CMD.

    CMD keeps its process, signals, terminal and exit status. Without CMD, the node is recorded
    until Ctrl-C, SIGTERM or --duration. With --pid, it is recorded until that process ends. With
    --export, the command returns at once, and what that process starts is recorded with spans.
    SIGUSR2 to the recorder (its pid: clusterprof doctor) closes the accelerators, for a reset or a
    MIG change; the next one opens them again.
    """
    from clusterprof.cli.recording import run_record

    values = (out, profile, duration, hz, inject, pid, gpu_events, keep_free, stacks, mode)
    watched = (metrics, nccl, on_hang, hang_after)
    run_record(options.RecordOptions(command or (), *values, *watched, redact, export, dive))
