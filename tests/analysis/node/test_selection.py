"""A part of a run: by hand, by step and by time; what lies outside is outside, to the ns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from clusterprof.analysis.attribution.rank.chunk_boundary import PartOfRecording
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.node.selection import Instant, PartOfRun, build_parts
from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import UsageError
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.text.wording import list_imbalances
from clusterprof.report.model import Report
from tests.support.faulty_recordings import HOUR, Machine, write_on
from tests.support.random_jobs import check_conservation, draw_scripts
from tests.support.recordings import SECOND, Script, write_recording
from tests.support.report_laws import check_history
from tests.support.waiting_jobs import make_scripts

SLOW = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 steps of 1 s from 1.0 s on; rank 0 loads for 0.4 s of each, rank 1 waits for it."""
    folder = tmp_path_factory.mktemp("run")
    for number, script in enumerate(make_scripts((0.4, 0.5), (0.0, 0.5), steps=30)):
        write_recording(script, folder / f"node-{number}")
    return folder


def part(run: Path, **bounds: int | Instant) -> Report:
    asked = PartOfRun(**bounds, description="--so and so")  # type: ignore[arg-type]
    report = analyze(run, history=True, part=asked)
    check_history(report)
    assert list_imbalances(report) == []
    return report


@pytest.mark.parametrize(
    "bounds",
    [
        {"first_step": 10, "end_step": 20},
        {"since": Instant(11 * SECOND), "until": Instant(21 * SECOND)},
    ],
)
def test_only_the_ten_selected_steps_are_counted(run: Path, bounds: dict) -> None:
    report = part(run, **bounds)
    assert report.notes[0].startswith("only a part of the run was analyzed, --so and so: ")
    assert report.selection_text == "--so and so"
    for rank in report.ranks:
        assert (rank.steps, rank.in_step_ns) == (10, 10 * SECOND)
        assert rank.lost_ns == 5 * SECOND  # 0.4 s for data or rank 0, 0.1 s transfer
        assert dict(rank.outside_buckets)["not-asked"] == 20 * SECOND
    whole = analyze(run)
    assert report.window_ns == whole.window_ns
    assert report.findings[0].cause == whole.findings[0].cause
    assert report.history is not None
    assert report.history.begin_ns == 11 * SECOND
    assert report.history.ranks[0].step_ends_ns == tuple(s * SECOND for s in range(12, 22))
    assert {wait.step for wait in report.history.waits} == set(range(10, 20))


def test_two_complementary_parts_add_up_to_the_run(run: Path) -> None:
    whole, before, after = analyze(run), part(run, end_step=13), part(run, first_step=13)
    for a, b, c in zip(whole.ranks, before.ranks, after.ranks, strict=True):
        assert a.in_step_ns == b.in_step_ns + c.in_step_ns
        assert a.lost_ns == b.lost_ns + c.lost_ns
        assert (b.steps, c.steps) == (13, 17)


def test_an_empty_part_is_an_error(run: Path) -> None:
    for bounds in ({"first_step": 30}, {"since": Instant(HOUR)}, {"until": Instant(SECOND // 2)}):
        with pytest.raises(UsageError, match=r"no time inside steps .* \(--so and so\)"):
            part(run, **bounds)  # type: ignore[arg-type]


def test_readable_output_warns_about_a_partial_analysis(run: Path) -> None:
    text = Plain().render(part(run, first_step=3))
    assert "Warning: ONLY A PART of the run: --so and so." in text


def test_selected_times_are_converted_to_each_node_clock(tmp_path: Path) -> None:
    machines = (
        Machine("node-0", ahead_ns=5 * HOUR, wall_ns=100 * HOUR),
        Machine("node-1", ahead_ns=77 * SECOND, wall_ns=100 * HOUR + 3 * SECOND),
    )
    for machine in machines:
        write_on(machine, Script(end=2.0, main="I2.0"), tmp_path / machine.name)
    folders = sorted(tmp_path.iterdir())
    since = PartOfRun(since=Instant(10 * SECOND))
    assert build_parts(folders, since) == [
        PartOfRecording(since_ns=5 * HOUR + 10 * SECOND),
        PartOfRecording(since_ns=84 * SECOND),
    ]
    wall = PartOfRun(until=Instant(100 * HOUR + 4 * SECOND, is_wall=True))
    assert build_parts(folders, wall) == [
        PartOfRecording(until_ns=5 * HOUR + 4 * SECOND),
        PartOfRecording(until_ns=78 * SECOND),
    ]


@SLOW
@given(draw_scripts(), st.floats(0, 12), st.floats(0.1, 12), st.integers(0, 20), st.integers(1, 9))
def test_sums_are_conserved_in_any_selected_part(
    tmp_path_factory: pytest.TempPathFactory,
    script: Script,
    since: float,
    length: float,
    first: int,
    count: int,
) -> None:
    folder = write_recording(script, tmp_path_factory.mktemp("run") / "node-1")
    begin, end = round(since * SECOND), round((since + length) * SECOND)
    for part in (PartOfRecording(begin, end), PartOfRecording(None, None, first, first + count)):
        whole, cut = (
            analyze_node(folder, build_limits({}), ns, part=part).ranks[0] for ns in (10**15, 10**9)
        )
        check_conservation(whole)
        check_conservation(cut)
        assert whole.ledger.in_step_ns == cut.ledger.in_step_ns
        assert whole.ledger.lost_ns == cut.ledger.lost_ns
        if not part.by_steps:
            assert whole.ledger.in_step_ns <= end - begin
