"""Open NVML with its devices and their facts.

One GPU or MIG instance: each value is guarded separately, each call made when due.

Constant facts about a GPU for the header.

A fact that NVML does not report is omitted. `numa_node` and `cpus` are what NVML calls
the ideal memory and processors of a GPU: those of its PCIe slot.

MIG: partitioned GPUs and their compute instances.

A process sees a compute instance as its device; the UUID ("MIG-…") identifies it.
Memory and processes are its own; clocks, power, temperature, links and errors are those
of the whole GPU.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlMultiInstanceGPU.html

NVML does not report the utilization of a GPU in MIG mode or of its instances. GPM does
since Hopper, for a *GPU instance*, in shares of that instance (as DCGM interprets it).
Where several compute instances share one GPU instance the value belongs to none of
them. Before driver 550 GPM is not used in MIG mode: users report that memory could no
longer be read afterwards.

NVML, the NVIDIA driver's own library: the calls, their intervals, their errors.

https://docs.nvidia.com/deploy/nvml-api/. There is one guarded call per value or pair of values that
NVML returns together, so that a failing call affects nothing else. Every call is timed: a call that
mostly takes more than 5 ms is made ten times less often, until three in a row are quick again. In
between, its last value is repeated, at most for its own period; after an error nothing is repeated.
A GPU that is lost, needs a reset or returns "unknown error" is not used again until NVML is
reopened, because further calls crash drivers.

`agent.collectors.gpu.nvml_queries` has the calls of each device, counters (GPM), links and
memory; `agent.collectors.gpu.nvml_library` has the devices, MIG instances and header facts.

These modules run in the helper process and stay small (15 MB with the driver's
library): no dataclasses, no signals, no `pynvml` before
`load_pynvml`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from clusterprof.agent.collectors.gpu import nvml_counters, nvml_queries
from clusterprof.agent.collectors.gpu.nvml_counters import Gpm, Value
from clusterprof.agent.collectors.gpu.nvml_errors import FATAL_CODES, explain_error, load_pynvml
from clusterprof.agent.collectors.gpu.nvml_queries import CALLS, SIGNALS, DeviceState, NvmlCall
from clusterprof.errors import Unavailable
from clusterprof.units import SECOND_NS

Mark = Callable[[int, str], None]
"""Called with (device index, call name) before every call and with an empty name after it."""

_SLOW_CALL_NS = 5_000_000
_SLOWDOWN_FACTOR = 10
_MIN_CALLS = 3
"""Number of calls before one is judged."""


class NvmlDevice:
    """One GPU, read by one thread; `sample()` never raises."""

    def __init__(
        self,
        nvml: Any,
        index: int,
        handle: Any,
        mark: Mark,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.index = index
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=64)
        """Events since the list was last cleared: `device-lost`, `call-slowed` (median_ns:
        0 once it is quick again), `device-processes` (held: [pid, bytes], whenever the list
        differs from the previous one).
        """
        self._nvml, self._handle, self._mark, self._clock = nvml, handle, mark, clock
        self._lost: Unavailable | None = None
        self._memory = DeviceState(clock, self.notes)
        self._states = [_CallState(call) for call in CALLS]
        self.signals = SIGNALS
        """Names of its values."""

    def set_calls(
        self,
        calls: Sequence[NvmlCall],
        gpm: Gpm | Unavailable,
        max_rates: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        """Set the calls to make.

        gpm: its counters, or why there are none.
        max_rates: see `compute_max_link_rates`.
        """
        self._memory.gpm, self._memory.max_rates = gpm, max_rates
        self._states = [_CallState(call) for call in calls]
        self.signals = tuple(signal for call in calls for signal in call.signals)

    def sample(self) -> list[Value]:
        """Return one value per signal, making only the calls that are due."""
        now_ns = self._clock()
        for state in self._states:
            if now_ns >= state.due_ns and self._lost is None:
                self._ask(state)
        if self._lost is not None:
            return [self._lost] * len(self.signals)
        return [value for state in self._states for value in state.values]

    def fail(self, reason: Unavailable) -> None:
        """Mark the device as lost because it could not be opened."""
        self._lost = reason

    def _ask(self, state: _CallState) -> None:
        call = state.call
        began_ns = self._clock()
        self._mark(self.index, call.name)
        try:
            state.values = call.read(self._nvml, self._handle, self._memory)
        except Exception as error:
            reason = explain_error(self._nvml, error)
            state.values = (reason,) * len(call.signals)
            if getattr(error, "value", 0) in FATAL_CODES:
                self._lost = reason
                self.notes.append(("device-lost", {"message": reason.message, "call": call.name}))
        finally:
            self._mark(self.index, "")
        median_ns = state.record_duration(began_ns, self._clock())
        if median_ns is not None:
            self.notes.append(("call-slowed", {"call": call.name, "median_ns": median_ns}))


class _CallState:
    """Due time, last values and durations of a call."""

    __slots__ = ("_durations", "call", "due_ns", "every_ns", "values")

    def __init__(self, call: NvmlCall) -> None:
        self.call = call
        self.every_ns = call.every_ns
        self.due_ns = 0
        self.values: tuple[Value, ...] = ()
        self._durations: deque[int] = deque(maxlen=9)

    def record_duration(self, began_ns: int, ended_ns: int) -> int | None:
        """Schedule the next call.

        Returns the median in ns if the call just became slow, 0 if it became quick, else None.
        """
        took_ns = ended_ns - began_ns
        self._durations.append(took_ns)
        is_slow = self.every_ns != self.call.every_ns
        change = None
        if is_slow and max(list(self._durations)[-_MIN_CALLS:]) <= _SLOW_CALL_NS:
            self.every_ns, change = self.call.every_ns, 0
        elif not is_slow and took_ns > _SLOW_CALL_NS and len(self._durations) >= _MIN_CALLS:
            in_order = sorted(self._durations)
            # On a node short of CPUs many calls take long, but not the quickest ones.
            if in_order[len(in_order) // 4] > _SLOW_CALL_NS:
                self.every_ns = _SLOWDOWN_FACTOR * max(self.call.every_ns, SECOND_NS // 10)
                change = in_order[len(in_order) // 2]
        # The quickest shows what the call costs; the others also waited for a processor.
        cost_ns = min(self._durations) if len(self._durations) >= _MIN_CALLS else 0
        self.due_ns = began_ns + max(self.every_ns, round(cost_ns / self.call.max_load_ratio))
        return change


_CPU_WORDS = 128  # 8,192 processors
_NODE_WORDS = 16
_WORD_BITS = 64
_MEMORY_SCOPE = 0  # NVML_AFFINITY_SCOPE_NODE
_NVLINK_SPEED = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: of a link, one way
_LANE_BYTES = {
    1: 250_000_000,
    2: 500_000_000,
    3: 984_615_385,
    4: 1_969_230_769,
    5: 3_938_461_538,
    6: 7_563_025_210,
    7: 15_126_050_420,
}
"""Bytes per second of a PCIe lane in one direction, by generation, net of its line code."""
_RATE_TOLERANCE = 1.05


class GuardedCalls:
    """Calls for one device that may fail individually; after a fatal error none is made."""

    def __init__(self, nvml: Any, mark: Callable[[str], None]) -> None:
        """Set up the calls.

        mark: called with the name of every call before it, and with "" after it.
        """
        self.nvml, self._mark = nvml, mark
        self.fatal_reason: Unavailable | None = None
        """Why the device must not be used again."""
        self.last_reason: Unavailable | None = None
        """Why the last call returned None."""

    def call_device(self, name: str, *arguments: Any) -> Any:
        """Return the result of `nvmlDevice<name>`, None when it fails."""

        def call() -> Any:
            return getattr(self.nvml, f"nvmlDevice{name}")(*arguments)

        return self.call(name, call)

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Return the result of a function, None when it raises."""
        if self.fatal_reason is not None:
            return None
        self.last_reason = None
        self._mark(name)
        try:
            value = function()
        except Exception as error:
            self.last_reason = explain_error(self.nvml, error)
            if getattr(error, "value", 0) in FATAL_CODES:
                self.fatal_reason = self.last_reason
            return None
        finally:
            self._mark("")
        return decode_text(value) if isinstance(value, str | bytes) else value


