"""TensorBoard's scalars as it gives them out: the CSV and JSON that "download" writes.

## What is read

`Wall time,Step,Value` and `[[wall time, step, value], …]`, one file per run and tag, named as
TensorBoard names them (`run-version_0-tag-loss.csv`); from its page with "show data download
links", or from its server:

    curl -s "$TENSORBOARD/data/plugin/scalars/scalars?run=version_0&tag=loss&format=csv" \\
        > run-version_0-tag-loss.csv

Event files themselves (`events.out.tfevents…`) are records in protobuf and not read: that is said,
with the way to these files.

## How it is understood

A point is written after its step: from one point to the next is one step, or as many as the numbers
say; each of these is then given the mean. Of the tags of a run the one with the most points tells
its steps. Each run is a process of its own. A tag that names a GPU and something we know of it
(`gpu_id: 0/utilization.gpu (%)` of Lightning, `system/gpu.0.gpu` of Weights & Biases) is readings
of that device instead, which are not tied to the steps.

## Where it is blind

TensorBoard gives out a thousand points of a tag at most, unless told otherwise; of long runs the
last 131,072 steps are laid. What is between two points is all of it in the steps: evaluations and
checkpoints too. Where a run was begun anew and its numbers go back, the time between is left out.
Nothing tells of ranks or of a cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.columns import unread_ns
from clusterprof.importers.gpu_tables.heads import WANDB
from clusterprof.importers.nvidia_smi.names import QUERY
from clusterprof.importers.tables import Int, NodeTables
from clusterprof.importers.telemetry.gathered import Gathered, Meaning
from clusterprof.importers.telemetry.times import epoch_ns
from clusterprof.importers.text_lines import lines_of, number, text_number, whole_json
from clusterprof.probe import layout
from clusterprof.signals import GPU_BUSY

POINTS_AT_MOST, STEPS_AT_MOST = 1 << 18, 1 << 17
"""Of all files together: TensorBoard gives out a thousand points of a tag."""
_HEAD = b"Wall time,Step,Value"
_TRIPLE = re.compile(rb'\[\s*\[\s*[1-4]\d{9}(?:\.\d+)?\s*,\s*\d{1,18}\s*,\s*(?:-?\d|"?-?[NI])')
_NAMED = re.compile(r"(?:run[-_])?(?P<run>.*?)[-_]tag[-_](?P<tag>.*)$")
_LIGHTNING = re.compile(r"gpu_id\W*_?\s*(\d{1,4})[/_]([a-z]+\.[a-z]+)")
_WANDB = re.compile(r"system\W?[/_.]?gpu\.(\d{1,4})\.(\w+)")
_EVENTS_UNREAD = "event files are not read: have TensorBoard give out its scalars as CSV or JSON"
_Points = list[tuple[int, int, float]]


class TensorBoard:
    """Scalars of TensorBoard, as files."""

    name: ClassVar[str] = "tensorboard"
    title: ClassVar[str] = "TensorBoard scalars"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the first line, or by the first point."""
        start = head.lstrip(b" \t\r\n\xef\xbb\xbf")
        return start.startswith(_HEAD) or _TRIPLE.match(start) is not None or _is_events(head)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield every run. Raises CannotImportError when none has two points."""
        runs: dict[str, list[tuple[str, _Points, Account]]] = {}
        held = 0
        for source, account in zip(sources, accounts):
            if _is_events(source.head):
                account.refuse(_EVENTS_UNREAD)
                continue
            run, tag = _named(source.path)
            points = _points(source, account, POINTS_AT_MOST - held)
            held += len(points)
            account.read["points"] += len(points)
            runs.setdefault(run, []).append((tag, points, account))
        some, room = False, Room(STEPS_AT_MOST)
        for run, tags in runs.items():
            for node in _nodes_of(run, tags, room):
                some = True
                yield node
        if not some and not runs:
            raise CannotImportError(_EVENTS_UNREAD, "docs/importers.md says how to get these")
        if not some:
            raise CannotImportError("no two points one after the other, and no readings", "")


def _is_events(head: bytes) -> bool:
    """The first record of an event file says its version, behind its length and sum."""
    return b"brain.Event:" in head[12:40]


def _named(path: Path) -> tuple[str, str]:
    """The run and the tag that a file's name says."""
    stem = path.name.removesuffix(".csv").removesuffix(".json")
    found = _NAMED.match(stem)
    return (found["run"], found["tag"]) if found else (stem, "")


@dataclass(slots=True)
class Room:
    """How many steps may still be laid, of all runs."""

    steps: int

    def take(self, count: Int, account: Account) -> slice:
        """Return which stretches of so many steps there is room for: the last ones."""
        size = np.minimum(count, STEPS_AT_MOST + 1)  # so that the sums fit
        fits = np.cumsum(size[::-1])[::-1] <= self.steps
        kept = slice(count.size - int(np.count_nonzero(fits)), None)
        self.steps -= int(count[kept].sum())
        if not fits.all():
            account.notes.append(
                f"only the last {int(count[kept].sum()):,} steps were laid: all runs together have"
                f" room for {STEPS_AT_MOST:,}"
            )
        return kept


