"""`clusterprof export RUN... --to FORMAT`: for other programs; of foreign traces, a recording."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clusterprof.cli import common

if TYPE_CHECKING:
    from clusterprof.exporters.base import Exporter

_OF_TABLES = ("parquet", "csv", "json")
_RECORDING = "recording"


def export(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help=common.RUN_HELP)],
    to: Annotated[
        str,
        typer.Option("--to", help="perfetto, parquet, csv, json, openmetrics, otlp, recording."),
    ],
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("-o", "--output", help="Write to this file, or into this FOLDER/."),
    ] = None,
    tables: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--table", help="Only this table (parquet, csv, json). Repeatable."),
    ] = None,
    signals: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--signal", help="Only samples like this: 'gpu.*'. Repeatable."),
    ] = None,
    endpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Where OTLP goes: http://HOST:4318."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that OTLP may take.")] = 10.0,
    profile: Annotated[
        Optional[str], typer.Option(help="Shipped profile, or a file.")  # noqa: UP045
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the nodes.")] = 1,
) -> None:
    """Write a recording for other programs: a trace, tables, or metrics."""
    if to == _RECORDING:
        _refuse_what_does_not_fit(to, tables, signals, endpoint, output)
        _as_recording(run, output, jobs)
        return
    from clusterprof.engine.local import analysing
    from clusterprof.exporters.base import run_of
    from clusterprof.exporters.output import Output

    exporter = _exporter(to, tables or [], signals or [], endpoint, timeout)
    _refuse_what_does_not_fit(to, tables, signals, endpoint, output)
    path = Path(output) if output is not None else None
    folder = output is not None and output.endswith(os.sep)
    target = Output(path, sys.stdout.buffer, folder)
    exporter.check(target)
    limits, facts = common.site_of(common.load_profile(profile))
    with analysing(
        *run, jobs=jobs, limits=limits, facts=facts, history=True, leave_unknown=True
    ) as made:
        for note in exporter.export(run_of(made), target):
            common.print_error(note)


def _as_recording(files: Sequence[Path], output: str | None, jobs: int) -> None:
    """Write what foreign files say as a recording, and say what was read and left out."""
    from clusterprof.engine.imported import Brought, foreign_files, write_all
    from clusterprof.errors import NoRecording, UsageError

    if output is None:
        raise UsageError("--to recording needs a folder to write to", "add: -o FOLDER")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: there is something already", "give a folder that is new")
    found, left_out = foreign_files(files)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    accounts = write_all(found, folder, jobs)
    for note in (*Brought((), accounts).notes, *left_out.notes):
        common.print_error(note)
    if not any(folder.iterdir()):
        folder.rmdir()
        raise NoRecording("nothing in these files could be used", "docs/importers.md says what can")


def _exporter(
    to: str, tables: Sequence[str], signals: Sequence[str], endpoint: str | None, timeout_s: float
) -> Exporter:
    from clusterprof.errors import UsageError
    from clusterprof.exporters.registry import EXPORTERS
    from clusterprof.profiles import nearest

    names = [*(exporter.name for exporter in EXPORTERS), _RECORDING]
    if to not in names:
        raise UsageError(f"--to {to!r} is unknown{nearest(to, names)}")
    chosen: Any = next(exporter for exporter in EXPORTERS if exporter.name == to)
    if to in _OF_TABLES:
        made: Exporter = chosen(tables, signals)
    elif to == "otlp":
        if endpoint is None:
            raise UsageError("--to otlp needs to know where", "--endpoint http://HOST:4318")
        made = chosen(endpoint, timeout_s, os.environ)
    else:
        made = chosen()
    return made


def _refuse_what_does_not_fit(
    to: str,
    tables: Sequence[str] | None,
    signals: Sequence[str] | None,
    endpoint: str | None,
    output: str | None,
) -> None:
    from clusterprof.errors import UsageError

    if (tables or signals) and to not in _OF_TABLES:
        option = "--table" if tables else "--signal"
        raise UsageError(f"{option} is for {', '.join(_OF_TABLES)}, not for {to}")
    if endpoint is not None and to != "otlp":
        raise UsageError(f"--endpoint is for otlp, not for {to}")
    if output is not None and to == "otlp":
        raise UsageError("--to otlp sends to --endpoint and writes no file")
