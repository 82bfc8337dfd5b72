"""Pipeline traces of Megatron (MegatronApp): when each stage ran which microbatch forward and back.

## What is read

Chrome JSON lists with begin and end events `forward` and `backward` (`args`: iteration, microbatch,
model_chunk, pp_rank), and instants `iteration begin`, `reduce`, `iteration end`. A process of the
trace is a stage of the pipeline; times are microseconds of one clock.

## How it is understood

A stage is busy in `forward` and `backward`; the rest of the iteration is its bubble. An iteration
is a step. A stage needs what the stage before it made of the same microbatch (backward: the stage
behind it), so until that one had finished it waited for a message from there. What it waited
longer is left without a cause: it may have been held by messages of its own that nobody took, or
by the transfer, and a trace does not tell. With `reduce` stages come to an operation with all
others; they wait there until the last has come. What is left until `iteration end` has no cause.

## Where it is blind

What a stage does besides (copies, optimizer) and why its work is more than that of others is not in
such a trace; nor are transfers apart from waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.device_gaps import union
from clusterprof.importers.tables import NodeTables, group_number
from clusterprof.probe import layout

BYTES_AT_MOST = 256 << 20
_NS = 1000
_HEAVY = 1.2
_LATEST_US = 1 << 52
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
    """Begin and end in ns, and what it was."""
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    """When an instant was, by its name and iteration, in ns."""


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
    data = bytearray()
    for block in source.blocks():
        data += block
        if len(data) > BYTES_AT_MOST:
            raise CannotImportError(f"more than {BYTES_AT_MOST:,} bytes", "give fewer iterations")
    try:
        found = msgspec.json.decode(bytes(data).lstrip())
        listed = found.get("traceEvents") if isinstance(found, dict) else found
        events = listed if isinstance(listed, list) else []
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise CannotImportError(f"no JSON that can be read ({error})") from error
    stages: dict[Who, _Stage] = {}
    for raw in sorted(_events(events, account), key=lambda event: event.ts):
        stage = stages.setdefault((raw.pid, raw.tid), _Stage())
        _take(stage, raw, account)
    left = sum(len(some) for stage in stages.values() for some in stage.begun.values())
    account.skipped["that never end"] += left
    return stages


def _events(events: list[Any], account: Account) -> Iterator[_Event]:
    for raw in events:
        try:
            event = msgspec.convert(raw, _Event)
        except (msgspec.ValidationError, RecursionError, OverflowError):
            account.skipped["events of another kind"] += 1
            continue
        if 0 <= event.ts < _LATEST_US and -1 < event.pid < 1 << 24 and abs(event.tid) < 1 << 31:
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
    chunks = 1 + max((piece[1] for s in stages.values() for *_, piece in s.work), default=0)
    sent = {one: {piece: end for _, end, piece in stages[one].work} for one in who}
    order: dict[tuple[int, int], dict[Piece, int]] = {}
    for one in who:
        for piece, target in _outgoing(one, sent[one], stages, chunks):
            to = order.setdefault((ranks[one], ranks[target]), {})
            to[piece] = len(to)
    for one in who:
        stage, rank = stages[one], ranks[one]
        stage.work.sort()
        pid, device = rank + 1, f"stage{rank}"
        node.device(device)
        node.rank(pid, rank, len(who), device)
        node.group(pid, group, team)
        _add_steps(node, stage, pid, device, account, rank)
        for (source, target), numbers in order.items():
            if rank == source:
                _add_sends(node, pid, group, sent[one], numbers, target)
            elif rank == target:
                who_sent = who[source]
                _add_receives(
                    node, pid, group, stage, numbers, source, who_sent, stages, sent[who_sent]
                )
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


def _outgoing(
    one: Who, ends: dict[Piece, int], stages: dict[Who, _Stage], chunks: int
) -> Iterator[tuple[Piece, Who]]:
    """What a stage makes for others, in the order in which it did: piece and receiver."""
    for piece in sorted(ends, key=lambda each: ends[each]):
        target = _neighbour(one, piece, stages, chunks)
        if target is not None:
            yield piece, target


def _neighbour(one: Who, piece: Piece, stages: dict[Who, _Stage], chunks: int) -> Who | None:
    """The stage that works on a piece next: forward the one behind, backward the one before."""
    _, chunk, _, way = piece
    stage, lane = one
    last = max(each for each, of in stages if of == lane)
    target = stage + 1 if way == 0 else stage - 1
    if target > last:
        target = 0 if chunk + 1 < chunks else -1
    elif target < 0:
        target = last if chunk > 0 else -1
    found = (target, lane)
    return found if found in stages and found != one else None


def _next_piece(one: Who, piece: Piece, stages: dict[Who, _Stage]) -> Piece:
    """What a piece is called where it goes: another chunk where it goes round."""
    iteration, chunk, microbatch, way = piece
    last = max(each for each, of in stages if of == one[1])
    around = (way == 0 and one[0] == last) or (way == 1 and one[0] == 0)
    return (iteration, chunk + (1 - 2 * way if around else 0), microbatch, way)


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


def _add_sends(
    node: NodeTables, pid: int, group: int, ends: dict[Piece, int], numbers: dict[Piece, int],
    target: int,
) -> None:  # fmt: skip
    at = np.array([ends[piece] for piece in numbers], np.int64)
    order = np.array(list(numbers.values()), np.int64)
    node.collectives(pid, at, at, group, order, -1, layout.SEND, peer=target)


def _add_receives(
    node: NodeTables, pid: int, group: int, stage: _Stage, numbers: dict[Piece, int], source: int,
    who: Who, stages: dict[Who, _Stage], sent: dict[Piece, int],
) -> None:  # fmt: skip
    """A stage waits for a message from the end of what it did before until it has been sent."""
    known = {_next_piece(who, piece, stages): (n, sent[piece]) for piece, n in numbers.items()}
    rows = []
    before = stage.marks.get(("iteration begin", stage.work[0][2][0]), stage.work[0][0])
    for start, end, piece in stage.work:
        before = max(before, stage.marks.get(("iteration begin", piece[0]), before))
        if piece in known and before <= start:
            number, made = known[piece]
            rows.append((before, min(max(before, made), start), number))
        before = end
    if rows:
        arrive, leave, number = np.array(rows, np.int64).T
        node.collectives(pid, arrive, leave, group, number, -1, layout.RECV, peer=source)


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
