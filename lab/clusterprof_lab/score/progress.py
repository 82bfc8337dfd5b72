"""Progress of a score on stderr: one line that is overwritten; in a file, a line at times.

Runs that could not be made get a line that stays, and so do wrongly judged runs of the split dev.
Results of runs of the split test are not shown.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from clusterprof_lab.score.clusterprof_answer import TOOL
from clusterprof_lab.score.metrics import list_errors
from clusterprof_lab.score.work import RunResult

_PARTS = 20
"""On a file every so manieth part of the work gets a line."""


class Progress:
    """Counts runs that are done."""

    def __init__(self, of: int, stream: TextIO | None = None) -> None:
        self.of, self.done, self.right, self.not_run = of, 0, 0, 0
        self._stream = sys.stderr if stream is None else stream
        self._begun = time.monotonic()
        self._over = self._stream.isatty()

    def report(self, done: RunResult) -> None:
        """Count a finished trial, and print its line."""
        self.done += 1
        mine = [row for row in done.rows if row.tool == TOOL and row.mode == "M0"]
        what = list_errors(mine[0]) if mine else ()
        if done.not_run:
            self.not_run += 1
            self._print_line(f"{done.work.name}: not run: {done.not_run}")
        elif what and mine[0].split == "dev":
            self._print_line(f"{done.work.name}: {', '.join(what)}")
        if (
            self._over
            or self.done == self.of
            or self.done * _PARTS // self.of > ((self.done - 1) * _PARTS // self.of)
        ):
            self._format_line()

    def _print_line(self, text: str) -> None:
        print(f"{self._clear()}{text}", file=self._stream)

    def _clear(self) -> str:
        return "\r\x1b[K" if self._over else ""

    def _format_line(self) -> None:
        gone = time.monotonic() - self._begun
        left = gone / self.done * (self.of - self.done)
        missing = f", {self.not_run} not run" if self.not_run else ""
        times = f"{_format_minutes(gone)}, {_format_minutes(left)} left"
        text = f"{self.done} of {self.of} runs{missing}; {times}"
        last = "\n" if self.done == self.of or not self._over else ""
        self._stream.write(f"{self._clear()}{text}{last}")
        self._stream.flush()


def _format_minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
