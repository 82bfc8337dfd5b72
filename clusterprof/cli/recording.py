"""What `clusterprof record` does once its options are read; light: every rank of a job runs it."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from clusterprof.recorder.options import Asked


def run(asked: Asked) -> NoReturn:
    """Elect, start the recorder, become the command; or record in the foreground."""
    from clusterprof.cli.common import load_profile
    from clusterprof.errors import UsageError
    from clusterprof.recorder.launch import Launch, launch, record_here
    from clusterprof.recorder.order import parse_duration
    from clusterprof.recorder.plan import Plan, plan_of_profile, with_hz

    if asked.inject not in ("auto", "off", "strict"):
        raise UsageError(f"--inject {asked.inject}: choose auto, off or strict")
    if asked.command and asked.pid is not None:
        raise UsageError("--pid attaches to a running process: leave the command out")
    duration_ns = parse_duration(asked.duration) if asked.duration is not None else None

    keep_free_bytes = _bytes(asked.keep_free) if asked.keep_free is not None else None
    if asked.hz is not None:
        with_hz(Plan(), asked.hz)  # refuses what no rank can mean

    def plan() -> Plan:
        # command line before profile before defaults
        profile = load_profile(asked.profile).effective()
        return plan_of_profile(profile, asked.hz, keep_free_bytes)

    if asked.profile or os.environ.get("CLUSTERPROF_PROFILE") or os.path.exists("clusterprof.yaml"):
        # Somebody wrote it: a mistake in it is every rank's to tell, not only the starter's.
        chosen = plan()
        plan = lambda: chosen  # noqa: E731
    if not asked.command:
        record_here(asked.out, plan(), duration_ns, asked.pid, os.environ)
    wish = Launch(asked.command, asked.out, plan, asked.inject, asked.gpu_events, duration_ns)  # type: ignore[arg-type]
    launch(wish, os.environ, _say)


def _bytes(size: str) -> int:
    from clusterprof.errors import UsageError
    from clusterprof.units import parse_quantity

    try:
        value, unit = parse_quantity(size)
    except ValueError as error:
        raise UsageError(f"--keep-free: {error}") from None
    if unit not in ("bytes", "") or value < 0:
        raise UsageError(f"--keep-free {size!r} is not a size", "write 2 GiB")
    return int(value)


def _say(line: str) -> None:
    from clusterprof.renderers.text_safety import safe_text

    print(safe_text(line, 2000), file=sys.stderr, flush=True)
