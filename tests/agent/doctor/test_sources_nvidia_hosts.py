"""What `doctor` says of NVIDIA GPUs of fixture machines, and what a recording of them holds.

NVML is the simulated library behind the real pynvml; the recording comes through the helper.
CLUSTERPROF_ACCEPT_GOLDEN=1 writes tests/hosts/<name>/{doctor.txt,recording.jsonl} anew.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.gpu.nvidia import GpuNvidiaCollector
from clusterprof.agent.collectors.kernel import KernelLogCollector
from clusterprof.agent.doctor.sources import check_sources
from clusterprof.agent.isolation.collector import IsolatedCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.kernel_log import KernelLog
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.cli.doctor import _print_source_checks
from clusterprof.trace.schema import Columns, Event, Gap
from tests.support.nvml.isolated_gpus import wait_for_exit
from tests.support.nvml.simulated import Scenario, build_library, load_library, make_environment

HOSTS = Path(__file__).parents[2] / "hosts"

NAMES = ("h100-node", "mig-node")
DOCTORS = {"h100-node": "doctor-nvidia.txt", "mig-node": "doctor.txt"}
LOGS = {"h100-node": "/dev/null", "mig-node": "/absent/kmsg"}
PATIENCE = 20.0


def accepted(name: str, file: str, text: str) -> None:
    path = HOSTS / name / file
    text = text.replace(f"{HOSTS / name}/", "/")
    if os.environ.get("CLUSTERPROF_ACCEPT_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def reading(log: str) -> Any:
    """The collector of the kernel's log, on another file."""

    def init(self: Any, context: Context) -> None:
        KernelLogCollector.__init__(self, context, lambda: KernelLog(log))

    return type("KernelLog", (KernelLogCollector,), {"__init__": init})


@pytest.mark.parametrize("name", NAMES)
def test_doctor_output_matches_the_golden_file(
    name: str,
    host: Callable[[str], Roots],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_library()
    monkeypatch.setenv("FAKENVML_CTL", str(HOSTS / name / "nvml.txt"))
    _print_source_checks(
        check_sources([GpuNvidiaCollector, reading(LOGS[name])], host(name)), as_json=False
    )
    accepted(name, DOCTORS[name], capsys.readouterr().out)


@pytest.mark.parametrize("name", NAMES)
def test_the_recording_matches_the_golden_file(
    name: str, host: Callable[[str], Roots], tmp_path: Path
) -> None:
    scenario = Scenario(tmp_path / "scenario")
    shutil.copy(HOSTS / name / "nvml.txt", scenario.path)
    collector = IsolatedCollector(
        "gpu_nvidia",
        Context(host(name), None, lambda: (4711,)),
        environment=make_environment(build_library(tmp_path / "lib"), scenario),
        first_wait_seconds=PATIENCE,
        options=("--gpm", "on"),  # however long a reading takes on this machine
    )
    faults: list[BaseException] = []
    slot = CollectorRunner(collector, 100_000_000, lambda _, error: faults.append(error))
    slot.open(time.monotonic_ns())
    lines = [json.dumps(device) for device in slot.devices_for_header()]
    assert collector.pid is not None
    pids = {collector.pid}
    slot.tick(time.monotonic_ns())
    for record in slot.take(time.monotonic_ns()):
        lines += [json.dumps(line, ensure_ascii=False) for line in shown(record)]
    slot.close()
    assert faults == []
    wait_for_exit(pids)
    accepted(name, "recording.jsonl", "\n".join(lines) + "\n")


def shown(record: Any) -> list[Any]:
    """A record without its times, which no two recordings have in common."""
    if isinstance(record, Gap):
        return [["gap", record.signal, record.device, record.kind, record.message]]
    if isinstance(record, Event):
        return [["event", record.kind, dict(record.attributes)]]
    assert isinstance(record, Columns)
    rows: dict[str, dict[str, Any]] = {}
    for signal, device, values, mask in zip(
        record.signals, record.devices, record.values, record.masks, strict=True
    ):
        value = None if mask is not None and mask[0] else values[0]
        if signal == "gpu.busy_ns_total" and value:
            value = "more than 0"  # as long as it was looked at
        if signal == "gpu.busy_until_ns" and value:
            value = "a time"
        rows.setdefault(device, {})[signal] = value
    return [["row", device, values] for device, values in rows.items()]
