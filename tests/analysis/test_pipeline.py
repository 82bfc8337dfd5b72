"""From a recording on disk to a report: what it says, and that its books balance."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import NoRecording, UsageError
from clusterprof.probe import layout
from tests.support.recordings import MAIN, SECOND, WORKER, make_training, write_recording
from tests.support.report_laws import analyze_metrics, analyze_script, check_conservation

# 60 steps of 0.2 s waiting (half reading, half decoding) and 0.3 s computing, from 1 s on
JOB = [(0.2, 0.3)] * 60


def test_lost_time_is_split_between_reading_and_decoding(tmp_path: Path) -> None:
    report = analyze_script(make_training(JOB), tmp_path)
    [ledger] = report.ranks
    # 60 * 0.5 s in steps, 60 * 0.2 s lost, 1 s before and 1 s after
    assert (ledger.window_ns, ledger.in_step_ns, ledger.lost_ns) == (
        32 * SECOND,
        30 * SECOND,
        12 * SECOND,
    )
    assert ledger.buckets == (
        ("cpu-preprocess", 6 * SECOND),
        ("storage-local", 6 * SECOND),
        ("unattributed", 0),
    )
    assert ledger.outside_buckets == (("startup", SECOND), ("after-steps", SECOND))
    assert (ledger.source, ledger.steps, ledger.coverage_ratio) == ("device-samples", 60, 1.0)
    rows = [
        (finding.cause.id, finding.lost_ns, finding.grade, finding.outside_steps)
        for finding in report.findings
    ]
    assert rows == [
        ("cpu-preprocess", 6 * SECOND, "A", False),
        ("storage-local", 6 * SECOND, "B", False),  # no disk counters to agree
        ("startup", SECOND, "A", True),
    ]
    first = report.findings[0]
    assert first.recoverable_ns == 6 * SECOND
    assert first.share_ratio == 0.2
    assert [(c.rank, c.device, c.resource) for c in first.culprits] == [
        (0, "emulated-0", f"worker pid {WORKER}")
    ]
    got = analyze_metrics(report)
    assert got["gpu.busy_ratio"] == pytest.approx(0.6)
    assert got["lost.ratio"] == pytest.approx(0.4)
    assert got["stall.storage_ratio"] == pytest.approx(0.2)
    assert got["stall.cpu-preprocess_ratio"] == pytest.approx(0.2)
    assert got["stall.storage-remote_ratio"] == 0.0  # looked for, and not there
    assert got["stall.cpu-throttled_ratio"] is None  # no cgroup counters: not looked for
    assert got["au_ratio"] is None  # only a run of the benchmark has it
    assert got["data_wait.ratio"] == pytest.approx(0.4)
    assert got["step.count"] == 60
    assert got["step.p50_ns"] == got["step.p95_ns"] == 0.5 * SECOND
    assert report.emulated
    assert any("emulated" in note for note in report.notes)
    assert [blind.what for blind in report.coverage_gaps] == ["cpu-throttled", "device-throttled"]


def test_loading_hidden_by_device_work_makes_no_finding(tmp_path: Path) -> None:
    report = analyze_script(make_training(JOB, hidden=True), tmp_path)
    assert report.lost_ns == 0
    assert [finding.cause.id for finding in report.findings] == ["startup"]
    assert analyze_metrics(report)["data_wait.ratio"] == pytest.approx(
        0.4
    )  # the host waited all the same


def test_a_negligible_loss_makes_no_finding(tmp_path: Path) -> None:
    # one wait of 0.1 s in 50 steps of 0.5 s: 0.4 % of the steps, below 1 %
    report = analyze_script(
        make_training([(0.0, 0.5)] * 25 + [(0.1, 0.5)] + [(0.0, 0.5)] * 24), tmp_path
    )
    assert report.lost_ns == SECOND // 10
    assert dict(report.ranks[0].buckets)["storage-local"] == SECOND // 20
    assert [finding.cause.id for finding in report.findings] == ["startup"]


def test_loss_without_a_device_is_reported_as_an_upper_bound(tmp_path: Path) -> None:
    script = make_training(JOB)
    script.busy = None
    report = analyze_script(script, tmp_path)
    assert report.ranks[0].source == "host-spans"
    assert report.lost_ns == 12 * SECOND
    in_steps = [finding for finding in report.findings if not finding.outside_steps]
    assert [step.cause.id for step in in_steps] == ["cpu-preprocess", "storage-local"]
    assert all(step.upper_bound and step.recoverable_ns is None for step in in_steps)
    assert any("upper bound" in note for note in report.notes)
    by_name = {metric.name: metric for metric in report.metrics}
    assert by_name["gpu.busy_ratio"].value is None
    assert by_name["gpu.busy_ratio"].why_missing
    assert by_name["stall.cpu_ratio"].bound == "at most"
    assert by_name["productive.ratio"].bound == "at least"


def test_a_single_measured_wait_leaves_the_loss_an_upper_bound(tmp_path: Path) -> None:
    script = make_training(JOB)
    script.busy = None
    _, start, end, *_ = script.main_spans[0]
    script.main_spans.append((layout.EXPOSED, start, end, 1, SECOND // 100))
    report = analyze_script(script, tmp_path)
    assert report.ranks[0].source == "host-spans"
    assert any("upper bound" in note for note in report.notes)


def test_a_never_readable_device_leaves_the_loss_an_upper_bound(tmp_path: Path) -> None:
    script = make_training(JOB)
    script.unread = range(10_000)
    report = analyze_script(script, tmp_path)
    assert (report.ranks[0].source, report.ranks[0].device) == ("host-spans", "")
    assert report.lost_ns == 12 * SECOND


def test_a_multi_rank_job_without_peers_gets_no_recoverable_time(tmp_path: Path) -> None:
    script = make_training(JOB)
    script.variables = {"RANK": "0", "WORLD_SIZE": "2"}
    report = analyze_script(script, tmp_path)
    assert [finding.recoverable_ns for finding in report.findings] == [None, None, None]


def test_a_checkpoint_blocked_on_disk_counts_as_checkpoint(tmp_path: Path) -> None:
    script = make_training([(0.0, 1.0)] * 10)
    # a save from 3.2 to 3.7 s, the device idle meanwhile, the main thread blocked on the disk
    script.main_spans.append((layout.CHECKPOINT, 3.2, 3.7, 1 << 20))
    script.busy = [(1, 3.2), (3.7, 11)]
    script.main = "U3.2 D0.5 U7.3"
    report = analyze_script(script, tmp_path)
    assert report.ranks[0].buckets == (("checkpoint", SECOND // 2), ("unattributed", 0))


def test_loss_without_spans_is_assigned_to_families_only(tmp_path: Path) -> None:
    # the main thread sleeps while its worker decodes (or reads) for the first 0.2 s of each step
    for letter, family in (("U", "cpu"), ("D", "storage")):
        script = make_training([(2.0, 3.0)] * 6)
        script.main_spans, script.worker_spans = [], []
        script.main = "U1 " + "I2 U3 " * 6
        script.worker = "I1 " + f"{letter}2 I3 " * 6
        folder = tmp_path / family
        write_recording(script, folder / "node-1")
        report = analyze(folder)
        check_conservation(report)
        [ledger] = report.ranks
        # first work at 3 s, last at 31 s: 5 waits of 2 s lie between
        assert (ledger.in_step_ns, ledger.lost_ns) == (28 * SECOND, 10 * SECOND)
        assert ledger.buckets == ((family, 10 * SECOND), ("unattributed", 0))
        assert {
            (finding.cause.id, finding.grade)
            for finding in report.findings
            if not finding.outside_steps
        } == {(family, "C")}
        got = analyze_metrics(report)
        assert got["stall.storage-local_ratio"] is None
        assert got["stall.cpu-preprocess_ratio"] is None


def test_a_busy_main_thread_without_spans_leaves_the_loss_unattributed(tmp_path: Path) -> None:
    # the worker decodes all the time, but the main thread computes too: it may be the one
    script = make_training([(2.0, 3.0)] * 6)
    script.main_spans, script.worker_spans = [], []
    script.main, script.worker = "U31", "U31"
    report = analyze_script(script, tmp_path)
    assert report.ranks[0].buckets == (("unattributed", 10 * SECOND),)
    assert report.findings == tuple(finding for finding in report.findings if finding.outside_steps)


def test_time_without_device_and_probe_is_unmeasured(tmp_path: Path) -> None:
    script = make_training(JOB)
    script.main_spans, script.worker_spans, script.busy = [], [], None
    report = analyze_script(script, tmp_path)
    [ledger] = report.ranks
    assert ledger.unmeasured_ns == ledger.window_ns == 32 * SECOND
    assert report.findings == ()
    assert analyze_metrics(report)["coverage.ratio"] == 0.0
    assert analyze_metrics(report)["lost.ratio"] is None


def test_failed_device_samples_leave_the_lost_time_unchanged(tmp_path: Path) -> None:
    script = make_training(JOB)
    script.unread = (50, 51, 52, 53, 54)
    assert analyze_script(script, tmp_path).lost_ns == 12 * SECOND


def test_misspelled_limits_get_the_nearest_name_suggested(tmp_path: Path) -> None:
    limits = {"storage-local": {"blocked_at_least_ratio": 0.9}}
    report = analyze_script(make_training(JOB), tmp_path, limits=limits)
    assert "storage-local" not in dict(report.ranks[0].buckets)
    assert report.unattributed_reasons == (("blocked-unknown", 6 * SECOND),)
    with pytest.raises(UsageError, match="no cause 'storage-locl'; did you mean 'storage-local'"):
        analyze(tmp_path, limits={"storage-locl": {}})
    with pytest.raises(UsageError, match="did you mean 'blocked_at_least_ratio'"):
        analyze(tmp_path, limits={"storage-local": {"blocked_at_least": 1}})


def test_a_family_without_thread_samples_has_no_value(tmp_path: Path) -> None:
    script = make_training(JOB)
    script.sampled = False
    report = analyze_script(script, tmp_path)
    got = analyze_metrics(report)
    assert got["stall.storage_ratio"] is None
    assert got["stall.cpu_ratio"] is None
    assert got["stall.checkpoint_ratio"] == 0.0
    assert report.unattributed_ns == report.lost_ns == 12 * SECOND


def test_an_empty_folder_raises_no_recording(tmp_path: Path) -> None:
    with pytest.raises(NoRecording):
        analyze(tmp_path)


def test_a_recording_cut_off_mid_step_keeps_its_whole_steps(tmp_path: Path) -> None:
    script = make_training(JOB)
    script.main_spans = [span for span in script.main_spans if span[2] <= 10.0]
    script.worker_spans = [span for span in script.worker_spans if span[2] <= 10.0]
    script.end = 10.1
    report = analyze_script(script, tmp_path)
    # steps end at 1.5, 2.0 … 10.0: 18 of them, and 0.1 s after the last
    assert report.ranks[0].steps == 18
    assert report.in_step_ns == 9 * SECOND
    assert report.ranks[0].pid == MAIN


def test_nodes_are_distinguished_with_any_number_of_processes(tmp_path: Path) -> None:
    for rank in ("1", "2"):
        script = dataclasses.replace(make_training(JOB), variables={"RANK": rank})
        write_recording(script, tmp_path / f"node-{rank}")
    report = analyze(tmp_path)
    check_conservation(report)
    assert len(report.ranks) == len(report.nodes) == 2
    assert report.lost_ns == 24 * SECOND
    assert dataclasses.asdict(analyze(tmp_path, jobs=2)) == dataclasses.asdict(report)
