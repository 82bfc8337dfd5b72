"""Trainium: reports of `neuron-monitor` written by hand, and the totals made of them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from clusterprof.agent.collectors.gpu import neuron
from clusterprof.agent.linux.reader_threads import LatestRows
from clusterprof.errors import Unavailable
from tests.support.accelerators.simulated import HOSTS

TOOLS = HOSTS / "trn1-node" / "tools"
REPORTS = [json.loads(line) for line in (TOOLS / "reports.jsonl").read_text().splitlines()]
SECOND_NS = 1_000_000_000
UNUSED = Unavailable("absent", "no process uses this core")
NODE = neuron.NeuronHardware("trainium1", 2, 2, 32 << 30)


def changed(*steps: Any, number: int = 0) -> dict[str, Any]:
    """A report of the node with one thing changed: keys that lead there, and what it becomes."""
    changed_copy = copy.deepcopy(REPORTS[number])
    at: Any = changed_copy
    for step in steps[:-2]:
        at = at[step]
    if steps[-1] is None:
        del at[steps[-2]]
    else:
        at[steps[-2]] = steps[-1]
    return changed_copy


def test_a_neuron_report_gives_the_values_of_each_core() -> None:
    assert neuron.parse_hardware(REPORTS[0]) == NODE
    # 42 % of a second in 100 programs of 8 ms (p99 1.5 × that), 1 GiB of tensors and 1 KiB more
    used = neuron.CoreReport(
        0.42, SECOND_NS, (1 << 30) + 1024, 100, 0, 8_000_000, 12_000_000, 1, 0, 0, (4711,)
    )
    other = neuron.CoreReport(
        1.0, SECOND_NS, (2 << 30) + 1024, 50, 0, 16_000_000, 24_000_000, 1, 0, 0, (4712,)
    )
    unused = neuron.CoreReport(0.0, UNUSED, 0, 0, 0, UNUSED, UNUSED, 0, 0, 0, ())
    assert neuron.parse_cores(REPORTS[0], NODE) == [used, unused, other, unused]
    # three memory errors of device 1, which has cores 2 and 3
    assert [core.corrected for core in neuron.parse_cores(REPORTS[1], NODE)] == [0, 0, 3, 3]


def test_a_period_without_finished_programs_has_no_execution_time() -> None:
    core = neuron.parse_cores(REPORTS[2], NODE)[0]
    assert (core.busy_ratio, core.executions) == (0.0, 0)
    assert core.p50_ns == Unavailable("absent", "no program ended in this period")


COUNTERS = ("neuron_runtime_data", 0, "report", "neuroncore_counters")
STATS = ("neuron_runtime_data", 0, "report", "execution_stats")
CORE = (*COUNTERS, "neuroncores_in_use", "0", "neuroncore_utilization")
ECC = ("system_data", "neuron_hw_counters", "neuron_devices")
PERCENT = "busy_ratio"


@pytest.mark.parametrize(
    ("steps", "fields", "message"),
    [
        ((*CORE, "42"), [PERCENT], "neuron-monitor reports '42' for neuroncore_utilization"),
        ((*CORE, -3), [PERCENT], "neuron-monitor reports -3 for neuroncore_utilization"),
        ((*CORE, 137), [PERCENT], "neuron-monitor: impossible value 137 %"),
        ((*CORE, None), [PERCENT], "neuron-monitor reports nothing for neuroncore_utilization"),
        ((*CORE, True), [PERCENT], "neuron-monitor reports True for neuroncore_utilization"),
        ((*COUNTERS, "period", "1"), ["period_ns"], "neuron-monitor reports '1' for period"),
        (
            (*STATS, "error", "denied"),
            ["executions", "errors", "p50_ns", "p99_ns"],
            "neuron-monitor: denied",
        ),
        (
            (*STATS, "error_summary", {"numerical": -1}),
            ["errors"],
            "neuron-monitor reports -1 for numerical",
        ),
        (
            (*STATS, "latency_stats", "device_latency", []),
            ["p50_ns", "p99_ns"],
            "neuron-monitor reports nothing for p50",
        ),
        (
            (*ECC, 0, None),
            ["corrected", "uncorrected"],
            "neuron-monitor does not report this device",
        ),
        (
            (*ECC, 0, "mem_ecc_corrected", "few"),
            ["corrected"],
            "neuron-monitor reports 'few' for mem_ecc_corrected",
        ),
    ],
)
def test_an_unreadable_value_has_a_reason_and_leaves_other_values(
    steps: tuple[Any, ...], fields: list[str], message: str
) -> None:
    result, before = (neuron.parse_cores(value, NODE) for value in (changed(*steps), REPORTS[0]))
    assert getattr(result[0], fields[0]) == Unavailable("failed", message)
    assert all(isinstance(getattr(result[0], field), Unavailable) for field in fields)
    others = {field: getattr(before[0], field) for field in fields}
    assert result[0]._replace(**others) == before[0]
    assert result[2] == before[2]


def test_an_unreadable_process_makes_cores_without_a_known_user_unknown() -> None:
    denied = Unavailable("failed", "neuron-monitor: permission denied")
    for steps in (
        ("neuron_runtime_data", 0, "error", "permission denied"),
        (*COUNTERS, "error", "permission denied"),
    ):
        cores = neuron.parse_cores(changed(*steps), NODE)
        assert [core.busy_ratio for core in cores] == [denied, denied, 1.0, denied]
        assert [core.memory_bytes for core in cores][1] == denied


def test_a_core_used_by_processes_sums_their_busy_time() -> None:
    result = changed(*CORE[:-1], {"neuroncore_utilization": 30.0})
    second = copy.deepcopy(result["neuron_runtime_data"][0]) | {"pid": 4713}
    result["neuron_runtime_data"].append(second)
    core = neuron.parse_cores(result, NODE)[0]
    assert (core.busy_ratio, core.executions, core.processes) == (0.6, 200, 2)
    assert core.p50_ns == Unavailable("absent", "several processes use this core")
    assert core.pids == (4711, 4713)


def test_missing_devices_are_absent_and_garbage_reports_are_rejected() -> None:
    for steps, message in (
        (
            ("neuron_hardware_info", "error", "driver not loaded"),
            "no Neuron device: neuron-monitor: driver not loaded",
        ),
        (
            ("neuron_hardware_info", "neuron_device_count", 0),
            "neuron-monitor lists no Neuron device",
        ),
    ):
        with pytest.raises(Unavailable) as raised:
            neuron.parse_hardware(changed(*steps))
        assert (raised.value.kind, raised.value.message) == ("absent", message)
    for line in (b"usage: neuron-monitor", b"[1]", b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(Unavailable):
            neuron.decode_report(line)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def library(clock: Clock) -> neuron.NeuronLibrary:
    """The real library without its thread: reports come when the test says so."""
    made = neuron.NeuronLibrary.__new__(neuron.NeuronLibrary)
    silent = Unavailable("failed", "silent")
    made._latest = LatestRows(len(neuron.SIGNALS), 5 * SECOND_NS, lambda: silent, clock)
    made._known, made._before_ns, made._period_ns = None, None, SECOND_NS
    made._opened = neuron.threading.Event()
    made.devices = []
    return made


def sampled(made: neuron.NeuronLibrary, clock: Clock, *events: Any) -> list[dict[str, Any] | None]:
    """Samples of core 0 at second 1, 2, …: of a report's utilisation, a text, or None = silence."""
    out: list[dict[str, Any] | None] = []
    for event in events:
        clock.now_ns += SECOND_NS
        if isinstance(event, str):
            made._handle_line(event.encode())
        elif event is not None:
            made._handle_line(json.dumps(changed(*CORE, event)).encode())
        values = made.devices[0].sample()
        out.append(None if values is None else dict(zip(neuron.SIGNALS, values)))
    return out


