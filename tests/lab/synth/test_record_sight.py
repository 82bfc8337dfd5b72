"""What recorders miss: clocks that are off, lost samples and spans, ranks and signals unseen."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import Unavailable
from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Event, Header
from clusterprof_lab.synth.record import RecordingQuality, write_story
from clusterprof_lab.synth.recorder_view import UPTIME_NS, draw_clocks
from clusterprof_lab.synth.story import Mark, Node, Rank, Rate, Story, Thread
from tests.support.stories import (
    MS,
    SECOND,
    STEPS,
    join_readings,
    list_gaps,
    list_rows,
    list_sample_times,
    list_spans,
    make_data_parallel_job,
    make_single_rank_job,
    make_training,
    record_story,
    sum_lost_by_cause,
)


def test_node_clocks_have_offset_and_drift(tmp_path):
    story = Story(
        [make_training(rank=n, node=f"n{n}")[0] for n in range(3)],
        {f"n{n}": Node(f"n{n}") for n in range(3)},
        0,
        3 * SECOND,
    )
    drawn = draw_clocks(np.random.default_rng(3), story.nodes)
    assert len(set(drawn.values())) == 3
    assert all(abs(ns) <= 50 * MS and abs(drift) <= 50e-6 for ns, drift in drawn.values())
    seen = {**drawn, "n2": (7 * MS, 50e-6)}
    write_story(story, tmp_path, np.random.default_rng(1), RecordingQuality(clocks=seen))
    for folder in list_node_folders(tmp_path):
        records = list(NodeReader(folder))
        header = next(item for item in records if isinstance(item, Header))
        offset, drift = seen[header.node["display"]]
        rank = int(header.node["display"][1:])
        first = [m for m in story.ranks[rank].main.marks if m.end_ns <= 2 * SECOND]
        ends = [
            int(t) for span in list_spans(records, 1000 + 10 * rank) for t in span.columns["end_ns"]
        ]
        assert ends[: len(first)] == [
            UPTIME_NS + offset + m.end_ns + round(drift * m.end_ns) for m in first
        ]
        assert header.started["monotonic_ns"] == UPTIME_NS + offset
    # After 2 s a clock that is 50 ppm fast is 100 us further ahead.
    assert seen["n2"] == (7 * MS, 50e-6)


@pytest.mark.parametrize("off", [False, True])
def test_two_nodes_are_joined_despite_clock_offsets(tmp_path, off):
    story = make_data_parallel_job(4, 2, late=3)
    random = np.random.default_rng(3)
    seen = (
        RecordingQuality(jitter_ns=300_000, clocks=draw_clocks(random, story.nodes))
        if off
        else RecordingQuality()
    )
    write_story(story, tmp_path, random, seen)
    report = analyze(tmp_path)
    caused_ns = sum_lost_by_cause(report)
    first, last = story.ranks[0].main.marks[0].start_ns, story.ranks[0].main.marks[-1].end_ns
    busy = sum(span.end_ns - span.start_ns for rank in story.ranks for span in rank.work)
    lost = 4 * (last - first) - busy
    assert report.lost_ns == pytest.approx(lost, abs=100_000)
    assert caused_ns["net-transfer"] == pytest.approx(4 * STEPS * 5 * MS, rel=0.01)
    assert caused_ns["storage-local"] == pytest.approx(
        report.lost_ns - 4 * STEPS * 5 * MS, rel=0.05
    )
    assert {rank.rank for rank in report.ranks} == {0, 1, 2, 3}


def test_lost_samples_and_spans_are_counted(tmp_path):
    rank, end = make_training()
    whole = record_story(make_single_rank_job(rank, end), tmp_path / "whole")
    half = record_story(
        make_single_rank_job(rank, end),
        tmp_path / "half",
        RecordingQuality(lost_samples_ratio=0.5, lost_spans_ratio=0.5),
    )
    full_set, array = list_sample_times(whole, "disk"), list_sample_times(half, "disk")
    assert set(array.tolist()) < set(full_set.tolist())
    assert 0.35 < len(array) / len(full_set) < 0.65
    missed = join_readings(half, "self.ticks_missed_total")
    last = list_sample_times(half, "self")[-1]
    assert missed[-1] == np.sum(full_set <= last) - np.sum(array <= last)
    assert set(list_rows(half, "threads")["t_ns"]) == set(array.tolist())
    # What a counter has grown by is in the next reading.
    for records, t_ns in ((whole, full_set), (half, array)):
        grown = join_readings(records, "disk.read_ns_total", "vdb")
        at = int(np.flatnonzero(t_ns == array[-1])[0])
        assert grown[at] - grown[0] == pytest.approx(STEPS * 50 * MS, abs=50 * MS)
    frames = list_spans(half, 1000)
    kept = sum(len(frame.columns["kind"]) for frame in frames)
    assert kept + sum(frame.dropped for frame in frames) == 2 * STEPS
    assert 0.3 < kept / (2 * STEPS) < 0.7
    following = 1
    for frame in frames:
        assert frame.first_sequence == following + frame.dropped
        following = frame.first_sequence + len(frame.columns["kind"])


def test_unreadable_signals_state_a_reason(tmp_path):
    why = Unavailable("absent", "the kernel does not count it for this cgroup", "")
    seen = RecordingQuality(
        missing=("threads", "disk", "cgroup.throttled_ns_total", "spans"),
        reasons={"cgroup.throttled_ns_total": why},
    )
    rank, end = make_training()
    records = record_story(make_single_rank_job(rank, end), tmp_path, seen)
    result = list_gaps(records)
    assert result["threads", ""] == ("denied", "/proc: mounted with hidepid")
    assert result["disk", ""] == ("denied", "permission denied")
    assert result["cgroup", "cgroup.throttled_ns_total"] == ("absent", why.message)
    assert result["mounts", ""] == ("absent", "no NFS file system is mounted")
    assert not list_rows(records, "threads") and not list_spans(records, 1000)
    frame = next(r for r in records if isinstance(r, Columns) and r.collector == "cgroup")
    masked = dict(zip(frame.signals, frame.masks))
    assert set(masked["cgroup.throttled_ns_total"]) == {1}
    assert masked["cgroup.cpu_ns_total"] is None
    header = next(r for r in records if isinstance(r, Header))
    status = {collector["name"]: collector["status"] for collector in header.collectors}
    assert (status["threads"], status["disk"], status["cpu"]) == ("denied", "denied", "available")
    sum_lost_by_cause(analyze(tmp_path))


def test_two_jobs_on_a_node_record_the_same_counters(tmp_path):
    (item, end), (two, _) = make_training(rank=0), make_training(rank=1)
    two.rank, two.device = 0, "emulated-1"
    jobs = [
        Story([rank], {"n0": Node("n0")}, 0, end, job) for rank, job in ((item, "a"), (two, "b"))
    ]
    write_story(jobs[0], tmp_path, np.random.default_rng(1), other_jobs=[jobs[1]])
    write_story(jobs[1], tmp_path, np.random.default_rng(2), other_jobs=[jobs[0]])
    folders = list_node_folders(tmp_path)
    assert len(folders) == 2
    for folder, pid in zip(sorted(folders, key=_job_of), (1000, 1010)):
        records = list(NodeReader(folder))
        assert set(list_rows(records, "threads")["pid"]) == {pid, pid + 1}
        read = join_readings(records, "disk.read_bytes_total", "vdb")
        assert read[-1] - read[0] == pytest.approx(2 * STEPS << 20, abs=2 << 20)
        cpu = join_readings(records, "cgroup.cpu_ns_total")
        own = 500 * MS + STEPS * 50 * MS
        assert cpu[-1] - cpu[0] == pytest.approx(own, abs=100 * MS)


def _job_of(folder) -> str:
    return next(r for r in NodeReader(folder) if isinstance(r, Header)).launcher["job"]


def test_an_unrecorded_rank_appears_only_in_node_counters(tmp_path):
    ranks = [make_training(rank=n)[0] for n in range(2)] + [make_training(rank=2, node="n1")[0]]
    story = Story(ranks, {"n0": Node("n0"), "n1": Node("n1")}, 0, 5 * SECOND)
    records = record_story(story, tmp_path, RecordingQuality(missing_ranks=(1, 2)))
    assert set(list_rows(records, "processes")["pid"]) == {1000, 1001}
    values = [
        event.attributes["rank"]
        for event in records
        if isinstance(event, Event) and event.kind == "process-registered"
    ]
    assert values == [0]
    assert join_readings(records, "cpu.blocked_count").max() == 2


def test_a_recording_can_start_in_the_middle_of_a_run(tmp_path):
    rank, end = make_training()
    records = record_story(make_single_rank_job(rank, end, start_ns=3 * SECOND), tmp_path)
    frames = list_spans(records, 1000)
    before = sum(mark.end_ns < 3 * SECOND for mark in rank.main.marks)
    assert frames[0].first_sequence == before + 1
    assert list_rows(records, "threads", pid=1000)["on_cpu_ns_total"][0] > 500 * MS
    assert min(list_rows(records, "threads")["t_ns"]) == UPTIME_NS + 3 * SECOND
    sum_lost_by_cause(analyze(tmp_path))


def test_hang_and_exit_leave_open_spans_and_exit_events(tmp_path):
    rank, _ = make_training()
    hangs = Mark(8 * SECOND, 60 * SECOND, layout.COLLECTIVE, 77, 12, 4096, layout.ALL_REDUCE)
    rank.main.marks.append(hangs)
    rank.groups = {77: (0, 1)}
    gone = make_training(rank=1)[0]
    gone.exit_ns, gone.exit_code, gone.device = 4 * SECOND, -9, "emulated-1"
    story = Story([rank, gone], {"n0": Node("n0")}, 0, 15 * SECOND)
    records = record_story(story, tmp_path)
    result = [
        (event.kind, (event.t_ns - UPTIME_NS) // MS, event.attributes)
        for event in records
        if isinstance(event, Event)
    ]
    kinds = [(kind, at) for kind, at, _ in result]
    assert kinds == [
        ("process-registered", 0),
        ("group-announced", 0),
        ("process-registered", 0),
        ("process-exited", 4000),
        ("operation-under-way", 13_000),
        ("recorder-stopped", 15_000),
    ]
    assert result[1][2] == {"pid": 1000, "group": 77, "ranks": [0, 1]}
    ticks = UPTIME_NS // 10_000_000
    assert result[3][2] == {
        "pid": 1010,
        "started_ticks": ticks,
        "wait_status": 9,
        "exit_code": None,
        "signal": 9,
    }
    assert result[4][2] == {
        "pid": 1000,
        "started_ticks": ticks,
        "start_ns": UPTIME_NS + 8 * SECOND,
        "group": 77,
        "number": 12,
        "bytes": 4096,
        "operation": layout.ALL_REDUCE,
    }
    assert result[5][2]["reason"] == "the duration is over"
    assert max(list_rows(records, "threads", pid=1010)["t_ns"]) < UPTIME_NS + 4 * SECOND


def test_other_load_on_the_node_follows_its_configured_rates(tmp_path):
    node = Node(
        "n0",
        extra={
            ("disk.read_bytes_total", "vdb"): [
                Rate(0, SECOND, 512_000),
                Rate(SECOND, 2 * SECOND, 0),
            ],
            ("memory.available_bytes", ""): [Rate(0, SECOND, 4096 * 10)],
            ("rdma.receive_bytes_total", "mlx5_0/1"): [Rate(0, 2 * SECOND, 2000)],
        },
    )
    rank = Rank(0, "n0", Thread(7, 7, 1, "python"), [], "", [])
    records = record_story(make_single_rank_job(rank, 2 * SECOND, node), tmp_path)
    read = join_readings(records, "disk.read_bytes_total", "vdb")
    assert ((read - read[0]) // 512).tolist() == [*range(0, 1000, 100), *[1000] * 11]
    assert join_readings(records, "memory.available_bytes")[0] == 40_960
    received = join_readings(records, "rdma.receive_bytes_total", "mlx5_0/1")
    assert (received - received[0]).tolist() == [0, 1000, 2000]
    header = next(r for r in records if isinstance(r, Header))
    assert header.host["hcas"] == [{"name": "mlx5_0"}]