def _points(source: Source, account: Account, most: int) -> _Points:
    """When, which step and what: of all that can be used."""
    points: _Points = []
    for cells in _rows(source, account):
        wall, step = (number(one) for one in cells[:2]) if len(cells) == 3 else (None, None)
        t_ns = None if wall is None else epoch_ns(wall)
        if t_ns is None or step is None or not 0 <= step < 1 << 53:
            account.skipped["points without a time or a step"] += 1
            continue
        value = number(cells[2])
        points.append((t_ns, int(step), float("nan") if value is None else value))
        if len(points) > POINTS_AT_MOST:
            raise CannotImportError(
                f"more than {POINTS_AT_MOST:,} points in one file", "give fewer"
            )
    return points


def _rows(source: Source, account: Account) -> Iterator[Sequence[object]]:
    if not source.head.lstrip(b" \t\r\n\xef\xbb\xbf").startswith(_HEAD):
        listed = whole_json(source)
        for one in listed if isinstance(listed, list) else ():
            yield one if isinstance(one, list) else ()
        return
    for line in lines_of(source, account):
        text = line.decode("utf-8", "replace").strip("\ufeff \t\r")
        if text and text != _HEAD.decode():
            yield [text_number(cell) for cell in text.split(",")]


def _nodes_of(
    run: str, tags: Sequence[tuple[str, _Points, Account]], room: Room
) -> Iterator[NodeTables]:
    """A run as one node: its steps, and the readings of its devices."""
    gathered = Gathered()
    told: list[tuple[_Points, Account]] = []
    for tag, points, account in tags:
        reading = _reading(tag)
        if reading is None:
            told.append((points, account))
            continue
        device, meaning = reading
        column = gathered.column("", meaning, device)
        if column is not None:
            for t_ns, _, value in points:
                column.add(t_ns, value)
        gathered.device("", device)
    key = run or "run"
    node = next(gathered.nodes(TensorBoard.name, tags[0][2], key), None)
    longest = max(told, key=lambda one: len(one[0]), default=None)
    laid = _steps(*longest, room) if longest is not None else None
    if laid is not None:
        node = node or NodeTables("", TensorBoard.name, 0, key)
        _lay(node, *laid)
    if node is not None:
        node.shown = key
        node.job = key
        yield node


def _reading(tag: str) -> tuple[str, Meaning] | None:
    """The device and the meaning of a tag that is readings; None of any other."""
    for pattern, names in ((_LIGHTNING, QUERY), (_WANDB, WANDB)):
        found = pattern.search(tag)
        if found and found[2] in names:
            return f"gpu{int(found[1])}", names[found[2]]
    return None


def _steps(points: _Points, account: Account, room: Room) -> tuple[Int, Int, Int] | None:
    """Start, end and number of steps; None when there are none."""
    table = np.array([point[:2] for point in points], np.int64).reshape(-1, 2)
    table = table[np.argsort(table[:, 0], kind="stable")]
    took, count = np.diff(table[:, 0]), np.diff(table[:, 1])
    good = (took > 0) & (count > 0)
    if not good.all():
        account.skipped["pairs of points whose step or time does not go on"] += int((~good).sum())
    rows = np.flatnonzero(good)
    took, count = took[rows], count[rows]
    if not rows.size:
        return None
    kept = room.take(count, account)
    rows, took, count = rows[kept], took[kept], count[kept]
    if not rows.size:
        return None
    if count.max() > 1:
        account.notes.append(
            f"points are up to {int(count.max()):,} steps apart: each step between two is given"
            " their mean"
        )
    of = np.repeat(np.arange(rows.size), count)
    place = np.arange(of.size) - np.repeat(np.cumsum(count) - count, count)
    first, number_ = table[rows, 0][of], table[rows, 1][of]
    start = first + took[of] // count[of] * place
    end = np.where(place + 1 == count[of], first + took[of], start + took[of] // count[of])
    account.read["steps"] += of.size
    return start, end, number_ + place + 1


def _lay(node: NodeTables, start: Int, end: Int, steps: Int) -> None:
    node.device("unseen")
    node.rank(1, device="unseen")
    node.spans(1, layout.STEP, start, end, steps, 2, -1, -1)
    first_ns, last_ns = int(start[0]), int(end[-1])
    t_ns = unread_ns(first_ns, last_ns, np.array([first_ns, last_ns], np.int64))
    node.series(GPU_BUSY.name, "unseen", t_ns, np.full(t_ns.size, np.nan))  # nobody read it
