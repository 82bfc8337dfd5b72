"""What a report says of ranks that stood still when their recordings ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterprof.attribution.blame_hangs import Hang
from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import AFTER_STEPS, NO_STEPS, RankBooks
from clusterprof.engine.hanging import Person, Recorded, Standstill, standstill
from clusterprof.engine.jobs import ranges
from clusterprof.engine.node import NodeResult
from clusterprof.findings import Culprit, Evidence, Finding
from clusterprof.probe import layout
from clusterprof.timeline.operation_names import OPERATIONS

FAIL_HANG = "fail-hang"
_SENTENCES = 8
_CONFIDENCE, _CONFIDENCE_UNSEEN = 0.95, 0.7
_OPERATIONS = {
    **OPERATIONS,
    layout.GRADIENTS: "the reduction of gradients",
    layout.OTHER_OPERATION: "an operation",
}
_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "blocked in the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended and not waited for",
}


@dataclass(frozen=True, slots=True)
class Hung:
    """All nodes, with the time of ranks that stood still in their books."""

    nodes: tuple[NodeResult, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def hung(nodes: Sequence[NodeResult]) -> Hung:
    """Find who stood still in the end, move that time in the books and say it."""
    still = standstill(nodes)
    notes = [_still_at_work(one, still) for one in still.at_work[:_SENTENCES]]
    if not still.found:
        return Hung(tuple(nodes), (), tuple(notes))
    lost = _standing_ns(still)
    moved = tuple(_moved(node, lost) for node in nodes)
    notes = [_sentence(one, still) for one in still.found[:_SENTENCES]] + notes
    return Hung(moved, (_finding(moved, still),), tuple(notes))


def _standing_ns(still: Standstill) -> dict[tuple[str, int, int], int]:
    """How long each rank that waits, or is waited for, had stood still; by node and process."""
    out: dict[tuple[str, int, int], int] = {}
    for hang in still.found:
        for number in {*hang.waiting, *hang.roots}:
            one = still.recorded.get(still.people[number])
            if one is None:
                continue
            under_way = still.stuck.get(number)
            ns = one.silent_ns if under_way is None else one.waited_ns(under_way)
            out[one.node.facts.key, one.ending.pid, one.ending.started_ticks] = ns
    return out


def _moved(node: NodeResult, lost: dict[tuple[str, int, int], int]) -> NodeResult:
    def new(one: RankBooks) -> RankBooks:
        ns = lost.get((node.facts.key, one.ledger.pid, one.started_ticks), 0)
        lines = dict(one.ledger.outside_buckets)
        for name in (AFTER_STEPS, NO_STEPS):
            part = min(ns, lines.get(name, 0))
            if part > 0:
                lines[name] -= part
                lines[FAIL_HANG] = lines.get(FAIL_HANG, 0) + part
                ns -= part
        left = tuple((name, amount) for name, amount in lines.items() if amount)
        return replace(one, ledger=replace(one.ledger, outside_buckets=left))

    return replace(node, books=tuple(map(new, node.books)))


def _finding(nodes: Sequence[NodeResult], still: Standstill) -> Finding:
    ledgers = [one.ledger for node in nodes for one in node.books]
    lost_ns = sum(dict(one.outside_buckets).get(FAIL_HANG, 0) for one in ledgers)
    window_ns = sum(one.window_ns for one in ledgers)
    seen = all(hang.recorded for hang in still.found)
    waiting = {number for hang in still.found for number in hang.waiting}
    longest_ns = max(
        still.recorded[still.people[number]].waited_ns(still.stuck[number]) for number in waiting
    )
    culprits = []
    for hang in still.found:
        for number in hang.roots:
            one = still.recorded.get(still.people[number])
            if one is not None and not hang.inside:
                culprits.append(_culprit(one))
    return Finding(
        cause=CAUSES[FAIL_HANG],
        lost_ns=lost_ns,
        share_ratio=lost_ns / window_ns if window_ns else 0.0,
        recoverable_ns=None,
        confidence_ratio=_CONFIDENCE if seen else _CONFIDENCE_UNSEEN,
        grade="A" if seen else "B",
        upper_bound=False,
        outside_steps=True,
        culprits=tuple(dict.fromkeys(culprits)),
        evidence=(
            Evidence(
                "hang.longest_ns", float(longest_ns), "ns",
                "the longest that a rank had been in one operation when it was last seen",
            ),
            Evidence(
                "hang.waiting_count", float(len(waiting)), "count",
                "ranks that waited in an operation which did not end",
            ),
        ),
    )  # fmt: skip


def _culprit(one: Recorded) -> Culprit:
    books = next((b for b in one.node.books if b.ledger.pid == one.ending.pid), None)
    device = books.ledger.device if books is not None else ""
    return Culprit(one.node.facts.name, one.ending.place.rank, device)


def _sentence(hang: Hang, still: Standstill) -> str:
    first = hang.waiting[0]
    one = still.recorded[still.people[first]]
    seconds = one.waited_ns(still.stuck[first]) / 1e9
    waiting = _ranks(hang.waiting, still)
    where = _operation(first, still)
    if hang.inside:
        return (
            f"progress stopped: {waiting} had come to {where}, all of its members, and none left it"
            f" for {seconds:.0f} s: the network, or a device"
        )
    if hang.circle:
        each = "; ".join(f"rank {_rank(n, still)} in {_operation(n, still)}" for n in hang.roots)
        return (
            f"progress stopped for {seconds:.0f} s: {_ranks(hang.roots, still)} wait for each other"
            f" in a circle ({each})"
        )
    said = f"progress stopped: {waiting} waited for {seconds:.0f} s in {where}"
    return f"{said} for {_root(still.people[hang.roots[0]], one, still)}"


def _still_at_work(hang: Hang, still: Standstill) -> str:
    one = still.recorded[still.people[hang.waiting[0]]]
    seconds = one.waited_ns(still.stuck[hang.waiting[0]]) / 1e9
    return (
        f"when the recording ended {_ranks(hang.waiting, still)} had been waiting for"
        f" {seconds:.0f} s for {_ranks(hang.roots, still)}, which was still at work"
    )


def _root(person: Person, waiting: Recorded, still: Standstill) -> str:
    one = still.recorded.get(person)
    name = f"rank {person[1]}"
    if one is None:
        return f"{name}, which has no recording: what it did is not known"
    name = f"{name} on {one.node.facts.name}"
    end = one.ending
    if end.exited is not None and one.ended_alone(waiting):
        signal, code = end.exited.get("signal"), end.exited.get("exit_code")
        if signal:
            return f"{name}, which had been killed by signal {signal}"
        how = "" if code is None else f" with exit code {code}"
        return f"{name}, which had ended{how}"
    state = _STATES.get(end.state, "in a state unseen")
    if end.state == "R" and end.on_cpu_ratio is not None:
        state += f", on the CPU for {100 * end.on_cpu_ratio:.0f} % of the time"
    elif end.wchan and end.state in ("S", "D"):
        state += f" in {end.wchan}"
    silent = f"for {one.silent_ns / 1e9:.0f} s" if end.spoke_ns else "from its beginning"
    return f"{name}, which had not come and had marked nothing {silent}: {state}"


def _operation(number: int, still: Standstill) -> str:
    began = still.stuck[number]
    name = _OPERATIONS.get(began.operation & layout.OPERATION_MASK, "an operation")
    return name if began.number < 0 else f"{name} {began.number}"


def _rank(number: int, still: Standstill) -> int:
    return still.people[number][1]


def _ranks(numbers: Sequence[int], still: Standstill) -> str:
    said = ranges(_rank(number, still) for number in numbers)
    return f"rank {said}" if len(numbers) == 1 else f"ranks {said}"
