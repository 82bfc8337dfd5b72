"""What `doctor` says of the accelerators of fixture machines, and what a recording of them holds.

CLUSTERPROF_ACCEPT_GOLDEN=1 writes tests/hosts/<name>/{doctor,recording}.txt anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.gpu.amd import GpuAmdCollector
from clusterprof.agent.collectors.gpu.intel import GpuIntelCollector
from clusterprof.agent.doctor.sources import check_sources
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.cli.doctor import _print_source_checks
from clusterprof.trace.schema import Columns, Record
from tests.support.golden_hosts import PATIENCE, S, format_record, read_golden

NAMES = ("mi300x-node", "intel-max-node")


def patient(kind: Any) -> Any:
    """The collector, given all the time it needs for its first readings."""

    def init(self: Any, context: Context) -> None:
        kind.__init__(self, context, first_wait_seconds=PATIENCE)

    return type(kind.__name__, (kind,), {"__init__": init})


@pytest.mark.parametrize("name", NAMES)
def test_doctor_output_matches_the_golden_file(
    name: str, host: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [patient(GpuAmdCollector), patient(GpuIntelCollector)]
    _print_source_checks(check_sources(kinds, host(name)), as_json=False)
    read_golden(name, "doctor.txt", capsys.readouterr().out)


@pytest.mark.parametrize("name", NAMES)
def test_the_recording_matches_the_golden_file(name: str, host: Any) -> None:
    kind = GpuAmdCollector if name == "mi300x-node" else GpuIntelCollector
    read_golden(name, "recording.txt", "\n".join(recorded(kind, host(name))) + "\n")


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
        while not any(isinstance(record, Columns) for record in records):
            assert time.monotonic() < end and faults == []
            slot.tick(now_ns)
            records += slot.take(now_ns)
            time.sleep(0.001)
        for record in records:
            yield from format_record(record)
        now_ns += S
    slot.close()
