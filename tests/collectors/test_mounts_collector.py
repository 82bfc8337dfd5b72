from __future__ import annotations

import pytest
from collecting import Opened

from clusterprof.collectors.mounts import MountsCollector
from clusterprof.errors import DevicesChanged, Unavailable

MS = 1_000_000
NAMES = ["operations_total", "retransmits_total", "queue_ns_total", "rtt_ns_total",
         "execute_ns_total"]  # fmt: skip


def operation(device: str, *numbers: object) -> list[tuple[str, str, object]]:
    return [(f"nfs.{name}", device, value) for name, value in zip(NAMES, numbers)]


def mount(device: str, *numbers: object) -> list[tuple[str, str, object]]:
    names = ["read_bytes_total", "write_bytes_total", "backlog_count_total"]
    return [(f"nfs.{name}", device, value) for name, value in zip(names, numbers)]


DATA = [
    *mount("/data", 1_210_214_218, 600, 70 + 30),  # backlog of both connections
    *operation("/data:READ", 1298, 3, 6 * MS, 79_386 * MS, 79_407 * MS),  # 1301 sent for 1298
    *operation("/data:WRITE", 2, 0, 0, 4 * MS, 5 * MS),
    *operation("/data:GETATTR", 50, 0, 1 * MS, 20 * MS, 25 * MS),
    *operation("/data:READDIR", 9, 0, 0, 9 * MS, 9 * MS),
]
HOME = [
    *mount("/mnt/a b", 30, 40, 9),
    *operation("/mnt/a b:LOOKUP", 3, 0, 0, 2 * MS, 3 * MS),
    *operation("/mnt/a b:READ", 0, 0, 0, 0, 0),
    *operation("/mnt/a b:WRITE", 0, 0, 0, 0, 0),
]


def test_the_mounts_of_the_job(host) -> None:
    assert Opened(MountsCollector, host("h100-node"), [4711]).readings() == [*DATA, *HOME]


@pytest.mark.parametrize("name", ["h100-node", "no-psi", "container-no-sys"])
def test_without_nfs_the_collector_is_absent_with_the_reason(host, name: str) -> None:
    with pytest.raises(Unavailable) as caught:
        Opened(MountsCollector, host(name))
    assert caught.value == Unavailable("absent", "no NFS file system is mounted", "")


def test_the_jobs_view_is_forbidden_and_ours_is_taken(host_copy, as_nobody) -> None:
    roots = host_copy("h100-node")
    jobs = roots.proc / "4711/mountstats"
    (roots.proc / "self/mountstats").write_text(jobs.read_text().replace("/data", "/ours"))
    jobs.chmod(0)
    with as_nobody():
        readings = Opened(MountsCollector, roots, [4711]).readings()
    assert readings == [(n, d.replace("/data", "/ours"), v) for n, d, v in [*DATA, *HOME]]


def rewrite(roots, old: str, new: str) -> None:
    path = roots.proc / "4711/mountstats"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_the_next_sample_has_the_next_numbers(host_copy) -> None:
    roots = host_copy("h100-node")
    mounts = Opened(MountsCollector, roots, [4711])
    rewrite(
        roots, "READ: 1298 1301 0 207680 1210292152 6 ", "READ: 1300 1303 0 208000 1210292999 9 "
    )
    assert mounts.reading("nfs.operations_total", "/data:READ") == 1300
    assert mounts.reading("nfs.queue_ns_total", "/data:READ") == 9 * MS


def test_the_first_operation_of_a_kind_changes_the_columns(host_copy) -> None:
    roots = host_copy("h100-node")
    mounts = Opened(MountsCollector, roots, [4711])
    rewrite(roots, "ACCESS: 0 0 ", "ACCESS: 1 1 ")
    with pytest.raises(DevicesChanged):
        mounts.readings()
    mounts.close()
    assert Opened(MountsCollector, roots, [4711]).reading(
        "nfs.operations_total", "/data:ACCESS"
    ) == 1  # fmt: skip


def test_a_mount_that_comes_or_goes_changes_the_columns(host_copy) -> None:
    roots = host_copy("h100-node")
    mounts = Opened(MountsCollector, roots, [4711])
    rewrite(roots, "mounted on /data", "mounted on /elsewhere")
    with pytest.raises(DevicesChanged):
        mounts.readings()


def test_a_counter_that_ran_below_zero_is_failed_and_not_a_number(host_copy) -> None:
    # Seen on a real machine (see the fixtures of node_exporter): 2^64 less 154467947070 ms.
    roots = host_copy("h100-node")
    rewrite(roots, "READ: 1298 1301 0 207680 1210292152 6 ",
            "READ: 1298 1290 0 207680 1210292152 18446743919241604546 ")  # fmt: skip
    mounts = Opened(MountsCollector, roots, [4711])
    assert mounts.reading("nfs.queue_ns_total", "/data:READ") == Unavailable(
        "failed", "the kernel's counter ran below zero", ""
    )
    assert mounts.reading("nfs.retransmits_total", "/data:READ") == 0  # 1290 sent for 1298
    assert mounts.reading("nfs.rtt_ns_total", "/data:READ") == 79_386 * MS


def test_our_own_view_is_given_up_as_soon_as_there_is_a_job(host_copy) -> None:
    roots = host_copy("h100-node")
    ours = (roots.proc / "4711/mountstats").read_text().replace("/data", "/ours")
    (roots.proc / "self/mountstats").write_text(ours)
    pids: list[int] = []
    before = Opened(MountsCollector, roots, pids)
    before.readings()
    pids.append(4711)
    with pytest.raises(DevicesChanged):
        before.readings()
    before.close()
    opened = Opened(MountsCollector, roots, pids)
    assert opened.readings() == [*DATA, *HOME]
