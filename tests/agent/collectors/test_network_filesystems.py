from __future__ import annotations

import pytest

from clusterprof.agent.collectors.network_filesystems import MountsCollector
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.opened_collector import OpenedCollector

MS = 1_000_000
NAMES = [
    "operations_total",
    "retransmits_total",
    "queue_ns_total",
    "rtt_ns_total",
    "execute_ns_total",
    "timeouts_total",
]


NOT_COUNTED = Unavailable("absent", "the kernel does not report it for this mount", "")


def operation(device: str, *numbers: object) -> list[tuple[str, str, object]]:
    return [(f"nfs.{name}", device, value) for name, value in zip(NAMES, numbers)]


def mount(device: str, *numbers: object) -> list[tuple[str, str, object]]:
    names = [
        "read_bytes_total",
        "write_bytes_total",
        "connections_count",
        "connects_total",
        "sends_total",
        "bad_xids_total",
        "slots_used_count_total",
        "backlog_count_total",
        "slots_most_count",
        "sending_count_total",
        "pending_count_total",
    ]
    return [(f"nfs.{name}", device, value) for name, value in zip(names, numbers, strict=True)]


DATA = [
    # Two connections; the most slots are those of the better one, all else is a sum.
    *mount(
        "/data",
        1_210_214_218,
        600,
        2,
        1 + 1,
        6428 + 6000,
        0,
        12154 + 12000,
        70 + 30,
        24,
        26 + 26,
        5726 + 5700,
    ),
    *operation("/data:READ", 1298, 3, 6 * MS, 79_386 * MS, 79_407 * MS, 0),  # 1301 sent for 1298
    *operation("/data:WRITE", 2, 0, 0, 4 * MS, 5 * MS, 0),
    *operation("/data:GETATTR", 50, 0, 1 * MS, 20 * MS, 25 * MS, 0),
    *operation("/data:READDIR", 9, 0, 0, 9 * MS, 9 * MS, 0),
]
HOME = [
    *mount("/mnt/a b", 30, 40, 1, NOT_COUNTED, 6428, 0, 12154, 9, 24, 26, 5726),  # UDP
    *operation("/mnt/a b:LOOKUP", 3, 0, 0, 2 * MS, 3 * MS, 0),
    *operation("/mnt/a b:READ", 0, 0, 0, 0, 0, 0),
    *operation("/mnt/a b:WRITE", 0, 0, 0, 0, 0, 0),
]


def test_all_values_of_the_jobs_nfs_mounts_are_read(host) -> None:
    assert OpenedCollector(MountsCollector, host("h100-node"), [4711]).read_all() == [*DATA, *HOME]


def test_nfs_over_rdma_reports_no_transport_queues(host) -> None:
    mounts = OpenedCollector(MountsCollector, host("lustre-nfs"), [4711])
    readings = {(name, device): value for name, device, value in mounts.read_all()}
    proj = {
        name.removeprefix("nfs."): value for (name, at), value in readings.items() if at == "/proj"
    }
    assert proj == {
        "read_bytes_total": 900_000_000,
        "write_bytes_total": 0,
        "connections_count": 4,
        "connects_total": 4,
        "sends_total": 100 + 200 + 300 + 400,
        "bad_xids_total": 0 + 1 + 2 + 3,
        "slots_used_count_total": 30_000,
        "backlog_count_total": 400,
        "slots_most_count": NOT_COUNTED,
        "sending_count_total": NOT_COUNTED,
        "pending_count_total": NOT_COUNTED,
    }
    assert readings["nfs.timeouts_total", "/proj:READ"] == 1
    assert readings["nfs.bad_xids_total", "/home"] == 3


@pytest.mark.parametrize("name", ["h100-node", "no-psi", "container-no-sys"])
def test_without_nfs_the_collector_is_absent_with_the_reason(host, name: str) -> None:
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(MountsCollector, host(name))
    assert caught.value == Unavailable("absent", "no NFS file system is mounted", "")


def test_forbidden_job_mounts_are_replaced_by_the_recorders_mounts(host_copy, as_nobody) -> None:
    roots = host_copy("h100-node")
    jobs = roots.proc / "4711/mountstats"
    (roots.proc / "self/mountstats").write_text(jobs.read_text().replace("/data", "/ours"))
    jobs.chmod(0)
    with as_nobody():
        readings = OpenedCollector(MountsCollector, roots, [4711]).read_all()
    assert readings == [(n, d.replace("/data", "/ours"), v) for n, d, v in [*DATA, *HOME]]


def rewrite(roots, old: str, new: str) -> None:
    path = roots.proc / "4711/mountstats"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_second_sample_has_the_new_values(host_copy) -> None:
    roots = host_copy("h100-node")
    mounts = OpenedCollector(MountsCollector, roots, [4711])
    rewrite(
        roots, "READ: 1298 1301 0 207680 1210292152 6 ", "READ: 1300 1303 0 208000 1210292999 9 "
    )
    assert mounts.read_value("nfs.operations_total", "/data:READ") == 1300
    assert mounts.read_value("nfs.queue_ns_total", "/data:READ") == 9 * MS


def test_the_first_operation_of_a_kind_changes_the_columns(host_copy) -> None:
    roots = host_copy("h100-node")
    mounts = OpenedCollector(MountsCollector, roots, [4711])
    rewrite(roots, "ACCESS: 0 0 ", "ACCESS: 1 1 ")
    with pytest.raises(DevicesChanged):
        mounts.read_all()
    mounts.close()
    assert (
        OpenedCollector(MountsCollector, roots, [4711]).read_value(
            "nfs.operations_total", "/data:ACCESS"
        )
        == 1
    )


def test_a_changed_set_of_mounts_changes_the_columns(host_copy) -> None:
    roots = host_copy("h100-node")
    mounts = OpenedCollector(MountsCollector, roots, [4711])
    rewrite(roots, "mounted on /data", "mounted on /elsewhere")
    with pytest.raises(DevicesChanged):
        mounts.read_all()


def test_a_negative_counter_is_a_failed_value(host_copy) -> None:
    # Seen on a real machine (see the fixtures of node_exporter): 2^64 less 154467947070 ms.
    roots = host_copy("h100-node")
    rewrite(
        roots,
        "READ: 1298 1301 0 207680 1210292152 6 ",
        "READ: 1298 1290 0 207680 1210292152 18446743919241604546 ",
    )
    mounts = OpenedCollector(MountsCollector, roots, [4711])
    assert mounts.read_value("nfs.queue_ns_total", "/data:READ") == Unavailable(
        "failed", "the kernel's counter ran below zero", ""
    )
    assert mounts.read_value("nfs.retransmits_total", "/data:READ") == 0  # 1290 sent for 1298
    assert mounts.read_value("nfs.rtt_ns_total", "/data:READ") == 79_386 * MS


def test_the_job_replaces_the_recorder_as_observed_process(host_copy) -> None:
    roots = host_copy("h100-node")
    ours = (roots.proc / "4711/mountstats").read_text().replace("/data", "/ours")
    (roots.proc / "self/mountstats").write_text(ours)
    pids: list[int] = []
    before = OpenedCollector(MountsCollector, roots, pids)
    before.read_all()
    pids.append(4711)
    with pytest.raises(DevicesChanged):
        before.read_all()
    before.close()
    opened = OpenedCollector(MountsCollector, roots, pids)
    assert opened.read_all() == [*DATA, *HOME]
