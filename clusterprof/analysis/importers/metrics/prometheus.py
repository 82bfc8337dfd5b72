"""Metrics of Prometheus: scrapes of exporters, and responses of its HTTP API.

## How to make the file

One file per metric is usual:

    api="$PROMETHEUS/api/v1/query_range" query=DCGM_FI_DEV_GPU_UTIL
    curl -sG "$api" -d query=$query -d step=15s -d start=-1h -d end=now > metrics/util.json

## How to analyze it

    clusterprof analyze metrics/

## What is read

The metrics of NVIDIA's dcgm-exporter, node_exporter, AMD's device-metrics-exporter and Omnistat:

* The text of exporters (Prometheus exposition format and OpenMetrics): one scrape, or several. A
  single scrape has no times. In a file of several scrapes, a time follows each value, or stands on
  a line of its own before each scrape (`# 1711034567`, `2026-03-21T15:22:47Z`).

      DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="gpu-node-1"} 97 1711034567000

* Responses of `/api/v1/query_range` (matrix) and `/api/v1/query` (vector), a bare list of series,
  and the lines of `values` and `timestamps` of VictoriaMetrics. A response may be larger than
  memory.

      {"data": {"resultType": "matrix", "result": [
          {"metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "gpu": "0"},
           "values": [[1711034567, "97"]]}]}}

## How the numbers are computed

The readings of a host become a node. Its name is the label `Hostname`, `nodename` or `node`, or
else the host in `instance`. An address that other series map to one host is taken as that host. A
GPU is identified by its UUID, or else by its number. Utilization is
`DCGM_FI_PROF_GR_ENGINE_ACTIVE`, or else `DCGM_FI_DEV_GPU_UTIL`. Values that DCGM marks as not
available stay unknown. Readings without a time are treated as readings of one instant.

## What it cannot see

The metrics contain no processes, ranks or steps. An idle device may have no job, so no loss is
claimed. Causes of idle time are reported only together with traces of the same job. A gauge holds
from one reading to the next; an interval of 15 or 60 seconds hides every single step. Rates
(`rate()`) and sums over hosts have other names and are left out.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import estimate_decoded_bytes
from clusterprof.analysis.importers.metrics.labeled_series import (
    XID_METRIC,
    LabeledSeries,
    is_known,
)
from clusterprof.analysis.importers.metrics.metric_readings import (
    ReadingColumn,
    convert_epoch,
    parse_time,
    read_stripped_lines,
)

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*"
# No alternation within a repetition: Python keeps some hundred bytes for each iteration of one.
_QUOTED_TEXT = rb"[^\"\\]*(?:\\.[^\"\\]*)*"
_LABELS = rb"(\{[^\"}]*(?:\"" + _QUOTED_TEXT + rb"\"[^\"}]*)*\})?"
_SAMPLE = re.compile(rb"(" + _NAME + rb")" + _LABELS + rb"[ \t]+[^\s#]+")
_META = re.compile(rb"#[ \t]*(HELP|TYPE|UNIT)[ \t]+" + _NAME)
# The lookbehind starts a name only at its first letter, which keeps the search linear.
LABEL = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPE = re.compile(r"\\[\\\"n]")
_MAX_CACHED_SERIES = 1 << 17
_MAX_UNKNOWN_NAMES = 1 << 16
_MAX_HEAD_LINES = 400


def is_exposition(head: bytes) -> bool:
    """Return whether a file begins like a scrape: with its comments, or with known names."""
    lines = [line.strip() for line in head.split(b"\n")[:_MAX_HEAD_LINES] if line.strip()]
    for line in lines[:-1] if len(lines) > 1 and not head.endswith(b"\n") else lines:
        if line[:1] == b"#":
            if _META.match(line):
                return True
            continue
        match = _SAMPLE.match(line)
        if match is None:
            if parse_time(line.decode("latin-1")) is None:
                return False
        elif is_known(match[1].decode()):
            return True
    return False


def parse_labels(text: str) -> dict[str, str]:
    """Parse the labels between braces and resolve their escapes."""
    return {
        name: _ESCAPE.sub(lambda match: _ESCAPES[match[0]], value) if "\\" in value else value
        for name, value in LABEL.findall(text)
    }


@dataclass(slots=True)
class _KnownSeries:
    """A series that was seen before, with its columns."""

    name: str
    labels: dict[str, str]
    error: dict[str, str] | None
    columns: dict[bool, ReadingColumn | None] = field(default_factory=dict)
    """Column of the readings with a time (True), and of those without (False)."""
    seen: bool = False


class ExpositionReader:
    """Reader of one file of scrapes."""

    def __init__(self, series_set: LabeledSeries, account: Account) -> None:
        self._series_set = series_set
        self._account = account
        self._cache: dict[bytes, _KnownSeries] = {}
        self._unknown_names: set[bytes] = set()
        self._scrape_ns: int | None = None

    def read(self, source: Source) -> None:
        """Read all lines."""
        for line in read_stripped_lines(source, self._account):
            # The cache key of a series is the text before its value.
            end = line.rfind(b"}") + 1 or line.find(b" ")
            series = self._cache.get(line[:end])
            if series is None:
                self._read_new_line(line.strip())
            else:
                self._read_sample(series, line[end:])

    def _read_new_line(self, line: bytes) -> None:
        """Read a line whose series was not seen before."""
        if not line:
            return
        if line[:1] == b"#" or line[:1].isdigit():
            self._read_time_line(line)
            return
        match = _SAMPLE.match(line)
        if match is None:
            self._account.skipped["lines that are not samples"] += 1
            return
        name, labels = match[1], match[2] or b""
        if name in self._unknown_names:
            return
        if not is_known(name.decode()):
            if len(self._unknown_names) >= _MAX_UNKNOWN_NAMES:
                raise CannotImportError(
                    f"more than {_MAX_UNKNOWN_NAMES:,} metric names", "export fewer of them"
                )
            self._unknown_names.add(name)
            self._account.skipped["metric names without a signal"] += 1
            return
        series = self._create_series(name, labels)
        if len(self._cache) < _MAX_CACHED_SERIES:
            self._cache[name + labels] = series
        self._read_sample(series, line[match.end(2) if match[2] else match.end(1) :])

    def _read_time_line(self, line: bytes) -> None:
        """Read a time on a line of its own: that of the scrape that follows."""
        time = parse_time(line.lstrip(b"# \t").decode("latin-1"))
        if time is not None:
            self._scrape_ns = time[0]
            self._account.read["scrapes"] += 1

    def _create_series(self, name: bytes, labels: bytes) -> _KnownSeries:
        labels_by_name = parse_labels(labels.decode("utf-8", "replace"))
        return _KnownSeries(
            name.decode(), labels_by_name, labels_by_name if name.decode() == XID_METRIC else None
        )

    def _read_sample(self, series: _KnownSeries, value_text: bytes) -> None:
        """Read the value of a series, and its time if one follows."""
        fields = value_text.split(b"#", 1)[0].split()
        t_ns = self._scrape_ns
        try:
            number = float(fields[0])
            if len(fields) > 1:
                t_ns = convert_epoch(float(fields[1]))
        except (ValueError, IndexError):
            self._account.skipped["samples whose value or time is not a number"] += 1
            return
        if t_ns is None and len(fields) > 1:
            self._account.skipped["samples with an impossible time"] += 1
            return
        if series.error is not None:
            self._series_set.error(series.error, number)
        column = self._get_column(series, t_ns is not None)
        if column is None:
            return
        if t_ns is None and series.seen:
            self._account.skipped["repeated samples without a time"] += 1
            return
        series.seen = True
        if self._series_set.add(column, t_ns or 0, number, self._account):
            self._account.read["samples"] += 1

    def _get_column(self, series: _KnownSeries, timed: bool) -> ReadingColumn | None:
        if timed not in series.columns:
            series.columns[timed] = self._series_set.column(
                series.name, series.labels, timed, self._account
            )
        return series.columns[timed]


MAX_SERIES_BYTES = 64 << 20
"""Largest estimated memory of one decoded series, in bytes: 300,000 readings."""
_RESULT_TYPE = re.compile(rb'"resultType"\s*:\s*"(matrix|vector)"')
_SERIES_START = re.compile(rb'(?:\[\s*)?\{\s*"metric"\s*:\s*\{')
_RESULT = re.compile(r'"result"\s*:\s*\[')
_RESULT_BYTES = re.compile(rb'"result"\s*:\s*\[')
_VALUES = re.compile(rb'"values?"\s*:')


def is_answer(head: bytes) -> bool:
    """Return whether a file begins like a response of the API, or like one of its series."""
    head = head.lstrip()
    start = head[:1]
    if start == b"{" and _RESULT_TYPE.search(head) and _RESULT_BYTES.search(head):
        return True
    return (
        start in (b"[", b"{")
        and _SERIES_START.match(head) is not None
        and _VALUES.search(head) is not None
    )


def read_series(source: Source, account: Account) -> Iterator[Any]:
    """Yield the series of a response; stops at their end, or where the text is damaged."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    blocks = (decode(block) for block in source.blocks(1 << 20))
    text = next(blocks, "")
    result = _RESULT.search(text)
    offset = result.end() if result else 1 if text.lstrip()[:1] == "[" else 0
    decode_value = json.JSONDecoder().raw_decode
    while True:
        while offset < len(text) and text[offset] in " \t\r\n,":
            offset += 1
        if offset < len(text) and text[offset] != "{":
            return
        try:
            element, offset = decode_value(text, offset)
        except (ValueError, RecursionError, IndexError) as error:
            next_block = next(blocks, None)
            if (
                next_block is None
                or estimate_decoded_bytes(text[offset:].encode("utf-8", "replace"))
                > MAX_SERIES_BYTES
            ):
                if offset < len(text):
                    account.cut = account.cut or f"damaged or cut off within a series ({error})"
                return
            text = text[offset:] + next_block + _read_at_least(blocks, len(text) - offset)
            offset = 0
            continue
        yield element


