"""Share helpers of several commands: output, renderers, error messages, analysis with a
profile.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TextIO

from clusterprof.agent.options import Option
from clusterprof.errors import ClusterprofError, OutputFailed, PartialRecording, UsageError

if TYPE_CHECKING:
    from clusterprof.analysis.pipeline import AnalysisRequest
    from clusterprof.analysis.tasks.base import Cluster
    from clusterprof.config import Profile
    from clusterprof.output.renderers.base import Renderer
    from clusterprof.report.model import Report

OptionalText = Optional[str]  # noqa: UP045 - typer evaluates it
OptionalNumber = Optional[int]  # noqa: UP045
SCHEMA_VERSION = 1
FORMATS = ("terminal", "plain", "brief", "json", "markdown", "html", "openmetrics")
_TABLE_FORMATS = ("terminal", "plain", "markdown")
PAGED_FORMATS = ("terminal", "plain", "markdown")
"""Formats whose full text goes through a pager in a terminal."""
_FULL_FORMATS = ("terminal", "plain", "markdown", "json", "html")
"""Formats that `--full` completes: with all sections, or with every rank above 512 ranks."""
_NO_OPTIONS: Mapping[str, Any] = {}
RUN_HELP = (
    "A recording, the folders of its nodes (host1/ host2/), or traces of other tools"
    " (docs/importers)"
)


PROFILE = Option(("--profile",), "NAME", "Name of a shipped profile, or a file.")
JOBS = Option(("--jobs",), "N", "Number of processes that analyze the nodes.", int, minimum=1)
SCHEDULER = Option(
    ("--scheduler",), "ADDRESS", "Analyze on the Dask cluster of this scheduler (docs/scale.md)."
)
SCHEDULER_FILE = Option(
    ("--scheduler-file",), "FILE", "The same, with the file that the scheduler has written."
)
WORKERS = Option(
    ("--workers",), "N", "Analyze on N Dask workers started on this machine.", int, minimum=1
)
OUTPUT = Option(("-o", "--output"), "FILE", "Write to this file.", Path)
WIDTH = Option(("--width",), "N", "Columns of the output; 0 = terminal width.", int, minimum=0)
NO_COLOR = Option(("--no-color",), None, "Print without colors.", bool, "store_true")
AS_JSON = Option(("--json",), None, "Same as --format json.", bool, "store_true", "as_json")


def declare_option(option: Option) -> Any:
    """Return the declaration of an option for typer."""
    import typer

    flags = [] if option.action == "switch" else option.flags  # typer adds the `--no-` form
    words = option.words or (option.metavar or "").split("|")
    return typer.Option(
        *flags,
        metavar=option.metavar,
        help=option.help,
        min=option.minimum,
        autocompletion=complete_from(words) if len(words) > 1 else None,
    )


def complete_from(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Make the function that completes a value in a shell: one of the words."""
    known = tuple(words)

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


def print_error(message: str, remedy: str = "") -> None:
    """Print what happened, and on a second line what to do, to stderr."""
    from clusterprof.output.renderers.text.safety import escape_text

    if sys.stderr is None:
        return  # stderr is closed: print would write to stdout instead
    lines = [f"clusterprof: {escape_text(message, 2000)}"]
    lines += [f"  {escape_text(remedy, 2000)}"] if remedy else []
    with suppress(OSError):  # stderr cannot be written either
        print("\n".join(lines), file=sys.stderr, flush=True)


def write_result(text: str, output: Path | None) -> None:
    """Write a result to stdout, or atomically into a file (see cli.app)."""
    from clusterprof.cli.app import write_pending_stdout
    from clusterprof.util.atomic_file import write_file

    if output is not None:
        write_file(output, text.encode("utf-8", "backslashreplace"))
        return
    write_line(text.removesuffix("\n"))
    write_pending_stdout()


def write_line(text: str) -> None:
    """Write one line to stdout; characters its encoding lacks are escaped."""
    from clusterprof.cli.app import write_stdout

    write_stdout(text + "\n")


def format_json(document: Any) -> str:
    """Format a document as JSON (RFC 8259) whose strings contain no control characters."""
    return json.dumps(_escape_values(document), indent=2, allow_nan=False) + "\n"


def _escape_values(value: Any) -> Any:
    from clusterprof.output.renderers.text.safety import escape_text

    if isinstance(value, str):
        return escape_text(value, 4096)
    if isinstance(value, dict):
        return {_escape_values(key): _escape_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_values(item) for item in value]
    return value


