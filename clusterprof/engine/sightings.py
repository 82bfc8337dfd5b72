"""Every training process that was recorded, once each, on nodes that are told apart.

A machine is known by its boot id. Several recorders may have seen one: one per job, one per
container, one after another, or two at once. The same process is then one process; two machines of
one host name get the beginning of their boot id behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from clusterprof.attribution.ledger import RankBooks
from clusterprof.engine.node import NodeResult
from clusterprof.timeline.identity import Place

TOUCH_NS = 1_000_000_000
"""A process that follows another may seem to begin that much before the other ends."""
_UNIQUE = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class Sighting:
    """One rank in one recording."""

    at: tuple[int, int]
    """Number of the node, and of the rank's books in it."""
    node: str
    machine: str
    """Boot id; the recording itself where none is known."""
    host: str
    pid: int
    started_ticks: int
    place: Place
    job: str
    """Its job's name; else where the ranks met; else ""."""
    first_ns: int
    """First and last record, by the wall clock that its node had at the start."""
    last_ns: int
    in_step_ns: int
    device: str
    """Of all machines: its UUID, else its machine and number; "" when none was measured."""


def sightings(nodes: Sequence[NodeResult]) -> list[Sighting]:
    """Return all ranks of all recordings."""
    out = []
    for number, node in enumerate(nodes):
        launcher = node.loaded.header.launcher
        shared = str(launcher.get("job") or "") if launcher.get("named") else ""
        host = node.loaded.header.node.get("hostname", "")
        ahead_ns = wall_ahead_ns(node)
        for at, one in enumerate(node.books):
            out.append(
                Sighting(
                    at=(number, at),
                    node=node.facts.name,
                    machine=node.facts.boot_id or node.facts.key,
                    host=host,
                    pid=one.ledger.pid,
                    started_ticks=one.started_ticks,
                    place=one.place,
                    job=one.place.job or shared or one.place.meets_at,
                    first_ns=one.first_ns + ahead_ns,
                    last_ns=one.last_ns + ahead_ns,
                    in_step_ns=one.ledger.in_step_ns,
                    device=_device(node, one.ledger.device),
                )
            )
    return out


def _device(node: NodeResult, name: str) -> str:
    if not name or name.startswith(_UNIQUE):
        return name
    return f"{name} of {node.facts.key}"


def shared_devices(seen: Iterable[Sighting]) -> list[str]:
    """Say which devices several processes used at the same time: their time counts for each."""
    by_device: dict[str, list[Sighting]] = {}
    for one in seen:
        if one.device:
            by_device.setdefault(one.device, []).append(one)
    notes = []
    for device, ones in sorted(by_device.items()):
        ones = sorted(ones, key=lambda one: one.first_ns)
        if any(b.first_ns + TOUCH_NS < a.last_ns for a, b in pairwise(ones)):
            who = ", ".join(f"{one.node} pid {one.pid}" for one in ones)
            notes.append(
                f"{device} was used by several processes at once ({who}): it counts for each"
            )
    return notes


def wall_ahead_ns(node: NodeResult) -> int:
    """Return how far the wall clock of a node was ahead of its own when its recording began."""
    started = node.loaded.header.started
    return int(started.get("realtime_ns", 0)) - int(started.get("monotonic_ns", 0))


def once_each(seen: Iterable[Sighting]) -> tuple[list[Sighting], list[str]]:
    """Leave out the shorter of two sightings of one process at one time; say so.

    A process is known by its machine, host, pid and start; seen from another process-id namespace
    it has another pid, and the same start, job and rank.
    """
    kept: list[Sighting] = []
    notes = []
    known: dict[tuple[object, ...], list[Sighting]] = {}
    for one in sorted(seen, key=lambda one: (-one.in_step_ns, one.at)):
        keys = _keys(one)
        again = next(
            (
                other
                for key in keys
                for other in known.get(key, ())
                if other.first_ns < one.last_ns and one.first_ns < other.last_ns
            ),
            None,
        )
        if again is not None:
            who = f"pid {one.pid}" if one.place.rank is None else f"rank {one.place.rank}"
            notes.append(f"{who} on {one.node} was recorded twice; it counts once")
            continue
        kept.append(one)
        for key in keys:
            known.setdefault(key, []).append(one)
    return sorted(kept, key=lambda one: one.at), sorted(set(notes))


def _keys(one: Sighting) -> list[tuple[object, ...]]:
    if one.started_ticks < 0:
        return []
    keys: list[tuple[object, ...]] = [
        ("pid", one.machine, one.host, one.pid, one.started_ticks, one.place.rank)
    ]
    if one.place.rank is not None and one.job:
        keys.append(("rank", one.machine, one.started_ticks, one.job, one.place.rank))
    return keys


def renamed(nodes: Sequence[NodeResult]) -> tuple[NodeResult, ...]:
    """Tell machines of one name apart by the beginning of their boot id."""
    machines: dict[str, set[str]] = {}
    for node in nodes:
        if node.facts.boot_id:
            machines.setdefault(node.facts.name, set()).add(node.facts.boot_id)
    return tuple(
        _named(node, f"{node.facts.name}-{node.facts.boot_id[:8]}")
        if node.facts.boot_id and len(machines[node.facts.name]) > 1
        else node
        for node in nodes
    )


def _named(node: NodeResult, name: str) -> NodeResult:
    def moved(one: RankBooks) -> RankBooks:
        return replace(one, ledger=replace(one.ledger, node=name))

    return replace(node, facts=replace(node.facts, name=name), books=tuple(map(moved, node.books)))