def busy_ns(samples: list[dict[str, Any] | None]) -> list[Any]:
    return [None if sample is None else sample["gpu.busy_ns_total"] for sample in samples]


def test_utilization_of_each_period_adds_up_to_busy_time() -> None:
    clock = Clock()
    samples = sampled(library(clock), clock, 90.0, 42.0, 100.0, 0.0)
    # what was before the first report is not ours: it only says where counting begins
    start = samples[0]["gpu.busy_ns_total"]  # type: ignore[index]
    assert [value - start for value in busy_ns(samples)] == [
        0,
        420_000_000,
        1_420_000_000,
        1_420_000_000,
    ]
    executions = [sample["gpu.executions_total"] for sample in samples if sample]
    assert [execution - executions[0] for execution in executions] == [0, 100, 200, 300]


def test_an_unobserved_period_is_not_idle() -> None:
    clock = Clock()
    made = library(clock)
    result = busy_ns(sampled(made, clock, 0.0, 0.0, None, None, 0.0, 50.0, "garbage", 0.0, 0.0))
    begun, steady, quiet, _, after, half, garbage, again, last = result
    assert (begun, quiet) == (steady, None)
    assert after == begun - 1  # goes back: the two seconds are not known, idle or not
    assert half == after + 500_000_000
    assert garbage == Unavailable("failed", "neuron-monitor printed no report: 'garbage'")
    assert again == last == after - 1


def test_a_silent_tool_is_reported_after_five_seconds() -> None:
    clock = Clock()
    samples = sampled(library(clock), clock, 10.0, *[None] * 7)
    silent = Unavailable("failed", "silent")
    assert [sample and sample["gpu.core_busy_ratio"] for sample in samples] == [
        0.1,
        None,
        None,
        None,
        None,
        None,
        silent,
        None,
    ]


def test_processes_using_a_core_are_reported_once_without_names() -> None:
    clock = Clock()
    made = library(clock)
    sampled(made, clock, 10.0, 20.0)
    assert [list(device.notes) for device in made.devices] == [
        [("device-owner", {"pid": 4711})],
        [],
        [("device-owner", {"pid": 4712})],
        [],
    ]
    printed = json.dumps(neuron._build_inventory(NODE)) + repr(made._latest.newest)
    for secret in ("ada", "i-0123", "subnet", "ami-", "neff"):
        assert secret not in printed