@contextmanager
def report_errors_as_json(wanted: bool) -> Iterator[None]:
    """Keep stdout one JSON document even when the command fails."""
    try:
        yield
    except ClusterprofError as error:
        if wanted and not isinstance(error, OutputFailed):
            from clusterprof.output.renderers.text.safety import escape_text

            document = {
                "format": "clusterprof-error",
                "schema_version": SCHEMA_VERSION,
                "exit_code": error.exit_code,
                "message": escape_text(error.message, 2000),
                "remedy": escape_text(error.remedy, 2000),
            }
            with suppress(OutputFailed):  # the first error counts
                write_result(format_json(document), None)
        raise


def choose_format(format_: str, as_json: bool, known: tuple[str, ...] = FORMATS) -> str:
    """Return the value of `--format`, or json for `--json`.

    Raises: UsageError for an unknown format.
    """
    if as_json:
        return "json"
    if format_ not in known:
        from clusterprof.config import format_suggestion

        raise UsageError(f"unknown format {format_!r}{format_suggestion(format_, known)}")
    return format_


def require_html_file(format_: str, output: Path | None) -> None:
    """Check that an HTML page does not go to a terminal.

    Raises: UsageError when it would.
    """
    if format_ == "html" and output is None and sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("an HTML page cannot be shown in a terminal", "add: -o report.html")


def parse_tables(options: Iterable[str]) -> tuple[str, ...]:
    """Parse the values of `--by` to table names, without duplicates.

    Raises: UsageError for an unknown table.
    """
    from clusterprof.config import format_suggestion
    from clusterprof.output.renderers.text.tables import TABLE_NAMES

    words = [word for option in options for word in option.split(",") if word]
    for word in words:
        if word not in TABLE_NAMES:
            raise UsageError(f"unknown table {word!r}{format_suggestion(word, TABLE_NAMES)}")
    return tuple(dict.fromkeys(words))


def find_newest_recording(folder: Path) -> Path:
    """Find the most recently written recording in a folder or in its `clusterprof-out`.

    Raises: NoRecording when there is none.
    """
    from clusterprof.agent.options import DEFAULT_OUT
    from clusterprof.errors import NoRecording
    from clusterprof.trace.reader import list_node_folders, list_recordings_inside, read_write_time

    newest, newest_path = -1.0, None
    nearby = [
        folder,
        *list_recordings_inside(folder),
        *list_recordings_inside(folder / DEFAULT_OUT),
    ]
    inside = [path for near in nearby[1:] for path in list_recordings_inside(near)]
    for path in (*nearby, *inside):
        try:
            written_at = max(map(read_write_time, list_node_folders(path)))
        except NoRecording:
            continue
        if written_at > newest:
            newest, newest_path = written_at, path
    if newest_path is None:
        raise NoRecording(
            f"no recording was given, and none is in this folder or in its {DEFAULT_OUT}",
            "record a job with: clusterprof record python train.py; or give the folder of one",
        )
    return newest_path if newest_path == folder else newest_path.relative_to(folder)


def choose_runs(paths: Sequence[Path] | None) -> Sequence[Path]:
    """Return the recordings to read: those given, else the newest, which is named on stderr.

    Recordings of other jobs inside the given one are named, too: they are not read.
    Raises: NoRecording when none is given and none is near.
    """
    from clusterprof.errors import NoRecording
    from clusterprof.trace.reader import list_node_folders, list_recordings_inside

    if not paths:
        newest = find_newest_recording(Path.cwd())
        print_note(f"no recording was given: this is the newest, {newest}")
        return [newest]
    for path in paths:
        try:
            inside = list_recordings_inside(path) if list_node_folders(path) else []
        except (NoRecording, OSError):
            continue  # reported where the path is read
        if inside:
            jobs = "another job" if len(inside) == 1 else f"{len(inside):,} other jobs"
            print_note(f"{path} also holds {jobs}, not shown here; the newest is {inside[0]}")
    return paths


def print_note(text: str) -> None:
    """Print one line to stderr that does not belong to the result."""
    print_error(text)


def require_section(name: str, format_: str) -> None:
    """Require that `--section` names a section, and that the format has sections.

    Raises: UsageError for an unknown name or another format.
    """
    if not name:
        return
    from clusterprof.output.renderers.terminal_tables import SECTION_NAMES

    if name not in SECTION_NAMES:
        raise UsageError(f"unknown section {name!r}", f"choose from: {', '.join(SECTION_NAMES)}")
    if format_ != "terminal":
        raise UsageError("--section applies to --format terminal only", "use --full instead")


