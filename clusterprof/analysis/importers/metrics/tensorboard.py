"""Scalars exported from TensorBoard as CSV or JSON.

## How to make the file

Use the download links of the scalar charts ("show data download links"), or ask the server:

    api="$TENSORBOARD/data/plugin/scalars/scalars"
    curl -s "$api?run=version_0&tag=loss&format=csv" > run-version_0-tag-loss.csv

## How to analyze it

    clusterprof analyze run-version_0-tag-loss.csv

## What is read

CSV with the header `Wall time,Step,Value`, and JSON as `[[wall time, step, value], …]`. One file is
one tag of one run, named as TensorBoard names it (`run-version_0-tag-loss.csv`). Event files
(`events.out.tfevents…`) are protobuf records and are not read. The error message says how to export
them.

## How the numbers are computed

A point is written after its step. The time between two points is one step, or several if the step
numbers say so; each of these gets the mean. The tag with the most points defines the steps of a
run. Each run is a separate process. A tag that names a GPU and a known metric (`gpu_id:
0/utilization.gpu (%)` of Lightning, `system/gpu.0.gpu` of Weights & Biases) is read as a metric of
that device. These readings are independent of the steps.

## What it cannot see

By default TensorBoard exports at most a thousand points per tag. Of long runs the last 131,072
steps are shown. All time between two points counts as steps, including evaluations and checkpoints.
If a run was restarted and its step numbers go back, the time between is left out. The files have no
ranks and no causes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import Int, NodeTables
from clusterprof.analysis.importers.core.text import (
    convert_number,
    parse_number,
    read_json,
    read_lines,
)
from clusterprof.analysis.importers.metrics.gpu_tables import WANDB_METRICS
from clusterprof.analysis.importers.metrics.metric_readings import (
    MetricMapping,
    MetricReadings,
    convert_epoch,
)
from clusterprof.analysis.importers.metrics.nvidia_smi import QUERY_METRICS
from clusterprof.probe import layout

MAX_POINTS, MAX_STEPS = 1 << 18, 1 << 17
"""Limits over all files together: TensorBoard exports a thousand points per tag."""
_HEAD = b"Wall time,Step,Value"
_FIRST_POINT = re.compile(rb'\[\s*\[\s*[1-4]\d{9}(?:\.\d+)?\s*,\s*\d{1,18}\s*,\s*(?:-?\d|"?-?[NI])')
_FILE_NAME = re.compile(r"(?:run[-_])?(?P<run>.*?)[-_]tag[-_](?P<tag>.*)$")
_LIGHTNING = re.compile(r"gpu_id\W*_?\s*(\d{1,4})[/_]([a-z]+\.[a-z]+)")
_WANDB = re.compile(r"system\W?[/_.]?gpu\.(\d{1,4})\.(\w+)")
_EVENTS_UNREAD = "event files are not read: export the scalars from TensorBoard as CSV or JSON"
_Points = list[tuple[int, int, float]]


class TensorBoard:
    """Importer of TensorBoard scalars exported as files."""

    name: ClassVar[str] = "tensorboard"
    title: ClassVar[str] = "TensorBoard scalars"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file begins with the CSV head, with a point, or as an event file."""
        start = head.lstrip(b" \t\r\n\xef\xbb\xbf")
        return (
            start.startswith(_HEAD) or _FIRST_POINT.match(start) is not None or _is_event_file(head)
        )

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield every run.

        Raises: CannotImportError when no run has two points or readings, or when all files are
        event files.
        """
        runs: dict[str, list[tuple[str, _Points, Account]]] = {}
        point_count = 0
        for source, account in zip(sources, accounts):
            if _is_event_file(source.head):
                account.refuse(_EVENTS_UNREAD)
                continue
            run, tag = _parse_file_name(source.path)
            points = _read_points(source, account, MAX_POINTS - point_count)
            point_count += len(points)
            account.read["points"] += len(points)
            runs.setdefault(run, []).append((tag, points, account))
        has_nodes, budget = False, StepBudget(MAX_STEPS)
        for run, tags in runs.items():
            for node in _build_nodes(run, tags, budget):
                has_nodes = True
                yield node
        if not has_nodes and not runs:
            raise CannotImportError(_EVENTS_UNREAD, "docs/importers/tensorboard.md describes how")
        if not has_nodes:
            raise CannotImportError("no two consecutive points and no GPU readings", "")


def _is_event_file(head: bytes) -> bool:
    """Return whether the first record names an event file's version."""
    return b"brain.Event:" in head[12:40]


def _parse_file_name(path: Path) -> tuple[str, str]:
    """Parse the run and the tag from the file name."""
    stem = path.name.removesuffix(".csv").removesuffix(".json")
    match = _FILE_NAME.match(stem)
    return (match["run"], match["tag"]) if match else (stem, "")