def describe_gpu(asking: GuardedCalls, handle: Any) -> dict[str, Any]:
    """Return the known facts of a GPU."""
    ask, nvml = asking.call_device, asking.nvml
    pci, memory = ask("GetPciInfo", handle), ask("GetMemoryInfo", handle)
    mig, ecc = ask("GetMigMode", handle), ask("GetEccMode", handle)
    persistence = ask("GetPersistenceMode", handle)
    limits = ask("GetPowerManagementLimitConstraints", handle)
    usual = ask("GetPowerManagementDefaultLimit", handle)
    links = asking.call("GetNvLinkState", lambda: nvml_counters.read_nvlink_states(nvml, handle))
    if asking.last_reason == nvml_counters.NO_LINKS:
        links = []
    speed = asking.call("GetFieldValues", lambda: _read_link_speed(nvml, handle)) if links else None
    capability = ask("GetCudaComputeCapability", handle)
    nodes = _list_set_bits(ask("GetMemoryAffinity", handle, _NODE_WORDS, _MEMORY_SCOPE))
    facts = {
        "name": ask("GetName", handle),
        "pci_bus_id": None if pci is None else decode_text(pci.busId),
        "memory_bytes": None if memory is None else memory.total,
        "compute_capability": None if capability is None else ".".join(map(str, capability)),
        "pcie_generation_max": ask("GetMaxPcieLinkGeneration", handle),
        "pcie_width_max": ask("GetMaxPcieLinkWidth", handle),
        "numa_node": nodes[0] if len(nodes) == 1 else None,
        "cpus": format_cpu_list(_list_set_bits(ask("GetCpuAffinity", handle, _CPU_WORDS))) or None,
        "power_limit_default_watts": None if usual is None else usual / 1000,
        "power_limit_max_watts": None if limits is None else limits[1] / 1000,
        "persistence": None if persistence is None else bool(persistence),
        "ecc": None if ecc is None else bool(ecc[0]),
        "mig": None if mig is None else bool(mig[0]),
        "nvlink_count": None if links is None else len(links),
        "nvlink_bytes_per_second": None if speed is None else speed * len(links),
    }
    return {key: value for key, value in facts.items() if value is not None}


