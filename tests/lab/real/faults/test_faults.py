"""Every real fault does what it says.

How long things take is not tested here: a busy machine may always take longer.
"""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from clusterprof_lab.real.faults import cgroups, disks
from clusterprof_lab.real.faults.base import Options
from clusterprof_lab.real.faults.processes import run_until_stdin_ends
from clusterprof_lab.real.faults.reader import open_source
from clusterprof_lab.real.faults.registry import FAULTS
from tests.support.fault_places import (
    NODE,
    SLOWED_NS,
    STEP_NS,
    find_option,
    list_injected,
    make_place,
    read_lines,
    require_fault,
)


def throttles(way: str) -> list[str]:
    return read_lines(f"{disks.THROTTLE}/blkio.throttle.{way}_bps_device")


def test_a_capped_disk_serves_a_batch_per_slowed_step(tmp_path: Path) -> None:
    with FAULTS[require_fault("disk-cap")].apply(make_place(tmp_path, NODE)) as options:
        device = os.stat(find_option(options, "--data")).st_dev
        # 8 items of 327,680 bytes for each of two ranks in 0.428571429 s
        rule = f"{os.major(device)}:{os.minor(device)} {2 * 8 * 327_680 * 10**9 // SLOWED_NS}"
        assert rule in throttles("read")
        assert open_source(find_option(options, "--data"), 327_680)(random.Random(0)) == 327_680
    assert rule not in throttles("read")
    assert [line["cause"] for line in list_injected(options)] == ["storage-local"]


