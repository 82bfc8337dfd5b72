"""Notes about a host: bound workers, far accelerators, full memory, heat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from clusterprof.analysis.node.observations import HostNotes, merge_node_notes
from clusterprof.analysis.timeline.model import Chunk, Placement, Process
from clusterprof.probe.layout import FETCH, WORKER_START
from tests.support.builders import (
    make_chunk,
    make_counter,
    make_gauge,
    make_header,
    make_process,
    make_spans,
)

CPUS = {
    "online": "0-7",
    "cores": ["0,4", "1,5", "2,6", "3,7"],
    "nodes": {"0": "0-1,4-5", "1": "2-3,6-7"},
}
NODE = make_header(cpus=CPUS)


def placed(item: Process, cpus: Sequence[int], ran_on: Sequence[int] = ()) -> Process:
    at = Placement(frozenset(cpus), frozenset(), np.array(ran_on, np.int64))
    return replace(item, placement=at)


def workers(cpus: Sequence[int], count: int = 8) -> list[Process]:
    main = placed(make_process(100, registration={"rank": 3, "variables": {"RANK": "3"}}), range(8))
    seen = {WORKER_START: make_spans((0, 1)), FETCH: make_spans((0, 4))}
    return [main, *(placed(make_process(200 + n, 100, seen), cpus) for n in range(count))]


def notes(*chunks: Chunk) -> tuple[str, ...]:
    host = HostNotes()
    assert list(host.watch(chunks)) == list(chunks)
    return host.notes()


def test_workers_bound_to_too_few_cpus_are_reported() -> None:
    assert notes(make_chunk(4, workers([3]), node=NODE)) == (
        "8 dataloader workers of rank 3 may run on 1 of 8 CPUs only (CPU 3): give the job more"
        " (srun --cpus-per-task, the container's cpuset) or undo a binding (--cpu-bind, taskset)",
    )
    (printed,) = notes(make_chunk(4, workers([2, 3, 6, 7], count=3), node=NODE))
    assert (
        "3 dataloader workers of rank 3 may run on 4 of 8 CPUs, 2 cores, only (CPU 2-3,6-7)"
        in printed
    )


def test_workers_with_enough_cpus_are_not_reported() -> None:
    assert notes(make_chunk(4, workers(range(8), count=64), node=NODE)) == ()
    assert notes(make_chunk(4, workers([0, 1, 2], count=3), node=NODE)) == ()
    assert notes(make_chunk(4, workers([3]))) == ()  # which CPUs there are was not recorded


def test_running_far_from_the_accelerator_numa_node_is_reported() -> None:
    device: dict[str, Any] = {"id": "GPU-1", "numa_node": 1, "pid": 100}
    node = replace(NODE, devices=[device])

    def notes_for(*ran_on: int) -> tuple[str, ...]:
        return notes(make_chunk(4, [placed(make_process(100), range(8), ran_on)], node=node))

    assert notes_for(0, 4, 1, 2) == (
        "process 100 ran on another NUMA node than its accelerator GPU-1 (node 1) 75% of the time:"
        " bind it to CPUs of node 1",
    )
    assert notes_for(2, 3, 0) == ()  # a third
    assert notes_for(0, 0) == ()  # seen too seldom
    assert notes_for(99, 99, 99) == ()  # CPUs of no node
    device["numa_node"] = -1
    assert notes_for(0, 0, 0) == ()


def test_an_accelerator_is_found_by_its_pci_address() -> None:
    """NVML says 00000000:3B:00.0 of what the kernel calls 0000:3b:00.0."""
    device = {"id": "GPU-1", "pci_bus_id": "00000000:3B:00.0", "pid": 100}
    cpus = {**CPUS, "accelerators": {"0000:3b:00.0": 1}}
    process_ = placed(make_process(100), range(8), [0, 0, 0])
    node = replace(make_header(cpus=cpus), devices=[device])
    assert "GPU-1 (node 1) 100% of the time" in notes(make_chunk(4, [process_], node=node))[0]
    assert notes(make_chunk(4, [process_], node=replace(NODE, devices=[device]))) == ()


def test_cpu_placement_samples_add_up_over_chunks() -> None:
    node = replace(NODE, devices=[{"id": "GPU-1", "numa_node": 1, "users": [100]}])
    timeline = make_chunk(4, [placed(make_process(100), range(8), [0, 0])], node=node)
    assert "100% of the time" in notes(timeline, timeline)[0]


def test_full_shared_memory_is_reported() -> None:
    def notes_for(*used: float) -> tuple[str, ...]:
        t_s = range(len(used))
        series = {
            ("shm.used_bytes", "/dev/shm"): make_gauge(t_s, used),
            ("shm.size_bytes", "/dev/shm"): make_gauge(t_s, [64 << 20] * len(used)),
        }
        return notes(make_chunk(4, series=series, node=NODE))

    (full,) = notes_for(1 << 20, 62 << 20, 3 << 20)
    assert full.startswith("/dev/shm was full (62.0 MiB of 64.0 MiB): workers die of a bus error")
    assert "--shm-size" in full
    assert notes_for(1 << 20, 60 << 20) == ()  # 94 %
    assert notes_for(np.nan, np.nan) == ()


def test_thermal_cpu_throttling_is_reported() -> None:
    def notes_for(*total_ms: float) -> tuple[str, ...]:
        series = {
            ("cpu.throttled_ns_total", "package0"): make_counter(
                range(len(total_ms)), [ms * 1e6 for ms in total_ms]
            )
        }
        return notes(make_chunk(4, series=series, node=NODE))

    assert notes_for(500, 500, 2000) == (
        "the CPUs of package0 were throttled by heat for 1.50 s of 4.00 s: check the node's"
        " cooling",
    )
    assert notes_for(500, 500, 520) == ()  # half a percent
    assert notes_for(500, np.nan, 100) == ()  # a counter that began anew says nothing


def test_equal_notes_of_several_nodes_are_merged() -> None:
    printed = [("n1", ("hot", "full")), ("n2", ("hot",)), ("n3", ())]
    assert merge_node_notes(printed) == ("n[1-2]: hot", "n1: full")
