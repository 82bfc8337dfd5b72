"""What can be said of jobs on accelerators that are read once a second, or never say they are busy.

The job: 30 steps of 0.2 s waiting for data and 0.3 s of work, from second 1 to second 16.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report
from clusterprof.trace.schema import Clock, Columns, Event, Record
from clusterprof.trace.writer import RecordingWriter
from tests.support.recordings import (
    MAIN,
    SECOND,
    Script,
    _make_header,
    iterate_seconds,
    make_training,
)

WAITED_S = 6.0
CORE = "neuron-0-core-1"
GAUDI = {"id": "HL-1", "vendor": "intel", "tells_busy": False}


def once_a_second(record: Record) -> Record:
    """The device's readings at whole seconds only, under the name of the second core."""
    if isinstance(record, Event) and record.kind == "process-registered":
        return replace(record, attributes={**record.attributes, "device": ""})
    if not isinstance(record, Columns) or record.signals[0] != "gpu.busy_ns_total":
        return record
    kept = [row for row, t_ns in enumerate(record.t_ns) if t_ns % SECOND == 0]
    return Columns(
        "gpu_neuron",
        record.signals,
        [CORE] * len(record.signals),
        array("q", [record.t_ns[row] for row in kept]),
        [array("q", [values[row] for row in kept]) for values in record.values],
        [None] * len(record.signals),
    )


def as_power(record: Record) -> Record:
    """What a Gaudi says at the same times: the power that it draws."""
    result = once_a_second(record)
    if not isinstance(result, Columns) or result.collector != "gpu_neuron":
        return result
    watts = array("d", [300.0] * len(result.t_ns))
    return Columns("gpu_gaudi", ["gpu.power_watts"], ["HL-1"], result.t_ns, [watts], [None])


def report_of(folder: Path, script: Script, devices: list[dict[str, Any]], made: Any) -> Report:
    now = [0]
    head = replace(_make_header(script, folder.name), devices=devices)
    writer = RecordingWriter(folder, head, lambda: Clock(now[0], now[0], now[0]), keep_free_bytes=0)
    for second, records in enumerate(iterate_seconds(script)):
        now[0] = second * SECOND
        if second == 1:
            owner = {"collector": "gpu_neuron", "device": CORE, "pid": MAIN}
            records.append(Event(now[0], "device-owner", owner))
        writer.append(*(made(record) for record in records))
    writer.close()
    return analyze(folder)


def lost_s(report: Report) -> float:
    return sum(ns for _, ns in report.ranks[0].buckets) / SECOND


def test_device_samples_once_a_second_measure_lost_time(tmp_path: Path) -> None:
    # The process has one core of two, and not the one that local ranks would give it.
    devices = [{"id": "neuron-0-core-0"}, {"id": CORE}]
    report = report_of(tmp_path / "node", make_training([(0.2, 0.3)] * 30), devices, once_a_second)
    ledger = report.ranks[0]
    assert (ledger.device, ledger.source, ledger.unmeasured_ns) == (CORE, "device-samples", 0)
    assert lost_s(report) == pytest.approx(WAITED_S, abs=0.1)
    assert report.findings
    assert not report.findings[0].upper_bound


def test_device_samples_once_a_second_show_hidden_waits(tmp_path: Path) -> None:
    devices = [{"id": "neuron-0-core-0"}, {"id": CORE}]
    hidden = make_training([(0.2, 0.3)] * 30, hidden=True)
    report = report_of(tmp_path / "node", hidden, devices, once_a_second)
    assert lost_s(report) == pytest.approx(0.0, abs=0.1)


def test_a_device_without_busy_time_leaves_an_upper_bound(tmp_path: Path) -> None:
    report = report_of(tmp_path / "node", make_training([(0.2, 0.3)] * 30), [GAUDI], as_power)
    ledger = report.ranks[0]
    assert (ledger.device, ledger.source, ledger.unmeasured_ns) == ("", "host-spans", 0)
    assert lost_s(report) == pytest.approx(WAITED_S, abs=0.01)
    assert report.findings[0].upper_bound
    assert [note for note in report.notes if "upper bound" in note]
