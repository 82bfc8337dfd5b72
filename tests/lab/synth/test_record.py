"""Stories as recorders see them: counters, states and gaps worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.cgroup import CgroupCollector, PressureCollector
from clusterprof.agent.collectors.cpu import CoresCollector, CpuCollector
from clusterprof.agent.collectors.disk import DiskCollector
from clusterprof.agent.collectors.memory import MemoryCollector
from clusterprof.agent.collectors.network import NetworkCollector
from clusterprof.agent.collectors.network_filesystems import MountsCollector
from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.trace.schema import Columns
from clusterprof_lab.synth.record import write_story
from clusterprof_lab.synth.recorder_view import UPTIME_NS
from clusterprof_lab.synth.story import Act, Mark, Node, Rank, Thread, Work
from tests.support.stories import (
    LOST_NS,
    MS,
    SECOND,
    STEPS,
    join_readings,
    list_rows,
    make_single_rank_job,
    make_training,
    record_story,
    sum_lost_by_cause,
)

NFS = Node("n0", mounts=(("/data", "server:/x", "nfs4"),))
FUSE = Node("n0", mounts=(("/fuse", "store", "fuse.store"),))


def test_the_analysis_splits_a_data_wait_into_disk_and_cpu(tmp_path):
    rank, end = make_training("block-io", resource="vdb")
    write_story(make_single_rank_job(rank, end), tmp_path, np.random.default_rng(1))
    caused_ns = sum_lost_by_cause(analyze(tmp_path))
    assert sum(caused_ns.values()) == LOST_NS
    assert caused_ns.pop("unattributed") == 0
    assert caused_ns == {
        "storage-local": pytest.approx(STEPS * 50 * MS, abs=1000),
        "cpu-preprocess": pytest.approx(STEPS * 20 * MS, abs=1000),
    }


@pytest.mark.parametrize(
    ("doing", "what", "node", "family"),
    [
        ("user", "", None, "cpu-preprocess"),
        ("runnable", "", None, "cpu-contention"),
        ("block-io", "", None, "storage-"),
        ("nfs", "READ", NFS, "storage-"),
        ("nfs", "GETATTR", NFS, "storage-"),
        ("fuse", "READ", FUSE, "storage-"),
        ("fuse", "OPEN", FUSE, "storage-"),
        ("memory", "", None, "cpu-memory"),
    ],
)
def test_synthetic_waits_are_attributed_to_their_cause_family(tmp_path, doing, what, node, family):
    size = 1 << 20 if what in ("", "READ") and doing in ("block-io", "nfs", "fuse") else 0
    rank, end = make_training(doing, what, size=size)
    write_story(make_single_rank_job(rank, end, node), tmp_path, np.random.default_rng(1))
    caused_ns = sum_lost_by_cause(analyze(tmp_path))
    held_up = sum(ns for cause, ns in caused_ns.items() if cause.startswith(family))
    own = LOST_NS if doing == "user" else STEPS * 50 * MS
    assert held_up == pytest.approx(own, rel=0.02)


def test_thread_counters_follow_the_story_at_each_tick(tmp_path):
    # 0 sleeps 50 reads 250 decodes 400 kernel 450 ready 550 decodes 650 (gone to sleep) 1000
    acts = [
        Act(0, 50 * MS, "idle"),
        Act(50 * MS, 250 * MS, "block-io", "vdb", 4000 * 512, 20),
        Act(250 * MS, 400 * MS, "user"),
        Act(400 * MS, 450 * MS, "system"),
        Act(450 * MS, 550 * MS, "runnable"),
        Act(550 * MS, 650 * MS, "user"),
    ]
    rank = Rank(0, "n0", Thread(7, 7, 1, "python", acts), [], "", [])
    records = record_story(make_single_rank_job(rank, SECOND), tmp_path)
    table = list_rows(records, "threads", pid=7)
    assert {
        name: [v // MS for v in table[name]] for name in table if name.endswith("ns_total")
    } == {
        "on_cpu_ns_total": [0, 0, 0, 50, 150, 200, 250, 300, 300, 300, 300],
        "run_delay_ns_total": [0, 0, 0, 0, 0, 0, 100, 100, 100, 100, 100],  # when it has ended
        "user_ns_total": [0, 0, 0, 50, 150, 150, 200, 250, 250, 250, 250],
        "system_ns_total": [0, 0, 0, 0, 0, 50, 50, 50, 50, 50, 50],
        "block_io_delay_ns_total": [0, 50, 150, 200, 200, 200, 200, 200, 200, 200, 200],
    }
    assert "".join(map(chr, table["state"])) == "SDDRRRRSSSS"
    asleep, read = "poll_schedule_timeout.constprop.0", "folio_wait_bit_common"
    assert table["wchan"] == [asleep, read, read, "", "", "", "", *[asleep] * 4]
    assert table["t_ns"] == [UPTIME_NS + n * 100 * MS for n in range(11)]

    def grown(signal: str, device: str) -> list[int]:
        values = join_readings(records, signal, device)
        return (values - values[0]).tolist()

    rest = [2000] * 8
    assert [n // 512 for n in grown("disk.read_bytes_total", "vdb")] == [0, 1000, 3000, *[4000] * 8]
    assert grown("disk.reads_total", "vdb") == [0, 5, 15, *[20] * 8]
    for signal in ("disk.read_ns_total", "disk.busy_ns_total", "disk.queue_ns_total"):
        assert [n // 100_000 for n in grown(signal, "vdb")] == [0, 500, 1500, *rest]
    assert set(grown("disk.read_bytes_total", "vda")) == {0}
    assert [n // MS for n in grown("cpu.user_ns_total", "all")] == [
        0,
        0,
        0,
        50,
        150,
        150,
        200,
        250,
        250,
        250,
        250,
    ]
    # 64 CPUs less what was used or waited for the disk.
    used = [0, 50, 150, 250, 350, 400, 450, 500, 500, 500, 500]
    assert [n // MS for n in grown("cpu.idle_ns_total", "all")] == [
        64 * 100 * n - ms for n, ms in enumerate(used)
    ]
    stalled = [0, 50, 150, *[200] * 8]
    assert [n // MS for n in grown("pressure.io_some_ns_total", "cgroup")] == stalled


# What a sample shows, the counters that rose, and by how much in 100 ms (1,000 bytes, 5 requests).
CASES = {
    ("user", ""): ("R", "", {"user": 100}),
    ("system", ""): ("R", "", {"system": 100, "read_chars": 1000}),
    ("runnable", ""): ("R", "", {"run_delay": 100}),
    ("throttled", ""): ("R", "", {"run_delay": 100, "cgroup throttled": 100}),
    ("block-io", ""): (
        "D",
        "folio_wait_bit_common",
        {"block_io_delay": 100, "read_chars": 1000, "read_bytes": 1000},
    ),
    ("block-io", "fsync"): (
        "D",
        "jbd2_log_wait_commit",
        {"block_io_delay": 100, "write_chars": 1000, "write_bytes": 1000},
    ),
    ("nfs", "READ"): (
        "D",
        "folio_wait_bit_common",
        {"block_io_delay": 100, "read_chars": 1000, "read_bytes": 1000, "nfs /data:READ": 100},
    ),
    ("nfs", "GETATTR"): ("D", "rpc_wait_bit_killable", {"nfs /data:GETATTR": 100}),
    ("fuse", "OPEN"): ("S", "request_wait_answer", {}),
    ("fuse", "READ"): ("D", "folio_wait_bit_common", {"block_io_delay": 100, "read_chars": 1000}),
    ("socket", ""): ("S", "wait_woken", {"network": 1000}),
    ("memory", ""): ("D", "__mem_cgroup_handle_over_high", {"memory": 100, "high": 5}),
    ("memory", "swap"): (
        "D",
        "folio_wait_bit_common",
        {"block_io_delay": 100, "memory": 100, "faults": 5, "read_bytes": 1000},
    ),
    ("lock", ""): ("S", "futex_do_wait", {}),
    ("device", ""): ("S", "poll_schedule_timeout.constprop.0", {}),
    ("peer", ""): ("S", "futex_do_wait", {}),
    ("idle", ""): ("S", "poll_schedule_timeout.constprop.0", {}),
}


@pytest.mark.parametrize(("doing", "what"), CASES, ids=lambda word: word or "any")
def test_each_act_shows_the_thread_state_of_a_real_kernel(tmp_path, doing, what):
    act = Act(1050 * MS, 1150 * MS, doing, "/data" if doing == "nfs" else "", 1000, 5, 0, what)
    rank = Rank(0, "n0", Thread(7, 7, 1, "python", [Act(0, 1050 * MS, "user"), act]), [], "", [])
    records = record_story(make_single_rank_job(rank, 3 * SECOND, NFS), tmp_path)
    table = list_rows(records, "threads", pid=7)
    io = list_rows(records, "processes", pid=7)
    sampled = {
        "user": table["user_ns_total"],
        "system": table["system_ns_total"],
        "run_delay": table["run_delay_ns_total"],
        "block_io_delay": table["block_io_delay_ns_total"],
        "cgroup throttled": join_readings(records, "cgroup.throttled_ns_total"),
        "memory": join_readings(records, "pressure.memory_some_ns_total"),
        **{
            f"nfs {device}": join_readings(records, "nfs.execute_ns_total", device)
            for device in ("/data:READ", "/data:GETATTR")
            if device == f"/data:{what}"
        },
    }
    plain = {
        "read_chars": io["read_chars_total"],
        "write_chars": io["write_chars_total"],
        "read_bytes": io["read_bytes_total"],
        "write_bytes": io["write_bytes_total"],
        "faults": table["major_faults_total"],
        "high": join_readings(records, "cgroup.memory_high_events_total"),
        "network": join_readings(records, "network.receive_bytes_total", "eth0"),
    }
    grown = {name: (int(v[-1]) - int(v[0])) // MS for name, v in sampled.items()}
    grown |= {name: int(v[-1]) - int(v[0]) for name, v in plain.items()}
    grown["user"] -= 1050
    if doing == "nfs":
        assert grown.pop("network") == 1000
    state, wchan, expected = CASES[doing, what]
    assert {name: n for name, n in grown.items() if n} == expected
    assert (chr(table["state"][11]), table["wchan"][11]) == (state, wchan)


def test_a_collective_without_computation_keeps_the_device_busy(tmp_path):
    work = [
        Work(0, SECOND, "compute", 0.9, 0.5, 0x40),
        Work(SECOND, 2 * SECOND, "collective"),
        Work(2 * SECOND, 3 * SECOND, "copy"),
    ]
    main = Thread(7, 7, 1, "python", [Act(0, 4 * SECOND, "device")])
    main.marks.append(Mark(2 * SECOND, 3 * SECOND, layout.H2D, 10_000_000))
    for name in ("emulated-0", "GPU-1"):
        rank = Rank(0, "n0", main, [], name, work)
        records = record_story(make_single_rank_job(rank, 4 * SECOND), tmp_path / name)
        at = [5, 15, 25, 35]

        def of(signal: str, records: list = records, name: str = name) -> np.ndarray:
            return join_readings(records, signal, name)

        assert (np.diff(of("gpu.busy_ns_total")[::10]) // MS).tolist() == [1000, 1000, 0, 0]
        assert of("gpu.busy_ratio")[at].tolist() == [1.0, 1.0, 0.0, 0.0]
        assert of("gpu.sm_active_ratio")[at].round(3).tolist() == [0.9, 0.05, 0.0, 0.0]
        assert of("gpu.power_watts")[at].round().tolist() == [375, 200, 90, 90]
        assert of("gpu.sm_clock_hertz")[at[:2]].tolist() == [0.99e9, 1.98e9]
        assert of("gpu.throttle_bits")[at[:2]].tolist() == [0x40, 0]
        assert of("gpu.thermal_violation_ns_total")[-1] == SECOND
        # A page says it at every tick; NVML, asked once a second, of the 20 ms before.
        late = name == "GPU-1"
        copied = [0, 0, 0, 1e7] if late else [0, 0, 1e7, 0]
        assert of("gpu.pcie_receive_bytes_per_second")[at].round().tolist() == copied


def test_synthetic_columns_match_those_of_the_real_collectors(tmp_path, host):
    # A fixture machine with the same quirks less: names and units have to agree, not devices.
    context = Context(host("h100-node"), None, lambda: [4711])
    rank, _ = make_training("nfs", "READ")
    records = record_story(make_single_rank_job(rank, SECOND, NFS), tmp_path)
    ours = {r.collector: r for r in records if isinstance(r, Columns)}
    for kind in (
        CpuCollector,
        CoresCollector,
        PressureCollector,
        MemoryCollector,
        CgroupCollector,
        DiskCollector,
        MountsCollector,
        NetworkCollector,
    ):
        collector = kind(context)
        columns = [signal.name for signal, _ in collector.open()]
        collector.close()
        assert dict.fromkeys(ours[kind.name].signals) == dict.fromkeys(columns), kind.name
        assert list(dict.fromkeys(ours[kind.name].signals)) == list(dict.fromkeys(columns))
