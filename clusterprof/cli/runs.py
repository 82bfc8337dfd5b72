"""Load the runs of a command line: recordings to analyze, or stored reports.

The part of a run to analyze comes from `--since`, `--until` and `--steps`. A progress bar with the
remaining time is shown on a terminal, and nothing elsewhere.

The usual command lines of `clusterprof analyze` are parsed here without typer, because typer and
its imports take 0.1 s of CPU, a third of the start-up. Everything but plain paths and complete
options, including mistakes and `--help`, is left to typer, and with it every message.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof.agent.options import Option, Parser
from clusterprof.cli import common
from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.analysis.node.selection import Instant, PartOfRun, Progress
    from clusterprof.analysis.pipeline import AnalysisRequest
    from clusterprof.analysis.tasks.base import Cluster
    from clusterprof.config import Profile
    from clusterprof.report.model import Report


RUN_OR_REPORT_HELP = (
    "A recording, the folders of its nodes, or a report written by `analyze --json`"
)


def load_run(
    paths: Sequence[Path], profile: Profile, jobs: int, cluster: Cluster | None = None
) -> Report:
    """Return the report of one run, analyzed or loaded from a file.

    Several paths are the node folders of one recording; a stored report must be given
    alone.
    Raises: UsageError for a stored report among several paths.
    """
    from clusterprof.gate.stored_report import is_report, load_report

    stored = [path for path in paths if is_report(path)]
    if not stored:
        from clusterprof.analysis.pipeline import analyze_with_request

        return analyze_with_request(paths, common.build_request(profile, jobs, cluster))
    if len(paths) > 1:
        raise UsageError(
            f"{stored[0]} is the report of a whole run and cannot be combined with other paths",
            "give more runs of the same job with --repeat, and baselines with --baseline",
        )
    return load_report(stored[0])


def load_runs(
    paths: Sequence[Path] | None, profile: Profile, jobs: int, cluster: Cluster | None = None
) -> list[Report]:
    """Return the reports of several runs, one path each."""
    return [load_run([path], profile, jobs, cluster) for path in paths or ()]


TIME_HELP = "90s, 1h30m, 4:05 after the start of the run, or 2026-01-31T12:00:00."
_SECONDS_PER_UNIT = {"h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "": 1.0, "ms": 1e-3}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(h|min|ms|m|s|)", re.ASCII)
_CLOCK_TIME = re.compile(r"(?:([0-9]+):)?([0-9]{1,2}):([0-9]{2}(?:\.[0-9]+)?)", re.ASCII)
_STEP_RANGE = re.compile(r"([0-9]*):([0-9]*)", re.ASCII)
_MAX_OFFSET_S = 1e9


def parse_part(since: str | None, until: str | None, steps: str | None) -> PartOfRun:
    """Parse the options that select a part of the run.

    Raises: UsageError for an invalid time or range.
    """
    from clusterprof.analysis.node.selection import PartOfRun

    first, end = _parse_steps(steps)
    begin, stop = (
        _parse_instant(text, name) for text, name in ((since, "since"), (until, "until"))
    )
    if begin and stop and begin.is_wall == stop.is_wall and begin.ns >= stop.ns:
        raise UsageError(f"--since {since} is not before --until {until}")
    options = (("since", since), ("until", until), ("steps", steps))
    description = ", ".join(f"--{name} {text}" for name, text in options if text)
    return PartOfRun(begin, stop, first, end, description)


def _parse_instant(text: str | None, name: str) -> Instant | None:
    from clusterprof.analysis.node.selection import Instant

    if text is None:
        return None
    seconds = _parse_offset(text.strip())
    if seconds is not None and seconds <= _MAX_OFFSET_S:
        return Instant(round(seconds * 1e9))
    try:
        when = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        return Instant(round(when.timestamp() * 1e6) * 1000, is_wall=True)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--{name} {text!r} is not a time", f"give {TIME_HELP}") from None


def _parse_offset(text: str) -> float | None:
    """Return the seconds of 90, 90s, 1.5m, 1h30m, 4:05, 1:02:09; None for anything else."""
    match = _CLOCK_TIME.fullmatch(text)
    if match:
        hours, minutes, seconds = match.groups()
        return int(hours or 0) * 3600.0 + int(minutes) * 60.0 + float(seconds)
    parts = [match.groups() for match in _DURATION_PART.finditer(text)]
    if (
        not parts
        or _DURATION_PART.sub("", text).strip()
        or (len(parts) > 1 and not all(u for _, u in parts))
    ):
        return None
    return sum(float(number) * _SECONDS_PER_UNIT[unit] for number, unit in parts)


def _parse_steps(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    match = _STEP_RANGE.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise UsageError(
            f"--steps {text!r} is not a range of steps", "give A:B, A: or :B; B is excluded"
        )
    first, end = (int(number) if number else None for number in match.groups())
    if first is not None and end is not None and first >= end:
        raise UsageError(f"--steps {text} has no step", "give A:B with A before B; B is excluded")
    return first, end


_DELAY_S = 0.7  # an analysis that ends earlier needs no bar


@contextmanager
def show_progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """Yield a function that takes the progress of an analysis; None when stderr is not a
    terminal.

    The bar appears after a short delay and is removed at the end.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    def __init__(self) -> None:
        self._since = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            if time.monotonic() - self._since < _DELAY_S:
                return
            self._open(progress.all_bytes)
        done = progress.read_bytes >= progress.all_bytes
        what = "comparing ranks" if done else f"node {progress.nodes + 1} of {progress.all_nodes}"
        self._bar.update(self._task, completed=progress.read_bytes, description=what)

    def _open(self, all_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("clusterprof: {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=max(all_bytes, 1))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


FORMAT = Option(
    ("--format",),
    "FORMAT",
    ", ".join(common.FORMATS) + ".",
    parameter="format_",
    words=common.FORMATS,
)
STRICT = Option(
    ("--strict",), None, "Exit with 6 if any input could not be read.", bool, "store_true"
)
BY = Option(
    ("--by",),
    "WHAT",
    "Add a table by node, rank, cause, line of code, step or time. Repeatable.",
    action="append",
    words=("node", "rank", "cause", "line", "step", "time"),
)
TOP = Option(("--top",), "N", "Rows in these tables and in the table of ranks.", int, minimum=1)
FULL = Option(
    ("--full",),
    None,
    "Print all sections, not only the first screen; through $PAGER in a terminal. In JSON and HTML:"
    " list every rank also above 512 ranks, instead of sums by node.",
    bool,
    "store_true",
)
_SECTIONS = (
    *("causes", "life", "impact", "matrix", "ranks", "ledger", "utilization", "slow-steps"),
    *("unattributed", "not-seen", "measures", "recording", "notes"),
)
SECTION = Option(
    ("--section",),
    "NAME",
    f"Print one section of --full: {', '.join(_SECTIONS[:-1])} or {_SECTIONS[-1]}.",
    words=_SECTIONS,
)
SINCE = Option(("--since",), "TIME", f"Analyze only the time from here on: {TIME_HELP}")
UNTIL = Option(("--until",), "TIME", "Analyze only the time before this.")
LOG_TO = Option(
    ("--log-to",),
    "TARGET",
    "Also send summary and HTML report to a run: wandb:PROJECT/RUN_ID, mlflow:RUN_ID or"
    " tensorboard:DIR. Repeatable.",
    action="append",
)
STEPS = Option(("--steps",), "A:B", "Analyze only steps A to B - 1 of every rank.")
QUEUED_AT = Option(
    ("--queued-at",),
    "TIME",
    "When the job was submitted, for its life: seconds since 1970, or 2026-01-31T12:00:00.",
)
ANALYZE_OPTIONS = (
    FORMAT,
    common.AS_JSON,
    common.OUTPUT,
    common.PROFILE,
    common.JOBS,
    common.SCHEDULER,
    common.SCHEDULER_FILE,
    common.WORKERS,
    STRICT,
    common.WIDTH,
    common.NO_COLOR,
    BY,
    TOP,
    SINCE,
    UNTIL,
    STEPS,
    FULL,
    SECTION,
    LOG_TO,
    QUEUED_AT,
)


def run_analysis(
    paths: Sequence[Path] | None = None,
    format_: str = "terminal",
    as_json: bool = False,
    output: Path | None = None,
    profile: str | None = None,
    jobs: int = 1,
    strict: bool = False,
    width: int = 0,
    no_color: bool = False,
    by: Sequence[str] | None = None,
    top: int | None = None,
    since: str | None = None,
    until: str | None = None,
    steps: str | None = None,
    scheduler: str | None = None,
    scheduler_file: str | None = None,
    workers: int | None = None,
    full: bool = False,
    section: str | None = None,
    log_to: Sequence[str] | None = None,
    queued_at: str | None = None,
) -> None:
    """Analyze recordings or foreign files, and write the report."""
    with common.report_errors_as_json(as_json or format_ == "json"):
        format_name = common.choose_format(format_, as_json)
        common.require_html_file(format_name, output)
        common.require_section(section or "", format_name)
        settings = common.load_profile(profile)
        tables = {"by": common.parse_tables(by or ()), "top": top}
        _check_targets(log_to or ())
        cluster = common.choose_cluster(scheduler, scheduler_file, workers)
        _load_analysis()
        part = parse_part(since, until, steps)
        request = replace(
            common.build_request(settings, jobs, cluster),
            history=True,
            part=part,
            leave_unknown=True,
            queued_at_ns=_parse_queued_at(queued_at),
        )
        chosen = common.choose_runs(paths)
        report = _analyze_with_progress_bar(chosen, request)
        to_file = output is not None
        renderer = common.build_renderer(
            format_name, settings, width, no_color, tables, to_file, full, section or ""
        )
        text = renderer.render(report)
        paged = full and format_name in common.PAGED_FORMATS and not to_file
        if paged and common.is_terminal(sys.stdout):
            common.write_paged(text)
        else:
            common.write_result(text, output)
        for target in log_to or ():
            from clusterprof.trackers import log_report

            log_report(report, target)
    if strict:
        common.require_complete_report(report)


def _parse_queued_at(text: str | None) -> int | None:
    """Parse `--queued-at` to ns since 1970; None if it was not given.

    Raises: UsageError for anything but a time.
    """
    from clusterprof.analysis.findings.life import parse_wall_time

    queued_at_ns = None if text is None else parse_wall_time(text)
    if text is not None and queued_at_ns is None:
        raise UsageError(
            f"--queued-at {text!r} is not a time",
            "give seconds since 1970, or a time such as 2026-01-31T12:00:00",
        )
    return queued_at_ns


def _check_targets(targets: Sequence[str]) -> None:
    """Check the values of `--log-to` before anything is analyzed.

    Raises: UsageError for an unknown tracker.
    """
    if targets:
        from clusterprof.trackers import parse_target

        for target in targets:
            parse_target(target)


def _analyze_with_progress_bar(paths: Sequence[Path], request: AnalysisRequest) -> Report:
    from clusterprof.analysis.pipeline import analyze_with_request

    with show_progress_bar() as on_progress:
        return analyze_with_request(paths, replace(request, on_progress=on_progress))


def _load_analysis() -> None:
    """Import the analysis without garbage collection, and exclude its objects from later
    collections.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        import clusterprof.analysis.pipeline
        import clusterprof.output.renderers.base  # noqa: F401
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def parse_plain_arguments(words: Sequence[str]) -> dict[str, Any] | None:
    """Parse the words after `analyze` to arguments of `run_analysis`; None when typer has to
    parse them.
    """
    is_unusual = any(word[:1] == "-" != word[1:2] and word != "-o" for word in words)
    if is_unusual or "" in words:  # bundled or joined short options, help, "-"
        return None
    parser = Parser("clusterprof analyze", add_help=False, argument_default=argparse.SUPPRESS)
    for option in ANALYZE_OPTIONS:
        parser.add_option(option)
    try:
        values, paths = parser.parse_known_args(words)
    except UsageError:
        return None
    arguments = vars(values)
    if any(path.startswith("-") for path in paths) or "" in arguments.values():
        return None
    return {"paths": [Path(path) for path in paths] or None, **arguments}
