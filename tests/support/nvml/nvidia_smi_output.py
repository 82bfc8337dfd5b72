"""Output of `nvidia-smi -q -x` as a scenario, with the expected values (nvml/inventories.py)."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from clusterprof.agent.collectors.gpu.nvml_queries import GPM_DRIVER_TOO_OLD
from tests.support.nvml.healthy import NO_PERIOD
from tests.support.nvml.inventories import NOT_SUPPORTED, ExpectedInventory, SimulatedGpu, combine

MIB = 1 << 20
BY_GPM = (
    "gpu.busy_ratio",
    "gpu.busy_ns_total",
    "gpu.sm_active_ratio",
    "gpu.sm_occupancy_ratio",
    "gpu.tensor_active_ratio",
    "gpu.memory_bandwidth_ratio",
)
"""What only GPM tells of an instance, here too old."""


def read_nvidia_smi(text: str) -> ExpectedInventory:
    """Read an output of `nvidia-smi -q -x`."""
    root = ElementTree.fromstring(text)
    driver, cuda = _get_text(root, "driver_version"), _get_text(root, "cuda_version")
    versions = {key: word for key, word in (("driver", driver), ("cuda", cuda)) if word}
    lines = [f"* GetCount = {len(root.findall('gpu'))}"]
    if driver:
        lines.append(f"* DriverVersion = {driver}")
    if cuda:
        major, minor = cuda.split(".")
        lines.append(f"* CudaVersion = {1000 * int(major) + 10 * int(minor)}")
    gpus, slices = [], []
    for index, printed in enumerate(root.findall("gpu")):
        uuid = _get_text(printed, "uuid")
        entry = {"id": uuid, "vendor": "nvidia", "index": index, "emulated": False, **versions}
        gpu = SimulatedGpu(str(index), entry)
        gpu.set_answer("GetUUID", uuid)
        _set_values(gpu, printed)
        gpu.values |= dict.fromkeys(
            ("gpu.retired_pages_count", "gpu.retirement_pending_count"), NOT_SUPPORTED
        )
        gpu.remove_links()
        gpus.append(gpu)
        if _get_text(printed, "mig_mode/current_mig") == "Enabled":
            _remove_mig_unknowns(gpu)
            devices = printed.findall("mig_devices/mig_device")
            gpu.set_answer("GetMaxMigDeviceCount", 7)
            slices += [_add_mig_instance(gpu, device, versions) for device in devices]
    for at, slice_ in enumerate(slices, len(gpus)):
        slice_.entry["index"] = at
    return combine(lines, [*gpus, *slices])


def _set_values(gpu: SimulatedGpu, document: Any) -> None:
    name, address = _get_text(document, "product_name"), document.get("id")
    gpu.set_answer("GetName", name, name=name)
    gpu.set_answer("GetPciInfo", address, pci_bus_id=address)
    for call, tag, keys in (
        ("GetMaxPcieLinkGeneration", "max_link_gen", ["pcie_generation_max"]),
        ("GetMaxPcieLinkWidth", "max_link_width", ["pcie_width_max"]),
        ("GetCurrPcieLinkGeneration", "current_link_gen", ["pcie_generation_count"]),
        ("GetCurrPcieLinkWidth", "current_link_width", ["pcie_width_count"]),
        ("GetPcieReplayCounter", "replay_counter", ["pcie_replays_total"]),
        ("GetTemperature", "gpu_temp", ["temperature_celsius"]),
    ):
        number = _get_number(document, f".//{tag}", "x", " C")
        gpu.set_answer(call, number, **dict.fromkeys(keys, number))
    for call, path, scale, key in (
        ("GetClockInfo:SM", "clocks/sm_clock", 1_000_000, "sm_clock_hertz"),
        ("GetMaxClockInfo:SM", "max_clocks/sm_clock", 1_000_000, "sm_clock_max_hertz"),
        ("GetClockInfo:MEM", "clocks/mem_clock", 1_000_000, "memory_clock_hertz"),
        ("GetPcieThroughput:RX", "pci/rx_util", 1000, "pcie_receive_bytes_per_second"),
        ("GetPcieThroughput:TX", "pci/tx_util", 1000, "pcie_transmit_bytes_per_second"),
    ):
        number = _get_number(document, path, " MHz", " KB/s")
        gpu.set_answer(call, number, **{key: (number or 0) * scale})
    _find_power(gpu, document)
    used = _get_number(document, "fb_memory_usage/used", " MiB")
    total = _get_number(document, "fb_memory_usage/total", " MiB")
    if used is not None and total is not None:
        gpu.set_answer(
            "GetMemoryInfo",
            f"{used * MIB} {total * MIB}",
            memory_bytes=total * MIB,
            memory_used_bytes=used * MIB,
            memory_total_bytes=total * MIB,
        )
    busy = _get_number(document, "utilization/gpu_util", " %")
    memory = _get_number(document, "utilization/memory_util", " %")
    if busy is not None and memory is not None:
        gpu.set_answer(
            "GetUtilizationRates",
            f"{busy} {memory}",
            busy_ratio=busy / 100,
            memory_busy_ratio=memory / 100,
            busy_ns_total=0,
            busy_until_ns=NO_PERIOD,
        )
    rows = [
        _get_text(document, f"remapped_rows/remapped_row_{name}")
        for name in ("corr", "unc", "pending", "failure")
    ]
    if None not in rows:
        numbers = [
            {"No": 0, "Yes": 1}.get(word) if word in ("No", "Yes") else int(word)
            for word in rows
            if word is not None
        ]
        gpu.set_answer(
            "GetRemappedRows",
            " ".join(map(str, numbers)),
            remapped_rows_corrected_count=numbers[0],
            remapped_rows_uncorrected_count=numbers[1],
            remap_pending_count=numbers[2],
            remap_failed_count=numbers[3],
        )
    for call, tag, key in (
        ("GetPersistenceMode", "persistence_mode", "persistence"),
        ("GetEccMode", "ecc_mode/current_ecc", "ecc"),
        ("GetMigMode", "mig_mode/current_mig", "mig"),
    ):
        word = _get_text(document, tag)
        if word is not None:
            on = word == "Enabled"
            gpu.set_answer(call, f"{int(on)} {int(on)}", **{key: on})


def _find_power(gpu: SimulatedGpu, document: Any) -> None:
    """Find the power: versions of the format have two names for it."""
    for call, tags, key in (
        ("GetPowerUsage", ["power_draw"], "power_watts"),
        (
            "GetEnforcedPowerLimit",
            ["enforced_power_limit", "current_power_limit"],
            "power_limit_watts",
        ),
        ("GetPowerManagementDefaultLimit", ["default_power_limit"], "power_limit_default_watts"),
        ("GetPowerManagementLimitConstraints", ["max_power_limit"], "power_limit_max_watts"),
    ):
        paths = [
            f"{group}/{tag}" for group in ("gpu_power_readings", "power_readings") for tag in tags
        ]
        word = next((word for path in paths if (word := _get_text(document, path))), None)
        if word is not None:
            watts = float(word.removesuffix(" W"))
            both = "0 " if call.endswith("Constraints") else ""
            gpu.set_answer(call, f"{both}{round(watts * 1000)}", **{key: watts})


def _remove_mig_unknowns(gpu: SimulatedGpu) -> None:
    """Remove the values that NVML does not give for a GPU in MIG mode."""
    gpu.entry["tells_busy"] = False
    for signal in ("busy_ratio", "busy_ns_total", "busy_until_ns", "memory_busy_ratio"):
        del gpu.values[f"gpu.{signal}"]
    del gpu.values["gpu.sm_active_ratio"]


def _add_mig_instance(gpu: SimulatedGpu, document: Any, versions: dict[str, str]) -> SimulatedGpu:
    """Add one MIG instance; nvidia-smi does not print its UUID here, which is made up."""
    position = _get_number(document, "index")
    uuid = f"MIG-{position}"
    entry = {
        "id": uuid,
        "uuid": f"GPU-{position}",
        "vendor": "nvidia",
        "emulated": False,
        "parent": gpu.entry["id"],
        "pci_bus_id": gpu.entry["pci_bus_id"],
        "tells_busy": False,
        **versions,
    }
    item = SimulatedGpu(f"{gpu.name}/{position}", entry)
    item.values = {
        "gpu.processes_count": NOT_SUPPORTED,
        **dict.fromkeys(BY_GPM, GPM_DRIVER_TOO_OLD),
    }
    item.set_answer("GetUUID", uuid)
    for call, tag, key in (
        ("GetGpuInstanceId", "gpu_instance_id", "gpu_instance"),
        ("GetComputeInstanceId", "compute_instance_id", "compute_instance"),
        ("GetAttributes", ".//multiprocessor_count", "sm_count"),
    ):
        number = _get_number(document, tag)
        item.set_answer(call, number, **{key: number})
    used = _get_number(document, "fb_memory_usage/used", " MiB")
    total = _get_number(document, "fb_memory_usage/total", " MiB")
    assert used is not None and total is not None
    item.set_answer("GetMemoryInfo", f"{used * MIB} {total * MIB}", memory_bytes=total * MIB)
    item.values |= {"gpu.memory_used_bytes": used * MIB, "gpu.memory_total_bytes": total * MIB}
    return item


def _get_text(document: Any, path: str) -> str | None:
    text = document.findtext(path)
    word = None if text is None else text.strip()
    return None if word in (None, "", "N/A") else word


def _get_number(document: Any, path: str, *units: str) -> int | None:
    word = _get_text(document, path)
    for unit in units:
        word = None if word is None else word.removesuffix(unit)
    return None if word is None else int(word)
