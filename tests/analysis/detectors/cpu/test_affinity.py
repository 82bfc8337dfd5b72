"""CPUs that affinity leaves, against those that would have been kept busy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.detectors.cpu.contention import CpuContention
from clusterprof.analysis.detectors.cpu.preprocess import CpuPreprocess
from clusterprof.analysis.timeline.host_resources import (
    CpuTopology,
    find_tightest_cpu_set,
    is_loader_process,
    parse_cpu_topology,
)
from clusterprof.analysis.timeline.load.processes import ProcessBuffer
from clusterprof.analysis.timeline.model import PHASE_DATA_WAIT, Placement, Process, Rank
from clusterprof.probe.layout import DATA_WAIT, FETCH, WORKER_START
from clusterprof.trace.schema import Rows
from tests.support.builders import (
    make_chunk,
    make_header,
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

NODE = make_header(
    cpus={
        "count": 8,
        "online": "0-7",
        "cores": ["0,4", "1,5", "2,6", "3,7"],
        "nodes": {"0": "0-1,4-5", "1": "2-3,6-7"},
    }
)
S = 1_000_000_000
RUNNABLE = {"runnable": 0.75}


def placed(item: Process, *cpus: int) -> Process:
    at = Placement(frozenset(cpus), frozenset({0, 1}), np.array([min(cpus, default=0)]))
    return replace(item, placement=at)


def job(*cpus: int, workers: int = 4) -> Rank:
    """Workers that each run for one second of four and wait three for a CPU, and a main thread
    that computes for half a second."""
    main = placed(make_process(100, thread=make_thread(parse_activity("U0.5 I3.5"), 4)), *cpus)
    loaders = [
        placed(
            make_process(
                200 + number,
                100,
                {WORKER_START: make_spans((0, 1)), FETCH: make_spans((0, 4))},
                make_thread(parse_activity("U1 R3"), 4),
            ),
            *cpus,
        )
        for number in range(workers)
    ]
    return make_rank(4, main, loaders, node=NODE)


def test_needed_cpus_include_running_and_waiting_threads() -> None:
    crowd = find_tightest_cpu_set(job(3), 0, 4 * S)
    assert crowd is not None and crowd.is_limiting
    assert crowd.needed == pytest.approx((4 * 4 + 0.5) / 4)  # four of four seconds each, and 0.5 s
    assert (crowd.allowed, crowd.online, crowd.cores, crowd.workers) == ({3}, 8, 1, 4)
    # of the first second only: four run, and the main thread does for half of it
    assert find_tightest_cpu_set(job(3), 0, S).needed == pytest.approx(4.5)  # type: ignore[union-attr]


def test_hyper_threads_count_as_two_cpus_of_a_single_core() -> None:
    crowd = find_tightest_cpu_set(job(1, 5), 0, 4 * S)
    assert crowd is not None and crowd.is_limiting
    assert (len(crowd.allowed), crowd.cores) == (2, 1)


def test_sufficient_or_unrestricted_cpu_sets_are_not_limiting() -> None:
    assert find_tightest_cpu_set(job(*range(8)), 0, 4 * S) is None
    # 4.125 needed of 4: less than a twentieth more, as every scheduler costs
    enough = find_tightest_cpu_set(job(0, 1, 2, 3), 0, 4 * S)
    assert enough is not None and enough.needed > 4 and not enough.is_limiting


def test_restricted_workers_are_found_beside_an_unrestricted_main_process() -> None:
    scripts = job(3)
    free = replace(scripts, main=placed(scripts.main, *range(8)))
    whole = make_chunk(4, [free.main, *free.workers], node=NODE)
    crowd = find_tightest_cpu_set(replace(free, chunk=whole), 0, 4 * S)
    assert crowd is not None and crowd.is_limiting
    assert (crowd.allowed, crowd.needed, crowd.workers) == ({3}, 4.0, 4)  # without the main one


def test_the_tightest_of_several_cpu_sets_is_reported() -> None:
    """Workers on a CPU each have enough; the two that share one do not."""
    scripts = job(3)
    spread = [
        placed(worker, cpu) for worker, cpu in zip(scripts.workers, (0, 1, 2, 2), strict=True)
    ]
    main = placed(scripts.main, 0, 1, 2)
    whole = make_chunk(4, [main, *spread], node=NODE)
    crowd = find_tightest_cpu_set(
        replace(scripts, main=main, workers=tuple(spread), chunk=whole), 0, 4 * S
    )
    assert crowd is not None and (crowd.allowed, crowd.needed, crowd.workers) == ({2}, 2.0, 2)


def test_offline_cpus_are_not_counted_as_allowed() -> None:
    crowd = find_tightest_cpu_set(job(3, 8, 9, 127), 0, 4 * S)
    assert crowd is not None and crowd.allowed == {3}


def test_processes_without_placement_are_unknown() -> None:
    scripts = job(3)
    unseen = [replace(worker, placement=None) for worker in scripts.workers[1:]]
    whole = make_chunk(4, [scripts.main, scripts.workers[0], *unseen], node=NODE)
    crowd = find_tightest_cpu_set(
        replace(scripts, workers=(scripts.workers[0], *unseen), chunk=whole), 0, 4 * S
    )
    assert crowd is not None and crowd.needed == pytest.approx((4 + 0.5) / 4)
    nobody = make_rank(4, replace(scripts.main, placement=None), unseen, node=NODE)
    assert find_tightest_cpu_set(nobody, 0, 4 * S) is None
    assert (
        find_tightest_cpu_set(make_rank(4, scripts.main, scripts.workers), 0, 4 * S) is None
    )  # a header without CPUs


def test_only_processes_confined_to_the_same_cpus_count_as_demand() -> None:
    scripts = job(3, workers=1)
    busy = make_thread(parse_activity("U4"), 4)
    beside = [
        placed(make_process(7, thread=busy), 3),
        placed(make_process(8, thread=busy), 2),
        placed(make_process(9, thread=busy), 2, 3),
    ]
    whole = make_chunk(4, [scripts.main, *scripts.workers, *beside], node=NODE)
    crowd = find_tightest_cpu_set(replace(scripts, chunk=whole), 0, 4 * S)
    assert crowd is not None and crowd.needed == pytest.approx((4 + 0.5 + 4) / 4)


def test_unavailable_kernel_times_are_unknown() -> None:
    scripts = job(3, workers=0)
    main = placed(
        make_process(
            100, thread=make_thread(parse_activity("U1"), 4, denied=("on_cpu_ns", "run_delay_ns"))
        ),
        3,
    )
    crowd = find_tightest_cpu_set(make_rank(4, main, node=NODE), 0, 4 * S)
    assert crowd is not None and np.isnan(crowd.needed) and not crowd.is_limiting
    assert scripts.workers == ()


def test_contention_from_a_restricted_cpu_set_is_named_affinity() -> None:
    pieces = make_lost_segments((0, 2, 2.0, PHASE_DATA_WAIT), (2, 4, 2.0, PHASE_DATA_WAIT), step=3)

    def claimed(*cpus: int):
        limits = CpuContention.Limits()
        return CpuContention().claim(job(*cpus), pieces, make_breakdown(RUNNABLE, RUNNABLE), limits)

    bound, free = claimed(3), claimed(*range(8))
    assert bound.resource == "affinity: 4 workers on 1 of 8 CPUs"
    assert bound.resource_facts.kind == "cpu-set"
    assert {evidence_row.name: evidence_row.value for evidence_row in bound.evidence} == {
        "thread.runnable_ratio": 0.75,
        "job.cpus_needed_count": pytest.approx(4.125),
        "job.cpus_allowed_count": 1.0,
    }
    assert free.resource == "" and [evidence_row.name for evidence_row in free.evidence] == [
        "thread.runnable_ratio"
    ]
    np.testing.assert_array_equal(bound.share, free.share)  # it is the same time, by another name


def test_computing_workers_get_evidence_on_allowed_cpus() -> None:
    pieces = make_lost_segments((0, 4, 4.0, PHASE_DATA_WAIT), step=3)

    def evidence_for(*cpus: int) -> list[tuple[str, float, str]]:
        claims = CpuPreprocess().claim(
            job(*cpus), pieces, make_breakdown({"user_cpu": 0.9}), CpuPreprocess.Limits()
        )
        assert claims is not None
        return [
            (evidence_row.name, evidence_row.value, evidence_row.note)
            for evidence_row in claims.evidence
        ][2:]

    note = "of 8 CPUs (2 cores) are allowed by affinity or cpuset"
    assert evidence_for(0, 1, 4, 5) == [("job.cpus_allowed_count", 4.0, note)]
    assert evidence_for(*range(8)) == []


@pytest.mark.parametrize("cpus", [2, None, {"online": "what"}, {"online": 3}, {}])
def test_missing_or_invalid_cpu_headers_give_an_empty_topology(cpus: object) -> None:
    assert parse_cpu_topology(make_header(cpus=cpus)) == CpuTopology(frozenset(), (), ())


def test_a_loader_process_fetches_and_does_not_wait_for_data() -> None:
    fetch, wait = {FETCH: make_spans((0, 1))}, {DATA_WAIT: make_spans((0, 1))}
    assert is_loader_process(make_process(1, spans=fetch))
    assert not is_loader_process(make_process(1, spans={**fetch, **wait}))  # without workers
    assert not is_loader_process(make_process(1))


def rows(t_ns: int, *of: tuple[int, int, int, int], cpus: tuple[str, ...]) -> Rows:
    names = ("t_ns", "pid", "processor", "cpus_allowed", "nodes_allowed")
    columns = [np.array(c, np.int64) for c in zip(*((t_ns, *value) for value in of))]
    return Rows("placement", names, columns, {"cpus_allowed": cpus, "nodes_allowed": ("0",)})


def test_placements_are_read_and_kept_between_samples() -> None:
    buffer = ProcessBuffer()
    buffer.add_rows(rows(1, (10, 3, 0, 0), (11, 1, 1, -1), cpus=("3", "garbage")))
    buffer.add_rows(rows(2, (10, 4, 2, 0), cpus=("3", "garbage", "0-7")))
    threads = ("t_ns", "pid", "tid")
    times = np.array([1, 1, 5 * S], np.int64)
    of = [times, np.array([10, 11, 10]), np.array([10, 11, 10])]
    buffer.add_rows(Rows("threads", threads, of, {}))
    first, _ = buffer.take(0, S, last=False)
    ten, eleven = first[10].placement, first[11].placement
    assert ten is not None and eleven is not None
    assert (ten.cpus, ten.nodes, ten.observed_cpus.tolist()) == ({*range(8)}, {0}, [3, 4])
    assert (eleven.cpus, eleven.nodes) == (frozenset(), frozenset())  # unknown
    later, _ = buffer.take(S, 6 * S, last=True)
    again = later[10].placement
    assert again is not None and again.cpus == {*range(8)} and again.observed_cpus.size == 0