def compute_max_link_rates(entry: dict[str, Any]) -> tuple[float, float]:
    """Return upper bounds of PCIe and NVLink rates, in bytes per second and direction."""
    lane = _LANE_BYTES.get(entry.get("pcie_generation_max", 0), math.inf)
    pcie = lane * entry.get("pcie_width_max", math.inf)
    return _RATE_TOLERANCE * pcie, _RATE_TOLERANCE * entry.get("nvlink_bytes_per_second", math.inf)


def _read_link_speed(nvml: Any, handle: Any) -> int | None:
    """Return the bytes per second of an NVLink in one direction."""
    (speed,) = nvml_counters.read_fields(nvml, handle, ((_NVLINK_SPEED, 0),))
    return None if isinstance(speed, Unavailable) or not speed else int(speed) * 1_000_000


def format_cpu_list(numbers: Iterable[int]) -> str:
    """Format ascending numbers like the kernel's CPU lists: 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def decode_text(value: str | bytes) -> str:
    """Decode a value that the binding returned as bytes or text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _list_set_bits(words: Any) -> list[int]:
    """Return the indices of the set bits in an array of 64-bit words."""
    if words is None:
        return []
    return [
        word_index * _WORD_BITS + bit
        for word_index, word in enumerate(words)
        for bit in range(_WORD_BITS)
        if word >> bit & 1
    ]


MIN_GPM_DRIVER = 550