def write_paged(text: str) -> None:
    """Write a text to the terminal through the pager that PAGER names; `less` by default."""
    import pydoc

    pager = os.environ.get("PAGER", "less -FRX")
    if not pager or pager == "cat":
        sys.stdout.write(text)
    else:
        pydoc.pipepager(text, pager)


def build_renderer(
    format_: str,
    profile: Profile,
    width: int,
    no_color: bool,
    tables: Mapping[str, Any] = _NO_OPTIONS,
    to_file: bool = False,
    full: bool = False,
    section: str = "",
) -> Renderer:
    """Build the renderer of a format, with the options that apply to it.

    tables: the options `by` and `top` of the readable formats. to_file: the output is
    UTF-8, whatever stdout can encode. full: readable formats have all sections, JSON and
    HTML list all ranks. section: the only section that the terminal format has.
    """
    from clusterprof.output.renderers.base import load_renderer
    from clusterprof.output.renderers.text.trend import BARS

    renderer = load_renderer(format_)
    options: dict[str, Any] = {}
    if format_ not in ("json", "openmetrics"):
        facts = profile.section("facts")
        options = {"gpu_price_per_hour": facts["gpu_price_per_hour"], "currency": facts["currency"]}
    if format_ == "terminal":
        encoding = "utf-8" if to_file else getattr(sys.stdout, "encoding", None)
        options |= {
            "width": width or measure_terminal_columns(),
            "color": not no_color and not to_file and has_color(),
            "plain_letters": not _can_encode(BARS, encoding),
        }
    if renderer.name in _TABLE_FORMATS:
        options |= tables
    if renderer.name in _FULL_FORMATS:
        options["full"] = full
    if format_ == "terminal":
        options["section"] = section
    return renderer(**options)


def build_request(profile: Profile, jobs: int, cluster: Cluster | None = None) -> AnalysisRequest:
    """Build the request of an analysis with the limits and facts of a profile."""
    import dataclasses

    from clusterprof.analysis.detectors.registry import list_limit_classes
    from clusterprof.analysis.pipeline import AnalysisRequest
    from clusterprof.config import build_limits

    bound = build_limits(profile, list_limit_classes())
    limits = {cause: dataclasses.asdict(bound[cause]) for cause in profile.section("limits")}
    request = AnalysisRequest(jobs=jobs, limits=limits, facts=profile.section("facts"))
    return request if cluster is None else dataclasses.replace(request, cluster=cluster)


def choose_cluster(
    scheduler: str | None, scheduler_file: str | None, workers: int | None
) -> Cluster | None:
    """Return the Dask cluster that the options name; None = no cluster.

    Raises: UsageError for more than one of them.
    """
    if not (scheduler or scheduler_file or workers):
        return None  # and nothing is imported
    from clusterprof.analysis.tasks.base import build_cluster

    return build_cluster(scheduler, scheduler_file, workers)


def require_complete_report(report: Report) -> None:
    """Require that the whole recording could be read (`--strict`).

    Raises: PartialRecording when bytes, spans or nodes are missing.
    """
    damaged = sum(node.damaged_bytes for node in report.nodes)
    dropped = sum(node.dropped_spans for node in report.nodes)
    lost = sum(blind.kind == "lost" for blind in report.coverage_gaps)
    if damaged or dropped or lost:
        raise PartialRecording(
            f"partial: {damaged:,} bytes unreadable, {dropped:,} spans dropped,"
            f" {lost:,} {'thing' if lost == 1 else 'things'} lost; the report covers the rest"
        )


def load_profile(name: str | None) -> Profile:
    """Load the profile chosen by the command line, the environment or the working directory."""
    from clusterprof.config import load_profile

    return load_profile(name, os.environ, Path.cwd())


def measure_terminal_columns() -> int:
    """Return the width of the terminal; 80 when there is none."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


def _can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def measure_terminal_lines() -> int:
    """Return how many lines a screen has; 50 when there is no terminal."""
    import shutil

    return shutil.get_terminal_size((80, 50)).lines


def has_color() -> bool:
    """Return whether to use color: NO_COLOR (https://no-color.org) overrides FORCE_COLOR;
    empty = unset.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(sys.stdout)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether an open stream is a terminal."""
    return stream is not None and stream.isatty()
