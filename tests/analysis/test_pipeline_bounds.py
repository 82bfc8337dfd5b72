"""A bound is said only where everything that could break it was looked at: loops without a device.

Each loop runs 20 steps of one second; of each the training thread computes a part and sleeps in the
rest, where no hook looks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import EXIT_GATE_CANNOT_TELL, EXIT_GATE_FAILED, EXIT_OK
from clusterprof.gate import Policy, judge_runs, parse_any_rule
from clusterprof.gate.stored_report import load_report
from clusterprof.output.renderers.html.page import Html
from clusterprof.output.renderers.json import Json
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.support.recordings import Script, write_recording

STEPS = 20
RENDERERS = (Terminal(), Plain(), Markdown(), Html())
POLICY = Policy(min_steps=1, min_coverage_ratio=0.0)


def run_loop(
    folder: Path, second: str, step_s: float = 1.0, validates: bool = False, sampled: bool = True
) -> Report:
    """Analyze a loop without a device. second: activity of each second; the step ends earlier."""
    script = Script(float(STEPS), main=" ".join([second] * STEPS), sampled=sampled)
    for number in range(STEPS):
        script.main_spans.append((layout.STEP, number, number + step_s, number, 2, -1, -1))
        if validates:  # its last fifth
            script.main_spans.append((layout.EVAL, number + 0.8, number + 1.0, 0, 0, 0, 0))
    return analyze(write_recording(script, folder / "run" / "node").parent)


def lost_ratio(report: Report) -> float:
    return report.lost_ns / report.in_step_ns


def gate(report: Report, rule: str) -> int:
    return judge_runs(report, [parse_any_rule(rule)], POLICY).exit_code


def texts(report: Report) -> list[str]:
    return [renderer.render(report) for renderer in RENDERERS]


def test_sleep_and_logging_between_steps_count_in_the_upper_bound(tmp_path: Path) -> None:
    """It computes for 0.6 s, and sleeps for 0.3 s and logs for 0.1 s after the end of the step."""
    report = run_loop(tmp_path, "U0.6 S0.3 F0.1", step_s=0.6)
    # 19 gaps of 0.4 s between the 20 steps, of 19.6 s
    assert lost_ratio(report) == pytest.approx(19 * 0.4 / 19.6, abs=0.01)
    assert "At most 38." in Terminal().render(report)
    assert gate(report, "lost.ratio <= 5%") == EXIT_GATE_CANNOT_TELL
    assert gate(report, "lost.ratio <= 50%") == EXIT_OK


def test_sleep_in_validation_counts_in_the_upper_bound(tmp_path: Path) -> None:
    report = run_loop(tmp_path, "U0.5 S0.3 U0.02 S0.18", validates=True)
    assert lost_ratio(report) == pytest.approx(0.48, abs=0.01)
    assert gate(report, "lost.ratio <= 5%") == EXIT_GATE_CANNOT_TELL


def test_a_mostly_sleeping_loop_is_not_called_busy(tmp_path: Path) -> None:
    report = run_loop(tmp_path, "U0.02 S0.98")
    assert lost_ratio(report) == pytest.approx(0.98, abs=0.01)
    assert gate(report, "lost.ratio <= 5%") == EXIT_GATE_CANNOT_TELL
    assert all("kept busy" not in text for text in texts(report))


def test_a_computing_loop_gets_a_bound_of_zero(tmp_path: Path) -> None:
    report = run_loop(tmp_path, "U1")
    assert (report.lost_ns, report.unobserved_ns, report.too_little_seen) == (0, 0, "")
    assert gate(report, "lost.ratio <= 5%") == EXIT_OK  # the bound holds: 0 %
    assert all("kept busy" not in text for text in texts(report))


def test_a_loop_without_thread_samples_gets_no_bound(tmp_path: Path) -> None:
    report = run_loop(tmp_path, "U0.02 S0.98", sampled=False)
    assert report.unobserved_ns == report.in_step_ns == 20 * 10**9
    why = "no device, and what the host did is not known for 100.0 % of the time in steps"
    assert report.too_little_seen == why
    assert {m.name: m.value for m in report.metrics}["lost.ratio"] is None
    assert gate(report, "lost.ratio <= 5%") == EXIT_GATE_CANNOT_TELL
    for text in texts(report):
        assert why in " ".join(text.split()).replace("&#32;", " ")
        assert "kept busy" not in text and "at most 0.0" not in text.lower()
    stored = tmp_path / "report.json"
    stored.write_text(Json().render(report))
    assert load_report(stored).too_little_seen == why
    assert gate(load_report(stored), "step.p50_ns <= 2 s") == EXIT_GATE_CANNOT_TELL


def test_a_single_step_is_too_little_to_judge_a_job_with_a_device(tmp_path: Path) -> None:
    script = Script(2.0, main="U2", busy=[(0.0, 2.0)])
    script.main_spans.append((layout.STEP, 0.0, 1.9, 0, 2, -1, -1))
    report = analyze(write_recording(script, tmp_path / "run" / "node").parent)
    assert report.too_little_seen == "a single step"
    for text in texts(report):
        assert "Too little was seen to judge the job: a single step." in " ".join(text.split())
    assert gate(report, "gpu.busy_ratio >= 50%") == EXIT_GATE_CANNOT_TELL


def test_a_few_milliseconds_of_steps_give_no_verdict(tmp_path: Path) -> None:
    script = Script(2.0, main="U2", busy=[(0.0, 2.0)])
    for number in range(4):
        at = 1.0 + number / 100
        script.main_spans.append((layout.STEP, at, at + 0.01, number, 2, -1, -1))
    report = analyze(write_recording(script, tmp_path / "run" / "node").parent)
    assert report.too_little_seen == "only 40.0 ms inside steps"
    assert gate(report, "gpu.busy_ratio >= 99%") == EXIT_GATE_CANNOT_TELL
    assert gate(report, "gpu.busy_ratio >= 50%") != EXIT_GATE_FAILED
