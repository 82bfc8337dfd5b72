"""`clusterprof export RUN... --to FORMAT`: export for other programs, or import foreign
traces.

`clusterprof dump PATH...`: print any recording, damaged or growing, as JSON lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clusterprof.cli import common
from clusterprof.cli.common import JOBS, PROFILE, OptionalNumber, OptionalText, declare_option

if TYPE_CHECKING:
    from clusterprof.output.exporters.base import Exporter


_TABLE_FORMATS = ("parquet", "csv", "json")
_RECORDING_FORMAT = "recording"
_FORMATS_OF_RECORDS = ("perfetto", *_TABLE_FORMATS)
"""These contain records, which are read on this machine, not only results of the analysis."""
_FORMATS = (
    *("perfetto", "speedscope", "collapsed", "parquet", "csv", "json", "openmetrics", "otlp"),
    "recording",
)

_RUN = typer.Argument(metavar="RUN...", readable=False, help=common.RUN_HELP)
_TO = typer.Option(
    "--to",
    metavar="FORMAT",
    help=f"{', '.join(_FORMATS)}.",
    autocompletion=common.complete_from(_FORMATS),
)


def export(
    run: Annotated[list[Path], _RUN],
    to: Annotated[str, _TO],
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("-o", "--output", metavar="PATH", help="Write to this file or FOLDER/."),
    ] = None,
    tables: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--table", metavar="NAME", help="Only this table (parquet, csv, json). Repeatable."
        ),
    ] = None,
    signals: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--signal",
            metavar="PATTERN",
            help="Only samples of these signals: 'gpu.*'. Repeatable.",
        ),
    ] = None,
    endpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="URL", help="Address of the OTLP receiver: http://HOST:4318."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Timeout of OTLP.")
    ] = 10.0,
    profile: Annotated[OptionalText, declare_option(PROFILE)] = None,
    jobs: Annotated[int, declare_option(JOBS)] = 1,
    scheduler: Annotated[OptionalText, declare_option(common.SCHEDULER)] = None,
    scheduler_file: Annotated[OptionalText, declare_option(common.SCHEDULER_FILE)] = None,
    workers: Annotated[OptionalNumber, declare_option(common.WORKERS)] = None,
) -> None:
    """Write a recording for other programs: trace, tables or metrics."""
    if to == _RECORDING_FORMAT:
        _check_options(to, tables, signals, endpoint, output)
        _export_recording(run, output, jobs)
        return
    from clusterprof.analysis.pipeline import open_analysis
    from clusterprof.output.exporters.base import Output, build_run

    exporter = _build_exporter(to, tables or [], signals or [], endpoint, timeout)
    _check_options(to, tables, signals, endpoint, output)
    path = Path(output) if output is not None else None
    folder = output is not None and output.endswith(os.sep)
    target = Output(path, sys.stdout.buffer, folder)
    exporter.check(target)
    cluster = common.choose_cluster(scheduler, scheduler_file, workers)
    request = replace(
        common.build_request(common.load_profile(profile), jobs, cluster),
        history=True,
        leave_unknown=True,
    )
    with open_analysis(run, request) as analyzed:
        if to in _FORMATS_OF_RECORDS:
            _require_visible_folders(analyzed.folders)
        for note in exporter.export(build_run(analyzed), target):
            common.print_error(note)


def _require_visible_folders(folders: Sequence[Path]) -> None:
    """Check that this machine sees the recordings, too.

    Raises: NoRecording when only the workers of a cluster do.
    """
    from clusterprof.errors import NoRecording

    for folder in folders:
        if not folder.exists():
            raise NoRecording(
                f"{folder}: only workers see this recording, and this export reads its records",
                "export where the recording can be read, or another format: openmetrics, otlp",
            )


def _export_recording(files: Sequence[Path], output: str | None, jobs: int) -> None:
    """Write foreign files as a recording, and report what was read and left out."""
    from clusterprof.analysis.inputs.foreign import (
        ImportedInputs,
        import_files,
        select_foreign_files,
    )
    from clusterprof.errors import NoRecording, UsageError

    if output is None:
        raise UsageError("--to recording needs a folder to write to", "add: -o FOLDER")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: the folder is not empty", "give a new folder")
    foreign, left_out = select_foreign_files(files)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    accounts = import_files(foreign, folder, jobs)
    for note in (*ImportedInputs((), accounts).notes, *left_out.notes):
        common.print_error(note)
    if not any(folder.iterdir()):
        folder.rmdir()
        raise NoRecording(
            "nothing in these files could be used", "docs/importers lists the supported formats"
        )


def _build_exporter(
    to: str, tables: Sequence[str], signals: Sequence[str], endpoint: str | None, timeout_s: float
) -> Exporter:
    from clusterprof.config import format_suggestion
    from clusterprof.errors import UsageError
    from clusterprof.output.exporters.registry import EXPORTERS

    names = [*(exporter.name for exporter in EXPORTERS), _RECORDING_FORMAT]
    if to not in names:
        raise UsageError(f"--to {to!r} is unknown{format_suggestion(to, names)}")
    exporter_type: Any = next(exporter for exporter in EXPORTERS if exporter.name == to)
    if to in _TABLE_FORMATS:
        selected: Exporter = exporter_type(tables, signals)
    elif to == "otlp":
        if endpoint is None:
            raise UsageError("--to otlp needs an address", "add: --endpoint http://HOST:4318")
        selected = exporter_type(endpoint, timeout_s, os.environ)
    else:
        selected = exporter_type()
    return selected


def _check_options(
    to: str,
    tables: Sequence[str] | None,
    signals: Sequence[str] | None,
    endpoint: str | None,
    output: str | None,
) -> None:
    from clusterprof.errors import UsageError

    if (tables or signals) and to not in _TABLE_FORMATS:
        option = "--table" if tables else "--signal"
        raise UsageError(f"{option} is for {', '.join(_TABLE_FORMATS)}, not for {to}")
    if endpoint is not None and to != "otlp":
        raise UsageError(f"--endpoint is for otlp, not for {to}")
    if output is not None and to == "otlp":
        raise UsageError("--to otlp sends to --endpoint and writes no file")


def dump(
    path: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            readable=False,
            help="Recordings, folders of nodes, or files in them.",
        ),
    ],
) -> None:
    """Print the contents of a recording as JSON lines."""
    from clusterprof.trace.dump import export_records as lines_of

    for line in lines_of(*path):
        common.write_line(line)