def test_a_wandering_disk_fault_is_slow_only_in_its_turns(tmp_path: Path) -> None:
    wandering = make_place(tmp_path, NODE, period_s=0.2, turns=2)
    with FAULTS[require_fault("disk-cap")].apply(wandering) as options:
        time.sleep(0.7)
    slow = list_injected(options)
    assert slow
    assert all(line["start_ns"] // 200_000_000 % 2 == 0 for line in slow)


@pytest.mark.parametrize(
    ("name", "file", "causes"),
    [
        ("fuse-latency", "", {"storage-remote"}),
        ("fuse-rate", "", {"storage-remote"}),
        ("fuse-small-files", "000007", {"storage-metadata", "storage-remote"}),
    ],
)
def test_a_slow_file_server_logs_its_delays(
    name: str, file: str, causes: set[str], tmp_path: Path
) -> None:
    with FAULTS[require_fault(name)].apply(make_place(tmp_path, NODE, reads=8)) as options:
        data, size = find_option(options, "--data"), int(find_option(options, "--read-bytes"))
        began_ns = time.monotonic_ns()
        assert open_source(data, size)(random.Random(1)) == size
        took_ns = time.monotonic_ns() - began_ns
    lines = list_injected(options)
    assert {line["cause"] for line in lines} == causes
    held_ns = sum(line["end_ns"] - line["start_ns"] for line in lines)
    # An eighth of an eighth of a slowed step, less what such a read takes by itself.
    at_least_ns = SLOWED_NS // 64 - 1_000_000 if name != "fuse-rate" else 13_000_000
    assert at_least_ns < held_ns <= took_ns


def test_a_clean_file_server_adds_no_delay(tmp_path: Path) -> None:
    with FAULTS[require_fault("fuse-small-files")].apply(
        make_place(tmp_path, NODE, clean=True)
    ) as options:
        assert open_source(find_option(options, "--data"), 0)(random.Random(1)) == 16_384
    assert list_injected(options) == []


def test_a_read_waits_while_all_server_slots_are_busy(tmp_path: Path) -> None:
    with FAULTS[require_fault("fuse-slots")].apply(make_place(tmp_path, NODE)) as options:
        data, size = find_option(options, "--data"), int(find_option(options, "--read-bytes"))
        readers = [
            threading.Thread(target=lambda i=i: open_source(data, size)(random.Random(i)))
            for i in range(4)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    lines = list_injected(options)
    assert sum(line["cause"] == "storage-remote" for line in lines) == 4
    assert sum(line["cause"] == "storage-client-queue" for line in lines) == 2  # of two slots


def test_fsync_on_the_server_is_delayed(tmp_path: Path) -> None:
    with FAULTS[require_fault("fuse-fsync")].apply(make_place(tmp_path, NODE)) as options:
        path = Path(find_option(options, "--log"))
        with path.with_suffix(".tmp").open("wb") as file:
            file.write(b"x" * 5000)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").rename(path)
        assert path.stat().st_size == 5000
    (line,) = list_injected(options)
    assert line["operation"] == "fsync"
    assert line["end_ns"] - line["start_ns"] > 0.9 * (SLOWED_NS - STEP_NS) / 1.1


def test_an_object_store_runs_on_a_separate_host(tmp_path: Path) -> None:
    with FAULTS["object-store"].apply(make_place(tmp_path, NODE)) as options:
        address, size = find_option(options, "--data"), int(find_option(options, "--read-bytes"))
        assert address.startswith("http://127.0.0.1:" if os.geteuid() else "http://10.78.")
        assert open_source(address, size)(random.Random(0)) == size
    (line,) = list_injected(options)
    assert line["cause"] == "storage-object"
    # 34 % of a slowed step, less 16 times 2.5 ms, over 16 requests and jitter: the least delay.
    assert line["end_ns"] - line["start_ns"] > (SLOWED_NS - 16 * 2_500_000) * 0.34 / 16 / 1.1


def group_value(options: Options, file: str) -> int:
    assert options.cgroup is not None
    return int((options.cgroup / file).read_text())


def first_version(controller: str) -> None:
    result = cgroups.find_controller(controller)
    if isinstance(result, str) or result.version != 1:
        pytest.skip("looks at files of version 1")


def test_a_cpu_quota_is_the_demand_over_a_slowed_step(tmp_path: Path) -> None:
    first_version("cpu")
    with FAULTS[require_fault("cpu-quota")].apply(make_place(tmp_path, NODE)) as options:
        # 0.7 * 300 ms over two ranks on one CPU; two times (105 + 10) ms in 428.57 ms
        assert options.script == ["--decode-ms=105.00"]
        assert group_value(options, "cpu.cfs_quota_us") == 53_667
        assert group_value(options, "cpu.cfs_period_us") == 100_000
    assert [line["cause"] for line in list_injected(options)] == ["cpu-throttled"]


def test_cpu_hogs_take_the_aimed_share_at_real_time_priority(tmp_path: Path) -> None:
    before = set(children())  # other tests' (multiprocessing keeps one) are no hogs
    with FAULTS[require_fault("cpu-hogs")].apply(make_place(tmp_path, NODE)) as options:
        assert options.script == ["--decode-ms=105.00"]
        (hog,) = set(children()) - before
        # 0.7 * 0.7 of the CPU is left to the ranks, of every 20 ms
        assert hog.read_bytes().split(b"\0")[-4:-1] == [b"0", b"20000000", b"10200000"]
        number = int(hog.parent.name)
        end = time.monotonic() + 10
        while os.sched_getscheduler(number) != os.SCHED_FIFO and time.monotonic() < end:
            time.sleep(0.01)
        assert os.sched_getscheduler(number) == os.SCHED_FIFO
        assert os.sched_getaffinity(number) == {0}
    assert not hog.exists()
    assert [line["cause"] for line in list_injected(options)] == ["cpu-contention"]


def children() -> list[Path]:
    """The command lines of processes that this one has started."""
    own = str(os.getpid())
    collected = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[1] == own:
                collected.append(stat.with_name("cmdline"))
    return collected


def test_a_harmless_neighbour_runs_with_idle_priority(tmp_path: Path) -> None:
    with FAULTS["free-neighbour"].apply(make_place(tmp_path, NODE)):
        children = read_lines(f"/proc/self/task/{threading.get_native_id()}/children")[0].split()
        end = time.monotonic() + 60
        while time.monotonic() < end and not any(
            os.sched_getscheduler(int(child)) == os.SCHED_IDLE for child in children
        ):
            time.sleep(0.02)
        policies = [os.sched_getscheduler(int(child)) for child in children]
    assert policies.count(os.SCHED_IDLE) == 1


def test_link_faults_are_sized_for_the_ring_exchange(tmp_path: Path) -> None:
    made = {}
    for name in ("link-rate", "link-latency", "link-loss"):
        with FAULTS[name].apply(make_place(tmp_path, NODE)) as options:
            made[name] = options.link
        (line,) = list_injected(options)
        assert line["cause"] in {"net-congestion", "net-path", "net-link"}
        with FAULTS[name].apply(make_place(tmp_path, NODE, clean=True)) as options:
            assert options.link == {}
    # 1.5 * 4 MiB, 82 % of it exposed, in 128.57 ms
    assert made["link-rate"] == {"rate_bits_per_second": 321_004_065}
    assert set(made["link-latency"]) == {"delay_s"}
    assert made["link-loss"]["loss_ratio"] == pytest.approx(0.002276, rel=1e-3)


def test_link_faults_without_a_node_are_refused(tmp_path: Path) -> None:
    for name in sorted(name for name in FAULTS if name.startswith("link-")):
        with (
            pytest.raises(ValueError, match="only a node has a link"),
            FAULTS[name].apply(make_place(tmp_path)),
        ):
            pass


def test_options_of_two_faults_on_a_node_are_combined() -> None:
    options = Options(["--a=1"], Path("/group"), {"A": "1"}, Path("/log"))
    other = Options(["--b=2"], None, {"B": "2"}, None, {"delay_s": 0.1})
    both = options.combine(other)
    assert both.script == ["--a=1", "--b=2"]
    assert (both.cgroup, both.log) == (Path("/group"), Path("/log"))
    assert both.environment == {"A": "1", "B": "2"}
    assert both.link == {"delay_s": 0.1}


def test_a_failed_helper_start_reports_its_error() -> None:
    with ExitStack() as stack, pytest.raises(RuntimeError, match="no such thing"):
        stack.enter_context(
            run_until_stdin_ends(["sh", "-c", "echo no such thing >&2"], b"ready\n")
        )