@dataclass(slots=True)
class StepBudget:
    """Number of steps that may still be added over all runs."""

    steps: int

    def take(self, count: Int, account: Account) -> slice:
        """Return which of the last intervals fit into the budget, and reduce it.

        count: int64[n], steps in each interval.
        """
        size = np.minimum(count, MAX_STEPS + 1)  # capped so that the sums fit
        fits = np.cumsum(size[::-1])[::-1] <= self.steps
        selected = slice(count.size - int(np.count_nonzero(fits)), None)
        self.steps -= int(count[selected].sum())
        if not fits.all():
            account.notes.append(
                f"only the last {int(count[selected].sum()):,} steps are shown: all runs"
                f" together have room for {MAX_STEPS:,}"
            )
        return selected


def _read_points(source: Source, account: Account, max_points: int) -> _Points:
    """Read the usable points: time in ns, step, value.

    Raises: CannotImportError when there are more than `max_points`.
    """
    points: _Points = []
    for cells in _read_rows(source, account):
        wall, step = (
            (convert_number(cell) for cell in cells[:2]) if len(cells) == 3 else (None, None)
        )
        t_ns = None if wall is None else convert_epoch(wall)
        if t_ns is None or step is None or not 0 <= step < 1 << 53:
            account.skipped["points without a time or a step"] += 1
            continue
        value = convert_number(cells[2])
        points.append((t_ns, int(step), float("nan") if value is None else value))
        if len(points) > max_points:
            raise CannotImportError(f"more than {MAX_POINTS:,} points in all files", "give fewer")
    return points


def _read_rows(source: Source, account: Account) -> Iterator[Sequence[object]]:
    if not source.head.lstrip(b" \t\r\n\xef\xbb\xbf").startswith(_HEAD):
        points = read_json(source)
        for point in points if isinstance(points, list) else ():
            yield point if isinstance(point, list) else ()
        return
    for line in read_lines(source, account):
        text = line.decode("utf-8", "replace").strip("\ufeff \t\r")
        if text and text != _HEAD.decode():
            yield [parse_number(cell) for cell in text.split(",")]


def _build_nodes(
    run: str, tags: Sequence[tuple[str, _Points, Account]], budget: StepBudget
) -> Iterator[NodeTables]:
    """Build one node for a run: its steps, and the readings of its devices."""
    readings = MetricReadings()
    scalars: list[tuple[_Points, Account]] = []
    for tag, points, account in tags:
        reading = _find_reading(tag)
        if reading is None:
            scalars.append((points, account))
            continue
        device, meaning = reading
        column = readings.column("", meaning, device)
        if column is not None:
            for t_ns, _, value in points:
                column.add(t_ns, value)
        readings.device("", device)
    key = run or "run"
    node = next(readings.nodes(TensorBoard.name, tags[0][2], key), None)
    longest = max(scalars, key=lambda scalar: len(scalar[0]), default=None)
    steps = _compute_steps(*longest, budget) if longest is not None else None
    if steps is not None:
        node = node or NodeTables("", TensorBoard.name, 0, key)
        _add_steps(node, *steps)
    if node is not None:
        node.display_name = key
        node.job = key
        yield node


def _find_reading(tag: str) -> tuple[str, MetricMapping] | None:
    """Find the device and the mapping of a tag with GPU readings; None for any other tag."""
    for pattern, names in ((_LIGHTNING, QUERY_METRICS), (_WANDB, WANDB_METRICS)):
        match = pattern.search(tag)
        if match and match[2] in names:
            return f"gpu{int(match[1])}", names[match[2]]
    return None


def _compute_steps(
    points: _Points, account: Account, budget: StepBudget
) -> tuple[Int, Int, Int] | None:
    """Compute start, end (ns) and number of the steps, int64[n] each; None if there are none."""
    table = np.array([point[:2] for point in points], np.int64).reshape(-1, 2)
    table = table[np.argsort(table[:, 0], kind="stable")]
    duration, count = np.diff(table[:, 0]), np.diff(table[:, 1])
    increasing = (duration > 0) & (count > 0)
    if not increasing.all():
        account.skipped["pairs of points without a later step or time"] += int((~increasing).sum())
    rows = np.flatnonzero(increasing)
    duration, count = duration[rows], count[rows]
    if not rows.size:
        return None
    selected = budget.take(count, account)
    rows, duration, count = rows[selected], duration[selected], count[selected]
    if not rows.size:
        return None
    if count.max() > 1:
        account.notes.append(
            f"points are up to {int(count.max()):,} steps apart: each step between two points gets"
            " their mean"
        )
    interval = np.repeat(np.arange(rows.size), count)
    step_in_interval = np.arange(interval.size) - np.repeat(np.cumsum(count) - count, count)
    first, number_ = table[rows, 0][interval], table[rows, 1][interval]
    start = first + duration[interval] // count[interval] * step_in_interval
    end = np.where(
        step_in_interval + 1 == count[interval],
        first + duration[interval],
        start + duration[interval] // count[interval],
    )
    account.read["steps"] += interval.size
    return start, end, number_ + step_in_interval + 1


def _add_steps(node: NodeTables, start: Int, end: Int, steps: Int) -> None:
    node.add_rank(1, device="unseen")
    node.add_spans(1, layout.STEP, start, end, steps, 2, -1, -1)
    node.add_unmeasured_device("unseen", int(start[0]), int(end[-1]))
