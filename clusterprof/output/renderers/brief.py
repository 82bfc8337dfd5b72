"""`--format brief`: the report in two lines of ASCII, for the comment of a job or a mail.

    clusterprof: Lost: 39.0 % of GPU time inside steps: 3.8 of 9.7 GPU-minutes. Main cause: …
    Try next: On rank 1: pack samples into large records … Expected gain: About 3.1 min, 32.1 % …

There are two lines whatever the report says, and nothing in them that shells or Slurm interpret.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof.output.renderers.text.first_screen import FirstScreen, build_first_screen
from clusterprof.output.renderers.text.safety import escape_comment
from clusterprof.report.model import Report

MAX_LINE_LENGTH = 300
"""Characters of a line: the essential is said by then, and `squeue` shows hardly as much."""
_RESULT, _ACTION = ("Lost", "Main cause", "Where"), ("Try next", "Expected gain")
_NO_ACTION = "Nothing to do is recommended; all details: clusterprof analyze --full"


class Brief:
    """The report in two lines: what was lost and why, and what to do."""

    name: ClassVar[str] = "brief"
    suffix: ClassVar[str] = ".txt"

    def __init__(self, gpu_price_per_hour: float | None = None, currency: str = "USD") -> None:
        """gpu_price_per_hour: also say what the lost time cost."""
        self._price = gpu_price_per_hour
        self._currency = currency

    def render(self, report: Report) -> str:
        """Return the two lines."""
        screen = build_first_screen(report, self._price, self._currency)
        result = f"clusterprof: {_join_rows(screen, _RESULT)}"
        action = _join_rows(screen, _ACTION) or _NO_ACTION
        return "".join(f"{escape_comment(line, MAX_LINE_LENGTH)}\n" for line in (result, action))


def _join_rows(screen: FirstScreen, labels: Sequence[str]) -> str:
    """Join the first line of each labeled row as sentences; rows that are missing are left out."""
    texts = {row.label: row.text for row in screen.rows if row.label}
    parts = [f"{label}: {texts[label]}" for label in labels if label in texts]
    return " ".join(part if part[-1] in ".!?" else f"{part}." for part in parts)
