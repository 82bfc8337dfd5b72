"""Causes of storage on Lustre and CIFS, on volumes, and on disks that others use too."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.detectors.storage.client_queue import StorageClientQueue
from clusterprof.analysis.detectors.storage.cold_cache import StorageColdCache
from clusterprof.analysis.detectors.storage.contention import StorageContention
from clusterprof.analysis.detectors.storage.local import StorageLocal
from clusterprof.analysis.detectors.storage.metadata import StorageMetadata
from clusterprof.analysis.detectors.storage.remote import StorageRemote
from clusterprof.analysis.timeline.model import PHASE_COLLECTIVE, PHASE_DATA_WAIT
from clusterprof.probe.layout import FETCH
from clusterprof.report.model import ResourceFacts
from tests.support.builders import (
    make_counter,
    make_gauge,
    make_header,
    make_io_samples,
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
)
from tests.support.data_waits import make_breakdown

DETECTORS = (
    StorageLocal(),
    StorageContention(),
    StorageRemote(),
    StorageClientQueue(),
    StorageMetadata(),
    StorageColdCache(),
)
PIECES = ((4, 5, 1.0, PHASE_DATA_WAIT), (7, 8, 1.0, PHASE_COLLECTIVE))
MS = 1e6
MIB = 1 << 20


def grew(value: float):
    """A counter that grew by `value` evenly in [4, 5)."""
    return make_counter([0, 4, 5, 10], [0, 0, value, value])


def claims(series: dict, row: dict[str, float], main=None, disks: tuple = ()) -> dict:
    """What each cause of storage claims of the wait; the segment of computing has no cause."""
    fed = make_breakdown(row, {"remote_io": 1.0, "block_io": 0.0})
    timeline = make_rank(
        10, main or make_process(100), series=series, node=make_header(disks=list(disks))
    )
    pieces = make_lost_segments(*PIECES, step=3)
    by_key = {d.cause.id: d.claim(timeline, pieces, fed, d.Limits()) for d in DETECTORS}
    assert all(claim.share[1] == 0 for claim in by_key.values())
    return by_key


def shares(values: dict) -> dict[str, float]:
    return {id_: round(float(item.share[0]), 6) for id_, item in values.items() if item.share.any()}


def evidence(claim) -> dict[str, float]:
    return {item.name: item.value for item in claim.evidence}


def lustre(read_ns: float, metadata_ns: float, at_limit: float = 0, pending: float = 0) -> dict:
    """100 reads of 1 MiB each; `pending` bytes queue from 4 s to 5 s."""
    return {
        ("lustre.rpcs_total", "/s:read"): grew(100),
        ("lustre.rpc_ns_total", "/s:read"): grew(read_ns),
        ("lustre.rpcs_total", "/s:metadata"): grew(40),
        ("lustre.rpc_ns_total", "/s:metadata"): grew(metadata_ns),
        ("lustre.fetched_bytes_total", "/s"): grew(100 * MIB),
        ("lustre.rpcs_at_limit_total", "/s"): grew(at_limit),
        ("lustre.pending_read_bytes", "/s"): make_gauge([0, 4, 5, 10], [0, pending, 0, 0]),
    }


def test_a_slow_object_server_is_remote_storage() -> None:
    claimed = claims(lustre(900 * MS, 50 * MS), {"remote_io": 0.8})
    assert shares(claimed) == {"storage-remote": 0.8}
    got = claimed["storage-remote"]
    assert (got.grade, got.resource) == ("A", "/s")
    assert evidence(got) == {
        "worker.remote_ratio": 0.8,
        "lustre.read_bytes_total": 100 * MIB,
        "lustre.read_rpc_ns": 9 * MS,
    }


def test_time_at_the_metadata_server_is_storage_metadata() -> None:
    # 600 ms at the metadata server, 400 ms for reads
    claimed = claims(lustre(400 * MS, 600 * MS), {"remote_io": 0.5, "user_cpu": 0.5})
    assert shares(claimed) == {"storage-remote": 0.2, "storage-metadata": 0.3}
    assert evidence(claimed["storage-metadata"]) == {
        "lustre.metadata_ratio": pytest.approx(0.6),
        "lustre.metadata_operations_total": 40,
    }


def test_reads_queued_on_the_client_are_client_queue_time() -> None:
    # 3 MiB wait for 1 s, in RPCs of 1 MiB: 3 s of waiting; 1 s at the server
    claimed = claims(lustre(1000 * MS, 0, at_limit=90, pending=3 * MIB), {"remote_io": 0.8})
    assert shares(claimed) == {"storage-remote": 0.2, "storage-client-queue": 0.6}
    assert evidence(claimed["storage-client-queue"]) == {
        "lustre.queued_ratio": pytest.approx(0.75),
        "lustre.read_rpc_ns": 10 * MS,
        "lustre.rpcs_at_limit_ratio": 0.9,
    }


def test_pages_gathered_for_an_rpc_are_no_queue() -> None:
    claimed = claims(lustre(1000 * MS, 0, at_limit=0, pending=3 * MIB), {"remote_io": 0.8})
    assert shares(claimed) == {"storage-remote": 0.8}


@pytest.mark.parametrize(("slow_ns", "resource"), [(290 * MS, "/s"), (310 * MS, "/s (s-OST0002)")])
def test_a_much_slower_lustre_target_is_named(slow_ns: float, resource: str) -> None:
    series = lustre(900 * MS, 0)
    for target, ns in (("s-OST0000", 80 * MS), ("s-OST0001", 120 * MS), ("s-OST0002", slow_ns)):
        series["lustre.target_rpcs_total", target] = grew(10)  # others: 200 ms for 20 RPCs
        series["lustre.target_rpc_ns_total", target] = grew(ns)
    series["lustre.target_rpcs_total", "s-MDT0000"] = grew(1)  # a metadata target is none of them
    series["lustre.target_rpc_ns_total", "s-MDT0000"] = grew(900 * MS)
    series["lustre.timeouts_total", "/s"] = grew(2)
    series["lustre.targets_unconnected_count", "/s"] = make_gauge([0, 4, 5, 10], [0, 1, 0, 0])
    got = claims(series, {"remote_io": 0.8})["storage-remote"]
    assert (got.resource, got.resource_facts.name or got.resource) == (resource, "/s")
    assert evidence(got)["lustre.timeouts_total"] == 2
    assert evidence(got)["lustre.targets_unconnected_count"] == 1


def test_cifs_waits_for_credits_are_client_queue_time() -> None:
    # 4 requests wait for 1 s: 4 s; 3 s for reads, 3 s for opens and queries
    series = {
        ("cifs.operation_ns_total", "filer:READ"): grew(3000 * MS),
        ("cifs.operation_ns_total", "filer:CREATE"): grew(2000 * MS),
        ("cifs.operation_ns_total", "filer:QUERY_INFO"): grew(1000 * MS),
        ("cifs.operation_ns_total", "filer:WRITE"): grew(9000 * MS),  # not asked
        ("cifs.operations_total", "/win:CREATE"): grew(70),
        ("cifs.operations_total", "/win:QUERY_INFO"): grew(30),
        ("cifs.waiting_count", "filer"): make_gauge([0, 4, 5, 10], [0, 4, 0, 0]),
        ("cifs.read_bytes_total", "/win"): grew(MIB),
    }
    claimed = claims(series, {"remote_io": 1.0})
    assert shares(claimed) == {
        "storage-remote": 0.3,
        "storage-client-queue": 0.4,
        "storage-metadata": 0.3,
    }
    assert evidence(claimed["storage-client-queue"]) == {"cifs.queued_ratio": pytest.approx(0.4)}
    assert evidence(claimed["storage-metadata"])["cifs.metadata_operations_total"] == 100
    assert claimed["storage-client-queue"].resource == "filer"


def test_nfs_evidence_states_slots_backlog_and_retransmissions() -> None:
    series = {
        ("nfs.operations_total", "/d:READ"): grew(100),
        ("nfs.rtt_ns_total", "/d:READ"): grew(500 * MS),
        ("nfs.execute_ns_total", "/d:READ"): grew(1000 * MS),
        ("nfs.read_bytes_total", "/d"): grew(MIB),
        ("nfs.retransmits_total", "/d:READ"): grew(7),
        ("nfs.timeouts_total", "/d:READ"): grew(1),
        ("nfs.sends_total", "/d"): grew(107),
        ("nfs.slots_used_count_total", "/d"): grew(107 * 16),
        ("nfs.backlog_count_total", "/d"): grew(107 * 5),
    }
    claimed = claims(series, {"remote_io": 0.8})
    assert shares(claimed) == {"storage-remote": 0.4, "storage-client-queue": 0.4}
    queue = evidence(claimed["storage-client-queue"])
    assert (queue["nfs.slots_used_count"], queue["nfs.backlog_count"]) == (16, 5)
    remote = evidence(claimed["storage-remote"])
    assert (remote["nfs.retransmits_total"], remote["nfs.timeouts_total"]) == (7, 1)


def disk(name: str, read: float, wrote: float = 0, busy_s: float = 0.0) -> dict:
    """What a disk moved evenly from 0 s to 10 s."""
    return {
        ("disk.read_bytes_total", name): make_counter([0, 10], [0, read]),
        ("disk.write_bytes_total", name): make_counter([0, 10], [0, wrote]),
        ("disk.busy_ns_total", name): make_counter([0, 10], [0, busy_s * 1e9]),
    }


def job(read: int, wrote: int = 0):
    """A process that moved so much evenly from 0 s to 10 s."""
    return make_process(
        100, io=make_io_samples([0, 10], read_bytes=[0, read], write_bytes=[0, wrote])
    )


def test_disk_use_by_other_processes_is_storage_contention() -> None:
    # Around the wait, from 3 s to 6 s, the disk moved 300 of 1000 MiB, of them 60 for the job.
    claimed = claims(
        disk("sda", 1000 * MIB, busy_s=9), {"block_io": 0.5, "reading_cpu": 0.2}, job(200 * MIB)
    )
    assert shares(claimed) == {"storage-local": 0.3, "storage-contention": 0.4}
    got = claimed["storage-contention"]
    assert (got.grade, got.resource) == ("B", "sda")
    assert evidence(got) == {
        "disk.others_ratio": pytest.approx(0.8),
        "disk.others_bytes_total": pytest.approx(240 * MIB),
        "disk.busy_ratio": pytest.approx(0.9),
    }


@pytest.mark.parametrize(
    ("series", "main"),
    [
        pytest.param(disk("sda", 1000, busy_s=9), job(610), id="most is the job's own"),
        pytest.param(disk("sda", 1000, busy_s=9), make_process(100), id="the job is unknown"),
        pytest.param(
            disk("sda", 1000, busy_s=9),
            make_process(100, io=make_io_samples([0, 10], read_bytes=[-1, -1], write_bytes=[0, 0])),
            id="permission was lost",
        ),
        pytest.param(disk("sda", 0, 300, 9), job(0, 290), id="its own checkpoint goes to disk"),
        pytest.param(
            {**disk("sda", 1000, busy_s=9), **disk("sdb", 200, busy_s=2)},
            job(200),
            id="the job may read another disk",
        ),
        pytest.param(disk("sda", 1000, busy_s=0), job(200), id="a disk that was never busy"),
        pytest.param(
            {
                **disk("sda", 1000, busy_s=9),
                ("memory.swap_in_bytes_total", ""): make_counter([0, 10], [0, 800]),
            },
            job(200),
            id="swap",
        ),
    ],
)
def test_possible_own_disk_use_is_no_contention(series: dict, main) -> None:
    assert shares(claims(series, {"block_io": 0.6}, main)) == {"storage-local": 0.6}


def test_a_rarely_busy_disk_is_no_contention() -> None:
    # In the wait the disk had requests for 0.1 s, and the thread was blocked for 0.5 s: others
    # can have delayed it for 0.8 x 0.1 s. What throttles the reads is above the disk.
    claimed = claims(
        disk("sda", 1000 * MIB, busy_s=1), {"block_io": 0.5, "reading_cpu": 0.2}, job(200 * MIB)
    )
    assert shares(claimed) == {"storage-local": 0.7}


@pytest.mark.parametrize(
    ("own", "named", "read_bytes"),
    [
        pytest.param(30, "dm-0 (sda)", 3, id="the volume gave what the job read"),
        pytest.param(50, "sda", 100, id="the volume gave 0.6 of it"),
        pytest.param(0, "sda", 100, id="nothing is known of the job"),
    ],
)
def test_a_volume_is_named_if_its_reads_match_the_job(own, named, read_bytes) -> None:
    # In the wait of 1 s, a tenth of all: 3 MiB from the volume, 100 MiB from the disk below it. The
    # volume's limit of requests keeps neither busy.
    series = {**disk("sda", 1000 * MIB, busy_s=1), **disk("dm-0", 30 * MIB, busy_s=1)}
    volume = ({"name": "dm-0", "on": ["sda"]},)
    claimed = claims(series, {"block_io": 0.6}, job(own * MIB), volume)
    assert shares(claimed) == {"storage-local": 0.6}
    got = claimed["storage-local"]
    assert got.resource == named
    assert evidence(got)["disk.read_bytes_total"] == pytest.approx(read_bytes * MIB)


def test_volume_traffic_is_not_counted_again_for_its_disks() -> None:
    # 500 MiB of the job and no others: the volume and its two halves say it twice
    series = {
        **disk("md0", 500 * MIB, busy_s=9),
        **disk("sda", 250 * MIB, busy_s=8),
        **disk("sdb", 250 * MIB, busy_s=7),
    }
    series["disk.reads_total", "md0"] = make_counter([0, 10], [0, 1000])
    series["disk.queue_ns_total", "md0"] = make_counter([0, 10], [0, 40e9])
    series["disk.read_ns_total", "md0"] = make_counter([0, 10], [0, 5e9])
    raid = ({"name": "md0", "on": ["sda", "sdb"]},)
    claimed = claims(series, {"block_io": 0.6}, job(500 * MIB), raid)
    assert shares(claimed) == {"storage-local": 0.6}
    got = claimed["storage-local"]
    assert (got.resource, got.resource_facts) == ("md0 (sda, sdb)", ResourceFacts(name="md0"))
    # the wait of 1 s has a tenth of all
    assert evidence(got) == {
        "worker.blocked_ratio": 0.6,
        "disk.read_bytes_total": pytest.approx(50 * MIB),
        "disk.read_latency_ns": pytest.approx(5 * MS),
        "disk.read_size_bytes": pytest.approx(MIB / 2),
        "disk.busy_ratio": pytest.approx(0.9),
        "disk.queue_count": pytest.approx(4),
        "disk.reads_total": pytest.approx(100),
        "disk.reads_per_second_count": pytest.approx(100),
    }


def test_refaults_are_compared_once_for_a_disk_and_volume() -> None:
    # 100 MiB read from sda, which dm-0 counts too; 40 MiB of them had been in memory: 10,240 pages
    series = {
        ("disk.read_bytes_total", "sda"): grew(100 * MIB),
        ("disk.read_bytes_total", "dm-0"): grew(100 * MIB),
        ("memory.refaults_total", ""): grew(10240),
    }
    main = make_process(
        100,
        # of fetches of one sample each, those that read 2 and 6 MiB ended in the wait
        spans={
            FETCH: make_spans(
                (3, 3.4, 1, 0, 0, 9 * MIB),
                (3.7, 4.1, 1, 0, 0, 2 * MIB),
                (4.2, 4.6, 1, 0, 0, 6 * MIB),
                (4.8, 5.2, 1, 0, 0, 9 * MIB),
            )
        },
        io=make_io_samples(
            [0, 4, 5, 10],
            read_bytes=[0, 0, 75 * MIB, 75 * MIB],
            read_chars=[0, 0, 100 * MIB, 100 * MIB],
            write_bytes=[0, 0, 0, 0],
        ),
    )
    claimed = claims(series, {"block_io": 1.0}, main, ({"name": "dm-0", "on": ["sda"]},))
    assert shares(claimed) == {"storage-local": 0.6, "storage-cold-cache": 0.4}
    got = evidence(claimed["storage-cold-cache"])
    assert got["page_cache.missed_ratio"] == 0.75
    assert got["loader.sample_read_bytes"] == 4 * MIB


def test_no_storage_cause_is_claimed_without_storage_waits() -> None:
    claimed = claims(disk("sda", 1000 * MIB, busy_s=9), {"user_cpu": 1.0}, job(0))
    assert shares(claimed) == {}
    assert all(np.isfinite(item.share).all() for item in claimed.values())
