"""What each rank caused, who waited for it, and the header, from recordings made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Culprit, Finding, Report
from tests.support.recordings import SECOND, Script, write_recording
from tests.support.report_laws import analyze_metrics, check_conservation
from tests.support.waiting_jobs import make_scripts, make_scripts_with_devices, record_and_analyze

MS = SECOND // 1000


def finding(report: Report, id_: str) -> Finding:
    [result] = [item for item in report.findings if item.cause.id == id_]
    return result


def test_a_culprit_reports_own_and_caused_loss_and_recoverable_time(tmp_path: Path) -> None:
    # Rank 1 loses 0.2 s of each of 60 steps to its loader, half of it to the disk; rank 0 waits as
    # long in the all-reduce; 0.1 s are transfer.
    report = record_and_analyze(make_scripts_with_devices((0.0, 0.3), (0.2, 0.3)), tmp_path)
    assert [dict(rank.caused) for rank in report.ranks] == [
        {},
        {"cpu-preprocess": 12 * SECOND, "storage-local": 12 * SECOND},
    ]
    assert report.lost_without_culprit == (("net-transfer", 12 * SECOND),)
    storage = finding(report, "storage-local")
    assert storage.lost_ns == 12 * SECOND
    # 0.1 s in 60 steps of both ranks: rank 0 then waits no longer, and rank 1 itself goes on sooner
    [culprit] = storage.culprits
    assert (culprit.rank, culprit.own_ns, culprit.others_ns) == (1, 6 * SECOND, 6 * SECOND)
    assert (culprit.victims, culprit.recoverable_ns) == (1, pytest.approx(12 * SECOND, abs=100))
    assert storage.recoverable_ns == culprit.recoverable_ns
    # 60 operations end between seconds 1.6 and 37.0: in stretches 1 to 37
    assert storage.persistence is not None
    assert (storage.persistence.kind, storage.persistence.operation_bins) == ("steady", 37)
    assert finding(report, "net-transfer").culprits == ()
    # 0.1 s in 60 steps of two devices, if data took no time at all
    assert finding(report, "net-transfer").recoverable_ns == 12 * SECOND
    assert finding(report, "net-transfer").persistence is None


def test_a_cause_equal_on_all_ranks_is_fully_recoverable(tmp_path: Path) -> None:
    # Nobody waits for anybody: no single rank wins a thing, the disk of all 0.1 s of every step.
    report = record_and_analyze(make_scripts_with_devices((0.2, 0.3), (0.2, 0.3)), tmp_path)
    storage = finding(report, "storage-local")
    assert storage.lost_ns == storage.recoverable_ns == 12 * SECOND
    assert storage.culprits == tuple(
        Culprit(
            f"node-{rank}", rank, "emulated-0", storage.culprits[0].resource, 6 * SECOND, 0, 0, 0
        )
        for rank in (0, 1)
    )
    assert storage.persistence is None


def test_culprits_without_a_device_have_no_recoverable_time(tmp_path: Path) -> None:
    report = record_and_analyze(make_scripts((0.0, 0.3), (0.2, 0.3)), tmp_path)
    storage = finding(report, "storage-local")
    assert storage.upper_bound and storage.recoverable_ns is None
    assert [(c.rank, c.own_ns, c.others_ns) for c in storage.culprits] == [
        (1, 6 * SECOND, 6 * SECOND)
    ]


def test_slow_steps_are_counted_with_their_late_rank(tmp_path: Path) -> None:
    # Steps of 0.4 s; in 7, 20 and 33 rank 1 computes for 0.9 s instead of 0.3, and rank 0 waits.
    scripts = make_scripts_with_devices((0.0, 0.3), (0.0, 0.3), steps=40)
    for rank, script in enumerate(scripts):
        lengthen(script, rank, {7, 20, 33})
    report = record_and_analyze(scripts, tmp_path)
    assert report.slow_step_summary is not None
    assert (report.slow_step_summary.p50_ns, report.slow_step_summary.p99_ns) == (
        400 * MS,
        1000 * MS,
    )
    assert (
        report.slow_step_summary.steps,
        report.slow_step_summary.slow_step_count,
        report.slow_step_summary.why_missing,
    ) == (40, 3, "")
    assert report.slow_step_summary.late_ranks == (("node-1", 1, 3),)
    assert analyze_metrics(report)["step.p99_ns"] == 1000 * MS


def lengthen(script: Script, rank: int, steps: set[int]) -> None:
    """Make some steps longer by 0.6 s: rank 1 computes, the other waits in its operation."""
    spans, busy, late = [], [], 0.0
    main = ["U1.0"]
    for number in range(40):
        at = round(1.0 + number * 0.4 + late, 6)
        more = 0.6 if number in steps else 0.0
        come = round(at + 0.3 + (more if rank == 1 else 0.0), 6)
        leave = round(at + 0.4 + more, 6)
        _, _, _, *values = next(s for s in script.main_spans if s[0] == 11 and s[4] == number)
        spans += [(11, come, leave, *values), (3, at, leave, number)]
        busy.append((at, come))
        main += [f"U{round(come - at, 6)}", f"I{round(leave - come, 6)}"]
        late += more
    script.main_spans, script.busy, script.end = spans, busy, round(18.0 + late, 6)
    script.main, script.worker = " ".join(main), f"I{script.end}"


def test_the_job_header_counts_recorded_ranks_and_gpus(tmp_path: Path) -> None:
    scripts = make_scripts_with_devices((0.0, 0.3), (0.2, 0.3))
    for script in scripts:
        script.variables["WORLD_SIZE"] = "6"
    report = record_and_analyze(scripts, tmp_path)
    assert report.job is not None
    assert (report.job.world_size, report.job.gpus, report.job.coverage_ratio) == (6, 2, 1.0)
    # Rank 1 cannot leave before rank 0 comes: its clock may be 0.3 s off, and no more.
    assert report.job.clock_bound_ns == pytest.approx(300 * MS, rel=1e-3)
    assert report.job.why_clocks_not_aligned == ""
    [missing] = [blind for blind in report.coverage_gaps if blind.what == "ranks"]
    assert missing.message.startswith("4 of 6 ranks of job a job have no recording: 2-5;")
    assert missing.remedy


def test_a_single_node_needs_no_clock_alignment(tmp_path: Path) -> None:
    report = record_and_analyze(make_scripts((0.0, 0.3))[:1], tmp_path)
    assert report.job is not None and report.slow_step_summary is None
    assert (report.job.gpus, report.job.why_clocks_not_aligned) == (0, "")


def test_unmatched_spans_are_reported_as_a_coverage_gap(tmp_path: Path) -> None:
    # rank 1 does 9 (a barrier) where the other reduces, in steps 10 to 14: neither side is the most
    scripts = make_scripts_with_devices((0.0, 0.3), (0.0, 0.3), (0.0, 0.3))
    odd = scripts[1].main_spans
    for at, span in enumerate(odd):
        if span[0] == 11 and 10 <= span[4] < 15:
            odd[at] = (*span[:6], 9)
    report = record_and_analyze(scripts, tmp_path)
    [blind] = [
        blind_spot
        for blind_spot in report.coverage_gaps
        if blind_spot.what == "operations between ranks"
    ]
    assert blind.kind == "failed"
    assert blind.message.startswith(
        "5 of their spans differ in kind from the operation of other ranks"
    )


def test_culprits_of_uncompared_ranks_have_own_loss_only(tmp_path: Path) -> None:
    scripts = make_scripts((0.2, 0.3), (0.2, 0.3))
    for number, script in enumerate(scripts):
        script.main_spans = [span for span in script.main_spans if span[0] != 11]
        write_recording(script, tmp_path / f"node-{number}")
    report = analyze(tmp_path)
    check_conservation(report)
    assert [rank.caused for rank in report.ranks] == [(), ()]
    [first, second] = finding(report, "storage-local").culprits
    assert (first.own_ns, first.others_ns, first.victims) == (6 * SECOND, None, None)
    assert second.recoverable_ns is None
    assert report.slow_step_summary is None


def test_marked_short_transfers_get_higher_confidence_than_sampled_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 20 steps of 2 ranks: 10 ms of each on the way and 10 ms for the disk make 0.4 s either way, of
    # which marks time the first in every step and samples see four of the second.
    monkeypatch.setattr("tests.support.waiting_jobs.TRANSFER_S", 0.01)
    report = record_and_analyze(make_scripts((0.02, 0.3), (0.02, 0.3), steps=20), tmp_path)
    transfer, storage = finding(report, "net-transfer"), finding(report, "storage-local")
    assert (transfer.lost_ns, storage.lost_ns) == (400 * MS, 400 * MS)
    # 0.85 is the prior of grade B, and 0.86 the mean; of 0.4 s 71.6 of 100 claims are right. The
    # part of the loss that has no cause could be any, and would take as large a part of the
    # confidence; here each thread works outside its marked waits, and there is none.
    assert [dict(rank.buckets)["unattributed"] for rank in report.ranks] == [0, 0]
    assert transfer.confidence_ratio == pytest.approx(0.945 * 0.85 / 0.86, abs=1e-3)
    assert storage.confidence_ratio == pytest.approx(0.716 * 0.85 / 0.86, abs=1e-3)
