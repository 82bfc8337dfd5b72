"""Read timelines of Horovod: the last rank of each operation, and how long others waited."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import parse_json, read_lines
from clusterprof.units import format_quantity

_HOROVOD = re.compile(rb'"name": ?"(?:CYCLE_START|NEGOTIATE_[A-Z]{4,16})"')
_NEGOTIATION = "NEGOTIATE_"
_MAX_RANKS = 16_384
_MAX_TENSORS = 65_536
_MAX_INTERVALS = 1 << 20
_MAX_TIME_US = 1 << 53


@dataclass(slots=True)
class _Tensor:
    """A tensor that is being announced or reduced."""

    open: list[tuple[str, int]] = field(default_factory=list)
    """Names and starts (us) of the open ranges, the outermost first."""
    ready_us: dict[int, int] = field(default_factory=dict)
    """When each rank was ready for the current operation."""


@dataclass(slots=True)
class _Timeline:
    """What was read of a timeline; intervals in us, two values each."""

    tensors: dict[int, _Tensor] = field(default_factory=dict)
    ranks: int = 0
    first_us: int = _MAX_TIME_US
    last_us: int = 0
    operations: array[int] = field(default_factory=lambda: array("q"))
    waits: dict[int, array[int]] = field(default_factory=dict)
    """By the rank that was ready last: from the second last to the last rank."""


class HorovodTimeline:
    """Timelines of Horovod: when each rank was ready for each operation.

    ## How to make the file

        HOROVOD_TIMELINE=timeline.json horovodrun -np 8 python train.py

    Rank 0 writes it. `HOROVOD_TIMELINE_MARK_CYCLES` may be set.

    ## How to analyze it

        clusterprof analyze timeline.json

    ## What is read

    Each operation of each tensor: when each rank was ready for it (`NEGOTIATE_ALLREDUCE` and the
    numbers of the ranks in it), and when it began and ended (`ALLREDUCE`, `BROADCAST`, …). Horovod
    never closes the list of events: such a file is whole.

    ## How the numbers are computed

    From the second last to the last rank the others waited for one rank alone. Operations wait at
    the same time: the answer counts each instant once, for each last rank. A rank is named if it
    caused at least half of these waits, and one and a half times its share of the ranks.

    ## What it cannot see

    The accelerator: no lost time is stated. A rank is ready when its announcement reached rank 0,
    up to a cycle (`HOROVOD_CYCLE_TIME`) after the tensor was computed. Why a rank is late is not in
    the file.
    """

    name: ClassVar[str] = "horovod"
    title: ClassVar[str] = "Horovod timeline"
    combines_files: ClassVar[bool] = False
    tells: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the list of events has Horovod's names."""
        return head.lstrip()[:1] == b"[" and _HOROVOD.search(head) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield nothing; add the answer.

        Raises: CannotImportError when the file holds no operation of two ranks.
        """
        for source, account in zip(sources, accounts):
            timeline = _read_timeline(source, account)
            account.read["operations"] += len(timeline.operations) // 2
            if not timeline.waits:
                raise CannotImportError(
                    "no operation for which two ranks were ready", "run two ranks or more"
                )
            account.answers.append(_describe_timeline(timeline))
        yield from ()


def _read_timeline(source: Source, account: Account) -> _Timeline:
    timeline = _Timeline()
    for line in read_lines(source, account):
        text = line.strip(b" \t\r,")
        if not text.startswith(b"{"):
            continue
        event = parse_json(text)
        if not isinstance(event, dict):
            account.skipped["lines that are not JSON"] += 1
        elif event.get("ph") in ("B", "E", "X") and not _add_event(timeline, event):
            account.skipped["events that are not of an operation"] += 1
    return timeline


def _add_event(timeline: _Timeline, event: dict[str, Any]) -> bool:
    """Add an event of a tensor; return whether it fits what came before."""
    tensor_id, time_us, name = event.get("pid"), event.get("ts"), str(event.get("name", ""))
    if type(tensor_id) is not int or type(time_us) is not int or not 0 <= time_us < _MAX_TIME_US:
        return False
    if tensor_id not in timeline.tensors and len(timeline.tensors) >= _MAX_TENSORS:
        return False
    tensor = timeline.tensors.setdefault(tensor_id, _Tensor())
    timeline.first_us = min(timeline.first_us, time_us)
    timeline.last_us = max(timeline.last_us, time_us)
    if event["ph"] == "B":
        if not tensor.open:
            tensor.ready_us.clear()
        tensor.open.append((name, time_us))
        return len(tensor.open) < 64
    if not tensor.open:
        return False
    if event["ph"] == "X":
        is_rank = name.isdecimal() and len(name) < 6 and int(name) < _MAX_RANKS
        if is_rank and tensor.open[-1][0].startswith(_NEGOTIATION):
            tensor.ready_us[int(name)] = time_us
        return True
    name, start_us = tensor.open.pop()
    if name.startswith(_NEGOTIATION):
        _add_negotiation(timeline, tensor)
    elif not tensor.open and len(timeline.operations) < 2 * _MAX_INTERVALS:
        timeline.operations.extend((start_us, time_us))
    return True


def _add_negotiation(timeline: _Timeline, tensor: _Tensor) -> None:
    if len(tensor.ready_us) < 2:
        return
    *_, (before_us, _), (last_us, rank) = sorted((t, r) for r, t in tensor.ready_us.items())
    timeline.ranks = max(timeline.ranks, max(tensor.ready_us) + 1)
    waits = timeline.waits.setdefault(rank, array("q"))
    if len(waits) < 2 * _MAX_INTERVALS:
        waits.extend((before_us, last_us))


def _sum_union(rows: array[int]) -> int:
    """Return how long any of the intervals lasted, us."""
    pairs = np.frombuffer(rows, np.int64).reshape(-1, 2)
    start, end = pairs[np.argsort(pairs[:, 0], kind="stable")].T
    reach = np.maximum.accumulate(end)
    before = np.append(start[:1], reach[:-1])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


def _describe_timeline(timeline: _Timeline) -> str:
    """Describe how long operations took, and which rank the others waited for."""
    span_us = timeline.last_us - timeline.first_us
    counts = {rank: len(rows) // 2 for rank, rows in timeline.waits.items()}
    wait_us = {rank: _sum_union(rows) for rank, rows in timeline.waits.items()}
    busy_us = _sum_union(timeline.operations) if timeline.operations else 0
    text = (
        f"horovod timeline of {timeline.ranks:,} ranks: {sum(counts.values()):,} operations in"
        f" {format_quantity(span_us * 1000, 'ns')}, under way for"
        f" {format_quantity(busy_us / max(span_us, 1), 'ratio')} of it"
    )
    chief = max(wait_us, key=lambda rank: (wait_us[rank], -rank))
    waited = format_quantity(wait_us[chief] / max(span_us, 1), "ratio")
    if wait_us[chief] < max(0.5, 1.5 / timeline.ranks) * sum(wait_us.values()):
        return f"{text}; the last rank changes, none caused most of the waits"
    return f"{text}; rank {chief} came last in {counts[chief]:,}: the others waited {waited} for it"
