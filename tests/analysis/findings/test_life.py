"""The life of a job: hand-made recordings of its attempts, and every second of it by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.findings.life import parse_wall_time
from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import UsageError
from clusterprof.probe import layout
from clusterprof.report.life import LIFE_PARTS, Life
from clusterprof.trace.schema import Event
from tests.support.faulty_recordings import Machine, write_on
from tests.support.recordings import MAIN, SECOND, Script, make_training

STEPS = [(0.2, 0.3)] * 20  # begun at 1 s, 10 s long; the recording ends 1 s later, at 12 s
EPOCH_S = 1_790_000_000
"""When the clock of the recordings shows 0, seconds since 1970."""


def script_of(counters: dict[int, int] | None = None, **variables: str) -> Script:
    """Make a rank that ends 20 steps.

    counters: step of the process -> the job's own number, reported at the end of the step.
    """
    script = make_training(STEPS)
    script.variables = {"RANK": "0", "WORLD_SIZE": "1", **variables}
    for step, job_step in (counters or {}).items():
        end = round(1.0 + 0.5 * (step + 1), 6)
        script.main_spans.append((layout.STEP_COUNTER, end, end, job_step, step))
    return script


def write_attempt(
    folder: Path, at_s: float, script: Script, end: dict[str, int] | None = None, job: str = "7"
) -> None:
    """Write an attempt that begins `at_s` after the epoch on one machine."""
    at_ns = round(at_s * SECOND)
    wall_ns = EPOCH_S * SECOND + at_ns
    machine = Machine("node-0", "boot", at_ns, wall_ns, job, started_ticks=1 + round(at_s))
    attributes = {"pid": MAIN, "started_ticks": 1, **(end or {})}
    exited = [] if end is None else [Event(12 * SECOND, "process-exited", attributes)]
    write_on(machine, script, folder, exited)


def seconds_by_part(life: Life | None) -> dict[str, float]:
    """Return the parts with time, s, after the check that they add up."""
    assert life is not None and not life.why_missing
    assert life.total_ns == life.wall_ns * life.devices
    assert sum(part.ns or 0 for part in life.parts) == life.total_ns
    assert [part.name for part in life.parts] == list(LIFE_PARTS)
    return {part.name: part.ns / SECOND for part in life.parts if part.ns}


def why_missing(life: Life | None) -> dict[str, str]:
    assert life is not None
    return {part.name: part.why_missing for part in life.parts if part.why_missing}


def test_the_life_of_a_single_attempt_matches_the_ledger(tmp_path: Path) -> None:
    write_attempt(tmp_path / "run", 0, script_of())
    report = analyze(tmp_path)
    # 1 s before the first step, 20 waits of 0.2 s, 20 computations of 0.3 s, 1 s after the last
    lost = report.lost_ns / SECOND
    starting = dict(report.ranks[0].buckets).get("startup", 0) / SECOND
    assert lost == pytest.approx(4.0, abs=0.1)
    assert seconds_by_part(report.life) == pytest.approx(
        {"startup": 1 + starting, "lost": lost - starting, "training": 10 - lost, "after": 1}
    )
    assert report.life is not None and report.life.devices == 1
    assert why_missing(report.life).keys() == {"queued"}


def test_steps_repeated_after_a_restart_are_counted_by_job_numbers(tmp_path: Path) -> None:
    # the first attempt does the steps 1 to 20, the second begins with 13: 8 steps twice
    write_attempt(tmp_path / "a", 0, script_of({0: 1, 1: 2}), {"signal": 9})
    write_attempt(tmp_path / "b", 30, script_of({0: 13, 1: 14}))
    report = analyze(tmp_path)
    assert report.life is not None
    first, second = report.life.attempts
    assert (first.repeated_steps, second.repeated_steps) == (8, 0)
    assert (first.first_job_step, second.first_job_step) == (1, 13)
    assert (first.ended, second.ended) == ("signal 9", "")
    assert (first.start_ns, first.end_ns) == (0, 12 * SECOND)
    assert (second.start_ns, second.end_ns) == (30 * SECOND, 42 * SECOND)
    parts = seconds_by_part(report.life)
    productive = [rank.productive_ns / SECOND for rank in report.ranks]
    assert parts["repeated"] == pytest.approx(0.3 * 8, abs=0.05)
    assert parts["repeated"] + parts["training"] == pytest.approx(sum(productive))
    assert parts["down"] == pytest.approx(18)  # from 12 to 30 s
    assert parts["restart"] >= 1.0  # the start of the second attempt
    assert why_missing(report.life).keys() == {"queued"}


@pytest.mark.parametrize(
    ("counters", "reason"),
    [
        ((None, {0: 13}), "no number of a step"),
        (({0: 1}, None), "no number of a step"),
        (({0: 1, 1: 5}, {0: 13}), "counts other steps"),
    ],
)
def test_missing_job_step_numbers_leave_repeated_steps_unknown(
    tmp_path: Path, counters: tuple[dict[int, int] | None, ...], reason: str
) -> None:
    for number, own in enumerate(counters):
        write_attempt(tmp_path / str(number), 30 * number, script_of(own))
    life = analyze(tmp_path).life
    assert life is not None
    assert "repeated" not in seconds_by_part(life)
    assert reason in why_missing(life)["repeated"]
    assert [attempt.repeated_steps for attempt in life.attempts] == [None, 0]


def test_steps_repeated_by_any_later_attempt_are_counted(tmp_path: Path) -> None:
    # 1 to 20, 13 to 32, and again from 5: of the first 16, of the second all 20
    for number, first in enumerate((1, 13, 5)):
        write_attempt(tmp_path / str(number), 30 * number, script_of({0: first, 1: first + 1}))
    life = analyze(tmp_path).life
    assert life is not None
    assert [attempt.repeated_steps for attempt in life.attempts] == [16, 20, 0]
    assert seconds_by_part(life)["repeated"] == pytest.approx(0.3 * 36, abs=0.2)


def test_queue_time_comes_from_the_command_or_the_job_variables(tmp_path: Path) -> None:
    stated = {"CLUSTERPROF_QUEUED_AT": str(EPOCH_S - 50), "SLURM_JOB_START_TIME": str(EPOCH_S - 20)}
    write_attempt(tmp_path / "run", 0, script_of(**stated))
    life = analyze(tmp_path).life
    parts = seconds_by_part(life)
    assert life is not None and life.begin_at_ns == (EPOCH_S - 50) * SECOND
    assert (parts["queued"], life.wall_ns) == (30, 62 * SECOND)
    assert parts["startup"] >= 21  # 20 s from the start of the job to the first record
    assert why_missing(life) == {}
    given = analyze(tmp_path, queued_at_ns=(EPOCH_S - 120) * SECOND).life
    assert seconds_by_part(given)["queued"] == 100
    with pytest.raises(UsageError, match="after the first record"):
        analyze(tmp_path, queued_at_ns=(EPOCH_S + 5) * SECOND)


def test_a_requeued_job_waits_in_the_queue_again(tmp_path: Path) -> None:
    write_attempt(tmp_path / "a", 0, script_of(), {"signal": 15}, job="7")
    again = {"CLUSTERPROF_QUEUED_AT": str(EPOCH_S + 14), "SLURM_JOB_START_TIME": str(EPOCH_S + 25)}
    write_attempt(tmp_path / "b", 30, script_of(**again), job="7-restart1")
    parts = seconds_by_part(analyze(tmp_path).life)
    # last record at 12 s, submitted at 14 s, started at 25 s, first record at 30 s
    assert (parts["down"], parts["queued"]) == (2, 11)
    assert parts["restart"] >= 6  # 5 s to the first record, 1 s to the first step


def test_saves_and_evaluations_after_the_last_step_are_counted(tmp_path: Path) -> None:
    script = script_of()
    script.main_spans.append((layout.CHECKPOINT, 11.0, 11.4, 1000))
    script.main_spans.append((layout.EVAL, 11.5, 11.7))
    write_attempt(tmp_path / "run", 0, script)
    parts = seconds_by_part(analyze(tmp_path).life)
    assert (parts["checkpoint"], parts["evaluation"]) == pytest.approx((0.4, 0.2))
    assert parts["after"] == pytest.approx(0.4)


def test_an_evaluation_within_steps_does_not_count_as_training(tmp_path: Path) -> None:
    script = script_of()
    # from 6.2 to 6.5 s the device computes for the step that began with a wait at 6.0 s
    script.main_spans.append((layout.EVAL, 6.2, 6.5))
    write_attempt(tmp_path / "run", 0, script)
    plain = tmp_path / "plain"
    write_attempt(plain / "run", 0, script_of())
    parts, without = (seconds_by_part(analyze(folder).life) for folder in (tmp_path / "run", plain))
    assert parts["evaluation"] == pytest.approx(0.3, abs=0.02)
    assert without["training"] - parts["training"] == pytest.approx(0.3, abs=0.02)


def test_recordings_of_different_jobs_have_no_life(tmp_path: Path) -> None:
    write_attempt(tmp_path / "a", 0, script_of(), job="7")
    write_attempt(tmp_path / "b", 30, script_of(), job="8")
    life = analyze(tmp_path).life
    assert life is not None
    assert (life.why_missing, life.parts) == ("recordings of different jobs were given", ())


def test_chained_slurm_jobs_of_the_same_name_share_a_life(tmp_path: Path) -> None:
    for number in range(2):
        script = script_of(SLURM_JOB_NAME="pretrain", SLURM_JOB_ID=str(7 + number))
        write_attempt(tmp_path / str(number), 30 * number, script, job=str(7 + number))
    life = analyze(tmp_path).life
    assert seconds_by_part(life)["down"] == 18
    assert life is not None and len(life.attempts) == 2


def test_successive_processes_without_a_rank_share_a_device_slot(tmp_path: Path) -> None:
    for number in range(2):
        script = script_of({0: 1 + 10 * number})
        script.variables = {}
        write_attempt(tmp_path / str(number), 30 * number, script, job="")
    life = analyze(tmp_path).life
    assert life is not None
    assert (life.devices, [attempt.repeated_steps for attempt in life.attempts]) == (1, [10, 0])


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1790000000", EPOCH_S * SECOND),
        ("1790000000.5", EPOCH_S * SECOND + SECOND // 2),
        ("2026-09-21T14:13:20Z", EPOCH_S * SECOND),
        ("2026-09-21T16:13:20+02:00", EPOCH_S * SECOND),
        ("12", None),
        ("yesterday", None),
        ("nan", None),
    ],
)
def test_a_wall_time_is_parsed_from_seconds_or_iso(text: str, ns: int | None) -> None:
    assert parse_wall_time(text) == ns
