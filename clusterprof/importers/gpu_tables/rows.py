"""Rows of such tables, from CSV and JSON lines; and Omnistat's CSV, whose head has several rows.

metric,rocm_utilization_percentage,rocm_utilization_percentage
instance,node01,node02
card,0,0
timestamp,,
2025-01-01 10:00:00,100.0,97.0
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

import msgspec

from clusterprof.importers.base import Account, Source
from clusterprof.importers.gpu_tables.heads import Heads, Reading, heads_of
from clusterprof.importers.telemetry.labelled import is_known
from clusterprof.importers.telemetry.lines import lines_of

_LINES_LOOKED_AT = 20
_MULTI = "metric"
_HEAD_ROWS_AT_MOST = 10
_KEYS_KEPT = 1 << 18
"""Of all sorts of lines together."""


def found_heads(head: bytes) -> tuple[str, Heads] | None:
    """Return the form (`csv`, `json`, `omnistat`) and the columns at the beginning of a file."""
    lines = [line for line in head.split(b"\n")[:_LINES_LOOKED_AT] if line.strip()]
    if lines and lines[0].lstrip()[:1] == b"{":
        return _json_heads(lines)
    texts = [line.decode("utf-8", "replace").replace("\0", "").strip("\r") for line in lines]
    rows = [_cells(text) for text in texts]
    if rows and rows[0][:1] == [_MULTI]:
        heads = omnistat_heads(rows)
        return ("omnistat", heads) if heads else None
    found = next((heads for row in rows if (heads := heads_of(row)) is not None), None)
    return ("csv", found) if found else None


def _json_heads(lines: list[bytes]) -> tuple[str, Heads] | None:
    """Of JSON lines any of the first may have the keys: events differ."""
    for line in lines:
        try:
            one = msgspec.json.decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        heads = heads_of(list(map(str, one))) if isinstance(one, dict) else None
        if heads is not None:
            return "json", heads
    return None


def omnistat_heads(rows: list[list[str]]) -> Heads | None:
    """Return what the columns are, by the rows above `timestamp`; None when nothing is known."""
    above: dict[str, list[str]] = {}
    for row in rows[:_HEAD_ROWS_AT_MOST]:
        if row[:1] == ["timestamp"]:
            names = above.pop(_MULTI, [])
            readings = {
                at: Reading(None, name, {k: v[at] for k, v in above.items() if at < len(v)})
                for at, name in enumerate(names)
                if 0 < at < len(row) and is_known(name)
            }
            return Heads(0, {}, readings, "amd") if readings else None
        above[row[0] if row else ""] = row
    return None


def rows_of(source: Source, form: str, account: Account) -> Iterator[tuple[Heads, list[str]]]:
    """Yield each row with what its columns are."""
    if form == "json":
        yield from _objects(source, account)
        return
    heads: Heads | None = None
    width = 0
    above: list[list[str]] = []
    for line in lines_of(source, account):
        text = line.decode("utf-8", "replace").replace("\0", "").strip("\r")
        if not text.strip():
            continue
        cells = _cells(text)
        if form == "omnistat" and heads is None and len(above) < _HEAD_ROWS_AT_MOST:
            above.append(cells)
            heads = omnistat_heads(above)
            width = len(cells)
            continue
        again = heads_of(cells) if form == "csv" else None
        if again is not None:
            heads, width = heads if again == heads else again, len(cells)
        elif heads is None or len(cells) != width:
            account.skipped["lines that are no rows of the table"] += 1
        else:
            yield heads, cells


def _objects(source: Source, account: Account) -> Iterator[tuple[Heads, list[str]]]:
    known: dict[tuple[str, ...], Heads | None] = {}
    room = _KEYS_KEPT
    decode = msgspec.json.Decoder().decode
    for line in lines_of(source, account):
        if not line.strip():
            continue
        try:
            one = decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            account.skipped["lines that are no JSON"] += 1
            continue
        keys = tuple(one) if isinstance(one, dict) else ()
        if keys not in known and len(keys) <= room:
            known[keys] = heads_of(keys)
            room -= len(keys)
        heads = known.get(keys)
        if heads is None:
            account.skipped["lines without readings"] += 1
            continue
        yield heads, ["" if value is None else str(value) for value in one.values()]


def _cells(text: str) -> list[str]:
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []
