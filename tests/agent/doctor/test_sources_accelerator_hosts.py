"""Fixture machines with other accelerators: what `doctor` prints and what a recording holds.

Accept a change with CLUSTERPROF_ACCEPT_GOLDEN=1, and read its diff.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.cpu import CpuCollector
from clusterprof.agent.collectors.gpu.gaudi import GpuGaudiCollector
from clusterprof.agent.collectors.gpu.neuron import GpuNeuronCollector
from clusterprof.agent.collectors.gpu.tpu import GpuTpuCollector
from clusterprof.agent.doctor.sources import check_sources
from clusterprof.agent.isolation.collector import IsolatedCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.service import make_isolated_collector
from clusterprof.cli.doctor import _print_source_checks
from clusterprof.trace.schema import Columns, Event, Gap
from tests.support.accelerators.simulated import HOSTS, prepend_to_path, wait_until

COLLECTORS = (CpuCollector, GpuGaudiCollector, GpuNeuronCollector, GpuTpuCollector)
NODES = {"gaudi-node": "gpu_gaudi", "trn1-node": "gpu_neuron"}


def agrees(path: Path, text: str) -> None:
    if os.environ.get("CLUSTERPROF_ACCEPT_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gate"
    path.write_text("1")
    monkeypatch.setenv("NEURON_GATE", str(path))
    return path


@pytest.mark.parametrize("node", NODES)
def test_doctor_output_matches_the_golden_file(
    node: str,
    gate: Path,
    host: Callable[[str], Roots],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", prepend_to_path(HOSTS / node / "tools"))
    _print_source_checks(
        check_sources(COLLECTORS, host(node), make_isolated_collector), as_json=False
    )
    agrees(HOSTS / node / "doctor.txt", capsys.readouterr().out)


@pytest.mark.parametrize("node", NODES)
def test_the_recording_matches_the_golden_file(
    node: str, gate: Path, host: Callable[[str], Roots], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", prepend_to_path(HOSTS / node / "tools"))
    context = Context(host(node), None, lambda: [])
    collector = IsolatedCollector(NODES[node], context, first_wait_seconds=20.0)
    faults: list[BaseException] = []
    slot = CollectorRunner(collector, 1_000_000_000, lambda name, error: faults.append(error))
    slot.open(time.monotonic_ns())
    devices = slot.devices_for_header()
    records: list[Any] = []
    for report in (1, 2, 3)[: 3 if node == "trn1-node" else 1]:
        gate.write_text(str(report))
        wait_until(lambda: took_a_row(slot, records))
    child = collector._helper
    slot.close()
    assert child is not None
    wait_until(child.reap)
    assert faults == []
    lines = [json.dumps(device) for device in devices]
    result = [line for record in records for line in shown(record)]
    result.sort(key=lambda line: (line[0] == "event", str(line) if line[0] == "event" else ""))
    lines += [json.dumps(line, ensure_ascii=False) for line in result]
    agrees(HOSTS / node / "recording.jsonl", "\n".join(lines) + "\n")


def took_a_row(slot: CollectorRunner, records: list[Any]) -> bool:
    """One turn of the recorder's loop; True when a row was recorded in it."""
    slot.tick(time.monotonic_ns())
    taken = slot.take(time.monotonic_ns())
    records += taken
    return any(isinstance(record, Columns) for record in taken)


def shown(record: Any) -> list[Any]:
    """A record without its times, which no two recordings have in common."""
    if isinstance(record, Gap):
        return [["gap", record.signal, record.device, record.kind, record.message]]
    if isinstance(record, Event):
        return [["event", record.kind, dict(record.attributes)]]
    assert isinstance(record, Columns)
    rows: dict[str, dict[str, Any]] = {}
    for signal, device, values, mask in zip(
        record.signals, record.devices, record.values, record.masks
    ):
        assert len(values) == 1
        rows.setdefault(device, {})[signal] = None if mask is not None and mask[0] else values[0]
    return [["row", device, values] for device, values in rows.items()]
