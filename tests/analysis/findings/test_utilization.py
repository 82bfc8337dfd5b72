"""Devices hardly filled, from the recording to what is advised; lost time knows nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.pipeline import analyze
from clusterprof.gate import Policy, judge_runs, parse_rule
from clusterprof.output.renderers.base import Renderer
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.wording import list_imbalances
from clusterprof.report.model import Report
from tests.support.recordings import SECOND, Script, make_training, write_recording
from tests.support.reduced_recordings import Step, make_cluster, record_and_analyze, remove_signals

GIB = float(1 << 30)
SM, POWER, LIMIT = "gpu.sm_active_ratio", "gpu.power_watts", "gpu.power_limit_watts"
USED, TOTAL = "gpu.memory_used_bytes", "gpu.memory_total_bytes"


def small(used_gib: float = 10.0, **instead: list) -> Script:
    """40 steps: 0.2 s of waiting, then 0.3 s of kernels on three tenths of the multiprocessors."""
    script = make_training([(0.2, 0.3)] * 40)
    work = [(start, end) for start, end in script.busy or ()]
    always = (0.0, script.end)
    script.gauges = {
        SM: [(*span, 0.3) for span in work],
        USED: [(*always, used_gib * GIB)],
        TOTAL: [(*always, 80 * GIB)],
        **{{"power": POWER, "limit": LIMIT}[name]: values for name, values in instead.items()},
    }
    return script


def filled() -> Script:
    """The same with kernels that fill nine tenths."""
    script = make_training([(0.2, 0.3)] * 40)
    script.gauges = {SM: [(start, end, 0.9) for start, end in script.busy or ()]}
    return script


def analysed(script: Script, folder: Path) -> Report:
    return analyze(write_recording(script, folder / "node-1").parent)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Report]:
    """Of small kernels, and of full ones."""
    folder = tmp_path_factory.mktemp("underfill")
    return analysed(small(), folder / "small"), analysed(filled(), folder / "full")


def values(report: Report) -> dict[str, float | None]:
    return {metric.name: metric.value for metric in report.metrics}


def test_a_small_batch_is_reported_apart_from_lost_time(reports: tuple[Report, Report]) -> None:
    report, full = reports
    assert report.ranks == full.ranks  # not a nanosecond moved
    underfill = report.device_utilization
    assert underfill is not None and list_imbalances(report) == []
    # 40 * 0.3 s of kernels, of which 0.3 filled the device
    assert (underfill.busy_ns, underfill.lost_ns, underfill.unmeasured_ns) == (12 * SECOND, 0, 0)
    assert (underfill.well_used_ns, underfill.under_used_ns) == (3_600_000_000, 8_400_000_000)
    (item,) = underfill.ranks
    assert (item.rank, item.device, item.advice) == (
        0,
        "emulated-0",
        ("larger-batch", "fewer-launches"),
    )
    assert (item.levels.memory_used_bytes, item.levels.host_on_cpu_ratio) == (10 << 30, 1.0)
    assert [(a.code, a.measured, a.grade, a.ranks) for a in underfill.advice] == [
        ("larger-batch", True, "B", 1),
        ("fewer-launches", True, "B", 1),
    ]
    assert [finding.cause.id for finding in report.findings if "fill" in finding.cause.id] == []
    got = values(report)
    assert got["underfill.ratio"] == pytest.approx(0.7)
    assert got["gpu.sm_active_ratio"] == pytest.approx(0.3 * 0.6)  # of all time in steps
    rules = [parse_rule(text) for text in ("underfill <= 80%", "gpu.sm_active >= 50%")]
    assert [result.outcome for result in judge_runs(report, rules, Policy()).results] == [
        "pass",
        "fail",
    ]


@pytest.mark.parametrize("renderer", [Terminal(), Plain(), Markdown()], ids=lambda r: r.name)
def test_every_readable_output_states_under_use_apart_from_idle_time(
    reports: tuple[Report, Report], renderer: Renderer
) -> None:
    text, quiet = (" ".join(renderer.render(report).split()) for report in reports)
    assert (
        "12.00 s: 3.60 s well used and 8.40 s under-used (70.0 %). None of this is idle"
        " time." in text
    )
    assert "10.0 GiB of 80.0 GiB memory used): Raise the batch size" in text
    assert "nder-used" not in quiet and "UNDER-USED" not in quiet


def test_utilization_is_the_same_for_any_chunk_size(tmp_path: Path) -> None:
    node = write_recording(
        small(power=[(1.0, 9.0, 200.0)], limit=[(0.0, 30.0, 700.0)]), tmp_path / "node-1"
    )
    whole, cut = (
        [
            rank.accumulator.utilization
            for rank in analyze_node(node, build_limits({}), chunk_ns).ranks
        ]
        for chunk_ns in (10**15, 900_000_000)
    )
    assert whole == cut and len(whole) == 1 and whole[0]["busy", 0] == 12 * SECOND


def test_power_and_memory_without_sm_activity_only_suggest_under_use(tmp_path: Path) -> None:
    # 110 W of 700 in idle windows, 200 in those of kernels: 90 of 590 on the way to the limit
    script = small(power=[], limit=[(0.0, 30.0, 700.0)])
    rest = [(0.0, script.end, 110.0), *((*span, 90.0) for span in script.busy or ())]
    script.gauges = {**script.gauges, POWER: rest}
    del script.gauges[SM]
    report = analysed(script, tmp_path / "low")
    underfill = report.device_utilization
    assert underfill is not None
    assert (underfill.well_used_ns, underfill.under_used_ns) == (0, 0)
    assert underfill.reasons == (("no-sm-activity", 12 * SECOND),)
    assert [
        (advice_item.code, advice_item.measured, advice_item.grade)
        for advice_item in underfill.advice
    ] == [("larger-batch", False, "C")]
    assert underfill.ranks[0].levels.power_ratio == pytest.approx(90 / 590)
    assert values(report)["underfill.ratio"] is None
    text = " ".join(Plain().render(report).split())
    assert "rank 0 may be under-used (power between idle and limit 15.3 %" in text
    assert "underfill.ratio: not known: no SM activity was recorded" in text


def test_spinning_for_other_ranks_does_not_count_as_under_use(tmp_path: Path) -> None:
    # both devices are at 0.9 while they compute, 0.3 and 0.7 s, then at 0.05 until all is moved:
    # for 0.5 s, of which 0.4 for the other rank, and for 0.1 s
    steps = [Step()] * 20, [Step(compute=0.7)] * 20
    report = record_and_analyze(
        remove_signals(make_cluster(*steps, on_device=True), "collectives"), tmp_path
    )
    underfill = report.device_utilization
    assert underfill is not None and underfill.advice == () and list_imbalances(report) == []
    assert underfill.ranks[0].lost_ns > 0.8 * 20 * 0.4 * SECOND
    for rank in underfill.ranks:
        assert rank.levels.sm_active_ratio == pytest.approx(0.9, abs=0.05)
