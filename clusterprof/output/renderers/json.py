"""The complete report as JSON (RFC 8259): the keys that `report.document` defines, filled here.

Times are integer nanoseconds, so that the sums of the ledger can be recomputed exactly.
Unknown values are null, never 0. Only ASCII is written, and every string passes `escape_text`,
so that even `jq -r` prints nothing that controls a terminal.

Above 512 ranks it has ledgers of the ranks that the report names, and sums of the others by node
(`report.aggregate`); `full` lists every rank. Both add up to the ledger of the job exactly.

A history per rank would grow with the job; `export --to parquet` and the HTML page have it. Here
its size is bounded: at most 240 time bins of 16 causes, 20 slow steps and 20 waits. Sums are
exact: over all time bins they equal the ledger. Stacks of lost time are bounded in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from msgspec import inspect

from clusterprof.output.renderers.text.code import sum_lines
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.output.renderers.text.trend import detect_trend
from clusterprof.output.renderers.text.wording import sum_buckets
from clusterprof.report import aggregate, document, document_base
from clusterprof.report.code import CodeProfile, StackTime
from clusterprof.report.history import WAITING_FOR_RANKS, History, StepStats
from clusterprof.report.impact import DeviceUtilization
from clusterprof.report.model import Finding, RankLedger, Report
from clusterprof.util.ranges import format_host_list

MAX_ENDED_RANKS = 64
_UTILIZATION_FIELDS = ("busy_ns", "lost_ns", "well_used_ns", "under_used_ns", "unmeasured_ns")
OTHER_CAUSES = "others"
"""Name of the row that sums the smallest causes."""


class Json:
    """The complete report for programs: a versioned schema, exact nanoseconds."""

    name: ClassVar[str] = "json"
    suffix: ClassVar[str] = ".json"

    def __init__(self, full: bool = False) -> None:
        """full: list every rank, however many there are."""
        self._full = full

    def render(self, report: Report) -> str:
        """Return one JSON document."""
        document_ = build_document(report, self._full)
        return json.dumps(document_, indent=2, allow_nan=False) + "\n"


def build_document(report: Report, full: bool = False) -> dict[str, Any]:
    """Build the document as plain values, keys in the order of the schema.

    full: list every rank; else above 512 ranks those that the report names.
    """
    is_aggregated = aggregate.is_aggregated(report) and not full
    places = aggregate.select_listed_ranks(report) if is_aggregated else range(len(report.ranks))
    listed = tuple(report.ranks[index] for index in places)
    names = (escape_text(node.name, document_base.MAX_TEXT_CHARACTERS) for node in report.nodes)
    source = _Changed(
        report,
        format=document_base.FORMAT,
        job=report.job and _Changed(report.job, hosts=format_host_list(names)),
        main_cause=report.main_cause and report.main_cause.cause.id,
        ledger=_Changed(report, buckets=tuple(sum_buckets(report).items())),
        steps=report.steps and _Changed(report.steps, lengths=_format_lengths(report.steps)),
        history=report.history and _summarize_history(report, report.history),
        findings=tuple(_limit_finding(finding, is_aggregated) for finding in report.findings),
        ranks=listed,
        unlisted=aggregate.sum_unlisted_ranks(report, places) if is_aggregated else report.unlisted,
        groups=aggregate.sum_groups(report) if is_aggregated else (),
        device_utilization=report.device_utilization
        and _limit_utilization(report.device_utilization, listed, is_aggregated),
        code=report.code and _summarize_code(report.code, places, is_aggregated),
    )
    return _convert_object(source, _list_document_keys(), document_base.MAX_TEXT_CHARACTERS)


def _limit_finding(finding: Finding, is_aggregated: bool) -> _Changed:
    """Limit the lines of a finding, and with `is_aggregated` its culprits; sum the others."""
    if not is_aggregated or len(finding.culprits) <= aggregate.MAX_LISTED_CULPRITS:
        listed, left_out = finding.culprits, None
    else:
        listed = finding.culprits[: aggregate.MAX_LISTED_CULPRITS]
        left_out = document.CulpritSum(*aggregate.sum_culprits(finding))
    lines = finding.lines[: document_base.MAX_LINES]
    return _Changed(finding, lines=lines, culprits=listed, culprits_left_out=left_out)


def _limit_utilization(
    utilization: DeviceUtilization, listed: Sequence[RankLedger], is_aggregated: bool
) -> _Changed:
    """Limit the utilization ledgers to listed ranks; the others are summed."""
    if not is_aggregated:
        return _Changed(utilization, unlisted=None)
    listed_ranks, other_sums = aggregate.split_utilization(utilization, listed)
    sums = {name: sum(getattr(rank, name) for rank in other_sums) for name in _UTILIZATION_FIELDS}
    reasons = aggregate.sum_amounts(rank.reasons for rank in other_sums)
    unlisted = (
        SimpleNamespace(ranks=len(other_sums), reasons=reasons, **sums) if other_sums else None
    )
    return _Changed(utilization, ranks=listed_ranks, unlisted=unlisted)


class _Changed:
    """An object of the model with attributes that replace or extend its own."""

    def __init__(self, source: object, **attributes: object) -> None:
        self._source = source
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)


class _Key(NamedTuple):
    """How one key is written."""

    name: str
    read: Callable[[Any], Any]
    """Takes the value out of the object."""
    keys: tuple[_Key, ...]
    """Keys of the value or of its items; () where these are not objects."""
    limit: int | None
    """Length of its strings; None = that of the object."""
    is_omitted_if_empty: bool


@cache
def _list_document_keys() -> tuple[_Key, ...]:
    return _list_keys(inspect.type_info(document.Report))


def _list_keys(type_: inspect.Type) -> tuple[_Key, ...]:
    """List the keys of the objects in a type; () if it holds none."""
    if isinstance(type_, inspect.Metadata):
        return _list_keys(type_.type)
    if isinstance(type_, inspect.UnionType):
        return next(filter(None, map(_list_keys, type_.types)), ())
    if isinstance(type_, inspect.VarTupleType):
        return _list_keys(type_.item_type)
    if not isinstance(type_, inspect.StructType | inspect.DataclassType):
        return ()
    keys = []
    for index, field in enumerate(type_.fields):
        marks = (field.type.extra or {}) if isinstance(field.type, inspect.Metadata) else {}
        path = marks.get("source", field.name)
        read = itemgetter(index) if issubclass(type_.cls, document_base.Row) else attrgetter(path)
        is_omitted_if_empty = marks.get("omit_if_empty", False)
        limit = marks.get("characters")
        keys.append(_Key(field.name, read, _list_keys(field.type), limit, is_omitted_if_empty))
    return tuple(keys)


def _convert_object(source: object, keys: tuple[_Key, ...], limit: int) -> dict[str, Any]:
    """Convert an object of the model to plain values; strings are cut to `limit` characters."""
    return {
        key.name: _convert_value(value, key.keys, key.limit or limit)
        for key in keys
        if (value := key.read(source)) or not key.is_omitted_if_empty
    }


def _convert_value(value: Any, keys: tuple[_Key, ...], limit: int) -> Any:
    if isinstance(value, str):
        return escape_text(value, limit)
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON has neither NaN nor infinity
    if value is None or isinstance(value, int):
        return value
    if not isinstance(value, tuple):
        return _convert_object(value, keys, limit)
    if keys:
        return [_convert_object(item, keys, limit) for item in value]
    return [_convert_value(item, keys, limit) for item in value]


def _format_lengths(stats: StepStats) -> tuple[str, ...]:
    """Format step lengths as "bin:steps bin:steps", one text for each block."""
    return tuple(
        " ".join(f"{bin_}:{count}" for bin_, count in histogram) for histogram in stats.lengths
    )


def _summarize_history(report: Report, history: History) -> _Changed:
    """Summarize the history over all ranks; indices of ranks become ranks."""

    def get_rank(index: int | None) -> RankLedger | None:
        return report.ranks[index] if index is not None and 0 <= index < len(report.ranks) else None

    longest = sorted(history.waits, key=lambda wait: (-wait.duration_ns, wait.start_ns))
    waits = sorted(longest[: document_base.MAX_WAITS], key=lambda wait: wait.start_ns)
    return _Changed(
        history,
        in_step_ns=_sum_columns([rank.in_step_ns for rank in history.ranks], history.bin_count),
        lost=_sum_lost_by_cause(history),
        slow_steps=tuple(
            _Changed(step, rank=get_rank(step.rank), lost=step.lost[: document_base.MAX_CAUSES])
            for step in history.slow_steps[: document_base.MAX_SLOW_STEPS]
        ),
        waits=tuple(
            _Changed(wait, victim=get_rank(wait.victim), culprit=get_rank(wait.culprit))
            for wait in waits
        ),
        course=detect_trend(report),
        ended=tuple((get_rank(index), ns) for index, ns in history.ended[:MAX_ENDED_RANKS]),
    )


def _summarize_code(code: CodeProfile, listed: Sequence[int], is_aggregated: bool) -> _Changed:
    """Limit the stacks to the largest, and the places to theirs; the rest is summed.

    listed: places of the listed ranks in `Report.ranks`. With `is_aggregated`, stacks of other
    ranks are summed by cause.
    """
    totals = sum_lines(code)
    shown: tuple[StackTime, ...] = code.stacks
    other_stacks: list[StackTime] = []
    if is_aggregated:
        at = {place: number for number, place in enumerate(listed)}
        shown = tuple(replace(s, rank=at[s.rank]) for s in code.stacks if s.rank in at)
        other_stacks = _sum_stacks(replace(s, rank=0) for s in code.stacks if s.rank not in at)
    listed_stacks = shown[: document_base.MAX_STACKS]
    used = sorted(
        {place for stack in listed_stacks for place in stack.places[-document_base.MAX_FRAMES :]}
    )
    number_of = {place: number for number, place in enumerate(used)}
    stacks = [
        _Changed(
            stack, places=tuple(number_of[at] for at in stack.places[-document_base.MAX_FRAMES :])
        )
        for stack in listed_stacks
    ]
    return _Changed(
        code,
        lines=totals.lines[: document_base.MAX_LINE_TOTALS],
        lines_left_out=max(len(totals.lines) - document_base.MAX_LINE_TOTALS, 0),
        places=tuple(code.places[place] for place in used),
        is_library=tuple(code.is_library[place] for place in used),
        stacks=(*stacks, *_sum_stacks(shown[document_base.MAX_STACKS :])),
        unlisted_stacks=tuple(other_stacks),
    )


def _sum_stacks(stacks: Iterable[StackTime]) -> list[StackTime]:
    """Sum stacks by cause and rank, without their places; the largest first."""
    sums: dict[tuple[str, int], StackTime] = {}
    for stack in stacks:
        key = stack.cause, stack.rank
        last = sums.get(key, StackTime(*key, (), 0, 0))
        sums[key] = StackTime(*key, (), last.lost_ns + stack.lost_ns, last.samples + stack.samples)
    return sorted(sums.values(), key=lambda stack: (-stack.lost_ns, stack.cause, stack.rank))


def _sum_lost_by_cause(history: History) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Sum lost ns of all ranks by cause and time bin, largest first; small causes in one row."""
    rows: dict[str, list[tuple[int, ...]]] = {}
    for cause, ns in chain.from_iterable(rank.lost for rank in history.ranks):
        rows.setdefault(cause, []).append(ns)
    sums = [
        (cause, _sum_columns(cause_rows, history.bin_count)) for cause, cause_rows in rows.items()
    ]
    sums.sort(key=lambda line: (-sum(line[1]), line[0] != WAITING_FOR_RANKS, line[0]))
    if len(sums) <= document_base.MAX_CAUSES:
        return tuple(sums)
    listed, remaining = sums[: document_base.MAX_CAUSES - 1], sums[document_base.MAX_CAUSES - 1 :]
    return (*listed, (OTHER_CAUSES, _sum_columns([ns for _, ns in remaining], history.bin_count)))


def _sum_columns(rows: list[tuple[int, ...]], bins: int) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows))) if rows else (0,) * bins
