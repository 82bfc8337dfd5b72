"""How ranks and nodes were set up, gathered from chunks for the advice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clusterprof.analysis.advice.context import Disk, LoaderSettings, Machine, Mount
from clusterprof.analysis.node.setup import (
    NodeSetup,
    ProcessSetup,
    SetupCollector,
    detect_launcher,
    find_rack,
)
from clusterprof.analysis.timeline.model import Chunk, Placement, Process
from clusterprof.probe.layout import (
    ANOMALY_DETECTION,
    DATA_WAIT,
    DEBUG_MODES,
    FETCH,
    LOADER_START,
    STEP,
    TORCH_PROFILER,
    WORKER_START,
)
from tests.support.builders import (
    make_chunk,
    make_counter,
    make_gauge,
    make_header,
    make_process,
    make_spans,
    make_thread,
    parse_activity,
)

GIB = 1 << 30
CPUS = {"online": "0-7", "cores": ["0,4", "1,5", "2,6", "3,7"], "nodes": {"0": "0-3", "1": "4-7"}}
HOST: dict[str, Any] = {
    "cpus": CPUS,
    "memory_bytes": 64 * GIB,
    "mounts": [{"point": "/data", "type": "nfs4", "source": "filer:/x", "device": "0:50"}],
    "disks": [
        {"name": "sda", "size_bytes": 1, "rotational": True},
        {"name": "sda1", "size_bytes": 1, "partition_of": "sda"},
        {"name": "dm-0", "size_bytes": 1, "on": ["sda"]},
    ],
    "hcas": [{"name": "mlx5_0"}],
}
NODE = make_header(**HOST)


def gathered(*chunks: Chunk) -> NodeSetup:
    setups = SetupCollector()
    assert list(setups.watch(chunks)) == list(chunks)
    return setups.result("node")


def placed(item: Process, *cpus: int) -> Process:
    return replace(item, placement=Placement(frozenset(cpus), frozenset(), np.zeros(0, np.int64)))


def test_the_loader_with_the_longest_waits_is_chosen() -> None:
    """Four workers for training, and two for evaluation that were waited for less."""
    begun = make_spans((0, 1, 4, 1, 2, 0), (5, 6, 2, 0, 8, 1))
    waits = make_spans((1, 4, 0, 201, 4), (6, 7, 0, 202, 2))
    gathered_tables = gathered(
        make_chunk(10, [make_process(100, spans={LOADER_START: begun, DATA_WAIT: waits})])
    )
    assert gathered_tables.ranks[100, 1].loader == LoaderSettings(
        4, prefetch=2, pinned=True, persistent=False
    )


def test_loader_settings_are_kept_from_an_earlier_chunk() -> None:
    begun = {LOADER_START: make_spans((0, 1, 3, 0, 0, 0)), STEP: make_spans((1, 2))}
    later = {DATA_WAIT: make_spans((11, 15, 0, 201, 3))}
    gathered_tables = gathered(
        make_chunk(10, [make_process(100, spans=begun)]),
        make_chunk(20, [make_process(100, spans=later)], start=10),
    )
    assert gathered_tables.ranks[100, 1].loader == LoaderSettings(
        3, prefetch=None, pinned=False, persistent=False
    )


def test_a_loader_without_settings_is_ignored() -> None:
    """-1: not PyTorch's."""
    waits = {DATA_WAIT: make_spans((1, 4, -1, -1, -1, -1))}
    gathered_tables = gathered(make_chunk(10, [make_process(100, spans=waits)]))
    assert gathered_tables.ranks == {(100, 1): ProcessSetup()}


def test_debug_modes_are_measured_as_shares_of_step_time() -> None:
    """8 of 20 in steps with anomaly detection, of which 4 with the profiler, too."""
    both = ANOMALY_DETECTION | TORCH_PROFILER
    first = {
        STEP: make_spans((0, 10)),
        DEBUG_MODES: make_spans((0, 4, ANOMALY_DETECTION), (4, 8, both)),
    }
    second = {STEP: make_spans((10, 20))}
    setup = gathered(
        make_chunk(10, [make_process(100, spans=first)]),
        make_chunk(20, [make_process(100, spans=second)], start=10),
    ).ranks[100, 1]
    assert setup.debug_mode_ratios == {TORCH_PROFILER: 0.2, ANOMALY_DETECTION: 0.4}


def test_worker_cpus_count_for_their_rank() -> None:
    main = placed(make_process(100, spans={STEP: make_spans((0, 1))}), 0, 1)
    work = {WORKER_START: make_spans((0, 1)), FETCH: make_spans((0, 4))}
    gathered_tables = gathered(
        make_chunk(10, [main, placed(make_process(200, 100, work), 1, 5)], node=NODE)
    )
    assert gathered_tables.ranks == {(100, 1): ProcessSetup(None, frozenset({0, 1, 5}), 2, 1)}


