"""The text that exporters are scraped for: Prometheus's form, and OpenMetrics.

    DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="gpu-node-1"} 97 1711034567000

One scrape has no times; files of several scrapes have a time behind each value, or a line of its
own before each scrape (`# 1711034567`, `2026-03-21T15:22:47Z`), as loops with `date` write it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.telemetry.dcgm_names import XID
from clusterprof.importers.telemetry.gathered import Column
from clusterprof.importers.telemetry.labelled import is_known
from clusterprof.importers.telemetry.lines import lines_of
from clusterprof.importers.telemetry.series import Labelled
from clusterprof.importers.telemetry.times import epoch_ns, time_ns

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*"
# Never a choice within a repetition: Python keeps some hundred bytes for each turn of one.
_TEXT = rb"[^\"\\]*(?:\\.[^\"\\]*)*"
_LABELS = rb"(\{[^\"}]*(?:\"" + _TEXT + rb"\"[^\"}]*)*\})?"
_SAMPLE = re.compile(rb"(" + _NAME + rb")" + _LABELS + rb"[ \t]+[^\s#]+")
_META = re.compile(rb"#[ \t]*(HELP|TYPE|UNIT)[ \t]+" + _NAME)
# A name is tried from its first letter only: what is no label costs no more than its length.
LABEL = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPE = re.compile(r"\\[\\\"n]")
_SERIES_KEPT = 1 << 17
_NAMES_AT_MOST = 1 << 16
_LINES_LOOKED_AT = 400


def is_exposition(head: bytes) -> bool:
    """Say whether a file begins like a scrape: with its comments, or with names we know."""
    lines = [line.strip() for line in head.split(b"\n")[:_LINES_LOOKED_AT] if line.strip()]
    for line in lines[:-1] if len(lines) > 1 and not head.endswith(b"\n") else lines:
        if line[:1] == b"#":
            if _META.match(line):
                return True
            continue
        match = _SAMPLE.match(line)
        if match is None:
            if time_ns(line.decode("latin-1")) is None:
                return False
        elif is_known(match[1].decode()):
            return True
    return False


def labels_of(text: str) -> dict[str, str]:
    """Return the labels between braces, without their escapes."""
    return {
        name: _ESCAPE.sub(lambda one: _ESCAPES[one[0]], value) if "\\" in value else value
        for name, value in LABEL.findall(text)
    }


@dataclass(slots=True)
class _Known:
    """What a series was found to be."""

    name: str
    labels: dict[str, str]
    error: dict[str, str] | None
    columns: dict[bool, Column | None] = field(default_factory=dict)
    """Of readings with a time, and of those without."""
    seen: bool = False


class Exposition:
    """Reads one file of scrapes."""

    def __init__(self, into: Labelled, account: Account) -> None:
        self._into = into
        self._account = account
        self._known: dict[bytes, _Known] = {}
        self._meaningless: set[bytes] = set()
        self._scrape_ns: int | None = None

    def read(self, source: Source) -> None:
        """Read all lines."""
        for line in lines_of(source, self._account):
            # What a series was found to be is kept by all that stands before its value.
            end = line.rfind(b"}") + 1 or line.find(b" ")
            known = self._known.get(line[:end])
            if known is None:
                self._other(line.strip())
            else:
                self._sample(known, line[end:])

    def _other(self, line: bytes) -> None:
        """A line whose beginning was not seen before."""
        if not line:
            return
        if line[:1] == b"#" or line[:1].isdigit():
            self._mark(line)
            return
        match = _SAMPLE.match(line)
        if match is None:
            self._account.skipped["lines that are no samples"] += 1
            return
        name, labels = match[1], match[2] or b""
        if name in self._meaningless:
            return
        if not is_known(name.decode()):
            if len(self._meaningless) >= _NAMES_AT_MOST:
                raise CannotImportError(
                    f"more than {_NAMES_AT_MOST:,} names of metrics", "export fewer of them"
                )
            self._meaningless.add(name)
            self._account.skipped["names we have no signal for"] += 1
            return
        known = self._series(name, labels)
        if len(self._known) < _SERIES_KEPT:
            self._known[name + labels] = known
        self._sample(known, line[match.end(2) if match[2] else match.end(1) :])

    def _mark(self, line: bytes) -> None:
        """A time that stands alone is that of the scrape that follows."""
        said = time_ns(line.lstrip(b"# \t").decode("latin-1"))
        if said is not None:
            self._scrape_ns = said[0]
            self._account.read["scrapes"] += 1

    def _series(self, name: bytes, labels: bytes) -> _Known:
        said = labels_of(labels.decode("utf-8", "replace"))
        return _Known(name.decode(), said, said if name.decode() == XID else None)

    def _sample(self, known: _Known, rest: bytes) -> None:
        """The value of a series, and its time when that stands behind it."""
        words = rest.split(b"#", 1)[0].split()
        t_ns = self._scrape_ns
        try:
            number = float(words[0])
            if len(words) > 1:
                t_ns = epoch_ns(float(words[1]))
        except (ValueError, IndexError):
            self._account.skipped["samples whose value or time is no number"] += 1
            return
        if t_ns is None and len(words) > 1:
            self._account.skipped["samples with an impossible time"] += 1
            return
        if known.error is not None:
            self._into.error(known.error, number)
        column = self._column(known, t_ns is not None)
        if column is None:
            return
        if t_ns is None and known.seen:
            self._account.skipped["repeated samples without a time"] += 1
            return
        known.seen = True
        if self._into.add(column, t_ns or 0, number, self._account):
            self._account.read["samples"] += 1

    def _column(self, known: _Known, timed: bool) -> Column | None:
        if timed not in known.columns:
            known.columns[timed] = self._into.column(known.name, known.labels, timed, self._account)
        return known.columns[timed]
