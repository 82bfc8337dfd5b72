"""What Prometheus's HTTP API answers: `/api/v1/query_range` (matrix) and `/query` (vector).

    {"data": {"resultType": "matrix", "result": [
        {"metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", "gpu": "0"},
         "values": [[1711034567, "97"]]}]}}

A bare list of such series is read too, and VictoriaMetrics' lines of `values` and `timestamps`.
Answers may be larger than memory: series are taken out of the text one by one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from clusterprof.importers.base import Account, Source
from clusterprof.importers.telemetry.dcgm_names import XID
from clusterprof.importers.telemetry.series import Labelled
from clusterprof.importers.telemetry.times import epoch_ns
from clusterprof.importers.text_lines import held_bytes

HELD_AT_MOST = 64 << 20
"""Of one series in memory: 300,000 readings."""
_KIND = re.compile(rb'"resultType"\s*:\s*"(matrix|vector)"')
_SERIES = re.compile(rb'(?:\[\s*)?\{\s*"metric"\s*:\s*\{')
_RESULT = re.compile(r'"result"\s*:\s*\[')
_RESULT_BYTES = re.compile(rb'"result"\s*:\s*\[')
_VALUES = re.compile(rb'"values?"\s*:')


def is_answer(head: bytes) -> bool:
    """Say whether a file begins like an answer of the API, or like one of its series."""
    head = head.lstrip()
    start = head[:1]
    if start == b"{" and _KIND.search(head) and _RESULT_BYTES.search(head):
        return True
    return (
        start in (b"[", b"{")
        and _SERIES.match(head) is not None
        and _VALUES.search(head) is not None
    )


def elements(source: Source, account: Account) -> Iterator[Any]:
    """Yield the series of an answer; ends where they end, or where the text is damaged."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    blocks = (decode(block) for block in source.blocks(1 << 20))
    text = next(blocks, "")
    found = _RESULT.search(text)
    at = found.end() if found else 1 if text.lstrip()[:1] == "[" else 0
    scan = json.JSONDecoder().raw_decode
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] != "{":
            return
        try:
            element, at = scan(text, at)
        except (ValueError, RecursionError, IndexError) as error:
            more = next(blocks, None)
            if more is None or held_bytes(text[at:].encode("utf-8", "replace")) > HELD_AT_MOST:
                if at < len(text):
                    account.cut = account.cut or f"damaged or cut off within a series ({error})"
                return
            text, at = text[at:] + more + _enough(blocks, len(text) - at), 0
            continue
        yield element


def _enough(blocks: Iterator[str], length: int) -> str:
    """As much text again as did not suffice: so a long series is not looked through too often."""
    parts = []
    while length > 0 and (more := next(blocks, None)) is not None:
        parts.append(more)
        length -= len(more)
    return "".join(parts)


def read_answer(source: Source, into: Labelled, account: Account) -> None:
    """Read the series of one file."""
    for element in elements(source, account):
        if not isinstance(element, dict) or not isinstance(element.get("metric"), dict):
            account.skipped["elements that are no series"] += 1
            continue
        labels = {str(k): str(v) for k, v in element["metric"].items()}
        name = labels.get("__name__", "")
        column = into.column(name, labels, True, account)
        for t_ns, value in _points(element, account):
            if name == XID:
                into.error(labels, value)
            if column is not None and into.add(column, t_ns, value, account):
                account.read["samples"] += 1


def _points(element: dict[str, Any], account: Account) -> Iterator[tuple[int, float]]:
    times = element.get("timestamps")
    values = element.get("values", [element.get("value")])
    pairs = zip(times, values) if isinstance(times, list) and isinstance(values, list) else values
    for pair in pairs if not isinstance(pairs, (str, dict, int, float)) and pairs else ():
        try:
            when, what = pair
            t_ns, value = epoch_ns(float(when)), float(what)
        except (TypeError, ValueError, OverflowError):
            account.skipped["points that are no pair of time and value"] += 1
            continue
        if t_ns is None:
            account.skipped["samples with an impossible time"] += 1
            continue
        yield t_ns, value
