"""Published GPU inventories as scenarios of the simulated library, with the expected values.

`read_profile(text)` takes a profile of NVIDIA's mock NVML (k8s-test-infra), `read_nvidia_smi(text)`
what `nvidia-smi -q -x` printed. Both give every value in NVML's own unit to the library, and say in
ours what the file states; a value that the file does not state, or as N/A, is not supported. All of
the profiles are of Ampere or newer: retired pages, which they lack, are not in the scenario.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from clusterprof.errors import Unavailable
from tests.support.nvml.healthy import HEALTHY, NO_GPM, NO_PERIOD

NOT_SUPPORTED = Unavailable("absent", "not supported by this GPU or driver")
REASONS = {
    "gpu_idle": 1,
    "applications_clocks_setting": 2,
    "sw_power_cap": 4,
    "hw_slowdown": 8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
"""nvmlClocksEventReason… of nvml.h."""


class ExpectedInventory(NamedTuple):
    """A scenario, and for each device the expected header entry and sample."""

    lines: list[str]
    inventory: list[dict[str, Any]]
    values: list[dict[str, Any]]


class SimulatedGpu:
    """One device of a scenario."""

    def __init__(self, name: str, entry: dict[str, Any]) -> None:
        self.name, self.lines, self.entry = name, list[str](), entry
        self.values: dict[str, Any] = dict.fromkeys(HEALTHY, NOT_SUPPORTED)
        self.values["gpu.sm_active_ratio"] = NO_GPM

    def set_answer(self, call: str, raw: Any, **known: Any) -> None:
        """Let NVML answer `raw`; `known`: signals without "gpu.", or keys of the header."""
        if raw is None:
            return
        self.lines.append(f"{self.name} {call} = {raw}")
        for key, value in known.items():
            if f"gpu.{key}" in self.values:
                self.values[f"gpu.{key}"] = value
            else:
                self.entry[key] = value

    def use_blackwell_error_counters(self) -> None:
        """Use the NVLink error counters that Blackwell has."""
        for name in ("replays", "crc_errors"):
            del self.values[f"gpu.nvlink_{name}_total"]
        for name in ("symbol_errors", "effective_errors"):
            self.values[f"gpu.nvlink_{name}_total"] = NOT_SUPPORTED

    def remove_links(self) -> None:
        """Remove NVLink and its signals."""
        self.entry["nvlink_count"] = 0
        self.values = {key: value for key, value in self.values.items() if "nvlink" not in key}


def read_profile(text: str) -> ExpectedInventory:
    """Read the profile of a GPU from the mock NVML's YAML."""
    import yaml

    document = yaml.safe_load(text)
    system = document["system"]
    numa = {
        address: complex_["numa_node"]
        for complex_ in document.get("pcie_topology", {}).get("root_complexes", ())
        for address in complex_["devices"]
    }
    nvlink = document.get("nvlink", {})
    major, minor = system["cuda_version_major"], system["cuda_version_minor"]
    lines = [
        f"* DriverVersion = {system['driver_version']}",
        f"* NVMLVersion = {system['nvml_version']}",
        f"* CudaVersion = {1000 * major + 10 * minor}",
        f"* GetCount = {len(document['devices'])}",
    ]
    gpus = []
    for index, own in enumerate(document["devices"]):
        merged = {**document["device_defaults"], **own}
        entry = {
            "id": own["uuid"],
            "vendor": "nvidia",
            "index": index,
            "emulated": False,
            "driver": system["driver_version"],
            "nvml": system["nvml_version"],
            "cuda": system["cuda_version"],
        }
        gpu = SimulatedGpu(str(index), entry)
        gpu.set_answer("GetUUID", own["uuid"])
        _set_identity(gpu, merged, own["pci"]["bus_id"], numa.get(own["pci"]["bus_id"]), nvlink)
        _set_state(gpu, merged)
        gpus.append(gpu)
    return combine(lines, gpus)


def _set_identity(
    gpu: SimulatedGpu,
    values: dict[str, Any],
    address: str,
    node: int | None,
    nvlink: dict[str, Any],
) -> None:
    """Set the facts that do not change."""
    power, pcie, mig = values["power"], values["pcie"], values["mig"]
    capability, links = values["compute_capability"], nvlink.get("links_per_gpu", 0)
    speed = nvlink.get("bandwidth_per_link_mbps")
    gpu.set_answer("GetName", values["name"], name=values["name"])
    gpu.set_answer("GetPciInfo", address, pci_bus_id=address)
    gpu.set_answer(
        "GetCudaComputeCapability",
        f"{capability['major']} {capability['minor']}",
        compute_capability=f"{capability['major']}.{capability['minor']}",
    )
    if capability["major"] >= 10:
        gpu.use_blackwell_error_counters()
    gpu.set_answer(
        "GetMaxPcieLinkGeneration", pcie["max_link_gen"], pcie_generation_max=pcie["max_link_gen"]
    )
    gpu.set_answer(
        "GetMaxPcieLinkWidth", pcie["max_link_width"], pcie_width_max=pcie["max_link_width"]
    )
    gpu.set_answer(
        "GetPowerManagementDefaultLimit",
        power["default_limit_mw"],
        power_limit_default_watts=power["default_limit_mw"] / 1000,
    )
    gpu.set_answer(
        "GetPowerManagementLimitConstraints",
        f"{power['min_limit_mw']} {power['max_limit_mw']}",
        power_limit_max_watts=power["max_limit_mw"] / 1000,
    )
    persistent = values["persistence_mode"] == "enabled"
    gpu.set_answer("GetPersistenceMode", int(persistent), persistence=persistent)
    ecc = values["ecc"]["mode_current"] == "enabled"
    gpu.set_answer("GetEccMode", f"{int(ecc)} {int(ecc)}", ecc=ecc)
    if mig["max_gpu_instances"]:
        gpu.set_answer("GetMigMode", "0 0", mig=False)
    if node is not None:
        gpu.set_answer("GetMemoryAffinity", f"{1 << node:x}", numa_node=node)
    if not links:
        gpu.remove_links()
    else:
        gpu.set_answer(
            "GetNvLinkState", "1 " * links, nvlink_count=links, nvlink_active_count=links
        )
        gpu.set_answer(
            "FieldValue:90", speed, nvlink_bytes_per_second=(speed or 0) * links * 1_000_000
        )


