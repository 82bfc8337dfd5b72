from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.network_filesystems import LustreCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.reader_threads import DEADLINE_NS
from clusterprof.agent.linux.storage.lustre import ROOT_ONLY
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from tests.support.opened_collector import OpenedCollector

INSTANCE = "ffff9a0b1c2d3e00"
OSC0, OSC1 = (f"osc/scratch-OST000{n}-osc-{INSTANCE}" for n in (0, 1))
US = 1000
NO_TIME = Unavailable("absent", "this Lustre counts such calls and not their time", "")
NO_TARGET = Unavailable("absent", "no target of this file system is known here", "")
SCRATCH = {
    "read_bytes_total": 800_000_000,
    "write_bytes_total": 5_000_000,
    "fetched_bytes_total": 400_000_000 + 300_000_000,
    "stored_bytes_total": 5_000_000,
    "rpcs_at_limit_total": 60 + 148 + 2,  # 8 of 8 at one, 8 and 9 of 8 at the other
    "pending_read_bytes": (256 + 1024) * os.sysconf("SC_PAGE_SIZE"),
    "read_rpcs_in_flight_count": 3 + 8,
    "timeouts_total": 2 + 0 + 5,
    "targets_unconnected_count": 1,  # FULL and IDLE are as they should be, DISCONN is not
}
PAIRS = {
    "operations_total operation_ns_total": {
        "read": (1000, 2_500_000 * US),
        "write": (10, 4000 * US),
        "open": (400, 600_000 * US),
        "close": (390, 39_000 * US),
        "getattr": (0, 0),  # no line: never called
        "mmap": (3, NO_TIME),
    },
    "rpcs_total rpc_ns_total": {
        # of both object servers, and of small files that lie with the metadata
        "read": (500 + 300 + 4, (2_000_000 + 8_900_000 + 2000) * US),
        "write": (10, 80_000 * US),
        # 1500 less 20 pings, 50 cancelled locks, a connection and those 4 reads
        "metadata": (1500 - 71 - 4, (900_000 - 12_500 - 2000) * US),
    },
}
TARGETS = {
    "scratch-MDT0000": (1500 - 71, (900_000 - 12_500) * US),
    "scratch-OST0000": (620 - 40, (3_100_000 - 7300) * US),
    "scratch-OST0001": (305 - 5, 8_900_000 * US),
}


def expected() -> list[tuple[str, str, object]]:
    collected: list[tuple[str, str, object]] = []
    for names, kinds in PAIRS.items():
        for kind, values in kinds.items():
            of = f"/scratch:{kind}"
            collected += [(f"lustre.{n}", of, v) for n, v in zip(names.split(), values)]
    collected += [(f"lustre.{name}", "/scratch", value) for name, value in SCRATCH.items()]
    names = ("target_rpcs_total", "target_rpc_ns_total")
    collected += [(f"lustre.{n}", t, v) for t, pair in TARGETS.items() for n, v in zip(names, pair)]
    return sorted(collected, key=str)


def readings_of(opened: OpenedCollector, device: str = "") -> list[tuple[str, str, object]]:
    return sorted(
        (reading for reading in opened.read_all() if not reading[1].startswith("old-")), key=str
    )


def test_all_values_of_a_lustre_mount_are_read(host) -> None:
    opened = OpenedCollector(LustreCollector, host("lustre-nfs"), [4711])
    assert readings_of(opened) == expected()
    opened.close()


def test_an_unreadable_file_system_has_reasons_instead_of_zeros(host) -> None:
    opened = OpenedCollector(LustreCollector, host("lustre-nfs"), [4711])
    old = {(n, d): v for n, d, v in opened.read_all() if d.startswith("old-ffff9a0b1c2d4f00")}
    assert len(old) == 9 + 2 * 3
    assert {v.kind for v in old.values() if isinstance(v, Unavailable)} == {"absent"}
    assert old["lustre.fetched_bytes_total", "old-ffff9a0b1c2d4f00"] == NO_TARGET
    assert old["lustre.rpcs_total", "old-ffff9a0b1c2d4f00:metadata"] == NO_TARGET
    opened.close()


@pytest.mark.parametrize("name", ["h100-node", "container-no-sys"])
def test_without_lustre_the_collector_is_absent(host, name: str) -> None:
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(LustreCollector, host(name))
    assert caught.value == Unavailable("absent", "no Lustre file system is mounted", "")


def test_forbidden_debugfs_is_denied_with_the_root_remedy(host_copy, as_nobody) -> None:
    roots = host_copy("lustre-nfs")
    debugfs = roots.sys / "kernel/debug"
    debugfs.chmod(0)  # for its owner, too: root may not run the tests
    with as_nobody(), pytest.raises(Unavailable) as caught:
        OpenedCollector(LustreCollector, roots, [4711])
    debugfs.chmod(0o700)
    assert (caught.value.kind, caught.value.remedy) == ("denied", ROOT_ONLY)


def without_debugfs(roots: Roots) -> Path:
    """The same parameters where Lustre before 2.12 had them: in /proc."""
    proc = roots.proc / "fs/lustre"
    shutil.move(roots.sys / "kernel/debug/lustre", proc)
    for path in (roots.sys / "fs/lustre").glob("*/scratch*/max_rpcs_in_flight"):
        shutil.move(path, proc / path.relative_to(roots.sys / "fs/lustre"))
    shutil.rmtree(roots.sys / "fs/lustre")
    return proc


