"""What hosts do beside the idle time of their devices, and jobs that come to a halt, without marks.

The job: 30 steps of 0.3 s of work and 0.1 s in a collective that all leave together.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.analysis.attribution.rank.chunk_boundary import RankState, find_settled_segments
from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks
from clusterprof.report.model import Report
from tests.support.recordings import SECOND, Script, write_recording
from tests.support.reduced_recordings import Step, make_cluster, record_and_analyze, remove_signals

N = 30
PLAIN = Step()


def seconds_of(report: Report, rank: int) -> dict[str, float]:
    """Without a name for what it slept in collectives: 0.1 s a step."""
    return {id_: ns / SECOND for id_, ns in report.ranks[rank].buckets if ns}


def blamed(report: Report, outside: bool = False) -> dict[str, list[int | None]]:
    return {
        finding.cause.id: [culprit.rank for culprit in finding.culprits]
        for finding in report.findings
        if finding.outside_steps is outside
    }


def each(step: Step, interval: int) -> list[Step]:
    return [step if number % interval == interval - 1 else PLAIN for number in range(N)]


@pytest.mark.parametrize(
    ("step", "interval", "family", "lost_s"),
    [
        (Step(save=0.4), 10, "checkpoint", 1.2),  # 40 MB in each pause
        (Step(save=0.05), 1, "eval", 1.5),  # 5 MB in each step: a log
        (Step(copy=0.2), 1, "h2d", 6.0),  # 2 GB
    ],
)
def test_a_single_late_rank_costs_other_ranks_as_much(
    tmp_path: Path, step: Step, interval: int, family: str, lost_s: float
) -> None:
    job = make_cluster([PLAIN] * N, each(step, interval), [PLAIN] * N)
    report = record_and_analyze(remove_signals(job, "spans"), tmp_path)
    # Samples are a tenth of a second apart, and who waited for whom is known per 2 s.
    assert seconds_of(report, 1)[family] == pytest.approx(lost_s, rel=0.25)
    assert seconds_of(report, 0)[family] == pytest.approx(lost_s, rel=0.45)
    assert next(iter(blamed(report).items()))[0] == family and blamed(report)[family][0] == 1


def test_a_rank_that_computes_while_its_device_idles_is_late_for_an_unknown_reason(
    tmp_path: Path,
) -> None:
    # Each step 0.05 s on a CPU: evaluation, logs, compilation and slow launches look alike.
    job = make_cluster([PLAIN] * N, each(Step(host=0.05), 1), [PLAIN] * N)
    report = record_and_analyze(remove_signals(job, "spans"), tmp_path)
    assert "cpu" not in blamed(report)
    reasons = {reason: ns / SECOND for reason, ns in report.unattributed_reasons}
    assert reasons["on-cpu"] == pytest.approx(1.5, rel=0.5)  # the others launch, too
    assert reasons["peers-unknown"] == pytest.approx(2 * 1.5, rel=0.45)  # what it cost the others


def test_simultaneous_cpu_pauses_of_all_ranks_are_an_evaluation(tmp_path: Path) -> None:
    job = make_cluster(*([each(Step(host=0.4), 10)] * 2))
    report = record_and_analyze(remove_signals(job, "spans"), tmp_path)
    for rank in (0, 1):
        assert seconds_of(report, rank)["eval"] == pytest.approx(1.2, rel=0.1)
        assert "cpu" not in seconds_of(report, rank)


def halted(scripts: list[Script], last: list[str]) -> list[Script]:
    """The same, and then 15 s in which the devices idle and main threads do `last`."""
    for script, letter in zip(scripts, last):
        script.end += 15.0
        script.main += f" {letter}16.0"
    return remove_signals(scripts, "spans")


@pytest.mark.parametrize(("last", "culprits"), [("III", []), ("ILI", [1]), ("LIW", [])])
def test_a_job_whose_devices_idle_and_hosts_sleep_to_the_end_hangs(
    tmp_path: Path, last: str, culprits: list[int]
) -> None:
    report = record_and_analyze(halted(make_cluster(*([[PLAIN] * N] * 3)), list(last)), tmp_path)
    assert blamed(report, outside=True)["fail-hang"] == culprits
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    # From the last work, 0.1 s before the last step ends, 1 s and 15 s.
    assert hang.lost_ns == pytest.approx(3 * 16.1 * SECOND, abs=3 * 0.11 * SECOND)
    assert any("progress stopped: no device of ranks 0-2" in note for note in report.notes)


def test_a_host_computing_after_the_last_step_is_no_hang(tmp_path: Path) -> None:
    report = record_and_analyze(halted(make_cluster(*([[PLAIN] * N] * 2)), ["I", "U"]), tmp_path)
    assert "fail-hang" not in blamed(report, outside=True)


def test_device_work_before_the_process_start_is_not_counted(tmp_path: Path) -> None:
    script = Script(end=10.0, busy=[(1.0, 4.0), (7.0, 9.0)], main="I10.0", worker="I10.0")
    [chunk] = NodeLoader(write_recording(script, tmp_path / "node")).chunks()
    [rank] = find_ranks(chunk)
    thread = rank.main.threads[rank.pid]
    later = {
        name: getattr(thread, name)[thread.t_ns >= 5 * SECOND]
        for name in thread.__dataclass_fields__
        if name != "name"
    }
    main = replace(rank.main, threads={rank.pid: replace(thread, **later)})
    _, state = find_settled_segments(replace(rank, main=main), RankState(), last=True)
    assert (state.step_begin_ns, state.step_end_ns) == (7 * SECOND, 9 * SECOND)
    _, state = find_settled_segments(rank, RankState(), last=True)
    assert (state.step_begin_ns, state.step_end_ns) == (SECOND, 9 * SECOND)
