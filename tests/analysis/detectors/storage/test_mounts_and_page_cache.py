"""Causes of the family storage that counters of mounts and of the page cache distinguish."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.detectors.storage.client_queue import StorageClientQueue
from clusterprof.analysis.detectors.storage.cold_cache import StorageColdCache
from clusterprof.analysis.detectors.storage.local import StorageLocal
from clusterprof.analysis.detectors.storage.metadata import StorageMetadata
from clusterprof.analysis.detectors.storage.object import StorageObject
from clusterprof.analysis.detectors.storage.remote import StorageRemote
from clusterprof.analysis.timeline.model import PHASE_COLLECTIVE, PHASE_DATA_WAIT
from tests.support.builders import (
    make_counter,
    make_header,
    make_io_samples,
    make_lost_segments,
    make_process,
    make_rank,
)
from tests.support.data_waits import make_breakdown

DETECTORS = (
    StorageLocal(),
    StorageRemote(),
    StorageClientQueue(),
    StorageMetadata(),
    StorageColdCache(),
)
PIECES = ((0, 1, 1.0, PHASE_DATA_WAIT), (2, 3, 1.0, PHASE_COLLECTIVE))
MS = 1e6
MIB = 1 << 20


def mount(point: str = "/data", **operations: tuple[int, float, float]) -> dict:
    """Counters of a mount that grew evenly in [0, 1): operation -> (count, rtt ns, execute ns)."""
    out = {}
    for name, values in operations.items():
        for signal, value in zip(("operations_total", "rtt_ns_total", "execute_ns_total"), values):
            out[f"nfs.{signal}", f"{point}:{name}"] = make_counter([0, 1, 3], [0, value, value])
    out["nfs.read_bytes_total", point] = make_counter([0, 1, 3], [0, 1 << 20, 1 << 20])
    return out


def claims(
    series: dict, *rows: dict[str, float], mounts: tuple = (), main_io=None, **host: int
) -> dict:
    """What each cause of storage claims of the wait; the segment of computing has no cause."""
    fed = make_breakdown(*rows, {"remote_io": 1.0, "block_io": 0.0})
    main = make_process(100, io=main_io)
    timeline = make_rank(3, main, series=series, node=make_header(mounts=list(mounts), **host))
    pieces = make_lost_segments(*PIECES, step=3)
    by_key = {d.cause.id: d.claim(timeline, pieces, fed, d.Limits()) for d in DETECTORS}
    assert all(claim.share[1] == 0 for claim in by_key.values())
    return by_key


def shares(values: dict) -> dict[str, float]:
    return {id_: round(float(item.share[0]), 6) for id_, item in values.items() if item.share.any()}


def evidence(claim) -> dict[str, float]:
    return {item.name: item.value for item in claim.evidence}


def test_nfs_requests_waiting_for_slots_are_client_queue_time() -> None:
    # reads took 1000 ms of which 200 at the server; lookups 40 of 40: too few to be claimed
    claimed = claims(
        mount(READ=(100, 200 * MS, 1000 * MS), LOOKUP=(10, 40 * MS, 40 * MS)), {"remote_io": 0.8}
    )
    # of 1040 ms: 800 queued (0.769), 200 reads (0.192) and 40 lookups (0.038): both below a fifth
    assert shares(claimed) == {"storage-client-queue": 0.8}
    got = claimed["storage-client-queue"]
    assert (got.grade, got.resource) == ("A", "/data")
    assert evidence(got) == {
        "nfs.queued_ratio": pytest.approx(1.0),
        "nfs.read_latency_ns": 10 * MS,
        "nfs.read_rtt_ns": 2 * MS,
        "nfs.read_size_bytes": pytest.approx((1 << 20) / 100),  # 1 MiB in 100 reads
        "nfs.reads_total": 100,
        "nfs.reads_per_second_count": pytest.approx(100),  # in a wait of 1 s
    }


def test_mount_time_is_split_among_causes_without_double_counting() -> None:
    # 1000 ms in all: 300 queued, 400 at the server for names, 300 for reads; writes are not asked
    series = mount(
        READ=(100, 300 * MS, 500 * MS),
        OPEN=(50, 250 * MS, 300 * MS),
        GETATTR=(50, 150 * MS, 200 * MS),
        WRITE=(9, 0, 9000 * MS),
    )
    claimed = claims(series, {"remote_io": 0.5, "user_cpu": 0.5})
    assert shares(claimed) == {
        "storage-remote": 0.15,
        "storage-client-queue": 0.15,
        "storage-metadata": 0.2,
    }
    assert evidence(claimed["storage-metadata"]) == {
        "nfs.metadata_ratio": pytest.approx(0.4),
        "nfs.metadata_operations_total": 100,
    }


def test_time_at_a_slow_nfs_server_is_remote_storage() -> None:
    claimed = claims(mount(READ=(100, 950 * MS, 1000 * MS)), {"remote_io": 0.8})
    assert shares(claimed) == {"storage-remote": 0.8}
    assert claimed["storage-remote"].grade == "A"


@pytest.mark.parametrize(
    ("mounts", "grade"), [((), "B"), (({"type": "fuse.sshfs"},), "B"), (({"type": "nfs4"},), "C")]
)
def test_missing_nfs_mount_counters_lower_the_grade(mounts, grade) -> None:
    claimed = claims({}, {"remote_io": 0.8}, mounts=mounts)
    assert shares(claimed) == {"storage-remote": 0.8}
    assert claimed["storage-remote"].grade == grade


def test_rereading_evicted_pages_is_a_cold_cache() -> None:
    # 100 MiB read, 75 MiB of them had been in memory: 19,200 pages
    series = {
        ("disk.read_bytes_total", "vda"): make_counter([0, 1, 3], [0, 100 << 20, 100 << 20]),
        ("memory.refaults_total", ""): make_counter([0, 1, 3], [0, 19200, 19200]),
    }
    claimed = claims(series, {"block_io": 0.6, "reading_cpu": 0.2})
    assert shares(claimed) == {"storage-local": 0.2, "storage-cold-cache": 0.6}
    got = claimed["storage-cold-cache"]
    assert (got.grade, got.resource) == ("B", "vda")
    assert evidence(got) == {
        "memory.refaulted_ratio": 0.75,  # what a cache would save
        "disk.read_bytes_per_second": 100 << 20,  # what the disk gave in the first second
        "memory.refaulted_bytes_total": 75 << 20,
        "disk.read_bytes_total": 100 << 20,
    }
    # A kernel with pages of 64 KiB counts 1,200 of them.
    series["memory.refaults_total", ""] = make_counter([0, 1, 3], [0, 1200, 1200])
    large = claims(series, {"block_io": 0.6, "reading_cpu": 0.2}, page_bytes=65536)
    assert evidence(large["storage-cold-cache"]) == evidence(got)


@pytest.mark.parametrize("pages", [0, 7000, np.nan])  # 7000 pages are 0.27 of 100 MiB
def test_few_refaults_are_no_cold_cache(pages) -> None:
    series = {
        ("disk.read_bytes_total", "vda"): make_counter([0, 1, 3], [0, 100 << 20, 100 << 20]),
        ("memory.refaults_total", ""): make_counter([0, 1, 3], [0, pages, pages]),
    }
    assert shares(claims(series, {"block_io": 0.6})) == {"storage-local": 0.6}


@pytest.mark.parametrize(("job_mib", "cold"), [(100, 0.45), (20, 0.0)])
def test_refaults_of_other_processes_are_not_charged_to_the_job(job_mib, cold) -> None:
    # of 100 MiB that the disk read, 75 had been in memory: known of the job if it read 30 or more
    series = {
        ("disk.read_bytes_total", "vda"): make_counter([0, 1, 3], [0, 100 << 20, 100 << 20]),
        ("memory.refaults_total", ""): make_counter([0, 1, 3], [0, 19200, 19200]),
    }
    read = make_io_samples((0, 1, 3), read_bytes=(0, job_mib << 20, job_mib << 20))
    claimed = claims(series, {"block_io": 0.6}, main_io=read)
    assert shares(claimed).get("storage-cold-cache", 0.0) == cold


FUSE = ({"point": "/mnt/data", "type": "fuse"},)


@pytest.mark.parametrize(
    ("disk_mib", "cold"),
    [
        (1, 0.594),  # 76 - 1 MiB read again of 101 that calls requested: 75 / 101 of 0.8
        (80, 0.0),  # a disk read more than was read again: it may be the server's own cache
    ],
)
def test_refaults_of_an_uncounted_mount_are_compared_with_requested_bytes(disk_mib, cold) -> None:
    series = {
        ("disk.read_bytes_total", "vda"): make_counter([0, 3], [0, disk_mib * MIB * 3]),
        ("memory.refaults_total", ""): make_counter([0, 3], [0, 76 * 256 * 3]),
    }
    read = make_io_samples((0, 3), read_bytes=(0, 0), read_chars=(0, 303 * MIB))
    claimed = claims(series, {"remote_io": 0.8}, mounts=FUSE, main_io=read)
    expected = {"storage-remote": pytest.approx(0.8 - cold, abs=1e-3)}
    if cold:
        expected["storage-cold-cache"] = pytest.approx(cold, abs=1e-3)
    assert shares(claimed) == expected
    for id_ in expected:
        assert claimed[id_].resource == "/mnt/data"
        assert not [name for name in evidence(claimed[id_]) if name.startswith("disk.")]


def test_loader_sleep_in_a_receive_is_object_storage() -> None:
    series = {
        ("network.receive_bytes_total", "eth0"): make_counter([0, 1, 3], [0, 900, 900]),
        ("tcp.job_received_bytes_total", "eth0"): make_counter([0, 1, 3], [0, 700, 5000]),
    }
    detector = StorageObject()
    timeline = make_rank(3, make_process(100), series=series)
    fed = make_breakdown({"socket": 0.7, "user_cpu": 0.3}, {"socket": 1.0})
    got = detector.claim(timeline, make_lost_segments(*PIECES, step=3), fed, detector.Limits())
    np.testing.assert_allclose(got.share, [0.7, 0.0])
    assert (got.grade, got.resource) == ("B", "eth0")
    assert evidence(got) == {"worker.socket_ratio": 0.7, "tcp.job_received_bytes_total": 700}


def test_receive_sleep_without_network_counters_is_still_claimed() -> None:
    detector = StorageObject()
    fed = make_breakdown({"socket": 0.7}, {})
    got = detector.claim(
        make_rank(3, make_process(100)), make_lost_segments(*PIECES), fed, detector.Limits()
    )
    assert (got.share.tolist(), got.grade, got.resource) == ([0.7, 0.0], "B", "")
    assert list(evidence(got)) == ["worker.socket_ratio"]