def _set_state(gpu: SimulatedGpu, values: dict[str, Any]) -> None:
    """Set the values that change."""
    power, pcie, clocks = values["power"], values["pcie"], values["clocks"]
    memory, errors = values["memory"], values["ecc"]["errors"]["volatile"]
    rows, busy = values["remapped_rows"], values["utilization"]
    bits = sum(bit for name, bit in REASONS.items() if values["clocks_throttle_reasons"].get(name))
    energy = power.get("total_energy_consumption_mj")
    gpu.set_answer(
        "GetMemoryInfo",
        f"{memory['used_bytes']} {memory['total_bytes']}",
        memory_bytes=memory["total_bytes"],
        memory_used_bytes=memory["used_bytes"],
        memory_total_bytes=memory["total_bytes"],
    )
    gpu.set_answer(
        "GetUtilizationRates",
        f"{busy['gpu']} {busy['memory']}",
        busy_ns_total=0,
        busy_until_ns=NO_PERIOD,
        busy_ratio=busy["gpu"] / 100,
        memory_busy_ratio=busy["memory"] / 100,
    )
    gpu.set_answer(
        "GetPowerUsage", power["current_draw_mw"], power_watts=power["current_draw_mw"] / 1000
    )
    gpu.set_answer(
        "GetEnforcedPowerLimit",
        power["enforced_limit_mw"],
        power_limit_watts=power["enforced_limit_mw"] / 1000,
    )
    gpu.set_answer("GetTotalEnergyConsumption", energy, energy_joules_total=(energy or 0) / 1000)
    degrees = values["thermal"]["temperature_gpu_c"]
    gpu.set_answer("GetTemperature", degrees, temperature_celsius=degrees)
    for call, key, signal in (
        ("GetClockInfo:SM", "sm_current", "sm_clock_hertz"),
        ("GetMaxClockInfo:SM", "sm_max", "sm_clock_max_hertz"),
        ("GetClockInfo:MEM", "memory_current", "memory_clock_hertz"),
    ):
        gpu.set_answer(call, clocks[key], **{signal: clocks[key] * 1_000_000})
    gpu.set_answer("GetCurrentClocksEventReasons", bits, throttle_bits=bits)
    for call, key, signal in (
        ("GetCurrPcieLinkGeneration", "current_link_gen", "pcie_generation_count"),
        ("GetCurrPcieLinkWidth", "current_link_width", "pcie_width_count"),
        ("GetPcieReplayCounter", "replay_counter", "pcie_replays_total"),
    ):
        gpu.set_answer(call, pcie[key], **{signal: pcie[key]})
    for way, key, signal in (("RX", "rx", "receive"), ("TX", "tx", "transmit")):
        rate = pcie[f"{key}_throughput_kbps"]
        gpu.set_answer(
            f"GetPcieThroughput:{way}", rate, **{f"pcie_{signal}_bytes_per_second": rate * 1000}
        )
    for kind, key in (("CORRECTED", "single_bit"), ("UNCORRECTED", "double_bit")):
        count = errors[key]["total"]
        gpu.set_answer(f"GetTotalEccErrors:{kind}", count, **{f"ecc_{kind.lower()}_total": count})
    numbers = [
        rows["correctable"],
        rows["uncorrectable"],
        int(rows["pending"]),
        int(rows["failure_occurred"]),
    ]
    gpu.set_answer(
        "GetRemappedRows",
        " ".join(map(str, numbers)),
        remapped_rows_corrected_count=numbers[0],
        remapped_rows_uncorrected_count=numbers[1],
        remap_pending_count=numbers[2],
        remap_failed_count=numbers[3],
    )
    processes = [
        (process["pid"], process.get("used_memory_bytes", 0)) for process in values["processes"]
    ]
    listed = " ".join(f"{pid}:{size}" for pid, size in processes)
    gpu.set_answer("GetComputeRunningProcesses", listed, processes_count=len(processes))


def combine(lines: list[str], gpus: list[SimulatedGpu]) -> ExpectedInventory:
    return ExpectedInventory(
        [*lines, *(line for gpu in gpus for line in gpu.lines)],
        [gpu.entry for gpu in gpus],
        [gpu.values for gpu in gpus],
    )
