"""`clusterprof fleet RUN... --db FILE`: keep a ledger over the jobs of a cluster, and show it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from clusterprof.cli import common
from clusterprof.cli.common import JOBS, NO_COLOR, PROFILE, WIDTH, OptionalText, declare_option

if TYPE_CHECKING:
    from clusterprof.config import Profile
    from clusterprof.fleet.database import Ledger, Price
    from clusterprof.fleet.intake import Intake
    from clusterprof.fleet.queries import Choice

_FORMATS = ("terminal", "plain", "markdown", "json", "html")
_EXPORT_FORMATS = ("parquet", "csv")
_MIN_INTERVAL_S = 1.0
_MAX_NAMED = 10

_Run = typer.Argument(
    metavar="[RUN...]",
    readable=False,
    help="Recordings, reports written by `analyze --json`, or folders of them. None: show the"
    " ledger as it is.",
)
_Db = typer.Option("--db", metavar="FILE", help="The ledger, a SQLite file; created if missing.")
_Watch = typer.Option(
    metavar="DIR",
    readable=False,
    help="Search this folder again and again until Ctrl-C or SIGTERM. Repeatable.",
)
_Interval = typer.Option("--every", metavar="TIME", help="Time between two searches of --watch.")
_Format = typer.Option(
    "--format",
    metavar="FORMAT",
    help=f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}.",
    autocompletion=common.complete_from(_FORMATS),
)
_To = typer.Option(
    "--to",
    metavar="FORMAT",
    help="Export the tables instead: parquet or csv, to -o FOLDER/.",
    autocompletion=common.complete_from(_EXPORT_FORMATS),
)
_Table = typer.Option(
    "--table", metavar="NAME", help="With --to: only jobs, causes, nodes or culprits. Repeatable."
)
_Output = typer.Option(
    "-o", "--output", metavar="PATH", help="Write to this file; with --to, or FOLDER/."
)
_Since = typer.Option(
    metavar="DATE", help="Only jobs that started then or later (2026-11-28, UTC)."
)
_Until = typer.Option(metavar="DATE", help="Only jobs that started before.")
_User = typer.Option(metavar="NAME", help="Only jobs of this user.")
_Account = typer.Option(metavar="NAME", help="Only jobs of this account.")
_Top = typer.Option(min=1, metavar="N", help="Rows of a table.")
_Again = typer.Option("--reread", help="Read all runs again, including unchanged ones.")
_Strict = typer.Option("--strict", help="Exit with 6 if any run could not be read.")
_Texts = Optional[list[str]]  # noqa: UP045
_Paths = Optional[list[Path]]  # noqa: UP045


def fleet(
    run: Annotated[_Paths, _Run] = None,
    db: Annotated[OptionalText, _Db] = None,
    watch: Annotated[_Paths, _Watch] = None,
    interval: Annotated[str, _Interval] = "1min",
    format_: Annotated[str, _Format] = "terminal",
    as_json: Annotated[bool, declare_option(common.AS_JSON)] = False,
    output: Annotated[OptionalText, _Output] = None,
    to: Annotated[OptionalText, _To] = None,
    tables: Annotated[_Texts, _Table] = None,
    since: Annotated[OptionalText, _Since] = None,
    until: Annotated[OptionalText, _Until] = None,
    user: Annotated[OptionalText, _User] = None,
    account: Annotated[OptionalText, _Account] = None,
    top: Annotated[int, _Top] = 20,
    again: Annotated[bool, _Again] = False,
    strict: Annotated[bool, _Strict] = False,
    profile: Annotated[OptionalText, declare_option(PROFILE)] = None,
    jobs: Annotated[int, declare_option(JOBS)] = 1,
    width: Annotated[int, declare_option(WIDTH)] = 0,
    no_color: Annotated[bool, declare_option(NO_COLOR)] = False,
) -> None:
    """Keep a ledger over the jobs of a cluster: what they lost, to which causes, on which nodes.

    Adds runs that are new or have changed, then shows the sums over all jobs.
    """
    from clusterprof.errors import PartialRecording

    with common.report_errors_as_json(as_json or format_ == "json"):
        view = _View(format_, as_json, output, to, tables or [], top, width, no_color)
        view.check()
        path = _require_db(db)
        choice = _build_choice(since, until, user, account)
        settings = common.load_profile(profile)
        interval_s = _parse_interval(interval)
        failed: list[tuple[str, str]] = []
        with _open(path, bool(run or watch), settings) as (ledger, price):
            runs = _Runs(settings, jobs, again, price)
            if run:
                failed += runs.read(ledger, run).failed
            if watch:
                _watch(ledger, runs, watch, interval_s, lambda: view.show(ledger, choice))
            else:
                view.show(ledger, choice)
        if strict and failed:
            raise PartialRecording(f"partial: {len(failed):,} of the runs could not be read")


def _require_db(db: str | None) -> Path:
    from clusterprof.errors import UsageError

    if not db:
        raise UsageError("fleet needs the file of its ledger", "add: --db fleet.db")
    return Path(db)


def _build_choice(
    since: str | None, until: str | None, user: str | None, account: str | None
) -> Choice:
    from clusterprof.fleet.queries import Choice, parse_date

    return Choice(
        None if since is None else parse_date(since, "--since"),
        None if until is None else parse_date(until, "--until"),
        user,
        account,
    )


def _parse_interval(text: str) -> float:
    from clusterprof.errors import UsageError
    from clusterprof.units import parse_quantity

    try:
        value, unit = parse_quantity(text)
    except ValueError as error:
        raise UsageError(f"--every: {error}", "write 30s, 1min or 1h") from None
    seconds = value / 1e9 if unit == "ns" else value
    if unit not in ("ns", "") or seconds < _MIN_INTERVAL_S:
        raise UsageError(f"--every {text!r} is no time of a second or more", "write 30s or 1min")
    return seconds


@contextmanager
def _open(path: Path, is_written: bool, settings: Profile) -> Iterator[tuple[Ledger, Price | None]]:
    """Open the ledger; jobs that have no price yet get that of the profile."""
    from clusterprof.fleet.database import Price, open_ledger

    facts = settings.section("facts")
    per_hour = facts["gpu_price_per_hour"]
    price = None if per_hour is None else Price(per_hour, facts["currency"])
    has_price = price is not None and path.exists()
    with open_ledger(path, is_written or has_price) as ledger:
        if price is not None:
            ledger.set_missing_prices(price)
        yield ledger, price


class _Runs:
    """Reads runs into a ledger."""

    def __init__(self, settings: Profile, jobs: int, again: bool, price: Price | None) -> None:
        self._settings, self._jobs = settings, jobs
        self._again, self._price = again, price

    def read(self, ledger: Ledger, paths: Sequence[Path], is_watched: bool = False) -> Intake:
        """Read the runs at some paths, and say on stderr what happened."""
        from clusterprof.fleet.intake import find_runs, format_intake, update_ledger

        intake = update_ledger(
            ledger,
            find_runs(paths),
            common.build_request(self._settings, self._jobs),
            self._price,
            is_watched,
            self._again and not is_watched,
        )
        for _, why in intake.failed[:_MAX_NAMED]:
            common.print_note(why)
        if not is_watched or intake.added or intake.replaced or intake.failed:
            common.print_note(f"{ledger.path}: {format_intake(intake)}")
        return intake


def _watch(
    ledger: Ledger, runs: _Runs, folders: Sequence[Path], interval_s: float, show: Any
) -> None:
    """Read new and changed runs until a signal comes; show the ledger when it changed."""
    stop = threading.Event()

    def end(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second signal does not wait for the analysis

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    is_shown = False
    while not stop.is_set():
        intake = runs.read(ledger, folders, is_watched=True)
        if intake.added or intake.replaced or not is_shown:
            show()
            is_shown = True
        stop.wait(interval_s)


class _View:
    """Shows a ledger as the command line asks for."""

    def __init__(
        self,
        format_: str,
        as_json: bool,
        output: str | None,
        to: str | None,
        tables: list[str],
        top: int,
        width: int,
        no_color: bool,
    ) -> None:
        self._format = common.choose_format(format_, as_json, _FORMATS)
        self._output, self._to, self._tables = output, to, tables
        self._top, self._width, self._no_color = top, width, no_color

    def check(self) -> None:
        """Check that the options fit together.

        Raises: UsageError when they do not.
        """
        from clusterprof.config import format_suggestion
        from clusterprof.errors import UsageError

        if self._to is not None and self._to not in _EXPORT_FORMATS:
            hint = format_suggestion(self._to, _EXPORT_FORMATS)
            raise UsageError(f"--to {self._to!r} is unknown{hint}")
        if self._tables and self._to is None:
            raise UsageError("--table is for an export", "add: --to parquet or --to csv")
        if self._to is None:
            common.require_html_file(self._format, None if self._output is None else Path("x"))

    def show(self, ledger: Ledger, choice: Choice) -> None:
        """Write the ledger to the output."""
        from clusterprof.fleet.queries import summarize_ledger

        if self._to is not None:
            self._export(ledger, self._to)
            return
        summary = summarize_ledger(ledger, choice, self._top)
        output = None if self._output is None else Path(self._output)
        common.write_result(self._render(summary), output)

    def _render(self, summary: Any) -> str:
        from clusterprof.fleet.outputs import (
            render_fleet_json,
            render_fleet_markdown,
            render_fleet_text,
        )
        from clusterprof.fleet.sections import build_fleet_document

        if self._format == "html":
            from clusterprof.fleet.page import render_fleet_page

            return render_fleet_page(summary, self._top)
        if self._format == "json":
            return render_fleet_json(summary)
        document = build_fleet_document(summary, self._top)
        if self._format == "markdown":
            return render_fleet_markdown(document)
        is_plain = self._format == "plain" or self._no_color or self._output is not None
        columns = self._width or common.measure_terminal_columns()
        return render_fleet_text(document, columns, not is_plain and common.has_color())

    def _export(self, ledger: Ledger, to: str) -> None:
        from clusterprof.fleet.outputs import export_ledger
        from clusterprof.output.exporters.base import Output

        is_folder = self._output is not None and self._output.endswith(os.sep)
        path = None if self._output is None else Path(self._output)
        export_ledger(ledger, to, Output(path, sys.stdout.buffer, is_folder), self._tables)
