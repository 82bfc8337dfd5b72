"""Causes of a data wait: each claims its part of what the critical thread did, and no other."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.cpu.contention import CpuContention
from clusterprof.analysis.detectors.cpu.gc import CpuGc
from clusterprof.analysis.detectors.cpu.loader_config import CpuLoaderConfig
from clusterprof.analysis.detectors.cpu.memory import CpuMemory
from clusterprof.analysis.detectors.cpu.preprocess import CpuPreprocess
from clusterprof.analysis.detectors.storage.local import StorageLocal
from clusterprof.analysis.detectors.storage.remote import StorageRemote
from clusterprof.analysis.timeline.data_wait.split import estimate_prefetch_savings
from clusterprof.analysis.timeline.model import PHASE_COLLECTIVE, PHASE_DATA_WAIT
from clusterprof.probe.layout import DATA_WAIT, FETCH, GC, LOADER_START
from clusterprof.report.model import Evidence, ResourceFacts
from tests.support.builders import (
    SECOND,
    make_counter,
    make_fetches,
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
    to_ns_array,
)
from tests.support.data_waits import make_breakdown

# Two waits of 1 s with all of it lost, and a piece of computing that no wait detector may touch.
PIECES = make_lost_segments(
    (0, 1, 1.0, PHASE_DATA_WAIT),
    (2, 3, 1.0, PHASE_DATA_WAIT),
    (4, 5, 1.0, PHASE_COLLECTIVE),
    step=3,
)


def claim(detector, rows, series=None, pieces=PIECES, workers=()) -> Claims:
    result = detector.claim(
        make_rank(6, make_process(100), workers, series=series),
        pieces,
        make_breakdown(*rows),
        detector.Limits(),
    )
    assert result is not None
    return result


def values(claims: Claims) -> dict[str, float]:
    return {item.name: item.value for item in claims.evidence}


def test_storage_local_claims_blocked_and_reading_time_and_names_the_disk() -> None:
    rows = [
        {"block_io": 0.6, "reading_cpu": 0.1, "user_cpu": 0.3},
        {"block_io": 0.2},
        {"block_io": 1},
    ]
    t = [0, 1, 2, 3, 6]
    series = {
        ("disk.read_bytes_total", "vda"): make_counter(t, [0, 10, 10, 10, 10]),
        ("disk.read_bytes_total", "vdb"): make_counter(t, [0, 3000, 9000, 9500, 9500]),
        ("disk.reads_total", "vdb"): make_counter(t, [0, 30, 90, 95, 95]),
        ("disk.read_ns_total", "vdb"): make_counter(t, [0, 6e8, 9e8, 10e8, 10e8]),
    }
    got = claim(StorageLocal(), rows, series)
    np.testing.assert_allclose(got.share, [0.7, 0.2, 0.0])
    assert got.grade == "A"
    assert got.resource == "vdb"
    # weighted by lost time, 1 s each: (0.7 + 0.2) / 2
    assert np.isclose(values(got)["worker.blocked_ratio"], 0.45)
    # inside the two waits: 3000 + 500 bytes, 30 + 5 reads, 600 + 100 ms: 20 ms a read
    assert values(got)["disk.read_bytes_total"] == 3500
    assert np.isclose(values(got)["disk.read_latency_ns"], 20e6)


def test_storage_local_without_disk_counters_still_claims_with_a_lower_grade() -> None:
    got = claim(StorageLocal(), [{"block_io": 0.5}, {}, {}])
    assert (got.grade, got.resource) == ("B", "")
    np.testing.assert_allclose(got.share, [0.5, 0, 0])


def test_claims_below_the_limit_are_zero() -> None:
    for detector, kind in (
        (StorageLocal(), "block_io"),
        (StorageRemote(), "remote_io"),
        (CpuPreprocess(), "user_cpu"),
        (CpuMemory(), "memory"),
        (CpuLoaderConfig(), "no_work"),
    ):
        got = claim(detector, [{kind: 0.019}, {kind: 0.021}, {}])
        np.testing.assert_allclose(got.share, [0, 0.021, 0], err_msg=detector.cause.id)


def test_storage_remote_claims_the_network_file_system_and_names_the_mount() -> None:
    series = {
        ("nfs.read_bytes_total", "/data"): make_counter([0, 6], [0, 6 << 20]),
        ("nfs.operations_total", "/data:READ"): make_counter([0, 6], [0, 600]),
        ("nfs.execute_ns_total", "/data:READ"): make_counter([0, 6], [0, 600 * 4e6]),
    }
    got = claim(StorageRemote(), [{"remote_io": 0.8}, {"block_io": 1.0}, {}], series)
    np.testing.assert_allclose(got.share, [0.8, 0, 0])
    assert (got.grade, got.resource) == ("A", "/data")
    # a sixth of 6 MiB lies in the claimed second; 2.4 s over 600 reads are 4 ms
    assert np.isclose(values(got)["nfs.read_bytes_total"], 1 << 20)
    assert np.isclose(values(got)["nfs.read_latency_ns"], 4e6)


def test_cpu_preprocess_claims_computing_only_inside_waits() -> None:
    workers = [make_process(201, parent=100), make_process(202, parent=100)]
    got = claim(
        CpuPreprocess(), [{"user_cpu": 0.9}, {"user_cpu": 0.5}, {"user_cpu": 1}], workers=workers
    )
    np.testing.assert_allclose(got.share, [0.9, 0.5, 0])
    assert got.evidence == (
        Evidence(
            "worker.on_cpu_ratio", 0.7, "ratio", "of the waits, the loading thread was computing"
        ),
        Evidence("loader.workers_count", 2.0, "count", "on this rank"),
    )
    assert got.resource == "worker pid 201"
    assert got.resource_facts == ResourceFacts("worker", pid=201)


def test_loader_config_takes_idle_workers_but_not_those_of_the_first_step() -> None:
    rows = [{"no_worker": 0.5, "delivery": 0.1, "no_work": 0.2}]
    pieces = make_lost_segments((0, 1, 1.0, PHASE_DATA_WAIT), step=0)
    np.testing.assert_allclose(claim(CpuLoaderConfig(), rows, pieces=pieces).share, [0.2])
    later = make_lost_segments((0, 1, 1.0, PHASE_DATA_WAIT), step=7)
    np.testing.assert_allclose(claim(CpuLoaderConfig(), rows, pieces=later).share, [0.7])


def test_a_batch_held_up_by_a_busy_interpreter_is_cpu_time_of_the_worker() -> None:
    # the batch was ready at 0.6; from then to 1.0 its worker computed 0.3 s and had no CPU 0.1 s
    worker = make_process(201, parent=100, thread=make_thread(parse_activity("U0.6 U0.3 R0.1"), 1))
    pieces = make_lost_segments((0, 1, 1.0, PHASE_DATA_WAIT), step=3)
    rows = [{"user_cpu": 0.6, "delivery": 0.4}]
    got = claim(CpuPreprocess(), rows, pieces=pieces, workers=[worker])
    np.testing.assert_allclose(got.share, [0.9])
    got = claim(CpuContention(), rows, pieces=pieces, workers=[worker])
    np.testing.assert_allclose(got.share, [0.1])
    # a worker that rests meanwhile holds nothing up
    idle = make_process(201, parent=100, thread=make_thread(parse_activity("U0.6 I0.4"), 1))
    got = claim(CpuPreprocess(), rows, pieces=pieces, workers=[idle])
    np.testing.assert_allclose(got.share, [0.6])


def test_memory_is_graded_by_pressure() -> None:
    series = {
        ("pressure.memory_some_ns_total", ""): make_counter([0, 1, 6], [0, 0.25 * SECOND, SECOND])
    }
    got = claim(CpuMemory(), [{"memory": 0.5}, {}, {}], series)
    assert got.grade == "A"
    # 0.25 s of pressure in the claimed second
    assert values(got) == {"worker.memory_ratio": 0.5, "pressure.memory_some_ratio": 0.25}
    calm = {("pressure.memory_some_ns_total", ""): make_counter([0, 6], [5, 5])}
    assert claim(CpuMemory(), [{"memory": 0.5}, {}, {}], calm).grade == "B"


def test_a_slow_batch_hideable_by_idle_workers_is_loader_config() -> None:
    # Two workers, one batch ahead each. Waits [0, 0.1) and [3, 4); the second is for a batch that
    # one worker computed from 2 to 4. In these 4 s both made 0.1 + 2 + 0.1 + 0.1 = 2.3 s of work,
    # 1.15 s each, and 4 - 1.1 s were there to hide it in.
    pieces = make_lost_segments(
        (0, 0.1, 0.1, PHASE_DATA_WAIT), (3.5, 4, 0.5, PHASE_DATA_WAIT), step=3
    )
    rows = [{"user_cpu": 1.0}, {"user_cpu": 0.8, "block_io": 0.2}]

    def shares(prefetch: int) -> list[list[float]]:
        def worker(pid: int, *fetched: tuple[float, float, int]):
            made = parse_activity(" ".join("U1" for _ in range(5)))
            return make_process(pid, 100, {FETCH: make_fetches(made, *fetched)})

        main = make_process(
            100,
            spans={
                DATA_WAIT: make_spans((0, 0.1, 0, 201, 2), (3, 4, 2, 201, 2)),
                LOADER_START: make_spans((0, 0, 2, 0, prefetch, 0)),
            },
        )
        both = [worker(201, (0, 0.1, 0), (2, 4, 0)), worker(202, (0, 0.1, 0), (1, 1.1, 0))]
        timeline = make_rank(6, main, both)
        result = [
            d.claim(timeline, pieces, make_breakdown(*rows), d.Limits())
            for d in (CpuPreprocess(), CpuLoaderConfig())
        ]
        return [claims.share.tolist() for claims in result]

    # While the first batches are made both workers are busy: that is computing.
    assert shares(prefetch=1) == [[1.0, 0.0], [0.0, 0.8]]
    assert shares(prefetch=4) == [[1.0, 0.8], [0.0, 0.0]]  # it may work that far ahead


def test_training_thread_compute_is_not_charged_to_loader_config() -> None:
    main = make_process(
        100,
        spans={
            DATA_WAIT: make_spans((0, 1, 0, 201, 2)),
            LOADER_START: make_spans((0, 0, 2, 0, 1, 0)),
        },
    )
    made = {FETCH: make_fetches(parse_activity("U0.1"), (0, 0.1, 0))}
    timeline = make_rank(6, main, [make_process(201, 100, made), make_process(202, 100)])
    pieces = make_lost_segments((0, 1, 1.0, PHASE_DATA_WAIT), step=3)

    def claim_own(worker: int) -> list[Claims]:
        rows = make_breakdown({"user_cpu": 0.8}, worker=worker)
        return [
            d.claim(timeline, pieces, rows, d.Limits())
            for d in (CpuPreprocess(), CpuLoaderConfig())
        ]

    computes, is_idle = claim_own(100)
    assert (computes.share.tolist(), is_idle.share.tolist()) == ([0.8], [0.0])
    assert values(computes)["loader.own_work_ratio"] == 0.8
    assert computes.resource == "training process pid 100"
    assert computes.resource_facts == ResourceFacts("training-process", pid=100)
    computes, is_idle = claim_own(201)
    assert is_idle.share[0] > 0.7 and computes.share[0] + is_idle.share[0] == 0.8
    assert "loader.own_work_ratio" not in values(computes)


def test_shares_of_workers_are_compared_by_their_cpu_time() -> None:
    def measure(*busy: float) -> float | None:
        """Workers that compute this long in each of 20 fetches of a second."""
        workers = []
        for pid, length in enumerate(busy, 201):
            doing = parse_activity(" ".join(f"U{length} S{1 - length}" for _ in range(20)))
            made = make_fetches(doing, *((at, at + 1, 0) for at in range(20)))
            workers.append(make_process(pid, 100, {FETCH: made}))
        got = claim(CpuPreprocess(), [{"user_cpu": 0.5}, {}, {}], workers=workers)
        return values(got).get("worker.balance_ratio")

    assert np.isclose(measure(0.8, 0.2) or 0.0, 0.625)  # 0.5 in the mean, of 0.8
    assert np.isclose(measure(0.5, 0.5) or 0.0, 1.0)
    assert measure(0.8) is None


def test_worker_garbage_collection_is_claimed_from_the_wait() -> None:
    # Of the first wait the worker computes for 0.6 s and has no CPU for 0.3 s; it collects for
    # 0.3 s, of which 0.2 s are on a CPU.
    worker = make_process(201, 100, {GC: make_spans((0.1, 0.3, 2), (0.8, 0.9, 2), (4, 5, 2))})
    rows = [{"user_cpu": 0.6, "runnable": 0.3}, {"user_cpu": 0.5}, {}]
    got = claim(CpuGc(), rows, workers=[worker])
    np.testing.assert_allclose(got.share, [0.2, 0.0, 0.0])
    assert got.resource == "worker pid 201"
    assert got.resource_facts == ResourceFacts("worker", pid=201)
    assert np.isclose(values(got)["worker.collecting_ratio"], 0.2)
    computing = claim(CpuPreprocess(), rows, workers=[worker])
    np.testing.assert_allclose(computing.share, [0.4, 0.5, 0.0])


def test_prefetch_savings_are_limited_by_all_workers_together() -> None:
    # A wait of 3 s, all of which one of two workers computed: made by both it takes 1.5 s.
    main = make_process(
        100,
        spans={
            DATA_WAIT: make_spans((1, 4, 1, 201, 2)),
            LOADER_START: make_spans((0, 0, 2, 0, 1, 0)),
        },
    )
    made = make_fetches(parse_activity("U4"), (1, 4, 0))
    timeline = make_rank(6, main, [make_process(201, 100, {FETCH: made}), make_process(202, 100)])
    assert estimate_prefetch_savings(timeline, to_ns_array([4, 5])).tolist() == [0.5, 0.0]
