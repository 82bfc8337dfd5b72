from __future__ import annotations

import pytest

from clusterprof.agent.collectors.network_filesystems import CifsCollector
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.opened_collector import OpenedCollector

JIFFY = 4_000_000  # 250 per second
READINGS = {
    ("cifs.read_bytes_total", "/win"): 52_428_800,
    ("cifs.write_bytes_total", "/win"): 0,
    ("cifs.operations_total", "/win:CLOSE"): 58,
    ("cifs.operations_total", "/win:CREATE"): 60,
    ("cifs.operations_total", "/win:QUERY_INFO"): 20,
    ("cifs.operations_total", "/win:READ"): 50,
    ("cifs.operations_total", "/win:WRITE"): 0,
    ("cifs.operation_ns_total", "filer:CLOSE"): 50 * JIFFY,
    ("cifs.operation_ns_total", "filer:CREATE"): 150 * JIFFY,
    ("cifs.operation_ns_total", "filer:QUERY_INFO"): 25 * JIFFY,
    ("cifs.operation_ns_total", "filer:READ"): 600 * JIFFY,
    ("cifs.operation_ns_total", "filer:WRITE"): 0,
    ("cifs.credits_count", "filer"): 0,
    ("cifs.in_flight_count", "filer"): 12,
    ("cifs.waiting_count", "filer"): 7,
}


def readings(opened: OpenedCollector) -> dict[tuple[str, str], object]:
    return {(name, device): value for name, device, value in opened.read_all()}


def rewrite(roots, name: str, old: str, new: str) -> None:
    path = roots.proc / "fs/cifs" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_all_values_of_a_share_and_server_are_read(host) -> None:
    assert readings(OpenedCollector(CifsCollector, host("lustre-nfs"), [4711])) == READINGS


@pytest.mark.parametrize("name", ["h100-node", "container-no-sys"])
def test_without_cifs_the_collector_is_absent(host, name: str) -> None:
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(CifsCollector, host(name))
    assert caught.value == Unavailable("absent", "no CIFS file system is mounted", "")


def test_a_loaded_module_without_mounts_is_absent(host_copy) -> None:
    roots = host_copy("lustre-nfs")
    (roots.proc / "fs/cifs/Stats").write_text("Resources in use\nCIFS Session: 0\n")
    with pytest.raises(Unavailable, match="no CIFS file system is mounted"):
        OpenedCollector(CifsCollector, roots)


def test_a_kernel_without_operation_times_has_a_reason(host_copy) -> None:
    roots = host_copy("lustre-nfs")
    rewrite(roots, "Stats", "jiffies (250 per second)", "nothing")
    rewrite(roots, "DebugData", "In Send: 1 In MaxReq Wait: 7", "")
    now = readings(OpenedCollector(CifsCollector, roots, [4711]))
    no_time = Unavailable("absent", "the kernel was built without CONFIG_CIFS_STATS2", "")
    assert now["cifs.operation_ns_total", "filer:READ"] == no_time
    not_written = Unavailable("absent", "the kernel does not report it for this share", "")
    assert now["cifs.waiting_count", "filer"] == not_written
    assert now["cifs.in_flight_count", "filer"] == 12


def test_forbidden_queues_are_denied(host_copy, as_nobody) -> None:
    roots = host_copy("lustre-nfs")
    (roots.proc / "fs/cifs/DebugData").chmod(0)
    with as_nobody():
        now = readings(OpenedCollector(CifsCollector, roots, [4711]))
    waiting = now["cifs.waiting_count", "filer"]
    assert isinstance(waiting, Unavailable) and waiting.kind == "denied"
    assert now["cifs.read_bytes_total", "/win"] == 52_428_800


def test_a_32_bit_counter_continues_after_wrapping(host_copy) -> None:
    roots = host_copy("lustre-nfs")
    rewrite(roots, "Stats", "Reads: 50 total", "Reads: -10 total")  # 2^32 - 10
    opened = OpenedCollector(CifsCollector, roots, [4711])
    assert opened.read_value("cifs.operations_total", "/win:READ") == (1 << 32) - 10
    rewrite(roots, "Stats", "Reads: -10 total", "Reads: 5 total")
    assert opened.read_value("cifs.operations_total", "/win:READ") == (1 << 32) + 5
    assert opened.read_value("cifs.operations_total", "/win:READ") == (1 << 32) + 5
    assert opened.read_value("cifs.operations_total", "/win:CREATE") == 60


def test_a_share_without_a_unique_mount_uses_its_share_name(host_copy) -> None:
    roots = host_copy("lustre-nfs")
    info = roots.proc / "4711/mountinfo"
    info.write_text(info.read_text() + "54 27 0:53 / /also rw - cifs //FILER/data rw\n")
    now = readings(OpenedCollector(CifsCollector, roots, [4711]))
    assert now["cifs.read_bytes_total", "//filer/data"] == 52_428_800


def test_a_changed_set_of_shares_changes_the_columns(host_copy) -> None:
    roots = host_copy("lustre-nfs")
    opened = OpenedCollector(CifsCollector, roots, [4711])
    rewrite(roots, "Stats", "filer\\data", "filer\\other")
    with pytest.raises(DevicesChanged):
        opened.read_all()


def test_the_job_replaces_the_recorder_as_observed_process(host) -> None:
    pids: list[int] = []
    opened = OpenedCollector(CifsCollector, host("lustre-nfs"), pids)
    assert readings(opened) == READINGS
    pids.append(4711)
    with pytest.raises(DevicesChanged):
        opened.read_all()