def test_machine_facts_come_from_header_and_counters() -> None:
    series = {
        ("memory.available_bytes", ""): make_gauge([0, 5, 10], [40 * GIB, 5 * GIB, 30 * GIB]),
        ("cgroup.cpu_quota_ratio", ""): make_gauge([0, 10], [4.0, 6.0]),
        ("cgroup.memory_limit_bytes", ""): make_gauge([0, 10], [32 * GIB, 32 * GIB]),
        ("cgroup.quota_periods_total", ""): make_counter([0, 10], [100, 200]),
        ("cgroup.throttled_periods_total", ""): make_counter([0, 10], [10, 35]),
        ("cgroup.memory_high_events_total", ""): make_counter([0, 10], [5, 12]),
        ("nfs.connections_count", "/data"): make_gauge([0, 10], [1, 2]),
    }
    gathered_tables = gathered(make_chunk(10, [], series, node=NODE))
    assert gathered_tables.machine == Machine(
        "node",
        cpus=8,
        numa_nodes=2,
        memory_bytes=64 * GIB,
        min_available_bytes=5 * GIB,
        quota_cpus=6.0,
        throttled_ratio=0.25,
        memory_limit_bytes=32 * GIB,
        reclaims=7,
        mounts=(Mount("/data", "nfs4", "filer:/x", 2),),
        disks=(Disk("sda", True), Disk("dm-0", None, ("sda",))),
        hcas=("mlx5_0",),
    )
    assert gathered_tables.machine.is_memory_short  # 5 of 64 GiB


def test_cpu_time_is_split_between_job_and_other_processes() -> None:
    """The job ran for 3 of the 12 s that were used: others for three quarters."""
    main = make_process(
        100, spans={STEP: make_spans((0, 1))}, thread=make_thread(parse_activity("U3 S7"), 10)
    )
    series = {
        ("cpu.user_ns_total", "all"): make_counter([0, 9.9], [0, 8e9]),
        ("cpu.system_ns_total", "all"): make_counter([0, 9.9], [0, 4e9]),
    }
    machine = gathered(make_chunk(10, [main], series)).machine
    assert machine.other_processes_cpu_ratio == 0.75
    ((name, pid, cpus),) = machine.cpu_users
    assert (name, pid) == (main.name, 100) and 0.29 < cpus < 0.31
    assert gathered(make_chunk(10, [main])).machine.other_processes_cpu_ratio is None


def test_wanted_cpus_include_running_and_waiting_time() -> None:
    main = make_process(
        100, spans={STEP: make_spans((0, 1))}, thread=make_thread(parse_activity("U3 R5 S2"), 10)
    )
    burner = make_process(300, thread=make_thread(parse_activity("U9 S1"), 10))
    machine = gathered(make_chunk(10, [main, burner])).machine
    assert machine.job_cpus_wanted is not None
    assert 0.78 < machine.job_cpus_wanted < 0.82  # 3 + 5 of 10 s, without the burner's
    assert [(pid, round(cpus, 1)) for _, pid, cpus in machine.cpu_users] == [(300, 0.9), (100, 0.3)]
    assert [pid for _, pid, _ in machine.busy_side_processes] == [300]


def test_an_empty_node_has_no_setup_facts() -> None:
    assert gathered() == NodeSetup(Machine("node"))
    assert gathered(make_chunk(10)).machine == Machine("node")


def test_the_launcher_is_detected_from_variables() -> None:
    assert detect_launcher({"SLURM_JOB_ID": "7", "RANK": "0"}) == "slurm"
    assert detect_launcher({"JOB_COMPLETION_INDEX": "0"}) == "kubernetes"
    assert detect_launcher({"RANK": "0"}) == ""


@pytest.mark.parametrize(
    ("address", "pattern", "rack"),
    [
        ("spine.leaf7.node12", "switch.switch.node", "leaf7"),
        ("leaf7.node12", "switch.node", "leaf7"),
        ("node12", "node", ""),  # no topology
        ("spine.leaf7.node12", "switch.node", ""),  # a name with a dot in it: which part is what?
        ("block3.node12", "block.node", ""),
        ("spine.leaf7.node12", "", ""),
    ],
)
def test_the_rack_is_read_from_the_leaf_switch(address: str, pattern: str, rack: str) -> None:
    variables = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert find_rack(variables) == rack
    assert find_rack(None) == find_rack({}) == ""