class MigInstance(NamedTuple):
    """A compute instance of a GPU."""

    parent: int
    """Index of the GPU."""
    position: int
    """Index under which NVML lists its handle."""
    gpu_instance: int | None
    compute_instance: int | None


def list_instances(asking: GuardedCalls, gpu: Any) -> list[tuple[int, Any]]:
    """Return (position, handle) of the instances of a GPU that this process may see."""
    max_count = asking.call_device("GetMaxMigDeviceCount", gpu) or 0
    instances = [
        (position, asking.call_device("GetMigDeviceHandleByIndex", gpu, position))
        for position in range(max_count)
    ]
    # most positions are unused
    return [(position, handle) for position, handle in instances if handle is not None]


def read_instance(asking: GuardedCalls, handle: Any, parent: int, position: int) -> MigInstance:
    """Read the GPU instance and compute instance numbers of an instance."""
    gpu_instance, compute_instance = (
        asking.call_device(f"Get{kind}InstanceId", handle) for kind in ("Gpu", "Compute")
    )
    return MigInstance(parent, position, gpu_instance, compute_instance)


def describe_instance(
    asking: GuardedCalls, handle: Any, instance: MigInstance, parent: dict[str, Any]
) -> dict[str, Any]:
    """Return the known facts of an instance: its own, and its location."""
    name = asking.call_device("GetName", handle)
    memory = asking.call_device("GetMemoryInfo", handle)
    attributes = asking.call_device("GetAttributes", handle)
    facts = {
        "name": name,
        "parent": parent["id"],
        "gpu_instance": instance.gpu_instance,
        "compute_instance": instance.compute_instance,
        "memory_bytes": None if memory is None else memory.total,
        "sm_count": None if attributes is None else attributes.multiprocessorCount,
        **{key: parent.get(key) for key in ("pci_bus_id", "numa_node", "cpus")},
    }
    return {key: value for key, value in facts.items() if value is not None}


def build_torch_name(uuid: str) -> str:
    """Return the name that the probe uses: PyTorch reports the UUID without its prefix."""
    return "GPU-" + decode_text(uuid).removeprefix("MIG-")


def can_use_gpm(driver: str) -> bool:
    """Return whether GPM may be used in MIG mode with this driver version."""
    major = driver.partition(".")[0]
    return major.isdecimal() and int(major) >= MIN_GPM_DRIVER


LIBRARY_INDEX = -1
"""Index that represents the library itself in a `Mark`."""
_CRASHED = Unavailable("failed", "not read: it crashed the driver's library")


