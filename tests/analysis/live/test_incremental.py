"""Parts of a growing recording add up to the whole, to the nanosecond, whatever happens between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.incremental import ABANDONED_NS, SILENT_NS, Cursor, JobSettler
from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import NoRecording
from clusterprof.report.live import WAIT_FOR_RANKS, JobPart
from clusterprof.report.model import RankLedger
from tests.support.growing_recording import STEPS, GrowingRecording
from tests.support.recordings import SECOND, make_training
from tests.support.waiting_jobs import make_scripts_with_devices

LIMITS = build_limits({})
STATES = ("productive_ns", "lost_ns", "outside_ns", "unmeasured_ns")


def follow(parts: JobSettler, growing: Iterable[GrowingRecording], *times: int) -> list[JobPart]:
    """Settle whenever the recordings have grown up to one of these seconds, and at the end."""
    out = []
    for second in times:
        for node in growing:
            node.write_until(second)
        parts.poll()
        out.append(parts.settle())
    for node in growing:
        node.stop()
    parts.poll()
    return [*out, parts.settle()]


def sum_parts(parts: Iterable[JobPart], rank: int | None = 0) -> Counter[str]:
    """Sum what a rank did, ns: its states, its steps, and what it lost by cause."""
    out: Counter[str] = Counter()
    for part in parts:
        for own in part.ranks:
            if own.rank == rank:
                out.update({name: getattr(own, name) for name in (*STATES, "steps")})
                out.update({f"lost {cause}": ns for cause, ns in own.lost.items()})
                out.update({f"caused {cause}": ns for cause, ns in own.caused.items()})
                assert sum(own.lost.values()) == own.lost_ns
    return +out


def as_counter(ledger: RankLedger, is_alone: bool = True) -> Counter[str]:
    out = Counter({name: getattr(ledger, name) for name in (*STATES, "steps")})
    out.update({f"lost {cause}": ns for cause, ns in ledger.buckets})
    caused = ledger.buckets if is_alone else ledger.caused
    out.update({f"caused {cause}": ns for cause, ns in caused})
    return +out


@pytest.mark.parametrize("times", [(), (7, 13, 14, 22, 31, 40), (40,), tuple(range(3, 41))])
def test_settled_parts_add_up_to_the_report(tmp_path: Path, times: tuple[int, ...]) -> None:
    growing = GrowingRecording(make_training(STEPS), tmp_path / "run/node-a")
    growing.write_until(2)
    parts = JobSettler([tmp_path / "run"], LIMITS, is_blaming=False)
    counted = sum_parts(follow(parts, [growing], *times, 40))
    (ledger,) = analyze(tmp_path / "run").ranks
    # 20 steps wait for 0.4 s, of which the first is cut by the end of the recording: half is read.
    assert counted["lost storage-local"] == 3.8 * SECOND
    assert counted == as_counter(ledger)
    assert sum(counted[name] for name in STATES) == ledger.window_ns == 40 * SECOND


def test_a_part_ends_where_the_last_step_has_ended(tmp_path: Path) -> None:
    growing = GrowingRecording(make_training([(0.0, 8.0)] * 5), tmp_path / "run/node-a")
    parts = JobSettler([tmp_path / "run"], LIMITS, is_blaming=False)
    # Steps begin at 1 s and last 8 s. At 15 s the second is open. At 21 s it has ended, at 17 s, so
    # that the part can end with the first sample 20 ms after the first, at 9.1 s.
    open_step, first_step, _ = follow(parts, [growing], 15, 21)
    assert sum(getattr(open_step.ranks[0], name) for name in STATES) == 0
    (rank,) = first_step.ranks
    assert (rank.steps, rank.productive_ns, rank.outside_ns) == (1, 8.1 * SECOND, SECOND)


def test_an_open_step_is_settled_only_after_its_end(tmp_path: Path) -> None:
    growing = GrowingRecording(
        make_training([(0.0, 1.0)] * 3 + [(0.0, 90.0)]), tmp_path / "run/node-a"
    )
    parts = JobSettler([tmp_path / "run"], LIMITS, is_blaming=False)
    growing.write_until(10)
    parts.poll()
    parts.settle()
    growing.write_until(60)
    parts.poll()
    (rank,) = parts.settle().ranks
    assert sum(getattr(rank, name) for name in STATES) == 0
    assert rank.status is not None and rank.status.since_step_ns == pytest.approx(56e9, abs=1e9)


def test_waits_are_blamed_only_with_the_whole_job(tmp_path: Path) -> None:
    # The second of two nodes waits 0.4 s for data in each step; the first waits for it. Every step
    # takes 0.4 + 0.3 + 0.1 s.
    scripts = make_scripts_with_devices((0.0, 0.3), (0.4, 0.3), steps=40)
    growing = [
        GrowingRecording(script, tmp_path / f"run/node-{number}")
        for number, script in enumerate(scripts)
    ]
    for node in growing:
        node.write_until(2)
    alone = JobSettler([tmp_path / "run/node-0"], LIMITS, is_blaming=False)
    job = JobSettler([tmp_path / "run"], LIMITS, is_blaming=True)
    own, whole = [], []
    for second in (9, 17, 25, 33, 34):
        for node in growing:
            node.write_until(second)
        alone.poll()
        own.append(alone.settle())
        job.poll()
        whole.append(job.settle())
    waited = sum_parts(own)
    assert waited[f"lost {WAIT_FOR_RANKS}"] > 0.9 * waited["lost_ns"] > 10 * SECOND
    report = analyze(tmp_path / "run")
    for rank in (0, 1):
        counted = sum_parts(whole, rank)
        expected = as_counter(report.ranks[rank], is_alone=False)
        # What is open at the end is not in the parts: less than three of 40 steps.
        assert expected["steps"] - 3 <= counted["steps"] <= expected["steps"]
        for key in expected:
            if key.startswith(("lost ", "caused ")):
                assert counted[key] == pytest.approx(expected[key], rel=3 / 40), key
    victim = sum(rank.lost_ns for part in whole for rank in part.ranks)
    culprit = sum(sum(rank.caused.values()) for part in whole for rank in part.ranks)
    unblamed = sum(sum(part.unblamed.values()) for part in whole)
    assert victim == culprit + unblamed
    assert not any(key.endswith(WAIT_FOR_RANKS) for key in sum_parts(whole))


def test_a_resumed_settler_neither_loses_nor_repeats_time(tmp_path: Path) -> None:
    growing = GrowingRecording(make_training(STEPS), tmp_path / "run/node-a")
    growing.write_until(12)
    cursor = Cursor()
    first = JobSettler([tmp_path / "run"], LIMITS, False, {"node-a": cursor})
    first.poll()
    before = [first.settle()]
    kept = Cursor(cursor.settled_ns, dict(cursor.ranks), cursor.skipped_ns)
    second = JobSettler([tmp_path / "run"], LIMITS, False, {"node-a": kept})
    counted = sum_parts([*before, *follow(second, [growing], 25, 40)])
    (ledger,) = analyze(tmp_path / "run").ranks
    assert counted == as_counter(ledger)


def test_time_skipped_by_a_long_pause_is_unmeasured(tmp_path: Path) -> None:
    growing = GrowingRecording(make_training([(0.0, 1.0)] * 500), tmp_path / "run/node-a")
    growing.write_until(12)
    cursor = Cursor()
    first = JobSettler([tmp_path / "run"], LIMITS, False, {"node-a": cursor})
    first.poll()
    before = [first.settle()]
    (settled_ns,) = cursor.ranks.values()
    growing.write_until(480)
    second = JobSettler([tmp_path / "run"], LIMITS, False, {"node-a": cursor})
    second.poll()
    after = second.settle()
    # It begins 60 s before the newest record, 479.9 s.
    assert after.nodes[0].skipped_ns == pytest.approx(419.9 * SECOND - settled_ns, abs=0.1 * SECOND)
    assert after.ranks[0].unmeasured_ns == 419.9 * SECOND - settled_ns
    counted = sum_parts([*before, after])
    assert [sum(counted[name] for name in STATES)] == list(cursor.ranks.values())


def test_a_wall_clock_jump_leaves_the_sums_unchanged(tmp_path: Path) -> None:
    growing = GrowingRecording(make_training(STEPS), tmp_path / "run/node-a")
    growing.write_until(12)
    parts = JobSettler([tmp_path / "run"], LIMITS, is_blaming=False)
    parts.poll()
    before = parts.settle()
    growing._ahead_ns = -3600 * SECOND  # the wall clock is set back by an hour
    counted = sum_parts([before, *follow(parts, [growing], 25, 40)])
    (ledger,) = analyze(tmp_path / "run").ranks
    assert counted == as_counter(ledger)


def test_a_silent_node_is_not_waited_for(tmp_path: Path) -> None:
    scripts = make_scripts_with_devices((0.0, 0.3), (0.4, 0.3), steps=120)
    growing = [
        GrowingRecording(script, tmp_path / f"run/node-{number}")
        for number, script in enumerate(scripts)
    ]
    growing[0].write_until(70)
    growing[1].write_until(30)
    parts = JobSettler([tmp_path / "run"], LIMITS, is_blaming=True)
    parts.poll()
    part = parts.settle()
    assert [node.state for node in part.nodes] == ["recording", "silent"]
    ends = [node.cursor.settled_ns for node in parts.nodes]
    assert ends[0] > 60 * SECOND and 20 * SECOND < ends[1] <= 30 * SECOND


def test_a_job_whose_recorders_were_killed_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0
    monkeypatch.setattr("clusterprof.analysis.live.incremental.time.monotonic_ns", lambda: now_ns)
    growing = GrowingRecording(make_training(STEPS), tmp_path / "run/node-a")
    growing.write_until(12)
    parts = JobSettler([tmp_path / "run"], LIMITS, is_blaming=True)
    states = []
    for later_ns in (0, SILENT_NS + 1, ABANDONED_NS, ABANDONED_NS + 1):
        now_ns = later_ns
        parts.poll()
        states.append((parts.settle().nodes[0].state, parts.is_abandoned))
    assert states == [("recording", False), ("silent", False), ("silent", False), ("silent", True)]
    growing.write_until(20)
    parts.poll()
    assert (parts.settle().nodes[0].state, parts.is_abandoned) == ("recording", False)


@pytest.mark.parametrize("name", ["sleep", "slow-dataset"])
def test_parts_of_a_real_gpu_recording_add_up(tmp_path: Path, name: str) -> None:
    """Eight parts of 20 s of an H200: lost time to the millisecond, causes to 5 % of it."""
    source = Path(__file__).parents[2] / "recordings/h200" / name
    (ledger,) = analyze(source).ranks
    (segment,) = source.glob("*/*.cpf")
    folder = tmp_path / segment.parent.name
    folder.mkdir()
    parts = JobSettler([folder], LIMITS, is_blaming=True)
    counted: Counter[str] = Counter()
    for eighth in range(1, 9):
        (folder / segment.name).write_bytes(
            segment.read_bytes()[: segment.stat().st_size * eighth // 8]
        )
        parts.poll()
        part = parts.settle()
        assert part.trouble == part.nodes[0].trouble == ""
        counted += sum_parts([part], ledger.rank)
    for state in ("productive_ns", "lost_ns"):
        assert counted[state] == pytest.approx(getattr(ledger, state), abs=1_000_000)
    for cause, ns in ledger.buckets:
        assert counted[f"lost {cause}"] == pytest.approx(ns, abs=0.05 * ledger.lost_ns), cause


def test_a_missing_recording_raises_no_recording(tmp_path: Path) -> None:
    with pytest.raises(NoRecording):
        JobSettler([tmp_path / "nothing"], LIMITS, True).poll()
