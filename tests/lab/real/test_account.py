"""Lost time by hand: what the stopwatches of a job's ranks say, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path

from clusterprof_lab.real.device_ledger import NOBODY, OWN, split_by_weight, split_steps, sum_losses
from clusterprof_lab.real.stopwatch_truth import find_cause, list_lost, list_outside_steps
from clusterprof_lab.real.stopwatches import (
    Busy,
    Incarnation,
    Item,
    Operation,
    Phase,
    read_stopwatches,
)
from clusterprof_lab.scenario import ExpectedVerdict
from clusterprof_lab.truth import Lost

MS = 1_000_000
STORAGE = ExpectedVerdict("storage", ("storage-remote", "storage-local"), "rank")


def busy(start: int, end: int, what: str = "compute", slowed: int = 0) -> Busy:
    return Busy(MS * start, MS * end, what, MS * slowed)


def together(number: int, come: int, left: int) -> Operation:
    return Operation(("device", -1, -1, number), MS * come, MS * left)


def life(rank: int, ended: int, **parts: list) -> Incarnation:
    item = Incarnation(rank, "host", 0, -5 * MS, 0, MS * ended, steps=1, **parts)
    item.loop_ends_ns, item.delays_ns = [MS * ended], [0]
    return item


def test_a_split_by_weight_adds_up_with_largest_remainder_rounding() -> None:
    assert split_by_weight(10, [("a", 1), ("b", 1), ("c", 1)]) == [("a", 4), ("b", 3), ("c", 3)]
    assert split_by_weight(7, [("a", 5), ("b", 3)]) == [("a", 4), ("b", 3)]  # 4.375 and 2.625
    assert split_by_weight(7, [("a", 0)]) == [("other", 7)]


def test_a_late_loader_costs_its_rank_and_the_waiting_rank() -> None:
    """Rank 1 waits 60 ms for a batch: 30 reading, 20 decoding (5 without a CPU), 10 on the way.

    Both compute 100; rank 0 comes to the collective 60 ms earlier; the transfer takes 8.
    """
    item = Item(10 * MS, 40 * MS, 60 * MS, 0, 5 * MS, 15 * MS)
    late = life(
        1,
        180,
        phases=[Phase(10 * MS, 70 * MS, "data_wait", 0)],
        batches=[[item]],
        busy=[busy(0, 10), busy(70, 170)],
        operations=[together(0, 170, 178)],
    )
    other = life(0, 180, busy=[busy(0, 110)], operations=[together(0, 110, 178)])
    zero, victim = sum_losses({0: other, 1: late})
    own = {"storage": 30, "decode": 15, "hand-over": 10, "contention": 5}
    waited = {(part, 1): ns * MS for part, ns in own.items()}
    rest = {("loop", OWN): 2 * MS, ("transfer", NOBODY): 8 * MS}
    assert {key: ns for key, ns in zero.items() if ns} == waited | rest
    mine = {(part, OWN): ns * MS for part, ns in own.items()}
    assert {key: ns for key, ns in victim.items() if ns} == mine | rest
    # Lost and computed are all there is, to the nanosecond.
    assert sum(zero.values()) + 110 * MS == sum(victim.values()) + 110 * MS == 180 * MS
    assert list_lost([other, late], STORAGE) == (
        Lost("cpu-contention", 1, 0, 5 * MS),
        Lost("cpu-contention", 1, 1, 5 * MS),
        Lost("cpu-preprocess", 1, 0, 15 * MS),
        Lost("cpu-preprocess", 1, 1, 15 * MS),
        Lost("net-transfer", None, 0, 8 * MS),
        Lost("net-transfer", None, 1, 8 * MS),
        Lost("other", None, 0, 12 * MS),
        Lost("other", None, 1, 12 * MS),
        Lost("storage-remote", 1, 0, 30 * MS),
        Lost("storage-remote", 1, 1, 30 * MS),
    )


def test_cpu_time_of_a_reader_is_not_storage_time() -> None:
    """Of 40 ms reading 12 are the process's own code (a protocol) and 4 without a CPU."""
    item = Item(0, 40 * MS, 40 * MS, 4 * MS, 0, 0, 12 * MS)
    recorded_process = life(0, 50, phases=[Phase(0, 50 * MS, "data_wait", 0)], batches=[[item]])
    (lost,) = sum_losses({0: recorded_process})
    by_key = {part: ns // MS for (part, _), ns in lost.items() if ns}
    assert by_key == {"storage": 24, "contention": 4, "decode": 12, "hand-over": 10}


def test_decoding_of_the_next_batch_delays_a_finished_batch() -> None:
    """One worker makes batch 0 until 20 and decodes batch 1 from 24 to 44, 4 of it without a CPU.

    The process waits from 10 on and has batch 0 at 40: 10 decoding, 4 on the way, 16 behind the
    next one (of 20: 14 busy, 4 late, 2 blocked), whose decoding goes on when it has arrived.
    """
    items = (
        [Item(0, 0, 20 * MS, 0, 0, 20 * MS)],
        [Item(20 * MS, 24 * MS, 44 * MS, 0, 4 * MS, 14 * MS)],
    )
    recorded_process = life(
        0, 50, phases=[Phase(10 * MS, 40 * MS, "data_wait", 0)], batches=list(items)
    )
    (lost,) = sum_losses({0: recorded_process})
    assert lost["decode", OWN] == 10 * MS + 16 * MS * 14 // 20
    assert lost["contention", OWN] == 16 * MS * 4 // 20
    # The next one's reading does not hold the interpreter.
    assert lost["hand-over", OWN] == 4 * MS + 16 * MS * 2 // 20
    recorded_process.workers = 2  # the other worker makes it: all of 20 ms were on the way
    (lost,) = sum_losses({0: recorded_process})
    assert (lost["decode", OWN], lost["hand-over", OWN]) == (10 * MS, 20 * MS)


def test_loop_time_in_the_first_step_is_startup() -> None:
    recorded_process = life(0, 100, busy=[busy(20, 50), busy(60, 90)])
    recorded_process.steps, recorded_process.loop_ends_ns, recorded_process.delays_ns = (
        2,
        [55 * MS, 100 * MS],
        [0, 0],
    )
    (lost,) = sum_losses({0: recorded_process})
    by_key = {key: ns for key, ns in lost.items() if ns}
    assert by_key == {("startup", OWN): 25 * MS, ("loop", OWN): 15 * MS}


def test_waits_for_healthy_pipeline_stages_are_bubble_time() -> None:
    wanted = ExpectedVerdict("synchronization", ("sync-imbalance",), "several")
    zero = life(0, 100, busy=[busy(0, 100)], operations=[together(0, 100, 100)])
    recorded_process = life(1, 100, busy=[busy(0, 70)], operations=[together(0, 70, 100)])
    assert list_lost([zero, recorded_process], wanted) == (Lost("sync-imbalance", 0, 1, 30 * MS),)
    assert list_lost([zero, recorded_process], wanted, [0]) == (
        Lost("sync-imbalance", 0, 1, 30 * MS),
    )
    assert list_lost([zero, recorded_process], wanted, [1]) == (
        Lost("sync-bubble", None, 1, 30 * MS),
    )


def test_varying_work_in_a_healthy_job_has_no_cause() -> None:
    zero = life(0, 100, busy=[busy(0, 100)], operations=[together(0, 100, 100)])
    recorded_process = life(1, 100, busy=[busy(0, 70)], operations=[together(0, 70, 100)])
    assert list_lost([zero, recorded_process], ExpectedVerdict("", (), "nobody")) == (
        Lost("other", None, 1, 30 * MS),
    )


def test_a_throttled_device_costs_its_rank_and_the_waiting_rank() -> None:
    """Rank 0 needs 150 ms for what takes 100 at full clock; a pause of its host costs 20 more."""
    slow = life(
        0,
        170,
        busy=[busy(0, 150, slowed=50)],
        operations=[together(0, 170, 170)],
        phases=[Phase(140 * MS, 170 * MS, "cpu-gc", 0)],
    )
    fast = life(1, 170, busy=[busy(0, 100)], operations=[together(0, 100, 170)])
    zero, victim = sum_losses({0: slow, 1: fast})
    assert {key: ns for key, ns in zero.items() if ns} == {
        ("device-throttled", OWN): 50 * MS,
        ("cpu-gc", OWN): 20 * MS,
    }
    assert {key: ns for key, ns in victim.items() if ns} == {
        ("device-throttled", 0): 50 * MS,
        ("cpu-gc", 0): 20 * MS,
    }


def test_a_message_chain_is_charged_to_its_first_sender() -> None:
    """Rank 0 stands still for 60 ms and sends; rank 1 takes it and sends on; rank 2 waits for both.

    What rank 1 sends at 70 has left at 71, though rank 2 comes for it at 75 only.
    """

    def message(sender: int, come: int, left: int) -> Operation:
        return Operation(("message", sender, sender + 1, 0), MS * come, MS * left)

    zero = life(0, 80, phases=[Phase(0, 60 * MS, "eval-host", 0)], operations=[message(0, 60, 65)])
    recorded_process = life(1, 80, operations=[message(0, 0, 65), message(1, 65, 66)])
    two = life(2, 80, busy=[busy(0, 75)], operations=[message(1, 75, 77)])
    victim = sum_losses({0: zero, 1: recorded_process, 2: two})
    assert victim[1]["eval-host", 0] == 60 * MS
    assert victim[1]["transfer", NOBODY] == 5 * MS
    assert ("eval-host", 0) not in victim[2]
    for rank, row in enumerate(victim):
        assert sum(row.values()) == (80 - 75 * (rank == 2)) * MS


def test_injected_time_precedes_phases_and_the_rest_is_loop_time() -> None:
    recorded_process = life(
        0,
        100,
        busy=[busy(0, 20), busy(30, 45, "copy")],
        injected=[(25 * MS, 35 * MS, "cpu-gil")],
        phases=[Phase(60 * MS, 90 * MS, "checkpoint", 0)],
    )
    assert [
        (p.start_ns // MS, p.end_ns // MS, p.weights[0][0]) for p in split_steps(recorded_process)
    ] == [
        (0, 20, "work"),
        (20, 25, "loop"),
        (25, 30, "cpu-gil"),
        (30, 35, "cpu-gil"),
        (35, 45, "h2d-copy"),
        (45, 60, "loop"),
        (60, 90, "checkpoint"),
        (90, 100, "loop"),
    ]


def test_a_part_becomes_the_leaf_named_by_the_scenario() -> None:
    launch = ExpectedVerdict("launch", ("launch-bound",), "everybody")
    both = ExpectedVerdict(
        "storage", ("storage-local",), "several", also=(("cpu", "cpu-loader-config"),)
    )
    assert find_cause("loop", launch) == "launch-bound"
    assert find_cause("loop", STORAGE) == "other"
    assert find_cause("storage", STORAGE) == "storage-remote"
    assert find_cause("storage", launch) == "storage-local"
    assert find_cause("decode", both) == "cpu-loader-config"
    assert find_cause("work", STORAGE) == "sync-imbalance"
    assert find_cause("checkpoint", STORAGE) == "checkpoint"


def test_lives_of_a_restarted_rank_are_distinguished(tmp_path: Path) -> None:
    """Rank 3 trains from 100 to 200, is gone, is there again at 500 and trains from 900 on."""
    for number, (started, began, ended) in enumerate([(10, 100, 200), (500, 900, 1000)]):
        first = {"life": number, "started_ns": started, "rank": 3, "world": 4, "host": "a"}
        step = {
            "step": 0,
            "began_ns": began,
            "ended_ns": ended,
            "delay_ns": 0,
            "items": [[1] * 6],
            "phases": [],
            "injected": [],
            "operations": [["send", 4, -1, began, began + 1]] * 2,
            "log": [[began, began + 9, "compute", 0, -1], [began, ended, "collective", 0, 7]],
        }
        torn = '{"step": 1, "began'  # killed while it wrote
        text = "\n".join([json.dumps(first), json.dumps(step), torn])
        (tmp_path / f"rank-3.life-{number}.jsonl").write_text(text)
    lives = read_stopwatches(tmp_path)
    assert [(live.number, live.began_ns, live.ended_ns, live.steps) for live in lives] == [
        (0, 100, 200, 1),
        (1, 900, 1000, 1),
    ]
    assert [operation.key for operation in lives[0].operations] == [
        ("message", 3, 4, 0),
        ("message", 3, 4, 1),
        ("device", -1, -1, 7),
    ]
    assert list_outside_steps(lives, [2], 0) == (
        Lost("startup", 3, 3, 90),
        Lost("fail-restart", 2, 3, 300),
        Lost("startup", 3, 3, 400),
    )
    assert list_outside_steps(lives[1:], [2], 5000)[-1] == Lost("fail-hang", 2, 3, 4000)
