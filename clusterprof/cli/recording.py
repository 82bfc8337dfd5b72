"""Run `clusterprof record` after its options were parsed; kept light, as every rank of a
job runs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from clusterprof.agent.options import Plan, RecordOptions

if TYPE_CHECKING:
    from clusterprof.agent.launch.launcher import LaunchRequest

_DIVE_AFTER_NS = 120_000_000_000
"""Time for which a rank stands out before `--dive auto` profiles it, ns: no passing disturbance."""


def run_record(requested: RecordOptions) -> NoReturn:
    """Elect a recorder, start it, and become the command; or record in the foreground.

    Raises: UsageError for invalid options.
    """
    from clusterprof.agent.launch.launcher import (
        LaunchRequest,
        record_command,
        record_in_foreground,
    )
    from clusterprof.agent.options import parse_duration

    _check_choices(requested)
    dive_after_ns = parse_dive(requested)
    duration_ns = parse_duration(requested.duration) if requested.duration is not None else None
    plan = _make_plan_builder(requested)
    stacks: Mapping[str, Any] = {}
    if (
        requested.profile
        or os.environ.get("CLUSTERPROF_PROFILE")
        or os.path.exists("clusterprof.yaml")
    ):
        # The profile is explicit: every rank reports an error in it, not only the starting one.
        loaded = plan()
        stacks = loaded.profile["stacks"]
        plan = lambda: loaded  # noqa: E731
    if not requested.command and requested.export is None:
        record_in_foreground(requested.out, plan(), duration_ns, requested.pid, os.environ)
    inject: Any = requested.inject  # one of the choices that the option allows
    paths = choose_stacks(requested.stacks, stacks)
    if requested.redact and paths is not None:
        paths = "hash"
    request = LaunchRequest(
        requested.command,
        requested.out,
        plan,
        inject,
        requested.gpu_events,
        paths,
        duration_ns,
        requested.nccl == "auto",
        dive_after_ns is not None,
    )
    if requested.export is not None and requested.pid is not None:
        _print_exports(request, requested.pid, requested.export)
    record_command(request, os.environ, _print_message)


def _print_exports(request: LaunchRequest, pid: int, form: str) -> NoReturn:
    """Start the recording of a process, print the variables for what it starts, and exit.

    Raises: CannotStart as `record_process` does; then nothing is printed on stdout.
    """
    from clusterprof.agent.launch.attach_and_export import format_exports, record_process

    variables = record_process(request, pid, os.environ, _print_message)
    sys.stdout.write(format_exports(variables, form))
    sys.exit(0)


def _make_plan_builder(requested: RecordOptions) -> Callable[[], Plan]:
    """Make the function that builds the plan; only the rank that starts the recorder calls it.

    Raises: UsageError for an invalid value, on every rank.
    """
    from clusterprof.agent.options import (
        build_plan,
        parse_duration,
        parse_mode,
        with_dive,
        with_hang_options,
        with_hz,
        with_metrics,
        with_mode,
        with_redaction,
    )
    from clusterprof.cli.common import load_profile

    keep_free = _parse_size(requested.keep_free) if requested.keep_free is not None else None
    mode = None if requested.mode is None else parse_mode(requested.mode)
    hang_after_ns = None if requested.hang_after is None else parse_duration(requested.hang_after)
    dive_after_ns = parse_dive(requested)
    targets = requested.metrics or ()
    # Every rank rejects a rate or a target that is invalid.
    given = with_metrics(Plan(), targets, os.environ, Path())
    with_hz(given, requested.hz if requested.hz is not None else given.hz)

    def plan() -> Plan:
        # command line before profile before defaults
        built = build_plan(load_profile(requested.profile).effective(), requested.hz, keep_free)
        built = with_hang_options(built, requested.on_hang or "", hang_after_ns)
        built = with_metrics(built, targets, os.environ, Path.cwd())
        built = built if mode is None else with_mode(built, mode)
        built = built if dive_after_ns is None else with_dive(built, dive_after_ns)
        return with_redaction(built) if requested.redact else built

    return plan


def _check_choices(requested: RecordOptions) -> None:
    from clusterprof.errors import UsageError

    if requested.inject not in ("auto", "off", "strict"):
        raise UsageError(f"--inject {requested.inject}: choose auto, off or strict")
    if requested.stacks not in (None, "on", "off"):
        raise UsageError(f"--stacks {requested.stacks}: choose on or off")
    if requested.nccl not in ("auto", "off"):
        raise UsageError(f"--nccl {requested.nccl}: choose auto or off")
    if requested.redact and (requested.on_hang or requested.metrics):
        option = "--on-hang" if requested.on_hang else "--metrics"
        raise UsageError(f"--redact: what {option} writes holds names", f"leave out {option}")
    if requested.on_hang and (
        not (requested.command or requested.export) or requested.inject == "off"
    ):
        raise UsageError(
            "--on-hang: progress is seen by the probe alone",
            "give the command of the job, and do not use --inject off",
        )
    if requested.export not in (None, "sh", "slurm"):
        raise UsageError(f"--export {requested.export}: choose sh or slurm")
    if requested.export is not None and (requested.command or requested.pid is None):
        raise UsageError(
            "--export prints variables for the programs that another process starts",
            "give --pid PID and no command; in a shell: --pid $$",
        )
    if requested.command and requested.pid is not None:
        raise UsageError("--pid attaches to a running process: leave the command out")


def parse_dive(requested: RecordOptions) -> int | None:
    """Parse `--dive`: for how long a rank stands out before it is profiled, ns; None = never.

    Raises: UsageError for anything else, and where no window can be taken.
    """
    from clusterprof.agent.options import parse_duration
    from clusterprof.errors import UsageError

    if requested.dive == "off":
        return None
    if not requested.command or requested.inject == "off":
        raise UsageError(
            "--dive: windows are taken by the probe alone",
            "give the command of the job, and do not use --inject off",
        )
    if requested.redact:
        raise UsageError("--redact: profiler traces hold names", "leave out --dive")
    return _DIVE_AFTER_NS if requested.dive == "auto" else parse_duration(requested.dive)


def choose_stacks(option: str | None, profile: Mapping[str, Any]) -> Any:
    """Return how files are named in sampled stacks, None = no stacks; the option comes first."""
    enabled = option == "on" if option is not None else profile.get("enabled", True)
    return profile.get("paths", "full") if enabled else None


def _parse_size(size: str) -> int:
    from clusterprof.errors import UsageError
    from clusterprof.units import parse_quantity

    try:
        value, unit = parse_quantity(size)
    except ValueError as error:
        raise UsageError(f"--keep-free: {error}") from None
    if unit not in ("bytes", "") or value < 0:
        raise UsageError(f"--keep-free {size!r} is not a size", "write 2 GiB")
    return int(value)


def _print_message(line: str) -> None:
    """Print a line to stderr; the command runs also where stderr is closed or cannot be written."""
    if sys.stderr is None:
        return  # stderr is closed: print would write to stdout instead
    with suppress(OSError, ImportError, MemoryError):
        from clusterprof.output.renderers.text.safety import escape_text

        print(escape_text(line, 2000), file=sys.stderr, flush=True)
