"""What `doctor` says of the accelerators of fixture machines, and what a recording of them holds.

CLUSTERPROF_ACCEPT_GOLDEN=1 writes tests/hosts/<name>/{doctor,recording}.txt anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.gpu.amd import GpuAmdCollector
from clusterprof.agent.collectors.gpu.intel import GpuIntelCollector
from clusterprof.agent.doctor.sources import check_sources
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.cli.doctor import _print_source_checks
from clusterprof.trace.schema import Columns, Event, Gap, Record

HOSTS = Path(__file__).parents[2] / "hosts"
PATIENCE = 20.0
S = 1_000_000_000
NAMES = ("mi300x-node", "intel-max-node")


def patient(kind: Any) -> Any:
    """The collector, given all the time it needs for its first readings."""

    def init(self: Any, context: Context) -> None:
        kind.__init__(self, context, first_wait_seconds=PATIENCE)

    return type(kind.__name__, (kind,), {"__init__": init})


def accepted(name: str, file: str, text: str) -> None:
    path = HOSTS / name / file
    text = text.replace(f"{HOSTS / name}/", "/")
    if os.environ.get("CLUSTERPROF_ACCEPT_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_doctor_is_as_accepted(name: str, host: Any, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [patient(GpuAmdCollector), patient(GpuIntelCollector)]
    _print_source_checks(check_sources(kinds, host(name)), as_json=False)
    accepted(name, "doctor.txt", capsys.readouterr().out)


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_as_accepted(name: str, host: Any) -> None:
    kind = GpuAmdCollector if name == "mi300x-node" else GpuIntelCollector
    accepted(name, "recording.txt", "\n".join(recorded(kind, host(name))) + "\n")


def recorded(kind: Any, roots: Roots) -> Iterator[str]:
    """Record two samples a second apart, as lines."""
    now_ns = 100 * S
    context = Context(roots, None, lambda: (4711, 4712))
    waits = {"first_wait_seconds": PATIENCE, "rest_ns": S // 2}
    faults: list[BaseException] = []
    slot = CollectorRunner(
        kind(context, lambda: now_ns, **waits), S // 10, lambda _, error: faults.append(error)
    )
    slot.open(now_ns)
    for device in slot.devices_for_header():
        yield f"device {device}"
    for _ in range(2):
        records: list[Record] = []
        end = time.monotonic() + PATIENCE
        while not any(isinstance(one, Columns) for one in records):
            assert time.monotonic() < end and faults == []
            slot.tick(now_ns)
            records += slot.take(now_ns)
            time.sleep(0.001)
        for record in records:
            yield from lines_of(record)
        now_ns += S
    slot.close()


def lines_of(record: Record) -> Iterator[str]:
    if isinstance(record, Gap):
        where = f"{record.signal} {record.device}".strip()
        yield f"gap {record.t_ns / S:g} s {where}: {record.kind}, {record.message}"
    elif isinstance(record, Event):
        yield f"event {record.t_ns / S:g} s {record.kind} {dict(record.attributes)}"
    elif isinstance(record, Columns):
        columns = zip(record.signals, record.devices, record.values, record.masks, strict=True)
        for signal, device, values, mask in columns:
            shown = ["-" if mask and mask[row] else repr(v) for row, v in enumerate(values)]
            times = [f"{t_ns / S:g} s" for t_ns in record.t_ns]
            yield " ".join([*times, signal, device, *shown])
