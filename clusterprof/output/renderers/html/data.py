"""The JSON document of the charts, whose size hardly grows with the job.

Ranks have one column per quantity. What is drawn over time has one *row* per rank, or
per node if there are too many ranks to look at (`output.renderers.html.data`), and its
numbers are packed as bytes (`output.renderers.html.data`). Amounts in words come from
Python and are exact; what the page reads from a chart is rounded.

Rows of everything drawn over time: ranks, or nodes if there are too many ranks.

In a large job each node has a row with the mean of its ranks, and so do the few ranks
that the report is about. If there are more nodes than can be drawn, adjacent nodes
share a row. Tables list nodes, racks and process groups, and open them to their ranks;
above MAX_EMBEDDED_RANKS the ranks that the report does not name are summed by node.

`Report.history` packed as bytes: lost shares of equal time bins, by row and cause.

A byte is lost time over the time of the bin: 255 is all of it, 1 is little but not
zero. If the total is too large, adjacent bins are merged until it fits; sums over the
run come from the ledger and are not affected.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from clusterprof.output.renderers.html.code import build_code_document
from clusterprof.output.renderers.html.markup import get_color
from clusterprof.output.renderers.text import culprits
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report import aggregate
from clusterprof.report.history import WAITING_FOR_RANKS, History, RankHistory
from clusterprof.report.model import UNATTRIBUTED, Finding, Report


@dataclass(frozen=True, slots=True)
class ChartRows:
    """Parallel lists with one entry per row."""

    MAX_ROWS: ClassVar[int] = 1024
    """Limit of the rows of nodes. Up to `aggregate.MAX_LISTED_RANKS` ranks rows are ranks."""
    MAX_SINGLE_RANKS: ClassVar[int] = 32
    """Rows of single ranks in addition to those of nodes."""

    by: str
    """"rank" or "node"."""
    first: list[int]
    """First node of the row, as an index into the list of nodes."""
    last: list[int]
    """Last node of the row, as an index into the list of nodes."""
    rank: list[int]
    """Place in `Report.ranks`; -1 for all ranks of the nodes."""
    members: list[list[int]]
    """Places in `Report.ranks`."""


def build_chart_rows(nodes: Sequence[int], node_count: int, wanted: Sequence[int]) -> ChartRows:
    """Assign ranks to rows; each rank in `wanted` gets a row of its own.

    nodes: index of the node of each rank.
    """
    if len(nodes) <= aggregate.MAX_LISTED_RANKS:
        places = list(range(len(nodes)))
        return ChartRows("rank", list(nodes), list(nodes), places, [[index] for index in places])
    nodes_per_row = -(-node_count // ChartRows.MAX_ROWS)
    count = -(-node_count // nodes_per_row)
    members: list[list[int]] = [[] for _ in range(count)]
    for index, node in enumerate(nodes):
        members[node // nodes_per_row].append(index)
    first = [row * nodes_per_row for row in range(count)]
    last = [min(low + nodes_per_row, node_count) - 1 for low in first]
    ranks = [-1] * count
    for index in wanted[: ChartRows.MAX_SINGLE_RANKS]:
        first.append(nodes[index])
        last.append(nodes[index])
        ranks.append(index)
        members.append([index])
    return ChartRows("node", first, last, ranks, members)


MAX_PLANE_BYTES = 900_000
"""Limit of all planes together, before base64 writes three bytes as four characters."""
MAX_BINS = 1200
MAX_STEP_MARKS = 40_000
_MAX_WAITS, _MAX_SLOW_STEPS = 400, 50
_MIN_BINS = 16  # time bins of even the largest job


def build_history_document(
    report: Report, causes: Sequence[str], rows: ChartRows, room: int = 1 << 30
) -> dict[str, Any]:
    """Build the data of the charts over time, with planes of at most `room` bytes.

    {"why": reason} if there is no history.
    """
    history = report.history
    if history is None:
        return {"why": "the history was not requested in this analysis"}
    if not history.ranks or history.bin_count < 1 or history.bin_ns < 1:
        return {"why": escape_text(history.why_missing or "no rank had steps", 400)}
    number_of = {cause: at for at, cause in enumerate(causes)}
    lost, in_step = _sum_by_row(history, rows, number_of)
    present = lost.any(axis=2)
    merge = _choose_merge_factor(int(present.sum()) + len(rows.rank), history.bin_count, room)
    lost, in_step = _merge_bins(lost, merge), _merge_bins(in_step, merge)
    ranks = np.array([max(len(members), 1) for members in rows.members], dtype=float)
    bin_ns = ranks[:, None] * history.bin_ns * merge
    everyone = [at for at, by in enumerate(rows.rank) if by < 0 or rows.by == "rank"]
    return {
        "why": escape_text(history.why_missing, 400),
        "started_at_ms": None if history.started_at_ns is None else history.started_at_ns // 10**6,
        "stretch_s": history.bin_ns * merge / 1e9,
        "stretches": lost.shape[2],
        "span_s": history.bin_ns * history.bin_count / 1e9,
        "in_step": pack_array(_scale_to_bytes(in_step, bin_ns)),
        "lost": [
            {
                "cause": cause,
                "rows": bins,
                "bytes": pack_array(_scale_to_bytes(lost[bins, cause], bin_ns[bins])),
            }
            for cause in range(len(causes))
            if (bins := np.flatnonzero(present[:, cause]).tolist())
        ],
        "total": _pack_total(lost[everyone], bin_ns[everyone]),
        "steps": _pack_step_marks(history, rows),
        "step_every": history.step_stride,
        "waits": _list_waits(history, number_of),
        "waits_left_out": max(len(history.waits) - _MAX_WAITS, 0),
        "slow_steps": _list_slow_steps(history, number_of),
    }


def _sum_by_row(history: History, rows: ChartRows, number_of: dict[str, int]) -> tuple[Any, Any]:
    """Sum lost ns by (row, cause, bin) and in-step ns by (row, bin): float64 arrays."""
    count = history.bin_count
    lost = np.zeros((len(rows.rank), len(number_of), count))
    in_step = np.zeros((len(rows.rank), count))
    for row, members in enumerate(rows.members):
        for rank_index in members:
            if rank_index >= len(history.ranks):
                continue
            rank_history = history.ranks[rank_index]
            in_step[row] += _pad_to_length(rank_history.in_step_ns, count)
            for cause, ns in rank_history.lost:
                lost[row, number_of[cause]] += _pad_to_length(ns, count)
    return lost, in_step


def _pad_to_length(ns: Sequence[int], count: int) -> Any:
    padded = np.zeros(count)
    values = np.asarray(ns[:count], dtype=float)
    padded[: len(values)] = values
    return padded


def _choose_merge_factor(planes: int, stretches: int, room: int) -> int:
    """Choose how many time bins share a byte."""
    bytes_per_plane = min(room, MAX_PLANE_BYTES) // max(planes, 1)
    return -(-stretches // max(min(bytes_per_plane, MAX_BINS), _MIN_BINS))


def _merge_bins(array: Any, merge: int) -> Any:
    if merge == 1:
        return array
    *head, count = array.shape
    short = -count % merge
    padded = np.concatenate([array, np.zeros((*head, short))], axis=-1)
    return padded.reshape(*head, -1, merge).sum(axis=-1)


def _scale_to_bytes(ns: Any, full: Any) -> Any:
    shares = np.clip(ns / full, 0.0, 1.0)
    scaled = np.rint(shares * 255).astype(np.uint8)
    scaled[(scaled == 0) & (ns > 0)] = 1
    return scaled


def _pack_total(lost: Any, full: Any) -> dict[str, Any]:
    """Pack the lost shares of the whole job by cause and time bin, 16 bits each."""
    sums = lost.sum(axis=0)
    rows = np.flatnonzero(sums.any(axis=1))
    shares = np.clip(sums[rows] / full.sum(), 0.0, 1.0)
    return {"causes": rows.tolist(), "bytes": pack_array(np.rint(shares * 65535).astype("<u2"))}


def _pack_step_marks(history: History, rows: ChartRows) -> list[dict[str, Any]]:
    """Pack the step marks of each rank row, or of the rank with most marks for all rows."""
    span = history.bin_ns * history.bin_count
    rank_rows = [
        (row, history.ranks[at])
        for row, at in enumerate(rows.rank)
        if 0 <= at < len(history.ranks) and history.ranks[at].step_ends_ns
    ]
    if (
        sum(len(rank_history.step_ends_ns) for _, rank_history in rank_rows) <= MAX_STEP_MARKS
        and rows.by == "rank"
    ):
        return [
            {"row": row, "bytes": _pack_marks(rank_history.step_ends_ns, span)}
            for row, rank_history in rank_rows
        ]
    longest: RankHistory = max(
        history.ranks, key=lambda rank_history: len(rank_history.step_ends_ns)
    )
    ends = longest.step_ends_ns[:: -(-len(longest.step_ends_ns) // MAX_STEP_MARKS) or 1]
    return [{"row": -1, "bytes": _pack_marks(ends, span)}] if ends else []


def _pack_marks(ends: Sequence[int], span: int) -> str:
    parts = np.clip(np.asarray(ends, dtype=float) / span, 0.0, 1.0)
    return pack_array(np.rint(parts * (2**32 - 1)).astype("<u4"))


def _list_waits(history: History, number_of: dict[str, int]) -> list[list[Any]]:
    """List [start s, length s, victim, culprit or -1, cause or -1, step or null], by start."""
    count = len(history.ranks)
    longest = sorted(history.waits, key=lambda wait: -wait.duration_ns)[:_MAX_WAITS]
    return [
        [
            round(wait.start_ns / 1e9, 6),
            round(wait.duration_ns / 1e9, 6),
            wait.victim,
            -1 if wait.culprit is None or not 0 <= wait.culprit < count else wait.culprit,
            number_of.get(wait.cause, -1),
            wait.step,
        ]
        for wait in sorted(longest, key=lambda wait: wait.start_ns)
        if 0 <= wait.victim < count
    ]


def _list_slow_steps(history: History, number_of: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "step": step.number,
            "start_s": round(step.start_ns / 1e9, 6),
            "length_s": round(step.duration_ns / 1e9, 6),
            "rank": step.rank,
            "lost": [[number_of[cause], ns] for cause, ns in step.lost if cause in number_of],
        }
        for step in history.slow_steps[:_MAX_SLOW_STEPS]
    ]


def pack_array(array: Any) -> str:
    """Encode the bytes of an array as base64.

    array: any shape and dtype, written in C order with its own byte order.
    """
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


_MAX_NAME_CHARACTERS = 80  # limit of a node's or cause's name
_TITLES = {
    UNATTRIBUTED: "lost without sufficient evidence of a cause",
    WAITING_FOR_RANKS: "waiting for other ranks: the findings name the culprits",
}
_MAX_MARKED_CULPRITS = 64  # culprits of a finding that charts mark
_ROWS_PER_FINDING = 4  # culprits of a finding with a row of their own
_MAX_CHARACTERS = 1_700_000  # limit of the document
_SPARSE_FACTOR = 3  # a value with its rank number takes three times the room
_UINT16_MAX = 65535
_MAX_GROUP_MEMBERS = 50_000  # members of all process groups together
MAX_EMBEDDED_RANKS = 12_288
"""Ranks up to which the page has amounts of every rank by cause: about 60 bytes each."""


def build_script_json(report: Report, full: bool = False) -> str:
    """Build the document as JSON that cannot end the script element around it.

    full: embed every rank, however many there are.
    """
    text = _encode_json(build_chart_document(report, full))
    for character in "<>&":  # non-ASCII characters are already escaped
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def count_embedded_ranks(report: Report, full: bool = False) -> int:
    """Count the ranks of which the document has details; the others are summed by node."""
    if full or len(report.ranks) <= MAX_EMBEDDED_RANKS:
        return len(report.ranks)
    return len(aggregate.select_listed_ranks(report))


def build_chart_document(report: Report, full: bool = False) -> dict[str, Any]:
    """Build the document as plain values.

    full: embed every rank, however many there are.
    """
    groups = _list_groups(report)
    counts: tuple[int, ...] = ()
    if count_embedded_ranks(report, full) < len(report.ranks):
        groups = []  # their members are merged
        report, counts = aggregate.merge_unlisted_ranks(
            report, aggregate.select_listed_ranks(report)
        )
    names = list_node_names(report)
    number_of = {name: index for index, name in enumerate(names)}
    nodes = [number_of[rank.node] for rank in report.ranks]
    causes = list_cause_ids(report)
    chiefs = [_find_main_culprits(finding, report) for finding in report.findings]
    rows = build_chart_rows(nodes, len(names), _select_single_ranks(report, chiefs))
    document = {
        "version": 1,
        "causes": _convert_causes(report, causes),
        "nodes": [_escape_name(name) for name in names],
        "ranks": {**_convert_ranks(report, nodes), "counts": list(counts)},
        "groups": groups,
        "lost_by_cause": _pack_matrix([rank.buckets for rank in report.ranks], causes),
        "caused": _pack_matrix([rank.caused for rank in report.ranks], causes),
        "compared": any(rank.caused for rank in report.ranks),
        "findings": [
            {
                "cause": causes.index(finding.cause.id),
                "outside": finding.outside_steps,
                "culprits": culprits[:_MAX_MARKED_CULPRITS],
                "culprit_count": len(culprits),
            }
            for finding, culprits in zip(report.findings, chiefs)
        ],
        "rows": {"by": rows.by, "first": rows.first, "last": rows.last, "rank": rows.rank},
    }
    document["code"] = build_code_document(report, causes)
    room = (_MAX_CHARACTERS - len(_encode_json(document))) * 3 // 4  # base64: 3 bytes -> 4
    document["history"] = build_history_document(report, causes, rows, room)
    return document


def _list_groups(report: Report) -> list[dict[str, Any]]:
    """List racks, as places of their nodes, and named process groups, as places of their ranks."""
    if not aggregate.is_aggregated(report):
        return []
    node_index = {name: index for index, name in enumerate(list_node_names(report))}
    racks: dict[str, list[int]] = {}
    for node in report.nodes:
        if node.name in node_index:
            racks.setdefault(node.rack, []).append(node_index[node.name])
    listed: list[dict[str, Any]] = []
    if set(racks) != {""}:
        for name, nodes in sorted(racks.items()):
            named = _escape_name(name) or "no rack known"
            listed.append({"of": "rack", "name": named, "nodes": nodes, "ranks": []})
    numbers = {rank.rank: index for index, rank in enumerate(report.ranks)}
    if None in numbers or len(numbers) < len(report.ranks):
        return listed
    room = _MAX_GROUP_MEMBERS
    for group in report.groups:
        ranks = [numbers[number] for number in group.ranks if number in numbers]
        room -= len(ranks)
        if ranks and room >= 0:
            name = _escape_name(group.name)
            listed.append({"of": "group", "name": name, "nodes": [], "ranks": ranks})
    return listed


def _encode_json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def list_node_names(report: Report) -> list[str]:
    """List the nodes that have ranks, in the order of their first rank."""
    return list(dict.fromkeys(rank.node for rank in report.ranks))


def list_cause_ids(report: Report) -> list[str]:
    """List the causes of all charts, largest loss first; waiting and unattributed last."""
    sums: dict[str, int] = {finding.cause.id: 0 for finding in report.findings}
    for rank in report.ranks:
        for cause, ns in rank.buckets:
            sums[cause] = sums.get(cause, 0) + ns
    if report.history is not None:
        for rank_history in report.history.ranks:
            for cause, _ in rank_history.lost:
                sums.setdefault(cause, 0)
        for wait in report.history.waits:
            if wait.cause:
                sums.setdefault(wait.cause, 0)
    for stack in report.code.stacks if report.code is not None else ():
        sums.setdefault(stack.cause, 0)
    last = {WAITING_FOR_RANKS: 1, UNATTRIBUTED: 2}
    return sorted(sums, key=lambda cause: (last.get(cause, 0), -sums[cause], cause))


def _convert_causes(report: Report, ids: Sequence[str]) -> list[dict[str, Any]]:
    about = {finding.cause.id: finding.cause for finding in report.findings}
    converted = []
    for cause in ids:
        facts = about.get(cause)
        family, tone = get_color(cause, report)
        title = facts.title if facts else _TITLES.get(cause, "")
        converted.append(
            {"id": _escape_name(cause), "family": family, "tone": tone, "title": escape_text(title)}
        )
    return converted


def _convert_ranks(report: Report, nodes: Sequence[int]) -> dict[str, Any]:
    ranks = report.ranks
    return {
        "node": list(nodes),
        "rank": [rank.rank for rank in ranks],
        "pid": [rank.pid for rank in ranks] if any(rank.rank is None for rank in ranks) else [],
        "lost_ns": _pack_floats([rank.lost_ns for rank in ranks]),
        "caused_ns": _pack_floats([sum(ns for _, ns in rank.caused) for rank in ranks]),
        "in_step_ns": _pack_floats([rank.in_step_ns for rank in ranks]),
    }


def _pack_matrix(
    buckets: Sequence[Sequence[tuple[str, int]]], causes: Sequence[str]
) -> dict[str, Any]:
    """Pack ns by cause and rank as 16-bit shares of the largest; sparse rows list "ranks"."""
    number_of = {cause: index for index, cause in enumerate(causes)}
    ns = np.zeros((len(causes), len(buckets)))
    for rank, of_rank in enumerate(buckets):
        for cause, amount in of_rank:
            if cause in number_of:
                ns[number_of[cause], rank] += amount
    largest = float(ns.max()) if ns.size else 0.0
    if largest <= 0:
        return {"full_ns": 0, "causes": []}
    scaled = np.rint(ns / largest * _UINT16_MAX).astype("<u2")
    scaled[(scaled == 0) & (ns > 0)] = 1  # a small value stays different from zero
    packed_causes: list[dict[str, Any]] = []
    for index, values in enumerate(scaled):
        ranks = np.flatnonzero(values)
        if len(ranks) * _SPARSE_FACTOR > len(buckets):
            packed_causes.append({"cause": index, "bytes": pack_array(values)})
        elif len(ranks):
            packed_causes.append(
                {"cause": index, "ranks": ranks.tolist(), "bytes": pack_array(values[ranks])}
            )
    return {"full_ns": round(largest), "causes": packed_causes}


def _pack_floats(ns: Sequence[int]) -> str:
    return pack_array(np.array(ns, dtype="<f8"))


def _find_main_culprits(finding: Finding, report: Report) -> list[int]:
    """Find the places of a finding's main culprits in `Report.ranks`."""
    places = {(rank.node, rank.rank, rank.device): index for index, rank in enumerate(report.ranks)}
    keys = (
        (culprit.node, culprit.rank, culprit.device)
        for culprit in culprits.select_main_culprits(finding)
    )
    indices = (places.get(key) for key in keys)
    return [place for place in indices if place is not None]


def _select_single_ranks(report: Report, chiefs: Sequence[Sequence[int]]) -> list[int]:
    """Select ranks with a row of their own among nodes: culprits, then the longest waits."""
    wanted = [index for culprits in chiefs for index in culprits[:_ROWS_PER_FINDING]]
    waits = report.history.waits if report.history is not None else ()
    for wait in sorted(waits, key=lambda wait: -wait.duration_ns)[: ChartRows.MAX_SINGLE_RANKS]:
        wanted += [wait.victim] if wait.culprit is None else [wait.culprit, wait.victim]
    return [index for index in dict.fromkeys(wanted) if 0 <= index < len(report.ranks)][
        : ChartRows.MAX_SINGLE_RANKS
    ]


def _escape_name(name: str) -> str:
    return escape_text(name, _MAX_NAME_CHARACTERS)
