"""Time lost to a restart: what lies between the end of a rank and its next first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report
from clusterprof.trace.schema import Event
from tests.support.faulty_recordings import Machine, write_on
from tests.support.recordings import MAIN, SECOND, Script, make_training
from tests.support.report_laws import check_conservation

STEPS = [(0.2, 0.3)] * 20  # begun at 1 s, 10 s long; the recording ends 1 s later, at 12 s


def lives(
    tmp_path: Path,
    *ends: dict[str, int] | None,
    counted: bool = True,
    name: str = "llama",
    boots: tuple[str, ...] = ("boot", "boot"),
) -> Report:
    """Two lives of rank 0, 30 s apart; how the first ended, as far as it was seen."""
    for life, (end, boot) in enumerate(zip(ends, boots)):
        script: Script = make_training(STEPS)
        script.variables = {"RANK": "0", "WORLD_SIZE": "1"}
        if name:
            script.variables["TORCHELASTIC_RUN_ID"] = name
        if counted:
            script.variables["TORCHELASTIC_RESTART_COUNT"] = str(life)
        at = 30 * life * SECOND
        machine = Machine("node-0", boot, at, at, started_ticks=1 + life)
        attributes = {"pid": MAIN, "started_ticks": 1 + life, **(end or {})}
        exited = [] if end is None else [Event(12 * SECOND, "process-exited", attributes)]
        write_on(machine, script, tmp_path / f"life-{life}", exited)
    report = analyze(tmp_path)
    check_conservation(report)
    return report


def outside(report: Report) -> list[dict[str, int]]:
    return [dict(ledger.outside_buckets) for ledger in report.ranks]


FIRST = {"startup": SECOND, "after-steps": SECOND}


def test_a_counted_restart_includes_the_gap_and_next_startup(tmp_path: Path) -> None:
    report = lives(tmp_path, {"exit_code": 1}, None)
    # from 12 s, the last record, to 31 s, the first step of the second life
    assert outside(report) == [FIRST, {"fail-restart": 19 * SECOND, "after-steps": SECOND}]
    assert [ledger.window_ns for ledger in report.ranks] == [12 * SECOND, 30 * SECOND]
    [finding] = [finding for finding in report.findings if finding.cause.id == "fail-restart"]
    assert (finding.lost_ns, finding.grade, finding.outside_steps) == (19 * SECOND, "A", True)
    assert finding.share_ratio == pytest.approx(19 / 42)
    assert [(culprit.node, culprit.rank) for culprit in finding.culprits] == [("node-0", 0)]


def test_a_failed_exit_reveals_an_uncounted_restart(tmp_path: Path) -> None:
    report = lives(tmp_path, {"signal": 11}, None, counted=False)
    assert outside(report)[1]["fail-restart"] == 19 * SECOND
    [finding] = [finding for finding in report.findings if finding.cause.id == "fail-restart"]
    assert finding.grade == "B"


@pytest.mark.parametrize("end", [None, {"exit_code": 0}, {"signal": 15}])
def test_a_successive_run_does_not_count_as_a_restart(tmp_path: Path, end: dict | None) -> None:
    report = lives(tmp_path, end, None, counted=False)
    assert outside(report) == [FIRST, FIRST]
    assert "fail-restart" not in [finding.cause.id for finding in report.findings]


def test_restart_time_excludes_the_gap_between_machines(tmp_path: Path) -> None:
    report = lives(tmp_path, None, None, boots=("one", "another"))
    assert outside(report)[1] == {"fail-restart": SECOND, "after-steps": SECOND}
    [finding] = [finding for finding in report.findings if finding.cause.id == "fail-restart"]
    assert (finding.lost_ns, finding.culprits) == (SECOND, ())
