"""What `clusterprof record` does once its options are read; light: every rank of a job runs it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from clusterprof.recorder.options import Asked

if TYPE_CHECKING:
    from clusterprof.recorder.plan import Plan


def run(asked: Asked) -> NoReturn:
    """Elect, start the recorder, become the command; or record in the foreground."""
    from clusterprof.errors import UsageError
    from clusterprof.recorder.launch import Launch, launch, record_here
    from clusterprof.recorder.order import parse_duration

    if asked.inject not in ("auto", "off", "strict"):
        raise UsageError(f"--inject {asked.inject}: choose auto, off or strict")
    if asked.command and asked.pid is not None:
        raise UsageError("--pid attaches to a running process: leave the command out")
    duration_ns = parse_duration(asked.duration) if asked.duration is not None else None

    def plan() -> Plan:
        return _plan(asked.profile, asked.hz, asked.keep_free)

    if not asked.command:
        record_here(asked.out, plan(), duration_ns, asked.pid, os.environ)
    wish = Launch(asked.command, asked.out, plan, asked.inject, asked.gpu_events, duration_ns)  # type: ignore[arg-type]
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
