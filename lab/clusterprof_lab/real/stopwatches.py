"""Read the stopwatches of a job: the files that `scripts/stopwatch.py` wrote, as numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Phase(NamedTuple):
    """What the host did for a while."""

    start_ns: int
    end_ns: int
    name: str
    """`data_wait`, or the cause that such a pause is."""
    delay_ns: int
    """Part of it in which it was ready to run and others had its CPU."""


class Item(NamedTuple):
    """How the loader made one item."""

    begun_ns: int
    read_ns: int
    made_ns: int
    read_delay_ns: int
    decode_delay_ns: int
    decode_cpu_ns: int
    read_user_ns: int = 0
    """While reading, in code of the process: a protocol, a checksum."""


class Operation(NamedTuple):
    """One operation with other ranks, when this one came and when it could go on."""

    key: tuple[str, int, int, int]
    """Kind, sender, receiver (-1 of a collective), number."""
    come_ns: int
    left_ns: int


class Busy(NamedTuple):
    """What the device did."""

    start_ns: int
    end_ns: int
    what: str
    """compute, copy."""
    slowed_ns: int


@dataclass
class Incarnation:
    """One process of one rank, from its first step to its last complete one."""

    rank: int
    host: str
    number: int
    """Number of earlier starts of the rank."""
    started_ns: int
    began_ns: int = 0
    ended_ns: int = 0
    steps: int = 0
    phases: list[Phase] = field(default_factory=list)
    batches: list[list[Item]] = field(default_factory=list)
    """By step."""
    workers: int = 1
    """Of the loader; each makes every so many batches."""
    operations: list[Operation] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)
    injected: list[tuple[int, int, str]] = field(default_factory=list)
    loop_ends_ns: list[int] = field(default_factory=list)
    """By step: when it was over for the host."""
    delays_ns: list[int] = field(default_factory=list)
    """By step: time without a CPU so far."""


def read_stopwatches(folder: Path) -> list[Incarnation]:
    """Read all incarnations of all ranks; those that trained no step have no times."""
    lives = [
        _parse_incarnation(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.jsonl")
    ]
    return sorted(lives, key=lambda life: (life.number, life.rank))


def _parse_incarnation(text: str) -> Incarnation:
    first, *lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    life = Incarnation(first["rank"], first["host"], first["life"], first["started_ns"])
    life.workers = first.get("workers", 1)
    sent: dict[tuple[int, int], int] = {}
    for line in lines:
        life.began_ns, life.ended_ns = line["began_ns"], line["ended_ns"]
        life.phases += [Phase(*phase) for phase in line["phases"]]
        life.injected += [(start, end, cause) for start, end, cause in line["injected"]]
        for kind, peer, number, come, left in line["operations"]:
            life.operations.append(
                Operation(_make_key(life.rank, kind, peer, number, sent), come, left)
            )
        for start, end, what, slowed, number in line["log"]:
            if what == "collective":
                life.operations.append(Operation(("device", -1, -1, number), start, end))
            else:
                life.busy.append(Busy(start, end, what, slowed))
        if line["step"] >= 0:
            life.steps += 1
            life.batches.append([Item(*row) for row in line["items"]])
            life.loop_ends_ns.append(line["ended_ns"])
            life.delays_ns.append(line["delay_ns"])
    return life


def _make_key(
    rank: int, kind: str, peer: int, number: int, sent: dict[tuple[int, int], int]
) -> tuple[str, int, int, int]:
    if kind == "all":
        return kind, -1, -1, number
    way = (rank, peer) if kind == "send" else (peer, rank)
    sent[way] = sent.get(way, -1) + 1
    return "message", *way, sent[way]


def find_last_incarnation(lives: Sequence[Incarnation]) -> int:
    """Return the number of the last incarnation in which a step was trained."""
    return max((life.number for life in lives if life.steps), default=0)
