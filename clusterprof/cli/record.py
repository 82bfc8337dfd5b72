"""`clusterprof record`: elect, start the recorder, become the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from clusterprof.recorder.plan import Plan


def record(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="CMD", help="The job; without it the whole node."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Default: clusterprof-out/<job>."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Profile: a shipped one by name, or a file."),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Stop recording after this time (90s, 10m, 2h)."),
    ] = None,
    hz: Annotated[
        float | None,
        typer.Option(metavar="N", help="Samples per second; slow sources keep their own rate."),
    ] = None,
    inject: Annotated[
        str,
        typer.Option(metavar="auto|off|strict", help="Whether Pythons of the job report spans."),
    ] = "auto",
    pid: Annotated[
        int | None,
        typer.Option(metavar="PID", help="Attach to a running process (no spans)."),
    ] = None,
    gpu_events: Annotated[
        bool, typer.Option(help="Let the probe record events on the job's CUDA streams.")
    ] = True,
    keep_free: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Pause writing when less disk than this is left."),
    ] = None,
) -> None:
    """Record a job: `record -- CMD` starts a recorder beside CMD and becomes CMD.

    CMD keeps its process, signals, terminal and exit status. Without CMD the node is recorded
    until Ctrl-C, SIGTERM or --duration; with --pid until that process ends.
    """
    from clusterprof.errors import UsageError
    from clusterprof.recorder.launch import Launch, launch, record_here
    from clusterprof.recorder.order import parse_duration

    if inject not in ("auto", "off", "strict"):
        raise UsageError(f"--inject {inject}: choose auto, off or strict")
    if command and pid is not None:
        raise UsageError("--pid attaches to a running process: leave the command out")
    duration_ns = parse_duration(duration) if duration is not None else None

    def plan() -> Plan:
        return _plan(profile, hz, keep_free)

    if not command:
        record_here(out, plan(), duration_ns, pid, os.environ)
    wish = Launch(command, out, plan, inject, gpu_events, duration_ns)  # type: ignore[arg-type]
    launch(wish, os.environ, _say)


def _plan(profile: str | None, hz: float | None, keep_free: str | None) -> Plan:
    """Return the sampling plan: command line before profile before defaults."""
    from clusterprof.cli.common import load_profile
    from clusterprof.errors import UsageError
    from clusterprof.recorder.plan import plan_of_profile
    from clusterprof.units import parse_quantity

    keep_free_bytes = None
    if keep_free is not None:
        try:
            value, unit = parse_quantity(keep_free)
        except ValueError as error:
            raise UsageError(f"--keep-free: {error}") from None
        if unit not in ("bytes", "") or value < 0:
            raise UsageError(f"--keep-free {keep_free!r} is not a size", "write 2 GiB")
        keep_free_bytes = int(value)
    return plan_of_profile(load_profile(profile).effective(), hz, keep_free_bytes)


def _say(line: str) -> None:
    from clusterprof.renderers.text_safety import safe_text

    print(safe_text(line, 2000), file=sys.stderr, flush=True)