def _read_at_least(blocks: Iterator[str], length: int) -> str:
    """Read at least `length` more characters, so that a long series is not scanned too often."""
    parts = []
    while length > 0 and (block := next(blocks, None)) is not None:
        parts.append(block)
        length -= len(block)
    return "".join(parts)


def read_answer(source: Source, series_set: LabeledSeries, account: Account) -> None:
    """Read the series of one file."""
    for element in read_series(source, account):
        if not isinstance(element, dict) or not isinstance(element.get("metric"), dict):
            account.skipped["elements that are not series"] += 1
            continue
        labels = {str(k): str(v) for k, v in element["metric"].items()}
        name = labels.get("__name__", "")
        column = series_set.column(name, labels, True, account)
        for t_ns, value in _parse_points(element, account):
            if name == XID_METRIC:
                series_set.error(labels, value)
            if column is not None and series_set.add(column, t_ns, value, account):
                account.read["samples"] += 1


def _parse_points(element: dict[str, Any], account: Account) -> Iterator[tuple[int, float]]:
    times = element.get("timestamps")
    values = element.get("values", [element.get("value")])
    pairs = zip(times, values) if isinstance(times, list) and isinstance(values, list) else values
    for pair in pairs if not isinstance(pairs, (str, dict, int, float)) and pairs else ():
        try:
            time_value, reading = pair
            t_ns, value = convert_epoch(float(time_value)), float(reading)
        except (TypeError, ValueError, OverflowError):
            account.skipped["points that are not a pair of time and value"] += 1
            continue
        if t_ns is None:
            account.skipped["samples with an impossible time"] += 1
            continue
        yield t_ns, value


class Prometheus:
    """Importer of Prometheus scrapes and API responses."""

    name: ClassVar[str] = "prometheus"
    title: ClassVar[str] = "Prometheus metrics"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file has the comments or names of a scrape or the keys of a response."""
        return is_answer(head) or is_exposition(head)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node for each host.

        Raises: CannotImportError when the files hold no known metric.
        """
        series = LabeledSeries()
        for source, account in zip(sources, accounts):
            if is_answer(source.head):
                read_answer(source, series, account)
            else:
                ExpositionReader(series, account).read(source)
        has_nodes = False
        for node in series.nodes(self.name, accounts[0]):
            has_nodes = True
            node.display_name = "unnamed host"
            yield node
        if not has_nodes:
            raise CannotImportError(
                "the files hold no known metric",
                "export DCGM_FI_*, node_*, rocm_* metrics with their labels",
            )
