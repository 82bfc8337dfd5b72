"""Results of many nodes without their recordings: copies of a few real ones under other names.

The recordings of `_cluster_recording.py` are analyzed for two nodes, with operations and history;
each further node is a copy with its own ranks, group members, name and clock.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from _cluster_recording import (
    NODE_GROUP,
    RANKS,
    make_header,
    make_registrations,
    write_job,
    write_node,
)

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import NodeResult, analyze_node
from clusterprof.analysis.node.transport import with_group_ranges
from clusterprof.analysis.spill import SpillLocation
from clusterprof.analysis.timeline.collectives.rows import RankOperations
from clusterprof.analysis.timeline.load.ranks import parse_job_position
from clusterprof.trace.schema import Event


def analyze_two_nodes(folder: Path, seconds: int) -> tuple[list[NodeResult], SpillLocation]:
    """Write and analyze two nodes: the one with the late rank, and another one."""
    job = folder / "job"
    job.mkdir()
    place = SpillLocation(str(folder / "operations"))
    Path(place.address).mkdir()
    for name in ("plain", "late"):
        write_node(folder / name, seconds, late=name == "late")
    write_job(job, 2, folder / "plain", folder / "late", apart_ns=0)
    limits = build_limits({})
    return [analyze_node(path, limits, None, place, True) for path in sorted(job.iterdir())], place


def replicate_nodes(results: list[NodeResult], nodes: int) -> Iterator[bytes]:
    """Yield the results of a job of `nodes` nodes, as they travel from a worker."""
    late, plain = results[0], results[1]
    for number in range(nodes):
        result = plain if number else late
        yield pickle.dumps(_rename_node(result, number, nodes * RANKS), 5)


def _rename_node(result: NodeResult, number: int, world: int) -> NodeResult:
    """Return a result as that of another node: its name, ranks and announced groups."""
    own, name = make_header(number, 0), f"node-{number:03d}"
    events = [
        event for event in make_registrations(number * RANKS, world) if isinstance(event, Event)
    ]
    variables = [event.attributes for event in events if event.kind == "process-registered"]
    ranks = tuple(
        replace(
            rank,
            ledger=replace(rank.ledger, node=name, rank=number * RANKS + at),
            launcher_variables=variables[at]["variables"],
            job_position=parse_job_position(variables[at]),
            operations=_with_own_group(rank.operations, number),
        )
        for at, rank in enumerate(result.ranks)
    )
    endings = tuple(
        replace(ending, job_position=parse_job_position(variables[at]))
        for at, ending in enumerate(result.endings)
    )
    announced = with_group_ranges(
        [
            replace(event, attributes={**event.attributes, "group": _get_group(event, number)})
            for event in events
            if event.kind == "group-announced"
        ]
    )
    return replace(
        result,
        facts=replace(result.facts, name=name, key=name, boot_id=f"b{number}"),
        ranks=ranks,
        loaded=replace(result.loaded, header=own, events=announced),
        endings=endings,
    )


def _get_group(event: Event, number: int) -> int:
    """Return the group of an announcement, that within the node with a number of its own."""
    group = int(event.attributes["group"])
    return group + number if group == NODE_GROUP else group


def _with_own_group(operations: RankOperations | None, number: int) -> RankOperations | None:
    """Return the operations with a number of its own for the group within the node."""
    if operations is None:
        return None
    channels = operations.channels.copy()
    channels[channels[:, 0] == NODE_GROUP, 0] += number
    return replace(operations, channels=channels)