def test_an_older_lustre_is_read_completely_from_proc(host_copy) -> None:
    roots = host_copy("lustre-nfs")
    without_debugfs(roots)
    opened = OpenedCollector(LustreCollector, roots, [4711])
    assert sorted(opened.read_all(), key=str) == expected()
    opened.close()


class Clock:
    now_ns = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now_ns


class Rig:
    """A collector on a copy, whose thread is asked for the next reading by `next()`."""

    def __init__(self, roots: Roots) -> None:
        self.clock = Clock()
        self.debug = roots.sys / "kernel/debug/lustre"
        context = Context(roots, None, lambda: [4711])
        self.collector = LustreCollector(context, self.clock, first_wait_seconds=5)
        self.columns = self.open()
        self.collector.sample()
        self.settle()  # a reading must not see half of an edit

    def open(self) -> list[tuple[str, str]]:
        return [(signal.name, device) for signal, device in self.collector.open()]

    def next(self, seconds: float = 1) -> dict[tuple[str, str], object]:
        self.settle()  # a reading must not see the clock jump
        self.clock.now_ns += round(seconds * 1e9)
        self.collector.sample()  # what was read before; it asks, and what that brings is of now
        self.settle()
        return dict(zip(self.columns, self.collector.sample()))

    def settle(self) -> None:
        assert self.collector._reader._worker.answered.wait(10)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.debug / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))


@pytest.fixture
def rig(host_copy):
    made = Rig(host_copy("lustre-nfs"))
    yield made
    made.collector.close()


def test_a_second_reading_has_the_new_values(rig: Rig) -> None:
    rig.edit(
        f"{OSC0}/stats", "500 samples [usec] 150 90000 2000000", "600 samples [usec] 1 9 2400000"
    )
    now = rig.next()
    assert now["lustre.rpcs_total", "/scratch:read"] == 600 + 300 + 4
    assert now["lustre.rpc_ns_total", "/scratch:read"] == (2_400_000 + 8_902_000) * US


def test_text_instead_of_a_number_is_a_reason(rig: Rig) -> None:
    rig.edit(f"{OSC1}/rpc_stats", "pending read pages:   1024", "pending read pages:   lots")
    now = rig.next()
    why = Unavailable("failed", f"{OSC1}/rpc_stats: not understood", "")
    for name in ("rpcs_at_limit_total", "read_rpcs_in_flight_count"):
        assert now[f"lustre.{name}", "/scratch"] == why
    assert now["lustre.pending_read_bytes", "/scratch"] == why
    assert now["lustre.fetched_bytes_total", "/scratch"] == SCRATCH["fetched_bytes_total"]


def test_a_removed_target_is_unknown_before_the_columns_change(rig: Rig) -> None:
    rig.settle()
    shutil.rmtree(rig.debug / OSC1)
    rig.collector._mount_readers[0]._files.close()  # a held file of a real debugfs fails as well
    now = rig.next()
    gone = now["lustre.fetched_bytes_total", "/scratch"]
    assert isinstance(gone, Unavailable) and gone.kind == "absent"
    assert now["lustre.read_bytes_total", "/scratch"] == 800_000_000
    shutil.rmtree(rig.debug.parents[2] / "fs/lustre" / OSC1)
    with pytest.raises(DevicesChanged):
        rig.next(seconds=10)
    rig.settle()
    rig.collector.close()
    rig.settle()
    assert ("lustre.target_rpcs_total", "scratch-OST0001") not in rig.open()


def test_the_first_use_of_an_operation_changes_the_columns(rig: Rig) -> None:
    rig.edit(
        f"llite/scratch-{INSTANCE}/stats",
        "mmap ",
        "unlink                    2 samples [usecs] 1 2 3 5\nmmap ",
    )
    with pytest.raises(DevicesChanged):
        rig.next()


def test_cleared_counters_restart_and_late_pings_do_not_decrease_counters(rig: Rig) -> None:
    ping = "obd_ping                  5 samples [usec] 100 100 500"
    rig.edit(f"{OSC1}/stats", ping, "obd_ping                  7 samples [usec] 100 100 700")
    assert rig.next()["lustre.target_rpcs_total", "scratch-OST0001"] == 300  # and not 298
    (rig.debug / OSC1 / "stats").write_text("snapshot_time 1.0 secs.nsecs\n")
    assert rig.next()["lustre.target_rpcs_total", "scratch-OST0001"] == 0


def test_connections_are_read_every_ten_seconds(rig: Rig) -> None:
    rig.edit(f"{OSC0}/import", "state: FULL", "state: EVICTED")
    assert rig.next()["lustre.targets_unconnected_count", "/scratch"] == 1
    assert rig.next(seconds=10)["lustre.targets_unconnected_count", "/scratch"] == 2


def test_a_hanging_client_does_not_block_the_loop(rig: Rig) -> None:
    rig.settle()
    rig.collector._reader._worker.answered.clear()  # as while a lock is held
    rig.clock.now_ns += 1_000_000_000
    rig.collector._reader._worker.requested_ns = rig.clock.now_ns
    with pytest.raises(NothingNew):
        rig.collector.sample()
    rig.clock.now_ns += DEADLINE_NS
    with pytest.raises(Unavailable, match="does not answer"):
        rig.collector.sample()
    rig.collector._reader._worker.answered.set()
