"""Pipeline traces of Megatron (MegatronApp): when each stage ran which microbatch forward and back.

## What is read

Chrome JSON lists with begin and end events `forward` and `backward` (`args`: iteration, microbatch,
model_chunk, pp_rank), and instants `iteration begin`, `reduce`, `iteration end`. A process of the
trace is a stage of the pipeline; times are microseconds of one clock.

## How it is understood

A stage is busy in `forward` and `backward`; the rest of the iteration is its bubble. An iteration
is a step. A stage needs what the stage before it made of the same microbatch (backward: the stage
behind it), so until that one had finished it waited for it. Where that had been there all along,
the stage was held by its exchange with those beside it, which lasts until both have come: it waited
for the nearest stage that finished a piece of work meanwhile, until then. What is left of a gap is
without a cause, for a trace does not tell transfers. With `reduce` stages come to an operation with
all others; they wait there until the last has come. What is left until `iteration end` has no
cause.

## Where it is blind

What a stage does besides (copies, optimizer), why it has more work, and how long transfers take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.device_gaps import union
from clusterprof.importers.tables import NodeTables, group_number
from clusterprof.importers.text_lines import whole_bytes
from clusterprof.probe import layout

_NS = 1000
_HEAVY = 1.2
_LATEST_US = 1 << 52
_NUMBER_AT_MOST = 1 << 31
Who = tuple[int, int]
Piece = tuple[int, int, int, int]  # iteration, model chunk, microbatch, 0 forward or 1 backward


class _Arguments(msgspec.Struct):
    iteration: int = 0
    microbatch: int = -1
    model_chunk: int = 0


class _Event(msgspec.Struct):
    name: str
    ph: str
    ts: float
    pid: int = 0
    tid: int = 0
    args: _Arguments | None = None


@dataclass(slots=True)
class _Stage:
    """What one process of the trace did."""

    begun: dict[str, list[float]] = field(default_factory=dict)
    work: list[tuple[int, int, Piece]] = field(default_factory=list)
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    """When an instant was, by its name and iteration, in ns; begin and end of work likewise."""


class MegatronPipeline:
    """Pipeline traces of MegatronApp."""

    name: ClassVar[str] = "megatron-pipeline"
    title: ClassVar[str] = "Megatron pipeline trace (MegatronApp)"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether this is a list of events with iterations and microbatches."""
        begins = head.lstrip()[:1] in (b"[", b"{")
        return begins and b'"iteration begin"' in head and b'"ph"' in head

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node, for all stages have one clock. Raises CannotImportError."""
        for source, account in zip(sources, accounts):
            stages = _stages(source, account)
            if not any(stage.work for stage in stages.values()):
                raise CannotImportError("no forward or backward has a begin and an end in it")
            yield _node(stages, account)


def _stages(source: Source, account: Account) -> dict[Who, _Stage]:
    try:
        found = msgspec.json.decode(whole_bytes(source))
        listed = found.get("traceEvents") if isinstance(found, dict) else found
        events = listed if isinstance(listed, list) else []
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise CannotImportError(f"no JSON that can be read ({error})") from error
    stages: dict[Who, _Stage] = {}
    for raw in sorted(_events(events, account), key=lambda event: event.ts):
        stage = stages.setdefault((raw.pid, raw.tid), _Stage())
        _take(stage, raw, account)
    left = sum(len(some) for stage in stages.values() for some in stage.begun.values())
    if left:
        account.skipped["that never end"] += left
    return stages


def _events(events: list[Any], account: Account) -> Iterator[_Event]:
    for raw in events:
        try:
            event = msgspec.convert(raw, _Event)
        except (msgspec.ValidationError, RecursionError, OverflowError):
            account.skipped["events of another kind"] += 1
            continue
        said = event.args or _Arguments()
        numbers = (event.tid, said.iteration, said.microbatch, said.model_chunk)
        sound = all(abs(one) < _NUMBER_AT_MOST for one in numbers)
        if sound and 0 <= event.ts < _LATEST_US and -1 < event.pid < 1 << 24:
            yield event
        else:
            account.skipped["events with times or numbers that cannot be"] += 1


def _take(stage: _Stage, event: _Event, account: Account) -> None:
    arguments = event.args or _Arguments()
    at = round(event.ts * _NS)
    if event.ph in ("i", "I"):
        stage.marks.setdefault((event.name, arguments.iteration), at)
    elif event.name not in ("forward", "backward"):
        account.skipped["events of another kind"] += 1
    elif event.ph == "B":
        stage.begun.setdefault(event.name, []).append(event.ts)
    elif event.ph == "E" and stage.begun.get(event.name):
        start = round(stage.begun[event.name].pop() * _NS)
        way = int(event.name == "backward")
        piece = (arguments.iteration, arguments.model_chunk, arguments.microbatch, way)
        stage.work.append((start, at, piece))
        account.read["forward and backward passes"] += 1
    else:
        account.skipped["ends without a begin"] += 1


def _node(stages: dict[Who, _Stage], account: Account) -> NodeTables:
    node = NodeTables("", MegatronPipeline.name)
    who = sorted(stages)
    ranks = {one: rank for rank, one in enumerate(who)}
    team = list(range(len(who)))
    group = group_number(team)
    for one in who:
        stage, rank = stages[one], ranks[one]
        stage.work.sort()
        device = f"stage{rank}"
        node.device(device)
        node.rank(rank + 1, rank, len(who), device)
        node.group(rank + 1, group, team)
        if stage.work:
            _add_steps(node, stage, rank + 1, device, account, rank)
    _add_waits(node, stages, ranks, group)
    _add_reduces(node, stages, ranks, group)
    _compare(stages, ranks, account)
    return node


def _compare(stages: dict[Who, _Stage], ranks: dict[Who, int], account: Account) -> None:
    """Say which stage has much more to do than the middle one."""
    work = sorted(
        (sum(e - s for s, e, _ in stage.work), ranks[one]) for one, stage in stages.items()
    )
    (most, rank), middle = work[-1], work[(len(work) - 1) // 2][0]
    if middle and most >= _HEAVY * middle:
        account.notes.append(
            f"stage {rank} does {most / middle:.1f} times the work of the middle stage: give it"
            " fewer layers (the last one also has the output layer and the loss)"
        )


def _add_steps(
    node: NodeTables, stage: _Stage, pid: int, device: str, account: Account, rank: int
) -> None:
    start, end = (np.array([one[at] for one in stage.work], np.int64) for at in (0, 1))
    iterations = sorted({number for _, number in stage.marks} | {p[0] for *_, p in stage.work})
    begins, ends = [], []
    for number in iterations:
        mine = [one for one in stage.work if one[2][0] == number]
        first = min((one[0] for one in mine), default=0)
        last = max((one[1] for one in mine), default=0)
        begins.append(stage.marks.get(("iteration begin", number), first))
        ends.append(max(stage.marks.get(("iteration end", number), last), begins[-1]))
    node.spans(pid, layout.STEP, begins, ends, iterations, 2, -1, -1)
    busy = union(start, end)
    low, high = min(begins), max(ends)
    node.busy(
        device, *busy, min(low, int(start.min(initial=low))), max(high, int(end.max(initial=high)))
    )
    for kind, way in ((layout.FORWARD, 0), (layout.BACKWARD, 1)):
        rows = np.array([piece[3] == way for *_, piece in stage.work], np.bool_)
        node.spans(pid, kind, start[rows], end[rows])
    whole = sum(e - b for b, e in zip(begins, ends))
    if whole > 0:
        bubble = 1 - float((busy[1] - busy[0]).sum()) / whole
        account.notes.append(
            f"stage {rank}: {bubble:.1%} bubble (neither forward nor backward),"
            f" {(busy[1] - busy[0]).sum() / 1e6 / len(iterations):.1f} ms of work an iteration"
        )


def _add_waits(
    node: NodeTables, stages: dict[Who, _Stage], ranks: dict[Who, int], group: int
) -> None:
    """A wait of one stage for another is a message: sent when that one had finished its work."""
    ends = {one: np.array([end for _, end, _ in stage.work], np.int64)
            for one, stage in stages.items()}  # fmt: skip
    made = {one: {piece: end for _, end, piece in stage.work} for one, stage in stages.items()}
    chunks = 1 + max((piece[1] for s in stages.values() for *_, piece in s.work), default=0)
    found: dict[tuple[Who, Who], list[tuple[int, int]]] = {}
    for one, stage in stages.items():
        for (_, before, earlier), (start, _, piece) in pairwise(stage.work):
            if start <= before or earlier[0] != piece[0]:
                continue
            waited = None
            maker = _maker(one, piece, stages, chunks)
            if maker is not None:
                at = made[maker[0]].get(maker[1], -1)
                waited = (maker[0], at) if before < at <= start else None
            waited = waited or _waited_for(one, before, start, ends)
            if waited is not None:
                found.setdefault((waited[0], one), []).append((before, waited[1]))
    for (source, target), some in found.items():
        arrive, leave = np.array(sorted(some), np.int64).T
        number = np.arange(arrive.size, dtype=np.int64)
        node.collectives(
            ranks[target] + 1, arrive, leave, group, number, -1, layout.RECV, peer=ranks[source]
        )
        node.collectives(
            ranks[source] + 1, leave, leave, group, number, -1, layout.SEND, peer=ranks[target]
        )


def _maker(
    one: Who, piece: Piece, stages: dict[Who, _Stage], chunks: int
) -> tuple[Who, Piece] | None:
    """The stage whose result a piece of work needs, and what that result was."""
    iteration, chunk, microbatch, way = piece
    stage, lane = one
    last = max(each for each, of in stages if of == lane)
    source = stage - 1 if way == 0 else stage + 1
    if source < 0:
        source, chunk = last, chunk - 1
    elif source > last:
        source, chunk = 0, chunk + 1
    found = (source, lane)
    if found not in stages or found == one or not 0 <= chunk < chunks:
        return None
    return found, (iteration, chunk, microbatch, way)


def _waited_for(
    one: Who, since: int, until: int, ends: dict[Who, NDArray[np.int64]]
) -> tuple[Who, int] | None:
    """The nearest stage that finished something in this time, and when it last did.

    Neighbours stand still until both have come: one that did so hands the wait on behind it.
    """
    ring = sorted(other for other in ends if other[1] == one[1])
    place = ring.index(one)
    for away in range(1, len(ring) // 2 + 1):
        beside = {ring[(place - away) % len(ring)], ring[(place + away) % len(ring)]} - {one}
        found = []
        for other in beside:
            row = int(ends[other].searchsorted(until, side="right")) - 1
            if row >= 0 and ends[other][row] > since:
                found.append((int(ends[other][row]), other))
        if found:
            at, other = max(found)
            return other, at
    return None


def _add_reduces(
    node: NodeTables, stages: dict[Who, _Stage], ranks: dict[Who, int], group: int
) -> None:
    """Stages wait at the end of an iteration until the last has come."""
    numbers = sorted({number for stage in stages.values() for name, number in stage.marks
                      if name == "reduce"})  # fmt: skip
    whole = [n for n in numbers if all(("reduce", n) in stage.marks for stage in stages.values())]
    leave = [max(stage.marks["reduce", n] for stage in stages.values()) for n in whole]
    for one, stage in stages.items():
        arrive = [stage.marks["reduce", number] for number in whole]
        node.collectives(ranks[one] + 1, arrive, leave, group, np.arange(len(whole)))
