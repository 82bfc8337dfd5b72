"""HLML through `pyhlml`: one guarded call per value; a device that is lost is not asked again."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from clusterprof.collectors.hlml.where import INSTALL
from clusterprof.errors import Unavailable

Mark = Callable[[int, str], None]
Value = int | float | Unavailable
LIBRARY = -1
_SECOND_NS = 1_000_000_000
_RESET = "look at the kernel's log; the device needs a reset or the node a reboot"
# Names and not numbers: the binding has numbered them anew.
_ERRORS = {
    "HLML_ERROR_UNINITIALIZED": Unavailable("absent", "libhlml.so was not found", INSTALL),
    # What the binding says of a function that an older library does not have.
    "HLML_ERROR_INVALID_ARGUMENT": Unavailable("absent", "not known to this version of HLML"),
    "HLML_ERROR_NOT_SUPPORTED": Unavailable("absent", "not supported by this Gaudi or driver"),
    "HLML_ERROR_NOT_FOUND": Unavailable("absent", "HLML: not found"),
    "HLML_ERROR_DRIVER_NOT_LOADED": Unavailable(
        "absent", "the habanalabs driver is not loaded", INSTALL
    ),
    "HLML_ERROR_TIMEOUT": Unavailable("failed", "HLML: timed out"),
    "HLML_ERROR_AIP_IS_LOST": Unavailable("failed", "the Gaudi is lost", _RESET),
    "HLML_ERROR_NO_DATA": Unavailable("failed", "HLML: no data"),
    "HLML_ERROR_UNKNOWN": Unavailable("failed", "HLML: unknown error", _RESET),
}
_FATAL = frozenset({"HLML_ERROR_AIP_IS_LOST", "HLML_ERROR_UNKNOWN"})
_AIP, _SOC, _CORRECTED, _UNCORRECTED, _VOLATILE = 0, 0, 0, 1, 0
# HLML's reasons for lowered clocks, and the bits of NVML's mask that mean the same.
_THROTTLE = ((1 << 0, 0x4), (1 << 1, 0x20))  # power limit, temperature


class Call:
    """One call of HLML: its name, how often it is made, the signals it fills, how it is read."""

    __slots__ = ("every_ns", "name", "read", "signals")

    def __init__(
        self,
        name: str,
        every_ns: int,
        signals: tuple[str, ...],
        read: Callable[[Any, Any], tuple[int | float, ...]],
    ) -> None:
        self.name, self.every_ns, self.signals, self.read = name, every_ns, signals, read


def _utilisation(hlml: Any, handle: Any) -> tuple[float]:
    found = hlml.hlmlDeviceGetUtilizationRates(handle)
    percent = int(
        getattr(found, "aip", found)
    )  # a structure in newer bindings, a number in old ones
    if not 0 <= percent <= 100:
        raise ValueError(f"impossible value {percent} %")
    return (percent / 100,)


def _memory(hlml: Any, handle: Any) -> tuple[int, int]:
    info = hlml.hlmlDeviceGetMemoryInfo(handle)
    if not 0 <= info.used <= info.total:
        raise ValueError(f"impossible: {info.used} of {info.total} bytes")
    return (info.used, info.total)


def _throttle(hlml: Any, handle: Any) -> tuple[int]:
    found = hlml.hlmlDeviceGetCurrentClocksThrottleReasons(handle)
    return (sum(ours for theirs, ours in _THROTTLE if found & theirs),)


def _count(value: int) -> tuple[int]:
    if value < 0:
        raise ValueError(f"impossible count {value}")
    return (value,)


CALLS: tuple[Call, ...] = (
    Call("GetUtilizationRates", _SECOND_NS, ("gpu.power_utilisation_ratio",), _utilisation),
    Call("GetMemoryInfo", _SECOND_NS, ("gpu.memory_used_bytes", "gpu.memory_total_bytes"), _memory),
    Call("GetPowerUsage", _SECOND_NS, ("gpu.power_watts",),
         lambda n, h: (n.hlmlDeviceGetPowerUsage(h) / 1000,)),
    Call("GetPowerManagementDefaultLimit", 10 * _SECOND_NS, ("gpu.power_limit_watts",),
         lambda n, h: (n.hlmlDeviceGetPowerManagementDefaultLimit(h) / 1000,)),
    Call("GetTotalEnergyConsumption", _SECOND_NS, ("gpu.energy_joules_total",),
         lambda n, h: (n.hlmlDeviceGetTotalEnergyConsumption(h) / 1000,)),
    Call("GetTemperature", _SECOND_NS, ("gpu.temperature_celsius",),
         lambda n, h: (n.hlmlDeviceGetTemperature(h, _AIP),)),
    Call("GetClockInfo", _SECOND_NS, ("gpu.soc_clock_hertz",),
         lambda n, h: (n.hlmlDeviceGetClockInfo(h, _SOC) * 1_000_000,)),
    Call("GetMaxClockInfo", 10 * _SECOND_NS, ("gpu.soc_clock_max_hertz",),
         lambda n, h: (n.hlmlDeviceGetMaxClockInfo(h, _SOC) * 1_000_000,)),
    Call("GetCurrentClocksThrottleReasons", _SECOND_NS, ("gpu.throttle_bits",), _throttle),
    Call("GetPCIEReplayCounter", 10 * _SECOND_NS, ("gpu.pcie_replays_total",),
         lambda n, h: _count(n.hlmlDeviceGetPCIEReplayCounter(h))),
    Call("GetCurrPCIELinkGeneration", 10 * _SECOND_NS, ("gpu.pcie_generation_count",),
         lambda n, h: (n.hlmlDeviceGetCurrPCIELinkGeneration(h),)),
    Call("GetCurrPCIELinkWidth", 10 * _SECOND_NS, ("gpu.pcie_width_count",),
         lambda n, h: (n.hlmlDeviceGetCurrPCIELinkWidth(h),)),
    Call("GetTotalECCErrors:CORRECTED", 10 * _SECOND_NS, ("gpu.ecc_corrected_total",),
         lambda n, h: _count(n.hlmlDeviceGetTotalECCErrors(h, _CORRECTED, _VOLATILE))),
    Call("GetTotalECCErrors:UNCORRECTED", 10 * _SECOND_NS, ("gpu.ecc_uncorrected_total",),
         lambda n, h: _count(n.hlmlDeviceGetTotalECCErrors(h, _UNCORRECTED, _VOLATILE))),
)  # fmt: skip
SIGNALS: tuple[str, ...] = tuple(signal for call in CALLS for signal in call.signals)


class Library:
    """The Gaudis of a node; raises Unavailable if there are none or the binding is of no use."""

    signals = SIGNALS

    def __init__(
        self,
        mark: Mark,
        skip: Collection[int] = (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._hlml, self._mark, self._clock = load(), mark, clock
        self._opening = threading.Lock()
        self._call(LIBRARY, "Init", self._hlml.hlmlInit)
        count = self._call(LIBRARY, "GetCount", self._hlml.hlmlDeviceGetCount)
        if not count:
            raise Unavailable("absent", "the driver knows no Gaudi")
        driver = self._fact(LIBRARY, "hlmlGetDriverVersion")
        self._versions = {"driver": driver} if driver else {}
        self.devices: list[Device] = []
        self.inventory: list[dict[str, Any]] = []
        """id (UUID), vendor, name, index, module, pci_bus_id, memory_bytes, driver."""
        for index in range(count):
            device, entry = self._open(index, index in skip)
            self.devices.append(device)
            self.inventory.append(entry)

    def adopt(self, index: int) -> Device:
        """Open a device that was skipped, or open one anew, and return it."""
        self.devices[index], self.inventory[index] = self._open(index, False)
        return self.devices[index]

    def close(self) -> None:
        """Close HLML; errors no longer matter."""
        try:
            self._call(LIBRARY, "Shutdown", self._hlml.hlmlShutdown)
        except Unavailable:
            pass

    def _open(self, index: int, skip: bool) -> tuple[Device, dict[str, Any]]:
        entry: dict[str, Any] = {"id": f"gaudi-{index}", "vendor": "intel", "index": index}
        entry |= {"emulated": False, "tells_busy": False}
        handle, reason = None, None
        if skip:
            reason = Unavailable("failed", "not asked: it crashed the driver's library")
        else:
            try:
                handle = self._call(index, "GetHandleByIndex", lambda: self._handle(index))
                uuid = self._call(index, "GetUUID", lambda: self._hlml.hlmlDeviceGetUUID(handle))
                entry["id"] = _text(uuid) or entry["id"]
            except Unavailable as error:
                reason = error
        device = Device(self._hlml, index, handle, self._mark, self._clock)
        if reason is not None:
            device.fail(reason)
            return device, {**entry, **self._versions}
        for key, name in (("name", "hlmlDeviceGetName"), ("module", "hlmlDeviceGetModuleID")):
            fact = self._fact(index, name, handle)
            if fact is not None:
                entry[key] = fact
        pci = self._fact(index, "hlmlDeviceGetPCIInfo", handle)
        memory = self._fact(index, "hlmlDeviceGetMemoryInfo", handle)
        if pci is not None:
            entry["pci_bus_id"] = _text(pci.bus_id)
        if memory is not None:
            entry["memory_bytes"] = memory.total
        return device, {**entry, **self._versions}

    def _handle(self, index: int) -> Any:
        with self._opening:  # old bindings write every handle into one object
            handle = self._hlml.hlmlDeviceGetHandleByIndex(index)
            return ctypes.c_void_p(handle.value) if hasattr(handle, "value") else handle

    def _fact(self, index: int, name: str, *arguments: Any) -> Any:
        """Return a fact that may be missing: None when it cannot be had."""
        try:
            function = getattr(self._hlml, name)
            value = self._call(index, name.removeprefix("hlmlDevice"), lambda: function(*arguments))
        except (Unavailable, AttributeError):
            return None
        return _text(value) if isinstance(value, str | bytes) else value

    def _call(self, index: int, name: str, function: Callable[[], Any]) -> Any:
        self._mark(index, name)
        try:
            return function()
        except Exception as error:
            raise explain(self._hlml, error)[0] from error
        finally:
            self._mark(index, "")


class Device:
    """One Gaudi, read by one thread; `sample()` never raises."""

    def __init__(
        self, hlml: Any, index: int, handle: Any, mark: Mark, clock: Callable[[], int]
    ) -> None:
        self.index = index
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=64)
        """Events since somebody last took them: `device-lost`."""
        self._hlml, self._handle, self._mark, self._clock = hlml, handle, mark, clock
        self._lost: Unavailable | None = None
        self._due_ns = [0] * len(CALLS)
        self._values: list[tuple[Value, ...]] = [()] * len(CALLS)

    def sample(self) -> list[Value]:
        """Return one value per entry of `SIGNALS`, asking only what is due."""
        for number, call in enumerate(CALLS):
            # A little early rather than a tick late: who asks does so on a grid of its own.
            if self._lost is None and self._clock() >= self._due_ns[number] - _SECOND_NS // 10:
                self._ask(number, call)
        if self._lost is not None:
            return [self._lost] * len(SIGNALS)
        return [value for values in self._values for value in values]

    def fail(self, reason: Unavailable) -> None:
        """Never ask this device again; it could not even be opened."""
        self._lost = reason

    def _ask(self, number: int, call: Call) -> None:
        self._due_ns[number] = self._clock() + call.every_ns
        self._mark(self.index, call.name)
        try:
            self._values[number] = call.read(self._hlml, self._handle)
        except Exception as error:
            reason, fatal = explain(self._hlml, error)
            self._values[number] = (reason,) * len(call.signals)
            if fatal:
                self._lost = reason
                self.notes.append(("device-lost", {"message": reason.message, "call": call.name}))
        finally:
            self._mark(self.index, "")


def load() -> Any:
    """Import the binding; raises Unavailable when it is missing, or hides the library's errors."""
    try:
        import pyhlml
        import pyhlml.hlml_types
        import pyhlml.main
    except ImportError:
        message = "the Python package habana-pyhlml is missing"
        raise Unavailable("absent", message, "pip install habana-pyhlml") from None
    try:
        pyhlml.main.check_return(pyhlml.hlml_types.HLML_RETURN.HLML_ERROR_UNKNOWN)
    except Exception:
        return pyhlml
    message = "this habana-pyhlml hides errors behind zeros"
    raise Unavailable("absent", message, "pip install --upgrade habana-pyhlml")


def explain(hlml: Any, error: Exception) -> tuple[Unavailable, bool]:
    """Translate what a call raised into our words; True when the device must be left alone."""
    if isinstance(error, Unavailable):
        return error, False
    code = getattr(error, "value", None)
    if code is not None:
        for name, reason in _ERRORS.items():
            if getattr(hlml.hlml_types.HLML_RETURN, name, None) == code:
                return reason, name in _FATAL
        return Unavailable("failed", f"HLML: error {code}"), False
    if isinstance(error, AttributeError):
        message = "habana-pyhlml is too old for this value"
        return Unavailable("absent", message, "pip install --upgrade habana-pyhlml"), False
    return Unavailable("failed", f"HLML: {error}"), False


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
