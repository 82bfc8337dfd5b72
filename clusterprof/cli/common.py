"""What several commands share: where results go, how a report is dressed, how an error is told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof.errors import ClusterprofError, PartialRecording, UsageError

if TYPE_CHECKING:
    from clusterprof.findings import Report
    from clusterprof.profiles import Profile
    from clusterprof.renderers.base import Renderer

SCHEMA_VERSION = 1
FORMATS = ("terminal", "plain", "json", "markdown", "html")
RUN_HELP = "The recording, or nodes' folders of it kept apart: host1/ host2/"


def print_error(message: str, remedy: str = "") -> None:
    """Write one line of what happened, and one of what to do, to stderr."""
    from clusterprof.renderers.text_safety import safe_text

    print(f"clusterprof: {safe_text(message, 2000)}", file=sys.stderr)
    if remedy:
        print(f"  {safe_text(remedy, 2000)}", file=sys.stderr)


def write_result(text: str, output: Path | None) -> None:
    """Write a result to stdout or into a file; a letter that stdout lacks is spelled out."""
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise UsageError(f"cannot write {output}: {reason}") from None
        return
    write_line(text.removesuffix("\n"))
    sys.stdout.flush()


def write_line(text: str) -> None:
    """Write one line to stdout; a letter that its encoding lacks is spelled out."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


@contextmanager
def errors_also_as_json(wanted: bool) -> Iterator[None]:
    """Keep stdout one JSON document even when the command fails."""
    try:
        yield
    except ClusterprofError as error:
        if wanted:
            from clusterprof.renderers.text_safety import safe_text

            document = {
                "format": "clusterprof-error",
                "schema_version": SCHEMA_VERSION,
                "exit_code": error.exit_code,
                "message": safe_text(error.message, 2000),
                "remedy": safe_text(error.remedy, 2000),
            }
            write_result(json.dumps(document, indent=2) + "\n", None)
        raise


def chosen_format(format_: str, as_json: bool, known: tuple[str, ...] = FORMATS) -> str:
    """Return the word after `--format`, or json for `--json`; raise UsageError for others."""
    if as_json:
        return "json"
    if format_ not in known:
        from clusterprof.profiles import nearest

        raise UsageError(f"unknown format {format_!r}{nearest(format_, known)}")
    return format_


def refuse_terminal(format_: str, output: Path | None) -> None:
    """Raise UsageError for a page that would go to a terminal, where nobody can read it."""
    if format_ == "html" and output is None and sys.stdout.isatty():
        raise UsageError("a page is of no use in a terminal", "add: -o report.html")


def renderer_for(format_: str, profile: Profile, width: int, no_color: bool) -> Renderer:
    """Build the renderer a format names, with the options that suit it."""
    from clusterprof.renderers.registry import RENDERERS
    from clusterprof.renderers.terminal import Terminal

    chosen = next(renderer for renderer in RENDERERS if renderer.name == format_)
    options: dict[str, Any] = {}
    if format_ != "json":
        facts = profile.section("facts")
        options = {
            "gpu_price_per_hour": facts["gpu_price_per_hour"],
            "currency": facts["currency"],
        }
    if chosen is Terminal:
        options |= {"width": width or columns(), "color": not no_color and _has_color()}
    return chosen(**options)


def analyse_with(paths: Sequence[Path], profile: Profile, jobs: int) -> Report:
    """Analyse a recording, in one place or several, with the limits and facts of a profile."""
    import dataclasses

    from clusterprof.engine.limits import known_limits
    from clusterprof.engine.local import analyze
    from clusterprof.profiles import bind_limits

    bound = bind_limits(profile, known_limits())
    limits = {cause: dataclasses.asdict(bound[cause]) for cause in profile.section("limits")}
    return analyze(*paths, jobs=jobs, limits=limits, facts=profile.section("facts"))


def insist_on_all(report: Report) -> None:
    """Raise PartialRecording when something of the recording could not be read (`--strict`)."""
    damaged = sum(node.damaged_bytes for node in report.nodes)
    dropped = sum(node.dropped_spans for node in report.nodes)
    lost = sum(blind.kind == "lost" for blind in report.blinds)
    if damaged or dropped or lost:
        raise PartialRecording(
            f"partial: {damaged:,} bytes unreadable, {dropped:,} spans dropped,"
            f" {lost:,} {'thing' if lost == 1 else 'things'} lost; the report is of the rest"
        )


def load_profile(name: str | None) -> Profile:
    """Return the profile that the command line, the environment or the folder chooses."""
    from clusterprof.profiles import load

    return load(name, os.environ, Path.cwd())


def columns() -> int:
    """Return the width of the terminal; 80 when there is none."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


def _has_color() -> bool:
    """NO_COLOR (https://no-color.org) beats FORCE_COLOR; empty means unset."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()
