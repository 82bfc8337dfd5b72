"""Who trains, who works for whom, on which accelerator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clusterprof.analysis.timeline.load.ranks import find_ranks, get_global_rank
from clusterprof.analysis.timeline.model import Chunk, Process
from clusterprof.probe.layout import DATA_WAIT, FETCH, STEP, WORKER_START
from tests.support.builders import (
    make_busy_counter,
    make_chunk,
    make_header,
    make_process,
    make_spans,
    make_thread,
    parse_activity,
)

STEPS = {STEP: make_spans((0, 1)), DATA_WAIT: make_spans((0, 0.5))}
WORKS = {WORKER_START: make_spans((0, 0)), FETCH: make_spans((0, 0.4))}


def named(role: str = "python", device: str = "", **variables: str) -> dict[str, Any]:
    return {"role": role, "device": device, "variables": variables}


def seen(given: Chunk) -> list[tuple[int | None, int, str, list[int], bool]]:
    return [
        (r.rank, r.pid, r.device, [w.pid for w in r.workers], r.marked) for r in find_ranks(given)
    ]


def with_devices(given: Chunk, *devices: dict[str, Any]) -> Chunk:
    return replace(given, header=replace(make_header(), devices=list(devices)))


def torchrun() -> list[Process]:
    """An agent, two ranks with two workers each, and a helper that fetches nothing."""
    return [
        make_process(10, registration=named("command")),
        make_process(101, 10, STEPS, registration=named(RANK="1", LOCAL_RANK="1")),
        make_process(100, 10, STEPS, registration=named(RANK="0", LOCAL_RANK="0")),
        make_process(201, 100, WORKS, registration=named(RANK="0", LOCAL_RANK="0")),
        make_process(202, 100, WORKS),
        make_process(211, 101, WORKS),
        make_process(212, 999, WORKS),  # its parent died: of no rank
        make_process(300, 100),
    ]


def test_launchers_and_helpers_are_neither_ranks_nor_workers() -> None:
    assert seen(make_chunk(2, torchrun())) == [
        (0, 100, "", [201, 202], True),
        (1, 101, "", [211], True),
    ]


def test_devices_follow_the_local_rank() -> None:
    report_with_devices = with_devices(make_chunk(2, torchrun()), {"id": "GPU-a"}, {"id": "GPU-b"})
    assert [(r.rank, r.device) for r in find_ranks(report_with_devices)] == [
        (0, "GPU-a"),
        (1, "GPU-b"),
    ]


def test_a_device_reported_by_the_process_takes_precedence() -> None:
    trainer = make_process(100, spans=STEPS, registration=named(device="GPU-b", LOCAL_RANK="0"))
    report_with_devices = with_devices(make_chunk(2, [trainer]), {"id": "GPU-a"}, {"id": "GPU-b"})
    assert [r.device for r in find_ranks(report_with_devices)] == ["GPU-b"]


def test_an_emulated_device_belongs_to_the_opening_process() -> None:
    mains = [make_process(100, spans=STEPS), make_process(101, spans=STEPS)]
    devices = (
        {"id": "emulated-0", "pid": 101, "emulated": True},
        {"id": "emulated-1", "pid": 100, "emulated": True},
    )
    found_ranks = find_ranks(with_devices(make_chunk(2, mains), *devices))
    assert [(r.pid, r.device, r.emulated) for r in found_ranks] == [
        (100, "emulated-1", True),
        (101, "emulated-0", True),
    ]


def test_a_device_is_matched_by_its_uuid() -> None:
    devices = {100: "GPU-3166", 101: "GPU-77"}
    mains = [
        make_process(pid, spans=STEPS, registration=named(device=name))
        for pid, name in devices.items()
    ]
    devices = ({"id": "GPU-1f", "uuid": "GPU-3166"}, {"id": "GPU-2e", "uuid": "GPU-3265"})
    found_ranks = find_ranks(with_devices(make_chunk(2, mains), *devices))
    assert [(r.pid, r.device) for r in found_ranks] == [(100, "GPU-1f"), (101, "GPU-77")]


def test_a_device_is_assigned_by_its_observed_users() -> None:
    mains = [
        make_process(100, spans=STEPS),
        make_process(101, spans=STEPS, registration=named(device="no")),
    ]
    mains.append(make_process(102, spans=STEPS, registration=named(device="0000:05:00.0")))
    devices = ({"id": "0000:05:00.0", "users": [101, 102]}, {"id": "0000:85:00.0", "users": [100]})
    found_ranks = find_ranks(with_devices(make_chunk(2, mains), *devices))
    assert [(r.pid, r.device) for r in found_ranks] == [
        (100, "0000:85:00.0"),
        (101, "0000:05:00.0"),  # what it said is no device here
        (102, "0000:05:00.0"),
    ]


def test_device_users_without_spans_count_as_ranks() -> None:
    mains = [
        make_process(pid, registration=named("command" if pid == 100 else "python"))
        for pid in (100, 101, 102)
    ]
    report_with_devices = with_devices(
        make_chunk(2, mains), {"id": "a", "users": [101]}, {"id": "b", "users": [102]}
    )
    assert [(r.pid, r.device) for r in find_ranks(report_with_devices)] == [(101, "a"), (102, "b")]


def test_a_process_owning_several_cores_gets_the_first() -> None:
    mains = [
        make_process(100, spans=STEPS, registration=named(RANK="0", LOCAL_RANK="0")),
        make_process(101, spans=STEPS, registration=named(RANK="1", LOCAL_RANK="1")),
    ]
    owners = {0: 100, 1: 100, 2: 101, 3: 101}  # by order of local ranks the second had core 1
    cores = [{"id": f"neuron-0-core-{n}", "pid": pid} for n, pid in owners.items()]
    found_ranks = find_ranks(with_devices(make_chunk(2, mains), *cores))
    assert [r.device for r in found_ranks] == ["neuron-0-core-0", "neuron-0-core-2"]


def test_a_device_without_busy_time_is_not_assigned() -> None:
    silent = {"id": "HL-1", "uuid": "GPU-1", "tells_busy": False}
    series = {("gpu.power_watts", "HL-1"): make_busy_counter([], 2)}
    for printed in ("", "HL-1", "GPU-1"):
        trainer = make_process(100, spans=STEPS, registration=named(device=printed, LOCAL_RANK="0"))
        report_with_devices = with_devices(make_chunk(2, [trainer], series), silent)
        assert [r.device for r in find_ranks(report_with_devices)] == [""]
    both = with_devices(
        make_chunk(2, [make_process(100, spans=STEPS)], series), silent, {"id": "GPU-a"}
    )
    assert [r.device for r in find_ranks(both)] == ["GPU-a"]


def test_a_single_process_gets_the_single_device() -> None:
    series = {("gpu.busy_ns_total", "GPU-a"): make_busy_counter([], 2)}
    assert seen(make_chunk(2, [make_process(100, spans=STEPS)], series)) == [
        (None, 100, "GPU-a", [], True)
    ]


def test_too_few_devices_without_local_ranks_stay_unassigned() -> None:
    mains = [make_process(100, spans=STEPS), make_process(101, spans=STEPS)]
    report_with_devices = with_devices(make_chunk(2, mains), {"id": "GPU-a"})
    assert [r.device for r in find_ranks(report_with_devices)] == ["", ""]


def test_registered_ranks_without_spans_count_as_training() -> None:
    bare = [replace(p, spans={}) for p in torchrun()]
    # the worker 201 inherited RANK=0 from its parent and is not a rank of its own
    assert seen(make_chunk(2, bare)) == [
        (0, 100, "", [201, 202, 300], False),
        (1, 101, "", [211], False),
    ]


def test_the_busiest_process_of_the_command_counts_as_training() -> None:
    def busy(pid: int, parent: int, text: str, **more: Any) -> Process:
        return make_process(pid, parent, thread=make_thread(parse_activity(text), 5), **more)

    shell = busy(10, 1, "I5", registration=named("command"))
    family = [shell, busy(100, 10, "U4 I1"), busy(201, 100, "U1 D4"), busy(900, 1, "U5")]
    assert seen(make_chunk(5, family)) == [(None, 100, "", [201], False)]


def test_accelerator_owners_without_spans_count_as_training() -> None:
    launcher = make_process(10, 1, registration=named("command"))
    trainers = [make_process(11, 10), make_process(12, 10)]
    loader = make_process(13, 12, thread=make_thread(parse_activity("U2"), 2))
    devices = [{"id": "emulated-0", "pid": 11}, {"id": "emulated-1", "pid": 12}]
    given = with_devices(make_chunk(2, [launcher, *trainers, loader]), *devices)
    # the loader used more CPU than anybody, and owns nothing
    assert seen(given) == [
        (None, 11, "emulated-0", [], False),
        (None, 12, "emulated-1", [13], False),
    ]


def test_a_worker_with_user_spans_remains_a_worker() -> None:
    marks = {FETCH: make_spans((0, 0.4)), 64: make_spans((0, 0.1))}
    timeline = make_chunk(2, [make_process(100, spans=STEPS), make_process(201, 100, marks)])
    assert seen(timeline) == [(None, 100, "", [201], True)]


def test_the_global_rank_comes_from_the_first_known_variable() -> None:
    assert get_global_rank(named(RANK="3", SLURM_PROCID="5")) == 3
    assert get_global_rank(named(SLURM_PROCID="5")) == 5
    assert get_global_rank({"rank": 2, "variables": {"RANK": "9"}}) == 2
    assert get_global_rank(named(RANK="zero")) is None
    assert get_global_rank({}) is None


def test_an_empty_chunk_has_no_ranks() -> None:
    assert find_ranks(make_chunk(1)) == ()
