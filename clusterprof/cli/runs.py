"""Runs as a command line names them: recordings to analyse, or reports that were stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.cli import common
from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.findings import Report
    from clusterprof.profiles import Profile

RUN_HELP = "The recording, nodes' folders of it, or the report that `analyze --json` made of it"


def report_of(paths: Sequence[Path], profile: Profile, jobs: int) -> Report:
    """Return the report of one run: analysed, or read if it is one already.

    Several paths are nodes' folders of one recording; a stored report stands alone.
    """
    from clusterprof.gate.stored import is_report, load

    stored = [path for path in paths if is_report(path)]
    if not stored:
        return common.analyse_with(paths, profile, jobs)
    if len(paths) > 1:
        raise UsageError(
            f"{stored[0]} is the report of a whole run: it stands alone",
            "more runs of the same job are given by --repeat, those to compare with by --baseline",
        )
    return load(stored[0])


def reports_of(paths: Sequence[Path] | None, profile: Profile, jobs: int) -> list[Report]:
    """Return the reports of several runs, one path each."""
    return [report_of([path], profile, jobs) for path in paths or ()]
