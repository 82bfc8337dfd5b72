"""A node whose data lie on file servers: what doctor says of it, and what is recorded there.

After a change that is meant run this with CLUSTERPROF_ACCEPT_GOLDEN=1, and look at the diff.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.disk import DiskCollector
from clusterprof.agent.collectors.memory import MemoryCollector
from clusterprof.agent.collectors.network_filesystems import (
    CifsCollector,
    LustreCollector,
    MountsCollector,
)
from clusterprof.agent.doctor.sources import check_sources
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.inventory import build_host_inventory
from clusterprof.trace.dump import export_records
from clusterprof.trace.schema import Clock, Header
from clusterprof.trace.writer import RecordingWriter

GOLDEN = Path(__file__).parents[2] / "hosts/lustre-nfs"
KINDS = (MemoryCollector, DiskCollector, MountsCollector, LustreCollector, CifsCollector)
NOW_NS = 5_000_000_000


def check(name: str, text: str, roots: Roots) -> None:
    """Compare with the golden file, the machine's own paths aside."""
    text = text.replace(str(roots.proc), "/proc").replace(str(roots.sys), "/sys")
    path = GOLDEN / name
    if os.environ.get("CLUSTERPROF_ACCEPT_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_doctor_reports_the_expected_lines(host) -> None:
    roots = host("lustre-nfs")
    looks = [asdict(look) for look in check_sources(KINDS, roots)]
    assert [look["status"] for look in looks] == ["available"] * len(KINDS)
    check("doctor.json", json.dumps(looks, indent=1) + "\n", roots)


def test_the_recording_matches_the_golden_file(host, tmp_path: Path) -> None:
    roots = host("lustre-nfs")
    context = Context(roots, None, lambda: [4711])
    slots = [CollectorRunner(kind(context), kind.interval_ns, pytest.fail) for kind in KINDS]
    for slot in slots:
        slot.open(NOW_NS)
        assert slot.status == "available"
        slot.tick(NOW_NS)
    host_facts = build_host_inventory(roots)
    header = Header(
        node={"key": "node", "hostname": "node", "boot_id": "b", "kernel": "6.8"},
        started={"monotonic_ns": NOW_NS, "boottime_ns": NOW_NS, "realtime_ns": NOW_NS},
        host={"disks": host_facts["disks"], "mounts": host_facts["mounts"]},
        devices=[],
        launcher={"variables": {}},
        versions={},
        profile={},
        collectors=[],
    )
    clock = Clock(NOW_NS, NOW_NS, NOW_NS)
    writer = RecordingWriter(tmp_path / "node", header, lambda: clock, keep_free_bytes=0)
    for slot in slots:
        writer.append(*slot.take(NOW_NS))
        slot.close()
    writer.close()
    check("recording.jsonl", "\n".join(export_records(tmp_path)) + "\n", roots)
