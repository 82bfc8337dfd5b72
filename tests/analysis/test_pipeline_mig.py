"""A job on a MIG slice: whose busy time it is, and what is said of errors of the GPU meanwhile.

The job: 30 steps of 0.2 s waiting for data and 0.3 s of work, from second 1 to second 16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report
from clusterprof.trace.schema import Clock, Columns, Event, Record
from clusterprof.trace.writer import RecordingWriter
from tests.support.recordings import SECOND, _make_header, iterate_seconds, make_training

SLICE, BY_TORCH = "MIG-a7b7d10d", "GPU-a7b7d10d"
WHOLE = {"id": "GPU-5c89852c", "index": 0, "pci_bus_id": "00000000:4A:00.0", "tells_busy": False}
XID = {"pci": "0000:4a:00", "code": 31, "text": "MMU Fault", "logged_ns": 5, "count": 1}


def on_a_slice(record: Record, is_stated: bool) -> list[Record]:
    """The job's records as its slice would give them; `is_stated`: GPM tells when it is busy."""
    if isinstance(record, Event) and record.kind == "process-registered":
        return [replace(record, attributes={**record.attributes, "device": BY_TORCH})]
    if not isinstance(record, Columns) or record.signals[0] != "gpu.busy_ns_total":
        return [record]
    return [replace(record, devices=[SLICE] * len(record.signals))] if is_stated else []


def report_of(folder: Path, is_stated: bool) -> Report:
    script, now = make_training([(0.2, 0.3)] * 30), [0]
    part: dict[str, Any] = {"id": SLICE, "uuid": BY_TORCH, "index": 1, "parent": WHOLE["id"]}
    devices = [WHOLE, part if is_stated else {**part, "tells_busy": False}]
    head = replace(_make_header(script, folder.name), devices=devices)
    writer = RecordingWriter(folder, head, lambda: Clock(now[0], now[0], now[0]), keep_free_bytes=0)
    for second, records in enumerate(iterate_seconds(script)):
        now[0] = second * SECOND
        if second == 7:
            records.append(Event(now[0], "gpu-xid", XID))
        writer.append(*(value for record in records for value in on_a_slice(record, is_stated)))
    writer.close()
    return analyze(folder)


@pytest.mark.parametrize(
    ("is_stated", "device", "source"), [(True, SLICE, "device-samples"), (False, "", "host-spans")]
)
def test_an_unassigned_mig_slice_leaves_an_upper_bound(
    is_stated: bool, device: str, source: str, tmp_path: Path
) -> None:
    report = report_of(tmp_path / "node", is_stated)
    ledger = report.ranks[0]
    assert (ledger.device, ledger.source, ledger.unmeasured_ns) == (device, source, 0)
    assert sum(ns for _, ns in ledger.buckets) / SECOND == pytest.approx(6.0, abs=0.1)
    note = "the NVIDIA driver reported Xid 31 of GPU 0 (GPU-5c89852c, 0000:4a:00) on node after 7 s"
    assert f"{note}: MMU Fault" in report.notes
    assert any("upper bound" in note for note in report.notes) is not is_stated