class NvmlLibrary:
    """The devices of a node and their known facts.

    GPUs come first, in NVML's order, then the instances of those in MIG mode. A device that
    cannot be opened is included, with the reason in place of every value. Devices in `skip`
    (they crashed the process before) are not touched; instances of a skipped GPU are not
    listed.
    Raises: Unavailable if there are no devices.
    """

    signals = SIGNALS

    def __init__(
        self,
        mark: Mark,
        skip: Collection[int] = (),
        clock: Callable[[], int] = time.monotonic_ns,
        pause: Callable[[float], None] = time.sleep,
        gpm: str = "auto",
    ) -> None:
        self._nvml, self._mark, self._clock, self._pause = load_pynvml(), mark, clock, pause
        self._gpm = gpm
        self.devices: list[NvmlDevice] = []
        self.inventory: list[dict[str, Any]] = []
        """Per device: id (UUID), vendor, index, versions, and the known facts."""
        self._handles: list[Any] = []
        self._instances: dict[int, MigInstance] = {}
        self._call("Init", self._nvml.nvmlInit)
        count = self._call("GetCount", self._nvml.nvmlDeviceGetCount)
        if not count:
            raise Unavailable("absent", "the driver lists no NVIDIA GPU", "")
        self._versions = self._find_versions()
        for index in range(count):
            self._add(*self._open_gpu(index, index in skip))
        partitioned = [
            gpu_index
            for gpu_index in range(count)
            if self.inventory[gpu_index].get("mig") and gpu_index not in skip
        ]
        instances = [
            (gpu_index, *pair)
            for gpu_index in partitioned
            for pair in list_instances(self._guard_calls(gpu_index), self._handles[gpu_index])
        ]
        for index, (gpu_index, position, handle) in enumerate(instances, count):
            self._instances[index] = (
                MigInstance(gpu_index, position, None, None)
                if index in skip
                else read_instance(self._guard_calls(index), handle, gpu_index, position)
            )
        for index, (_, _, handle) in enumerate(instances, count):
            self._add(*self._open_instance(index, handle, skip))

    def adopt(self, index: int) -> NvmlDevice:
        """Open a device that was skipped, or reopen one, and return it."""
        if index in self._instances:
            instance = self._instances[index]
            calls = self._guard_calls(index)
            gpu = self._handles[instance.parent]
            handle = calls.call_device("GetMigDeviceHandleByIndex", gpu, instance.position)
            self._instances[index] = read_instance(
                calls, handle, instance.parent, instance.position
            )
            opened = self._open_instance(index, handle, ())
        else:
            opened = self._open_gpu(index, False)
        self.devices[index], self.inventory[index], self._handles[index] = opened
        return self.devices[index]

    def close(self) -> None:
        """Close NVML and ignore errors."""
        try:
            self._call("Shutdown", self._nvml.nvmlShutdown)
        except Unavailable:
            pass

    def _add(self, device: NvmlDevice, entry: dict[str, Any], handle: Any) -> None:
        self.devices.append(device)
        self.inventory.append(entry)
        self._handles.append(handle)

    def _open_gpu(self, index: int, skip: bool) -> tuple[NvmlDevice, dict[str, Any], Any]:
        entry = self._build_entry(index)
        handle, calls = None, self._guard_calls(index)
        reason: Unavailable | None = _CRASHED
        if not skip:
            try:
                by_index = self._nvml.nvmlDeviceGetHandleByIndex
                handle = self._call("GetHandleByIndex", lambda: by_index(index), index)
                uuid = self._nvml.nvmlDeviceGetUUID
                entry["id"] = decode_text(self._call("GetUUID", lambda: uuid(handle), index))
                entry.update(describe_gpu(calls, handle))
                reason = calls.fatal_reason
            except Unavailable as error:
                reason = error
        device = NvmlDevice(self._nvml, index, handle, self._mark, self._clock)
        if reason is not None:
            device.fail(reason)
        elif entry.get("mig"):
            entry["tells_busy"] = False  # no process runs on the whole GPU
            device.set_calls(
                nvml_queries.plan_partitioned_gpu_calls(entry),
                nvml_counters.GPM_UNSUPPORTED,
                compute_max_link_rates(entry),
            )
        else:
            wanted = (nvml_counters.GRAPHICS, *nvml_queries.list_gpm_metrics(entry))
            counters = self._open_gpm(calls, handle, wanted)
            device.set_calls(
                nvml_queries.plan_gpu_calls(entry, counters),
                counters,
                compute_max_link_rates(entry),
            )
            if calls.fatal_reason is not None:
                device.fail(calls.fatal_reason)
        return device, entry, handle

    def _open_instance(
        self, index: int, handle: Any, skip: Collection[int]
    ) -> tuple[NvmlDevice, dict[str, Any], Any]:
        instance, entry, calls = (
            self._instances[index],
            self._build_entry(index),
            self._guard_calls(index),
        )
        parent = self.inventory[instance.parent]
        entry["id"] = f"{parent['id']}/{instance.position}"
        device = NvmlDevice(self._nvml, index, handle, self._mark, self._clock)
        device.set_calls(nvml_queries.plan_instance_calls(False), nvml_counters.GPM_UNSUPPORTED)
        if index in skip or handle is None:
            device.fail(_CRASHED if index in skip else nvml_queries.INSTANCE_GONE)
            return device, entry, handle
        uuid = calls.call_device("GetUUID", handle)
        if uuid is not None:
            entry["id"], entry["uuid"] = uuid, build_torch_name(uuid)
        entry.update(describe_instance(calls, handle, instance, parent))
        counters = self._open_instance_gpm(calls, instance)
        has_gpm = isinstance(counters, Gpm)
        if not has_gpm:
            entry["tells_busy"] = False
        device.set_calls(nvml_queries.plan_instance_calls(has_gpm), counters)
        if calls.fatal_reason is not None:
            device.fail(calls.fatal_reason)
        return device, entry, handle

    def _open_gpm(
        self, calls: GuardedCalls, handle: Any, metrics: tuple[int, ...]
    ) -> Gpm | Unavailable:
        """Return the GPM counters of a GPU, or why there are none."""
        nvml = self._nvml

        def take(sample: Any) -> Any:
            return nvml.nvmlGpmSampleGet(handle, sample)

        return self._open_counters(calls, handle, take, metrics)

    def _open_instance_gpm(self, calls: GuardedCalls, instance: MigInstance) -> Gpm | Unavailable:
        """Return the counters of the GPU instance if it has only this compute instance."""
        nvml, handle = self._nvml, self._handles[instance.parent]
        if not can_use_gpm(str(self._versions.get("driver", ""))):
            return nvml_queries.GPM_DRIVER_TOO_OLD
        gpu_instance = (instance.parent, instance.gpu_instance)
        sharing = sum((a.parent, a.gpu_instance) == gpu_instance for a in self._instances.values())
        if instance.gpu_instance is None or sharing > 1:
            return nvml_queries.INSTANCE_SHARED

        def take(sample: Any) -> Any:
            return nvml.nvmlGpmMigSampleGet(handle, instance.gpu_instance, sample)

        return self._open_counters(calls, handle, take, nvml_queries.INSTANCE_METRICS)

    def _open_counters(
        self, calls: GuardedCalls, gpu: Any, take: Callable[[Any], Any], metrics: tuple[int, ...]
    ) -> Gpm | Unavailable:
        if self._gpm == "off":
            return nvml_counters.GPM_OFF
        nvml = self._nvml
        support = calls.call("GpmQueryDeviceSupport", lambda: nvml.nvmlGpmQueryDeviceSupport(gpu))
        if support is None or not support.isSupportedDevice:
            return nvml_counters.GPM_UNSUPPORTED
        counters = Gpm(nvml, take, metrics, self._clock, self._pause)
        calls.call("GpmSampleGet", counters.begin)  # the first one also loads what it needs
        if calls.last_reason is not None or self._gpm != "auto":
            return calls.last_reason or counters
        return nvml_counters.time_readings(counters, calls.call, self._clock)

    def _build_entry(self, index: int) -> dict[str, Any]:
        """Build the header fields that every device has."""
        entry: dict[str, Any] = {"id": f"nvidia-{index}", "vendor": "nvidia", "index": index}
        return {**entry, "emulated": False, **self._versions}

    def _find_versions(self) -> dict[str, str]:
        calls = self._guard_calls(LIBRARY_INDEX)
        nvml = self._nvml
        cuda = calls.call("CudaVersion", lambda: nvml.nvmlSystemGetCudaDriverVersion())
        versions = {
            "driver": calls.call("DriverVersion", lambda: nvml.nvmlSystemGetDriverVersion()),
            "nvml": calls.call("NVMLVersion", lambda: nvml.nvmlSystemGetNVMLVersion()),
            "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
        return {key: value for key, value in versions.items() if value is not None}

    def _guard_calls(self, index: int) -> GuardedCalls:
        return GuardedCalls(self._nvml, lambda name: self._mark(index, name))

    def _call(self, name: str, function: Callable[[], Any], index: int = LIBRARY_INDEX) -> Any:
        self._mark(index, name)
        try:
            return function()
        except Exception as error:
            raise explain_error(self._nvml, error) from error
        finally:
            self._mark(index, "")
