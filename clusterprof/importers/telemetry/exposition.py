"""The text that exporters are scraped for: Prometheus's form, and OpenMetrics.

    DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="gpu-node-1"} 97 1711034567000

One scrape has no times; files of several scrapes have a time behind each value, or a line of its
own before each scrape (`# 1711034567`, `2026-03-21T15:22:47Z`), as loops with `date` write it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterprof.importers.base import Account, Source
from clusterprof.importers.telemetry.dcgm_names import XID
from clusterprof.importers.telemetry.gathered import Column
from clusterprof.importers.telemetry.labelled import is_known
from clusterprof.importers.telemetry.lines import lines_of
from clusterprof.importers.telemetry.series import Labelled
from clusterprof.importers.telemetry.times import epoch_ns, time_ns

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rb"(" + _NAME + rb")(\{.*\})?[ \t]+([^\s#]+)(?:[ \t]+([-+0-9.eE]+))?")
_META = re.compile(rb"#[ \t]*(HELP|TYPE|UNIT)[ \t]+" + _NAME)
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPE = re.compile(r"\\[\\\"n]")
_SERIES_KEPT = 1 << 18
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

    column: Column | None
    error: dict[str, str] | None = None
    seen: bool = False


class Exposition:
    """Reads one file of scrapes."""

    def __init__(self, into: Labelled, account: Account) -> None:
        self._into = into
        self._account = account
        self._known: dict[tuple[bytes, bool], _Known] = {}
        self._meaningless: set[bytes] = set()
        self._scrape_ns: int | None = None

    def read(self, source: Source) -> None:
        """Read all lines."""
        account = self._account
        for line in lines_of(source, account):
            line = line.strip()
            if not line:
                continue
            if line[:1] == b"#" or line[:1].isdigit():
                self._mark(line)
                continue
            if line.split(b"{", 1)[0].split(None, 1)[0] in self._meaningless:
                continue
            match = _SAMPLE.match(line)
            if match is None:
                account.skipped["lines that are no samples"] += 1
                continue
            if not is_known(match[1].decode()):
                self._meaningless.add(match[1])
                account.skipped["names we have no signal for"] += 1
                continue
            self._sample(match)

    def _mark(self, line: bytes) -> None:
        """A time that stands alone is that of the scrape that follows."""
        said = time_ns(line.lstrip(b"# \t").decode("latin-1"))
        if said is not None:
            self._scrape_ns = said[0]
            self._account.read["scrapes"] += 1

    def _sample(self, match: re.Match[bytes]) -> None:
        name, labels, value, time = match.groups()
        t_ns = self._scrape_ns
        if time is not None:
            try:
                t_ns = epoch_ns(float(time))
            except ValueError:
                t_ns = None
            if t_ns is None:
                self._account.skipped["samples with an impossible time"] += 1
                return
        try:
            number = float(value)
        except ValueError:
            self._account.skipped["values that are no numbers"] += 1
            return
        known = self._series(name, labels or b"", t_ns is not None)
        if known.error is not None:
            self._into.error(known.error, number)
        if known.column is None:
            return
        if t_ns is None and known.seen:
            self._account.skipped["repeated samples without a time"] += 1
            return
        known.seen = True
        if self._into.add(known.column, t_ns or 0, number, self._account):
            self._account.read["samples"] += 1

    def _series(self, name: bytes, labels: bytes, timed: bool) -> _Known:
        key = (name + labels, timed)
        known = self._known.get(key)
        if known is None:
            said = labels_of(labels.decode("utf-8", "replace"))
            word = name.decode()
            column = self._into.column(word, said, timed, self._account)
            known = _Known(column, said if word == XID else None)
            if len(self._known) < _SERIES_KEPT:
                self._known[key] = known
        return known
