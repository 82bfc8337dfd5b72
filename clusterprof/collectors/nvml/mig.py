"""MIG: GPUs that are split up, and their compute instances.

A compute instance is what a process sees as its device; its UUID ("MIG-…") is its identity. Its
memory and processes are its own; clocks, power, heat, links and errors are told of the whole GPU.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlMultiInstanceGPU.html

NVML does not tell the utilisation of a GPU in MIG mode or of its instances. GPM does, from Hopper
on: of a *GPU instance*, in shares of that instance (DCGM takes it so, too). Where several compute
instances share one GPU instance it is nobody's. Before driver 550 GPM is not used in MIG mode:
users report that memory cannot be read any more once it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from clusterprof.collectors.nvml.facts import Asking, text

GPM_SINCE_DRIVER = 550


class Instance(NamedTuple):
    """A compute instance of a GPU."""

    parent: int
    """Index of the GPU."""
    position: int
    """Number under which NVML has its handle."""
    gpu_instance: int | None
    compute_instance: int | None


def handles(asking: Asking, gpu: Any) -> list[tuple[int, Any]]:
    """Return (position, handle) of the instances of a GPU that this process may see."""
    most = asking.ask("GetMaxMigDeviceCount", gpu) or 0
    found = [(at, asking.ask("GetMigDeviceHandleByIndex", gpu, at)) for at in range(most)]
    return [(at, handle) for at, handle in found if handle is not None]  # most are not in use


def identify(asking: Asking, handle: Any, parent: int, position: int) -> Instance:
    """Return the numbers of an instance."""
    gpu_instance, compute_instance = (
        asking.ask(f"Get{kind}InstanceId", handle) for kind in ("Gpu", "Compute")
    )
    return Instance(parent, position, gpu_instance, compute_instance)


def describe(asking: Asking, handle: Any, one: Instance, parent: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of an instance: what is its own, and where it is."""
    name = asking.ask("GetName", handle)
    memory = asking.ask("GetMemoryInfo", handle)
    attributes = asking.ask("GetAttributes", handle)
    known = {
        "name": name,
        "parent": parent["id"],
        "gpu_instance": one.gpu_instance,
        "compute_instance": one.compute_instance,
        "memory_bytes": None if memory is None else memory.total,
        "sm_count": None if attributes is None else attributes.multiprocessorCount,
        **{key: parent.get(key) for key in ("pci_bus_id", "numa_node", "cpus")},
    }
    return {key: value for key, value in known.items() if value is not None}


def torch_name(uuid: str) -> str:
    """Return what the probe calls an instance: PyTorch has the UUID without its prefix."""
    return "GPU-" + text(uuid).removeprefix("MIG-")


def gpm_allowed(driver: str) -> bool:
    """True when GPM may be used beside MIG with this version of the driver."""
    major = driver.partition(".")[0]
    return major.isdecimal() and int(major) >= GPM_SINCE_DRIVER
