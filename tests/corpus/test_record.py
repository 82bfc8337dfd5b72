"""Stories as recorders see them: counters, states and gaps worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from stories import (
    LOST_NS,
    MS,
    SECOND,
    STEPS,
    alone,
    gaps,
    rows,
    seen_as,
    series,
    spans,
    times,
    training,
)

from clusterprof.collectors.base import Context
from clusterprof.collectors.cgroup import CgroupCollector
from clusterprof.collectors.cores import CoresCollector
from clusterprof.collectors.cpu import CpuCollector
from clusterprof.collectors.disk import DiskCollector
from clusterprof.collectors.memory import MemoryCollector
from clusterprof.collectors.mounts import MountsCollector
from clusterprof.collectors.network import NetworkCollector
from clusterprof.collectors.pressure import PressureCollector
from clusterprof.engine.local import analyze
from clusterprof.errors import Unavailable
from clusterprof.findings import Report
from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader, node_folders
from clusterprof.trace.schema import Columns, Event, Header
from clusterprof_lab.synth.record import Seen, record
from clusterprof_lab.synth.record_sight import UPTIME_NS, clocks
from clusterprof_lab.synth.story import Act, Mark, Node, Rank, Rate, Story, Thread, Work

NFS = Node("n0", mounts=(("/data", "server:/x", "nfs4"),))
FUSE = Node("n0", mounts=(("/fuse", "store", "fuse.store"),))


def caused(report: Report) -> dict[str, int]:
    """Lost time inside steps by cause, all of it."""
    found = {f.cause.id: f.lost_ns for f in report.findings if f.cause.id != "startup"}
    assert sum(found.values()) + report.unattributed_ns == report.lost_ns
    assert report.productive_ns + report.lost_ns == report.in_step_ns
    return {**found, "unattributed": report.unattributed_ns}


def test_the_analysis_says_which_part_of_the_wait_was_the_disk(tmp_path):
    rank, end = training("block-io", resource="vdb")
    record(alone(rank, end), tmp_path, np.random.default_rng(1))
    found = caused(analyze(tmp_path))
    assert sum(found.values()) == LOST_NS
    assert found.pop("unattributed") == 0
    assert found == {
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
def test_what_the_detectors_know_is_seen(tmp_path, doing, what, node, family):
    size = 1 << 20 if what in ("", "READ") and doing in ("block-io", "nfs", "fuse") else 0
    rank, end = training(doing, what, size=size)
    record(alone(rank, end, node), tmp_path, np.random.default_rng(1))
    found = caused(analyze(tmp_path))
    held_up = sum(ns for cause, ns in found.items() if cause.startswith(family))
    own = LOST_NS if doing == "user" else STEPS * 50 * MS
    assert held_up == pytest.approx(own, rel=0.02)


def test_a_thread_s_counters_at_each_tick(tmp_path):
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
    records = seen_as(alone(rank, SECOND), tmp_path)
    table = rows(records, "threads", pid=7)
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
        values = series(records, signal, device)
        return (values - values[0]).tolist()

    rest = [2000] * 8
    assert [n // 512 for n in grown("disk.read_bytes_total", "vdb")] == [0, 1000, 3000, *[4000] * 8]
    assert grown("disk.reads_total", "vdb") == [0, 5, 15, *[20] * 8]
    for signal in ("disk.read_ns_total", "disk.busy_ns_total", "disk.queue_ns_total"):
        assert [n // 100_000 for n in grown(signal, "vdb")] == [0, 500, 1500, *rest]
    assert set(grown("disk.read_bytes_total", "vda")) == {0}
    assert [n // MS for n in grown("cpu.user_ns_total", "all")] == [
        0, 0, 0, 50, 150, 150, 200, 250, 250, 250, 250,
    ]  # fmt: skip
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
    ("block-io", ""): ("D", "folio_wait_bit_common",
                       {"block_io_delay": 100, "read_chars": 1000, "read_bytes": 1000}),
    ("block-io", "fsync"): ("D", "jbd2_log_wait_commit",
                            {"block_io_delay": 100, "write_chars": 1000, "write_bytes": 1000}),
    ("nfs", "READ"): ("D", "folio_wait_bit_common",
                      {"block_io_delay": 100, "read_chars": 1000, "read_bytes": 1000,
                       "nfs /data:READ": 100}),
    ("nfs", "GETATTR"): ("D", "rpc_wait_bit_killable", {"nfs /data:GETATTR": 100}),
    ("fuse", "OPEN"): ("S", "request_wait_answer", {}),
    ("fuse", "READ"): ("D", "folio_wait_bit_common", {"block_io_delay": 100, "read_chars": 1000}),
    ("socket", ""): ("S", "wait_woken", {"network": 1000}),
    ("memory", ""): ("D", "__mem_cgroup_handle_over_high", {"memory": 100, "high": 5}),
    ("memory", "swap"): ("D", "folio_wait_bit_common",
                         {"block_io_delay": 100, "memory": 100, "faults": 5, "read_bytes": 1000}),
    ("lock", ""): ("S", "futex_do_wait", {}),
    ("device", ""): ("S", "poll_schedule_timeout.constprop.0", {}),
    ("peer", ""): ("S", "futex_do_wait", {}),
    ("idle", ""): ("S", "poll_schedule_timeout.constprop.0", {}),
}  # fmt: skip


@pytest.mark.parametrize(("doing", "what"), CASES, ids=lambda word: word or "any")
def test_what_a_real_kernel_would_show_of_each_act(tmp_path, doing, what):
    act = Act(1050 * MS, 1150 * MS, doing, "/data" if doing == "nfs" else "", 1000, 5, 0, what)
    rank = Rank(0, "n0", Thread(7, 7, 1, "python", [Act(0, 1050 * MS, "user"), act]), [], "", [])
    records = seen_as(alone(rank, 3 * SECOND, NFS), tmp_path)
    table = rows(records, "threads", pid=7)
    io = rows(records, "processes", pid=7)
    sampled = {
        "user": table["user_ns_total"], "system": table["system_ns_total"],
        "run_delay": table["run_delay_ns_total"],
        "block_io_delay": table["block_io_delay_ns_total"],
        "cgroup throttled": series(records, "cgroup.throttled_ns_total"),
        "memory": series(records, "pressure.memory_some_ns_total"),
        **{f"nfs {device}": series(records, "nfs.execute_ns_total", device)
           for device in ("/data:READ", "/data:GETATTR") if device == f"/data:{what}"},
    }  # fmt: skip
    plain = {
        "read_chars": io["read_chars_total"], "write_chars": io["write_chars_total"],
        "read_bytes": io["read_bytes_total"], "write_bytes": io["write_bytes_total"],
        "faults": table["major_faults_total"],
        "high": series(records, "cgroup.memory_high_events_total"),
        "network": series(records, "network.receive_bytes_total", "eth0"),
    }  # fmt: skip
    grown = {name: (int(v[-1]) - int(v[0])) // MS for name, v in sampled.items()}
    grown |= {name: int(v[-1]) - int(v[0]) for name, v in plain.items()}
    grown["user"] -= 1050
    if doing in ("nfs",) and what == "READ":
        assert grown.pop("network") == 1000
    state, wchan, expected = CASES[doing, what]
    assert {name: n for name, n in grown.items() if n} == expected
    assert (chr(table["state"][11]), table["wchan"][11]) == (state, wchan)


def test_a_device_is_busy_for_a_collective_that_computes_nothing(tmp_path):
    work = [
        Work(0, SECOND, "compute", 0.9, 0.5, 0x40),
        Work(SECOND, 2 * SECOND, "collective"),
        Work(2 * SECOND, 3 * SECOND, "copy"),
    ]
    main = Thread(7, 7, 1, "python", [Act(0, 4 * SECOND, "device")])
    main.marks.append(Mark(2 * SECOND, 3 * SECOND, layout.H2D, 10_000_000))
    for name in ("emulated-0", "GPU-1"):
        rank = Rank(0, "n0", main, [], name, work)
        records = seen_as(alone(rank, 4 * SECOND), tmp_path / name)
        at = [5, 15, 25, 35]

        def of(signal: str, records: list = records, name: str = name) -> np.ndarray:
            return series(records, signal, name)

        assert (np.diff(of("gpu.busy_ns_total")[::10]) // MS).tolist() == [1000, 1000, 0, 0]
        assert of("gpu.busy_ratio")[at].tolist() == [1.0, 1.0, 0.0, 0.0]
        assert of("gpu.sm_active_ratio")[at].round(3).tolist() == [0.9, 0.05, 0.0, 0.0]
        assert of("gpu.power_watts")[at].round().tolist() == [375, 200, 90, 90]
        assert of("gpu.sm_clock_hertz")[at[:2]].tolist() == [0.99e9, 1.98e9]
        assert of("gpu.throttle_bits")[at[:2]].tolist() == [0x40, 0]
        assert of("gpu.thermal_violation_ns_total")[-1] == SECOND
        assert of("gpu.pcie_receive_bytes_per_second")[at].tolist() == [0, 0, 1e7, 0]


def test_columns_are_those_of_the_real_collectors(tmp_path, host):
    # A fixture machine with the same quirks less: names and units have to agree, not devices.
    context = Context(host("h100-node"), None, lambda: [4711])
    rank, _ = training("nfs", "READ")
    records = seen_as(alone(rank, SECOND, NFS), tmp_path)
    ours = {r.collector: r for r in records if isinstance(r, Columns)}
    for kind in (CpuCollector, CoresCollector, PressureCollector, MemoryCollector, CgroupCollector,
                 DiskCollector, MountsCollector, NetworkCollector):  # fmt: skip
        collector = kind(context)
        columns = [signal.name for signal, _ in collector.open()]
        collector.close()
        assert dict.fromkeys(ours[kind.name].signals) == dict.fromkeys(columns), kind.name
        assert list(dict.fromkeys(ours[kind.name].signals)) == list(dict.fromkeys(columns))


def test_clocks_of_nodes_are_off_and_drift(tmp_path):
    story = Story([training(rank=n, node=f"n{n}")[0] for n in range(3)],
                  {f"n{n}": Node(f"n{n}") for n in range(3)}, 0, 3 * SECOND)  # fmt: skip
    drawn = clocks(np.random.default_rng(3), story.nodes)
    assert len(set(drawn.values())) == 3
    assert all(abs(ns) <= 50 * MS and abs(drift) <= 50e-6 for ns, drift in drawn.values())
    seen = {**drawn, "n2": (7 * MS, 50e-6)}
    record(story, tmp_path, np.random.default_rng(1), Seen(clocks=seen))
    for folder in node_folders(tmp_path):
        records = list(NodeReader(folder))
        header = next(one for one in records if isinstance(one, Header))
        offset, drift = seen[header.node["display"]]
        rank = int(header.node["display"][1:])
        first = [m for m in story.ranks[rank].main.marks if m.end_ns <= 2 * SECOND]
        ends = [int(t) for one in spans(records, 1000 + 10 * rank) for t in one.columns["end_ns"]]
        assert ends[: len(first)] == [
            UPTIME_NS + offset + m.end_ns + round(drift * m.end_ns) for m in first
        ]
        assert header.started["monotonic_ns"] == UPTIME_NS + offset
    # After 2 s a clock that is 50 ppm fast is 100 us further ahead.
    assert seen["n2"] == (7 * MS, 50e-6)


def test_lost_samples_and_spans_are_counted(tmp_path):
    rank, end = training()
    whole = seen_as(alone(rank, end), tmp_path / "whole")
    half = seen_as(alone(rank, end), tmp_path / "half",
                   Seen(lost_samples_ratio=0.5, lost_spans_ratio=0.5))  # fmt: skip
    every, some = times(whole, "disk"), times(half, "disk")
    assert set(some.tolist()) < set(every.tolist())
    assert 0.35 < len(some) / len(every) < 0.65
    missed = series(half, "self.ticks_missed_total")
    last = times(half, "self")[-1]
    assert missed[-1] == np.sum(every <= last) - np.sum(some <= last)
    assert set(rows(half, "threads")["t_ns"]) == set(some.tolist())
    # What a counter has grown by is in the next reading.
    for records, t_ns in ((whole, every), (half, some)):
        grown = series(records, "disk.read_ns_total", "vdb")
        at = int(np.flatnonzero(t_ns == some[-1])[0])
        assert grown[at] - grown[0] == pytest.approx(STEPS * 50 * MS, abs=50 * MS)
    frames = spans(half, 1000)
    kept = sum(len(one.columns["kind"]) for one in frames)
    assert kept + sum(one.dropped for one in frames) == 2 * STEPS
    assert 0.3 < kept / (2 * STEPS) < 0.7
    following = 1
    for one in frames:
        assert one.first_sequence == following + one.dropped
        following = one.first_sequence + len(one.columns["kind"])


def test_what_could_not_be_read_says_why(tmp_path):
    why = Unavailable("absent", "the kernel does not count it for this cgroup", "")
    seen = Seen(missing=("threads", "disk", "cgroup.throttled_ns_total", "spans"),
                reasons={"cgroup.throttled_ns_total": why})  # fmt: skip
    rank, end = training()
    records = seen_as(alone(rank, end), tmp_path, seen)
    found = gaps(records)
    assert found["threads", ""] == ("denied", "/proc: mounted with hidepid")
    assert found["disk", ""] == ("denied", "permission denied")
    assert found["cgroup", "cgroup.throttled_ns_total"] == ("absent", why.message)
    assert found["mounts", ""] == ("absent", "no NFS file system is mounted")
    assert not rows(records, "threads") and not spans(records, 1000)
    frame = next(r for r in records if isinstance(r, Columns) and r.collector == "cgroup")
    masked = dict(zip(frame.signals, frame.masks))
    assert set(masked["cgroup.throttled_ns_total"]) == {1}
    assert masked["cgroup.cpu_ns_total"] is None
    header = next(r for r in records if isinstance(r, Header))
    status = {one["name"]: one["status"] for one in header.collectors}
    assert (status["threads"], status["disk"], status["cpu"]) == ("denied", "denied", "available")
    caused(analyze(tmp_path))


def test_two_jobs_of_a_node_are_two_recordings_of_the_same_counters(tmp_path):
    (one, end), (two, _) = training(rank=0), training(rank=1)
    two.rank, two.device = 0, "emulated-1"
    jobs = [
        Story([rank], {"n0": Node("n0")}, 0, end, job) for rank, job in ((one, "a"), (two, "b"))
    ]
    record(jobs[0], tmp_path, np.random.default_rng(1), beside=[jobs[1]])
    record(jobs[1], tmp_path, np.random.default_rng(2), beside=[jobs[0]])
    folders = node_folders(tmp_path)
    assert len(folders) == 2
    for folder, pid in zip(sorted(folders, key=_job_of), (1000, 1010)):
        records = list(NodeReader(folder))
        assert set(rows(records, "threads")["pid"]) == {pid, pid + 1}
        read = series(records, "disk.read_bytes_total", "vdb")
        assert read[-1] - read[0] == pytest.approx(2 * STEPS << 20, abs=2 << 20)
        cpu = series(records, "cgroup.cpu_ns_total")
        own = 500 * MS + STEPS * 50 * MS
        assert cpu[-1] - cpu[0] == pytest.approx(own, abs=100 * MS)


def _job_of(folder) -> str:
    return next(r for r in NodeReader(folder) if isinstance(r, Header)).launcher["job"]


def test_a_rank_that_is_not_recorded_leaves_its_trace_in_the_node_only(tmp_path):
    ranks = [training(rank=n)[0] for n in range(2)] + [training(rank=2, node="n1")[0]]
    story = Story(ranks, {"n0": Node("n0"), "n1": Node("n1")}, 0, 5 * SECOND)
    records = seen_as(story, tmp_path, Seen(missing_ranks=(1, 2)))
    assert set(rows(records, "processes")["pid"]) == {1000, 1001}
    told = [one.attributes["rank"] for one in records
            if isinstance(one, Event) and one.kind == "process-registered"]  # fmt: skip
    assert told == [0]
    assert series(records, "cpu.blocked_count").max() == 2


def test_a_recording_that_starts_mid_run(tmp_path):
    rank, end = training()
    records = seen_as(alone(rank, end, start_ns=3 * SECOND), tmp_path)
    frames = spans(records, 1000)
    before = sum(mark.end_ns < 3 * SECOND for mark in rank.main.marks)
    assert frames[0].first_sequence == before + 1
    assert rows(records, "threads", pid=1000)["on_cpu_ns_total"][0] > 500 * MS
    assert min(rows(records, "threads")["t_ns"]) == UPTIME_NS + 3 * SECOND
    caused(analyze(tmp_path))


def test_what_a_hang_and_an_exit_leave(tmp_path):
    rank, _ = training()
    hangs = Mark(8 * SECOND, 60 * SECOND, layout.COLLECTIVE, 77, 12, 4096, layout.ALL_REDUCE)
    rank.main.marks.append(hangs)
    rank.groups = {77: (0, 1)}
    gone = training(rank=1)[0]
    gone.exit_ns, gone.exit_code, gone.device = 4 * SECOND, -9, "emulated-1"
    story = Story([rank, gone], {"n0": Node("n0")}, 0, 15 * SECOND)
    records = seen_as(story, tmp_path)
    found = [(one.kind, (one.t_ns - UPTIME_NS) // MS, one.attributes)
             for one in records if isinstance(one, Event)]  # fmt: skip
    kinds = [(kind, at) for kind, at, _ in found]
    assert kinds == [
        ("process-registered", 0), ("group-announced", 0), ("process-registered", 0),
        ("process-exited", 4000), ("operation-under-way", 13_000), ("recorder-stopped", 15_000),
    ]  # fmt: skip
    assert found[1][2] == {"pid": 1000, "group": 77, "ranks": [0, 1]}
    ticks = UPTIME_NS // 10_000_000
    assert found[3][2] == {"pid": 1010, "started_ticks": ticks, "wait_status": 9,
                           "exit_code": None, "signal": 9}  # fmt: skip
    assert found[4][2] == {
        "pid": 1000, "started_ticks": ticks, "start_ns": UPTIME_NS + 8 * SECOND, "group": 77,
        "number": 12, "bytes": 4096, "operation": layout.ALL_REDUCE,
    }  # fmt: skip
    assert found[5][2]["reason"] == "the duration is over"
    assert max(rows(records, "threads", pid=1010)["t_ns"]) < UPTIME_NS + 4 * SECOND


def test_others_on_the_node_are_told_by_rates(tmp_path):
    node = Node("n0", extra={
        ("disk.read_bytes_total", "vdb"): [Rate(0, SECOND, 512_000), Rate(SECOND, 2 * SECOND, 0)],
        ("memory.available_bytes", ""): [Rate(0, SECOND, 4096 * 10)],
        ("rdma.receive_bytes_total", "mlx5_0/1"): [Rate(0, 2 * SECOND, 2000)],
    })  # fmt: skip
    rank = Rank(0, "n0", Thread(7, 7, 1, "python"), [], "", [])
    records = seen_as(alone(rank, 2 * SECOND, node), tmp_path)
    read = series(records, "disk.read_bytes_total", "vdb")
    assert ((read - read[0]) // 512).tolist() == [*range(0, 1000, 100), *[1000] * 11]
    assert series(records, "memory.available_bytes")[0] == 40_960
    received = series(records, "rdma.receive_bytes_total", "mlx5_0/1")
    assert (received - received[0]).tolist() == [0, 1000, 2000]
    header = next(r for r in records if isinstance(r, Header))
    assert header.host["hcas"] == [{"name": "mlx5_0"}]
