"""What several commands share: where results go, how a report is dressed, how an error is told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from clusterprof.errors import ClusterprofError, OutputFailed, PartialRecording, UsageError

if TYPE_CHECKING:
    from clusterprof.findings import Report
    from clusterprof.profiles import Profile
    from clusterprof.renderers.base import Renderer

SCHEMA_VERSION = 1
FORMATS = ("terminal", "plain", "json", "markdown", "html", "openmetrics")
_FOR_PEOPLE = ("terminal", "plain", "markdown")
_NONE: Mapping[str, Any] = {}
RUN_HELP = (
    "The recording, or nodes' folders of it kept apart: host1/ host2/; or traces of other tools"
    " (docs/importers.md)"
)


def print_error(message: str, remedy: str = "") -> None:
    """Write one line of what happened, and one of what to do, to stderr."""
    from clusterprof.renderers.text_safety import safe_text

    if sys.stderr is None:
        return  # closed: print would take stdout instead
    lines = [f"clusterprof: {safe_text(message, 2000)}"]
    lines += [f"  {safe_text(remedy, 2000)}"] if remedy else []
    with suppress(OSError):  # then nobody can be told
        print("\n".join(lines), file=sys.stderr, flush=True)


def write_result(text: str, output: Path | None) -> None:
    """Write a result to stdout, or into a file that is whole or as it was (see `cli.output`)."""
    from clusterprof.cli.output import flush_stdout
    from clusterprof.wholefile import write_file

    if output is not None:
        write_file(output, text.encode("utf-8", "backslashreplace"))
        return
    write_line(text.removesuffix("\n"))
    flush_stdout()


def write_line(text: str) -> None:
    """Write one line to stdout; a letter that its encoding lacks is spelled out."""
    from clusterprof.cli.output import write_stdout

    write_stdout(text + "\n")


def json_text(document: Any) -> str:
    """Return a document as JSON (RFC 8259) of which `jq -r` prints nothing that controls."""
    return json.dumps(_safe(document), indent=2, allow_nan=False) + "\n"


def _safe(value: Any) -> Any:
    from clusterprof.renderers.text_safety import safe_text

    if isinstance(value, str):
        return safe_text(value, 4096)
    if isinstance(value, dict):
        return {_safe(key): _safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(item) for item in value]
    return value


@contextmanager
def errors_also_as_json(wanted: bool) -> Iterator[None]:
    """Keep stdout one JSON document even when the command fails."""
    try:
        yield
    except ClusterprofError as error:
        if wanted and not isinstance(error, OutputFailed):
            from clusterprof.renderers.text_safety import safe_text

            document = {
                "format": "clusterprof-error",
                "schema_version": SCHEMA_VERSION,
                "exit_code": error.exit_code,
                "message": safe_text(error.message, 2000),
                "remedy": safe_text(error.remedy, 2000),
            }
            with suppress(OutputFailed):  # the first error counts
                write_result(json_text(document), None)
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
    if format_ == "html" and output is None and sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("a page is of no use in a terminal", "add: -o report.html")


def chosen_tables(by: Iterable[str]) -> tuple[str, ...]:
    """Return the words after `--by`, each once; raise UsageError for one that is none."""
    from clusterprof.profiles import nearest
    from clusterprof.renderers.by import BY

    words = [word for some in by for word in some.split(",") if word]
    for word in words:
        if word not in BY:
            raise UsageError(f"unknown table {word!r}{nearest(word, BY)}")
    return tuple(dict.fromkeys(words))


def renderer_for(
    format_: str,
    profile: Profile,
    width: int,
    no_color: bool,
    tables: Mapping[str, Any] = _NONE,
    to_file: bool = False,
) -> Renderer:
    """Build the renderer a format names, with the options that suit it.

    `tables`: the options `by` and `top` of those for people; `to_file`: in UTF-8, whatever stdout
    can write.
    """
    from clusterprof.renderers.registry import renderer_named
    from clusterprof.renderers.sparks import BARS

    chosen = renderer_named(format_)
    options: dict[str, Any] = {}
    if format_ not in ("json", "openmetrics"):
        facts = profile.section("facts")
        options = {
            "gpu_price_per_hour": facts["gpu_price_per_hour"],
            "currency": facts["currency"],
        }
    if format_ == "terminal":
        letters = "utf-8" if to_file else getattr(sys.stdout, "encoding", None)
        options |= {
            "width": width or columns(),
            "color": not no_color and not to_file and has_color(),
            "plain_letters": not _can_write(BARS, letters),
        }
    if chosen.name in _FOR_PEOPLE:
        options |= tables
    return chosen(**options)


def analyse_with(paths: Sequence[Path], profile: Profile, jobs: int, **more: Any) -> Report:
    """Analyse a recording, in one place or several, with the limits and facts of a profile.

    `more` are options of `engine.local.analyze`.
    """
    from clusterprof.engine.local import analyze

    limits, facts = site_of(profile)
    return analyze(*paths, jobs=jobs, limits=limits, facts=facts, **more)


def site_of(profile: Profile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a profile says to an analysis: the limits of causes, and facts of the site."""
    import dataclasses

    from clusterprof.engine.limits import known_limits
    from clusterprof.profiles import bind_limits

    bound = bind_limits(profile, known_limits())
    limits = {cause: dataclasses.asdict(bound[cause]) for cause in profile.section("limits")}
    return limits, profile.section("facts")


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


def _can_write(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def lines() -> int:
    """Return how many lines a screen has; 50 when there is no terminal."""
    import shutil

    return shutil.get_terminal_size((80, 50)).lines


def has_color() -> bool:
    """NO_COLOR (https://no-color.org) beats FORCE_COLOR; empty means unset."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(sys.stdout)


def is_terminal(stream: TextIO | None) -> bool:
    """True for an open stream that is a terminal."""
    return stream is not None and stream.isatty()
