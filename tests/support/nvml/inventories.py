"""Inventories of other people as scenarios of the simulated library, with what is to come out.

`profile(text)` takes a profile of NVIDIA's mock NVML (k8s-test-infra), `printed.smi(text)` what
`nvidia-smi -q -x` printed. Both give every value in NVML's own unit to the library, and say in ours
what the file states; a value that the file does not state, or as N/A, is not supported. All of the
profiles are of Ampere or newer: retired pages, which such GPUs have not, are not in the scenario.
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


class Told(NamedTuple):
    """A scenario, and by device what the header and a sample are to say."""

    lines: list[str]
    inventory: list[dict[str, Any]]
    values: list[dict[str, Any]]


class Gpu:
    """One device on its way into a scenario."""

    def __init__(self, name: str, entry: dict[str, Any]) -> None:
        self.name, self.lines, self.entry = name, list[str](), entry
        self.values: dict[str, Any] = dict.fromkeys(HEALTHY, NOT_SUPPORTED)
        self.values["gpu.sm_active_ratio"] = NO_GPM

    def tell(self, call: str, raw: Any, **known: Any) -> None:
        """Let NVML answer `raw`; `known`: signals without "gpu.", or keys of the header."""
        if raw is None:
            return
        self.lines.append(f"{self.name} {call} = {raw}")
        for key, value in known.items():
            if f"gpu.{key}" in self.values:
                self.values[f"gpu.{key}"] = value
            else:
                self.entry[key] = value

    def counts_errors_as_blackwell(self) -> None:
        """It has other counters of errors of NVLinks."""
        for name in ("replays", "crc_errors"):
            del self.values[f"gpu.nvlink_{name}_total"]
        for name in ("symbol_errors", "effective_errors"):
            self.values[f"gpu.nvlink_{name}_total"] = NOT_SUPPORTED

    def without_links(self) -> None:
        """It has no NVLink, and so no signals of any."""
        self.entry["nvlink_count"] = 0
        self.values = {key: value for key, value in self.values.items() if "nvlink" not in key}


def profile(text: str) -> Told:
    """Return what a profile of the mock NVML states."""
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
        gpu = Gpu(str(index), entry)
        gpu.tell("GetUUID", own["uuid"])
        _identity(gpu, merged, own["pci"]["bus_id"], numa.get(own["pci"]["bus_id"]), nvlink)
        _state(gpu, merged)
        gpus.append(gpu)
    return together(lines, gpus)


def _identity(
    gpu: Gpu, values: dict[str, Any], address: str, node: int | None, nvlink: dict[str, Any]
) -> None:
    """What does not change."""
    power, pcie, mig = values["power"], values["pcie"], values["mig"]
    capability, links = values["compute_capability"], nvlink.get("links_per_gpu", 0)
    speed = nvlink.get("bandwidth_per_link_mbps")
    gpu.tell("GetName", values["name"], name=values["name"])
    gpu.tell("GetPciInfo", address, pci_bus_id=address)
    gpu.tell(
        "GetCudaComputeCapability",
        f"{capability['major']} {capability['minor']}",
        compute_capability=f"{capability['major']}.{capability['minor']}",
    )
    if capability["major"] >= 10:
        gpu.counts_errors_as_blackwell()
    gpu.tell(
        "GetMaxPcieLinkGeneration", pcie["max_link_gen"], pcie_generation_max=pcie["max_link_gen"]
    )
    gpu.tell("GetMaxPcieLinkWidth", pcie["max_link_width"], pcie_width_max=pcie["max_link_width"])
    gpu.tell(
        "GetPowerManagementDefaultLimit",
        power["default_limit_mw"],
        power_limit_default_watts=power["default_limit_mw"] / 1000,
    )
    gpu.tell(
        "GetPowerManagementLimitConstraints",
        f"{power['min_limit_mw']} {power['max_limit_mw']}",
        power_limit_max_watts=power["max_limit_mw"] / 1000,
    )
    persistent = values["persistence_mode"] == "enabled"
    gpu.tell("GetPersistenceMode", int(persistent), persistence=persistent)
    ecc = values["ecc"]["mode_current"] == "enabled"
    gpu.tell("GetEccMode", f"{int(ecc)} {int(ecc)}", ecc=ecc)
    if mig["max_gpu_instances"]:
        gpu.tell("GetMigMode", "0 0", mig=False)
    if node is not None:
        gpu.tell("GetMemoryAffinity", f"{1 << node:x}", numa_node=node)
    if not links:
        gpu.without_links()
    else:
        gpu.tell("GetNvLinkState", "1 " * links, nvlink_count=links, nvlink_active_count=links)
        gpu.tell("FieldValue:90", speed, nvlink_bytes_per_second=(speed or 0) * links * 1_000_000)


def _state(gpu: Gpu, values: dict[str, Any]) -> None:
    """What does."""
    power, pcie, clocks = values["power"], values["pcie"], values["clocks"]
    memory, errors = values["memory"], values["ecc"]["errors"]["volatile"]
    rows, busy = values["remapped_rows"], values["utilization"]
    bits = sum(bit for name, bit in REASONS.items() if values["clocks_throttle_reasons"].get(name))
    energy = power.get("total_energy_consumption_mj")
    gpu.tell(
        "GetMemoryInfo",
        f"{memory['used_bytes']} {memory['total_bytes']}",
        memory_bytes=memory["total_bytes"],
        memory_used_bytes=memory["used_bytes"],
        memory_total_bytes=memory["total_bytes"],
    )
    gpu.tell(
        "GetUtilizationRates",
        f"{busy['gpu']} {busy['memory']}",
        busy_ns_total=0,
        busy_until_ns=NO_PERIOD,
        busy_ratio=busy["gpu"] / 100,
        memory_busy_ratio=busy["memory"] / 100,
    )
    gpu.tell("GetPowerUsage", power["current_draw_mw"], power_watts=power["current_draw_mw"] / 1000)
    gpu.tell(
        "GetEnforcedPowerLimit",
        power["enforced_limit_mw"],
        power_limit_watts=power["enforced_limit_mw"] / 1000,
    )
    gpu.tell("GetTotalEnergyConsumption", energy, energy_joules_total=(energy or 0) / 1000)
    degrees = values["thermal"]["temperature_gpu_c"]
    gpu.tell("GetTemperature", degrees, temperature_celsius=degrees)
    for call, key, signal in (
        ("GetClockInfo:SM", "sm_current", "sm_clock_hertz"),
        ("GetMaxClockInfo:SM", "sm_max", "sm_clock_max_hertz"),
        ("GetClockInfo:MEM", "memory_current", "memory_clock_hertz"),
    ):
        gpu.tell(call, clocks[key], **{signal: clocks[key] * 1_000_000})
    gpu.tell("GetCurrentClocksEventReasons", bits, throttle_bits=bits)
    for call, key, signal in (
        ("GetCurrPcieLinkGeneration", "current_link_gen", "pcie_generation_count"),
        ("GetCurrPcieLinkWidth", "current_link_width", "pcie_width_count"),
        ("GetPcieReplayCounter", "replay_counter", "pcie_replays_total"),
    ):
        gpu.tell(call, pcie[key], **{signal: pcie[key]})
    for way, key, signal in (("RX", "rx", "receive"), ("TX", "tx", "transmit")):
        rate = pcie[f"{key}_throughput_kbps"]
        gpu.tell(
            f"GetPcieThroughput:{way}", rate, **{f"pcie_{signal}_bytes_per_second": rate * 1000}
        )
    for kind, key in (("CORRECTED", "single_bit"), ("UNCORRECTED", "double_bit")):
        count = errors[key]["total"]
        gpu.tell(f"GetTotalEccErrors:{kind}", count, **{f"ecc_{kind.lower()}_total": count})
    numbers = [
        rows["correctable"],
        rows["uncorrectable"],
        int(rows["pending"]),
        int(rows["failure_occurred"]),
    ]
    gpu.tell(
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
    gpu.tell("GetComputeRunningProcesses", listed, processes_count=len(processes))


def together(lines: list[str], gpus: list[Gpu]) -> Told:
    return Told(
        [*lines, *(line for gpu in gpus for line in gpu.lines)],
        [gpu.entry for gpu in gpus],
        [gpu.values for gpu in gpus],
    )
