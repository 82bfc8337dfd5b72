"""Slices of blame as tasks of a cluster, with blocks that lie on its workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.spill import SpillLocation, SpillWriter
from clusterprof.analysis.tasks.remote_blame import RemoteSlices
from clusterprof.analysis.timeline.collectives.matching import RankEntry
from tests.support.dask_cluster import run_cluster
from tests.support.synthetic.run_slices import (
    blame_job,
    list_all_results,
    make_entries,
    plan_job_slices,
    sample_all_cuts,
)
from tests.support.synthetic.scenarios import draw_fault

pytest.importorskip("distributed", reason="needs distributed: pip install 'clusterprof[dask]'")

RANKS_A_NODE = 2


def store_blocks(entries: list[RankEntry], sinks: dict[int, bytearray]) -> list[RankEntry]:
    """Move the blocks of each node, two ranks, from memory to what its worker keeps."""
    out = []
    for at, entry in enumerate(entries):
        number = 1 + at // RANKS_A_NODE
        sink = sinks.setdefault(number, bytearray())
        with SpillWriter(SpillLocation(number=number, sink=sink)) as writer:
            blocks = tuple(
                replace(block, location=writer.put(block.location))  # type: ignore[arg-type]
                for block in entry.operations.blocks
            )
        out.append(replace(entry, operations=replace(entry.operations, blocks=blocks)))
    return out


def test_blame_on_workers_equals_blame_in_a_single_process(tmp_path: Path) -> None:
    job = draw_fault("data parallel", 8, 5, 300, decoy=True)
    with sample_all_cuts():
        entries = make_entries(job, 16)
    expected, left_out = blame_job(plan_job_slices(entries, 60), 8)
    sinks: dict[int, bytearray] = {}
    jobs = plan_job_slices(store_blocks(entries, sinks), 60)
    assert len(jobs[0].spans) > 2 and len(sinks) == 4
    from distributed import Client

    with run_cluster(tmp_path, 2) as cluster:
        file = str(cluster.scheduler_file)
        with Client(scheduler_file=file, set_as_default=False) as client:
            outputs = {
                number: client.scatter([(None, np.frombuffer(sink, np.uint8))], hash=False)[0]
                for number, sink in sinks.items()
            }
            run_slices = RemoteSlices(client, outputs, lambda: False)
            sums, unmatched = blame_job(jobs, 8, run_slices.map)
            location = jobs[0].entries[0].operations.blocks[0].location
            assert isinstance(location, int)
            fetched = run_slices.fetch([(location, 10)])
    assert list_all_results(sums) == list_all_results(expected)
    assert unmatched == left_out
    assert fetched[location].tobytes() == sinks[1][:10]
