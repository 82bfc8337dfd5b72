"""Which rank stands out, when windows are asked for, and how traces get into the recording."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.processes.dives import INTERVAL_NS, PATIENCE_NS, Dives, StragglerWatch
from clusterprof.agent.processes.span_rings import RankProgress, SpanRings
from clusterprof.trace.schema import Event

SECOND = 1_000_000_000
MS = 1_000_000
AFTER = 80 * SECOND  # compared every 10 s


class Rings:
    """Ranks as SpanRings lists them; each ends 100 steps of 100 ms in 10 s."""

    def __init__(self, **own_ms: int) -> None:
        self.own_ms = {int(name.removeprefix("pid")): ms for name, ms in own_ms.items()}
        self.ranks = {pid: RankProgress(pid, 1, is_rank=True) for pid in self.own_ms}
        self.measures_work = False

    def advance(self, steps: int = 100) -> None:
        for pid, rank in self.ranks.items():
            self.ranks[pid] = replace(
                rank,
                steps=rank.steps + steps,
                step_ns=rank.step_ns + steps * 100 * MS,
                operation_ns=rank.operation_ns + steps * (100 - self.own_ms[pid]) * MS,
            )

    def list_progress(self) -> list[RankProgress]:
        return list(self.ranks.values())


def find_first(watch: StragglerWatch, rings: Rings, seconds: int, step: int = 10) -> Any:
    for now in range(step, seconds, step):
        rings.advance()
        straggler = watch.check(rings.list_progress(), now * SECOND)
        if straggler is not None:
            return now, straggler
    return None


def test_the_straggler_is_compared_with_the_rank_nearest_the_median() -> None:
    rings = Rings(pid11=40, pid12=90, pid13=50, pid14=60)
    now, straggler = find_first(StragglerWatch(AFTER), rings, 300)
    # the first look at 10 s begins; from then on 80 s
    assert now == 90
    assert (straggler.pid, straggler.healthy_pid) == (12, 13)
    assert (straggler.own_ns, straggler.healthy_own_ns) == (90 * MS, 50 * MS)
    assert straggler.since_ns == 10 * SECOND


@pytest.mark.parametrize(
    "own_ms",
    [
        {"pid11": 59, "pid12": 50},  # 1.18 times
        {"pid11": 6, "pid12": 2},  # 4 % of a step
        {"pid11": 90},  # nothing to compare with
    ],
)
def test_ranks_with_similar_step_times_have_no_straggler(own_ms: dict[str, int]) -> None:
    assert find_first(StragglerWatch(AFTER), Rings(**own_ms), 300) is None


def test_a_temporarily_slow_rank_is_not_a_straggler() -> None:
    rings, watch = Rings(pid11=50, pid12=90), StragglerWatch(AFTER)
    assert find_first(watch, rings, 80) is None
    rings.own_ms = {11: 90, 12: 50}  # now the other one
    for now in range(80, 150, 10):
        rings.advance()
        assert watch.check(rings.list_progress(), now * SECOND) is None


def test_a_straggler_is_found_only_after_steps_end() -> None:
    rings, watch = Rings(pid11=50, pid12=90), StragglerWatch(10 * SECOND)
    watch.check(rings.list_progress(), 10 * SECOND)
    for now in range(11, 60):
        assert watch.check(rings.list_progress(), now * SECOND) is None  # none has ended a step
    rings.advance()
    straggler = watch.check(rings.list_progress(), 60 * SECOND)
    assert straggler is not None and straggler.own_ns == 90 * MS


class Node:
    """A node with a dive of the ranks 11 and 12."""

    def __init__(self, tmp_path: Path) -> None:
        self.run_dir, self.folder = tmp_path / "run", tmp_path / "node"
        (self.run_dir / "register").mkdir(parents=True)
        self.folder.mkdir()
        for pid, rank in ((11, 0), (12, 1)):
            content = {"pid": pid, "started_ticks": 1, "variables": {"RANK": str(rank)}}
            (self.run_dir / "register" / f"{pid}.json").write_text(json.dumps(content))
        self.rings = Rings(pid11=50, pid12=90)
        seen: SpanRings = self.rings  # type: ignore[assignment]
        self.dives = Dives(self.run_dir, self.folder, seen, AFTER)
        self.now_s = 0
        self.wanted = self.run_dir / "dives" / "wanted"

    def advance(self, seconds: int) -> list[Event]:
        events = []
        for _ in range(0, seconds, 10):
            self.now_s += 10
            self.rings.advance()
            events += self.dives.take(self.now_s * SECOND)
        return [event for event in events if isinstance(event, Event)]

    def answer(self, pid: int, trace: bytes = b"", reason: str = "") -> None:
        if trace:
            (self.run_dir / "dives" / f"{pid}.json").write_bytes(trace)
        numbers = dict.fromkeys(("steps", "begun_ns", "ended_ns", "step_ns", "events"), 3)
        answer = {**numbers, "cost_ns": 5, "reason": reason}
        (self.run_dir / "dives" / f"{pid}.done").write_text(json.dumps(answer))


def test_traces_are_moved_into_the_recording(tmp_path: Path) -> None:
    node = Node(tmp_path)
    [begun] = node.advance(90)
    assert begun.kind == "dive-begun"
    assert begun.attributes["pid"] == 12 and begun.attributes["healthy_pid"] == 11
    assert node.wanted.read_text().split() == ["12", "11"]
    trace = b"x" * (3 << 20) + b"end"  # four chunks
    node.answer(12, trace)
    node.answer(11, b"{}")
    [finished] = node.advance(100)
    late, healthy = finished.attributes["windows"]
    assert (late["rank"], healthy["rank"]) == (1, 0)
    assert late["reason"] == healthy["reason"] == "" and late["cost_ns"] == 5
    assert gzip.decompress((node.folder / "dives" / late["file"]).read_bytes()) == trace
    assert gzip.decompress((node.folder / "dives" / healthy["file"]).read_bytes()) == b"{}"
    assert list((node.run_dir / "dives").iterdir()) == []  # memory: nothing stays


def test_dives_begin_at_most_once_an_hour(tmp_path: Path) -> None:
    node = Node(tmp_path)
    [begun] = node.advance(90)
    node.answer(12, reason="another profiler was active")
    node.answer(11, reason="another profiler was active")
    kinds = [event.kind for event in node.advance(INTERVAL_NS // SECOND - 10)]
    assert kinds == ["dive-finished"]
    [again] = node.advance(20)
    assert again.kind == "dive-begun" and again.t_ns >= begun.t_ns + INTERVAL_NS


def test_ended_and_unresponsive_processes_have_a_reason_instead_of_traces(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.advance(90)
    del node.rings.ranks[12]
    [finished] = node.advance(PATIENCE_NS // SECOND + 10)
    late, healthy = finished.attributes["windows"]
    assert late["reason"] == "the process ended before its window did" and not late["file"]
    assert healthy["reason"] == "it did not answer in time" and not healthy["file"]
    assert not node.wanted.exists()


def test_the_end_of_the_recording_ends_a_dive(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.advance(90)
    node.answer(12, b"{}")
    [finished] = node.dives.finish(node.now_s * SECOND)
    assert isinstance(finished, Event)
    late, healthy = finished.attributes["windows"]
    assert late["file"] and healthy["reason"] == "the recording ended before its window did"
    assert node.dives.finish(node.now_s * SECOND) == []


def test_a_symbolic_link_instead_of_a_trace_is_not_followed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.advance(90)
    (node.run_dir / "dives" / "12.json").symlink_to("/etc/hostname")
    node.answer(12)
    node.answer(11, b"{}")
    [finished] = node.advance(50)
    late, _ = finished.attributes["windows"]
    assert not late["file"] and late["reason"].startswith("its trace could not be kept")
