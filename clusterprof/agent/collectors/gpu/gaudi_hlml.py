"""Whether this node may have a Gaudi, determined without starting anything.

Gaudi through `hl-smi`, run every few seconds.

    $ hl-smi -Q index,uuid,name,bus_id,…,power.draw -f csv,noheader,nounits
    0, 01P0-HL3080A0-15-TNBS32-09-07-08, HL-325L, 0000:33:00.0, …, 225

Memory is in MiB, power in watts, temperatures in °C (System Management Interface Tool,
Intel Gaudi documentation). Units are accepted where a version prints them; a cell
without a number is a reason.

HLML through `pyhlml`: one guarded call per value; a lost device is not used again.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from clusterprof.agent.linux.reader_threads import LatestRows, PollingThread, RowReader, Value
from clusterprof.agent.linux.vendor_tools import find_program, run_tool
from clusterprof.errors import Unavailable
from clusterprof.units import SECOND_NS

HL_SMI = "hl-smi"
INSTALL = "install the Intel Gaudi driver and habanalabs-thunk, or run the container with it"
_DRIVER_PATHS = ("/sys/module/habanalabs", "/dev/hl0", "/usr/lib/habanalabs/libhlml.so")


def explain_absence(
    environ: Mapping[str, str], driver_paths: Sequence[str] = _DRIVER_PATHS
) -> Unavailable | None:
    """Return why this node has no Gaudi; None when it may have one."""
    if any(os.path.exists(path) for path in driver_paths) or find_program(HL_SMI, environ):
        return None
    return Unavailable("absent", "no Gaudi: neither its driver nor hl-smi was found")


POLL_SECONDS, TIMEOUT_SECONDS = 5.0, 10.0
_SILENCE_LIMIT_NS = 20_000_000_000
_MIB = 1 << 20
_FACTS = ("index", "uuid", "name", "bus_id", "driver_version", "module_id")
_VALUES: tuple[tuple[str, str, Callable[[float], Value]], ...] = (
    ("utilization.aip", "gpu.power_utilisation_ratio", lambda value: _convert_percent(value)),
    ("memory.used", "gpu.memory_used_bytes", lambda value: int(value * _MIB)),
    ("memory.total", "gpu.memory_total_bytes", lambda value: int(value * _MIB)),
    ("power.draw", "gpu.power_watts", lambda value: value),
    ("temperature.aip", "gpu.temperature_celsius", lambda value: value),
)
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:%|MiB|MB|W|C|°C)?\s*", re.ASCII)
_MISSING_VALUES = ("", "n/a", "[n/a]", "not supported", "[not supported]")


class HlSmiLibrary:
    """The Gaudis that `hl-smi` lists.

    Raises: Unavailable when it lists none.
    """

    signals = tuple(signal for _, signal, _ in _VALUES)

    def __init__(self, every_seconds: float = POLL_SECONDS) -> None:
        path = find_program(HL_SMI, os.environ)
        if path is None:
            raise Unavailable("absent", "hl-smi was not found", INSTALL)
        columns = ",".join([*_FACTS, *(column for column, _, _ in _VALUES)])
        self._argv = [path, "-Q", columns, "-f", "csv,noheader,nounits"]
        rows = parse_hl_smi(run_tool(self._argv, TIMEOUT_SECONDS))
        self.inventory = [describe_device(facts) for facts, _ in rows]
        self._ids = [entry["id"] for entry in self.inventory]
        silence = Unavailable(
            "failed", f"hl-smi has printed nothing for {_SILENCE_LIMIT_NS // 10**9} s"
        )
        self._latest = LatestRows(len(self.signals), _SILENCE_LIMIT_NS, lambda: silence)
        self._latest.put([values for _, values in rows])
        self.devices = [RowReader(self._latest, index) for index in range(len(rows))]
        self._first, self._poller = True, PollingThread(self._latest, self._work, every_seconds)
        self._poller.start()

    def adopt(self, index: int) -> RowReader:
        """Return a device; none is ever skipped, because the tool is a separate process."""
        return self.devices[index]

    def close(self) -> None:
        """Stop the tool if it runs."""
        self._poller.stop()

    end_tools = close

    def _work(self, wanted: Callable[[], bool]) -> None:
        if self._first:  # the constructor has just read
            self._first = False
            return
        values_by_id = {
            describe_device(facts)["id"]: values for facts, values in parse_hl_smi(self._run())
        }
        missing = Unavailable("failed", "hl-smi no longer lists this Gaudi", "check the kernel log")
        self._latest.put(
            [values_by_id.get(id_, [missing] * len(self.signals)) for id_ in self._ids]
        )

    def _run(self) -> str:
        return run_tool(self._argv, TIMEOUT_SECONDS)


def parse_hl_smi(text: str) -> list[tuple[dict[str, str], list[Value]]]:
    """Parse (facts, one value per signal) of each device.

    Raises: Unavailable when there is no device.
    """
    rows = []
    width = len(_FACTS) + len(_VALUES)
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != width or not cells[0].isdigit():
            continue
        facts = dict(zip(_FACTS, cells))
        rows.append((facts, [_parse_value(*pair) for pair in zip(_VALUES, cells[len(_FACTS) :])]))
    if not rows:
        first = text.strip().partition("\n")[0][:100]
        raise Unavailable("failed", f"hl-smi printed no list of devices: {first!r}")
    return rows


def describe_device(facts: dict[str, str]) -> dict[str, Any]:
    """Build a device's header entry."""
    index = int(facts["index"])
    stated = {key: value for key, value in facts.items() if value.lower() not in _MISSING_VALUES}
    entry: dict[str, Any] = {"id": stated.get("uuid", f"gaudi-{index}"), "vendor": "intel"}
    entry |= {"index": index, "emulated": False, "tells_busy": False}
    for key, fact in (("name", "name"), ("pci_bus_id", "bus_id"), ("driver", "driver_version")):
        if fact in stated:
            entry[key] = stated[fact]
    if stated.get("module_id", "").isdigit():
        entry["module"] = int(stated["module_id"])
    return entry


def _parse_value(column_spec: Sequence[Any], cell: str) -> Value:
    column, _, convert = column_spec
    if cell.lower() in _MISSING_VALUES:
        return Unavailable("absent", f"hl-smi does not report {column}")
    match = _NUMBER.fullmatch(cell)
    if match is None:
        return Unavailable("failed", f"hl-smi reports {cell[:40]!r} for {column}")
    return convert(float(match[1]))  # type: ignore[no-any-return]


def _convert_percent(percent: float) -> Value:
    if percent > 100:
        return Unavailable("failed", f"hl-smi: impossible value {percent:g} %")
    return percent / 100


Mark = Callable[[int, str], None]
ValueBinding = int | float | Unavailable
LIBRARY = -1
_RESET_REMEDY = "check the kernel log; the device needs a reset or the node a reboot"
# Names, not numbers: the binding has renumbered them.
_ERRORS = {
    "HLML_ERROR_UNINITIALIZED": Unavailable("absent", "libhlml.so was not found", INSTALL),
    # The binding's answer for a function that an older library lacks.
    "HLML_ERROR_INVALID_ARGUMENT": Unavailable("absent", "not known to this version of HLML"),
    "HLML_ERROR_NOT_SUPPORTED": Unavailable("absent", "not supported by this Gaudi or driver"),
    "HLML_ERROR_NOT_FOUND": Unavailable("absent", "HLML: not found"),
    "HLML_ERROR_DRIVER_NOT_LOADED": Unavailable(
        "absent", "the habanalabs driver is not loaded", INSTALL
    ),
    "HLML_ERROR_TIMEOUT": Unavailable("failed", "HLML: timed out"),
    "HLML_ERROR_AIP_IS_LOST": Unavailable("failed", "the Gaudi is lost", _RESET_REMEDY),
    "HLML_ERROR_NO_DATA": Unavailable("failed", "HLML: no data"),
    "HLML_ERROR_UNKNOWN": Unavailable("failed", "HLML: unknown error", _RESET_REMEDY),
}
_FATAL_ERRORS = frozenset({"HLML_ERROR_AIP_IS_LOST", "HLML_ERROR_UNKNOWN"})
_AIP, _SOC, _CORRECTED, _UNCORRECTED, _VOLATILE = 0, 0, 0, 1, 0
# HLML's throttle reasons, and the corresponding bits of NVML's mask.
_THROTTLE_BITS = ((1 << 0, 0x4), (1 << 1, 0x20))  # power limit, temperature


class HlmlCall:
    """One call of HLML: its name, its interval, the signals it fills, and its reader function."""

    __slots__ = ("every_ns", "name", "read", "signals")

    def __init__(
        self,
        name: str,
        every_ns: int,
        signals: tuple[str, ...],
        read: Callable[[Any, Any], tuple[int | float, ...]],
    ) -> None:
        self.name, self.every_ns, self.signals, self.read = name, every_ns, signals, read


def _read_power_utilization(hlml: Any, handle: Any) -> tuple[float]:
    rates = hlml.hlmlDeviceGetUtilizationRates(handle)
    percent = int(
        getattr(rates, "aip", rates)
    )  # a structure in newer bindings, a number in old ones
    if not 0 <= percent <= 100:
        raise ValueError(f"impossible value {percent} %")
    return (percent / 100,)


def _read_memory(hlml: Any, handle: Any) -> tuple[int, int]:
    info = hlml.hlmlDeviceGetMemoryInfo(handle)
    if not 0 <= info.used <= info.total:
        raise ValueError(f"impossible: {info.used} of {info.total} bytes")
    return (info.used, info.total)


def _read_throttle_reasons(hlml: Any, handle: Any) -> tuple[int]:
    reasons = hlml.hlmlDeviceGetCurrentClocksThrottleReasons(handle)
    return (sum(reason_bit for hlml_bit, reason_bit in _THROTTLE_BITS if reasons & hlml_bit),)


def _check_count(value: int) -> tuple[int]:
    if value < 0:
        raise ValueError(f"impossible count {value}")
    return (value,)


CALLS: tuple[HlmlCall, ...] = (
    HlmlCall(
        "GetUtilizationRates", SECOND_NS, ("gpu.power_utilisation_ratio",), _read_power_utilization
    ),
    HlmlCall(
        "GetMemoryInfo",
        SECOND_NS,
        ("gpu.memory_used_bytes", "gpu.memory_total_bytes"),
        _read_memory,
    ),
    HlmlCall(
        "GetPowerUsage",
        SECOND_NS,
        ("gpu.power_watts",),
        lambda n, h: (n.hlmlDeviceGetPowerUsage(h) / 1000,),
    ),
    HlmlCall(
        "GetPowerManagementDefaultLimit",
        10 * SECOND_NS,
        ("gpu.power_limit_watts",),
        lambda n, h: (n.hlmlDeviceGetPowerManagementDefaultLimit(h) / 1000,),
    ),
    HlmlCall(
        "GetTotalEnergyConsumption",
        SECOND_NS,
        ("gpu.energy_joules_total",),
        lambda n, h: (n.hlmlDeviceGetTotalEnergyConsumption(h) / 1000,),
    ),
    HlmlCall(
        "GetTemperature",
        SECOND_NS,
        ("gpu.temperature_celsius",),
        lambda n, h: (n.hlmlDeviceGetTemperature(h, _AIP),),
    ),
    HlmlCall(
        "GetClockInfo",
        SECOND_NS,
        ("gpu.soc_clock_hertz",),
        lambda n, h: (n.hlmlDeviceGetClockInfo(h, _SOC) * 1_000_000,),
    ),
    HlmlCall(
        "GetMaxClockInfo",
        10 * SECOND_NS,
        ("gpu.soc_clock_max_hertz",),
        lambda n, h: (n.hlmlDeviceGetMaxClockInfo(h, _SOC) * 1_000_000,),
    ),
    HlmlCall(
        "GetCurrentClocksThrottleReasons", SECOND_NS, ("gpu.throttle_bits",), _read_throttle_reasons
    ),
    HlmlCall(
        "GetPCIEReplayCounter",
        10 * SECOND_NS,
        ("gpu.pcie_replays_total",),
        lambda n, h: _check_count(n.hlmlDeviceGetPCIEReplayCounter(h)),
    ),
    HlmlCall(
        "GetCurrPCIELinkGeneration",
        10 * SECOND_NS,
        ("gpu.pcie_generation_count",),
        lambda n, h: (n.hlmlDeviceGetCurrPCIELinkGeneration(h),),
    ),
    HlmlCall(
        "GetCurrPCIELinkWidth",
        10 * SECOND_NS,
        ("gpu.pcie_width_count",),
        lambda n, h: (n.hlmlDeviceGetCurrPCIELinkWidth(h),),
    ),
    HlmlCall(
        "GetTotalECCErrors:CORRECTED",
        10 * SECOND_NS,
        ("gpu.ecc_corrected_total",),
        lambda n, h: _check_count(n.hlmlDeviceGetTotalECCErrors(h, _CORRECTED, _VOLATILE)),
    ),
    HlmlCall(
        "GetTotalECCErrors:UNCORRECTED",
        10 * SECOND_NS,
        ("gpu.ecc_uncorrected_total",),
        lambda n, h: _check_count(n.hlmlDeviceGetTotalECCErrors(h, _UNCORRECTED, _VOLATILE)),
    ),
)
SIGNALS: tuple[str, ...] = tuple(signal for call in CALLS for signal in call.signals)


class HlmlLibrary:
    """The Gaudis of a node.

    Raises: Unavailable if there are none or the binding is unusable.
    """

    signals = SIGNALS

    def __init__(
        self, mark: Mark, skip: Collection[int] = (), clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._hlml, self._mark, self._clock = load_binding(), mark, clock
        self._opening = threading.Lock()
        self._call(LIBRARY, "Init", self._hlml.hlmlInit)
        count = self._call(LIBRARY, "GetCount", self._hlml.hlmlDeviceGetCount)
        if not count:
            raise Unavailable("absent", "the driver lists no Gaudi")
        driver = self._fact(LIBRARY, "hlmlGetDriverVersion")
        self._versions = {"driver": driver} if driver else {}
        self.devices: list[GaudiDevice] = []
        self.inventory: list[dict[str, Any]] = []
        """Per device: id (UUID), vendor, name, index, module, pci_bus_id, memory_bytes, driver."""
        for index in range(count):
            device, entry = self._open(index, index in skip)
            self.devices.append(device)
            self.inventory.append(entry)

    def adopt(self, index: int) -> GaudiDevice:
        """Open a device that was skipped, or reopen one, and return it."""
        self.devices[index], self.inventory[index] = self._open(index, False)
        return self.devices[index]

    def close(self) -> None:
        """Close HLML and ignore errors."""
        try:
            self._call(LIBRARY, "Shutdown", self._hlml.hlmlShutdown)
        except Unavailable:
            pass

    def _open(self, index: int, skip: bool) -> tuple[GaudiDevice, dict[str, Any]]:
        entry: dict[str, Any] = {"id": f"gaudi-{index}", "vendor": "intel", "index": index}
        entry |= {"emulated": False, "tells_busy": False}
        handle, reason = None, None
        if skip:
            reason = Unavailable("failed", "not read: it crashed the driver's library")
        else:
            try:
                handle = self._call(index, "GetHandleByIndex", lambda: self._handle(index))
                uuid = self._call(index, "GetUUID", lambda: self._hlml.hlmlDeviceGetUUID(handle))
                entry["id"] = _decode_text(uuid) or entry["id"]
            except Unavailable as error:
                reason = error
        device = GaudiDevice(self._hlml, index, handle, self._mark, self._clock)
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
            entry["pci_bus_id"] = _decode_text(pci.bus_id)
        if memory is not None:
            entry["memory_bytes"] = memory.total
        return device, {**entry, **self._versions}

    def _handle(self, index: int) -> Any:
        with self._opening:  # old bindings write every handle into one object
            handle = self._hlml.hlmlDeviceGetHandleByIndex(index)
            return ctypes.c_void_p(handle.value) if hasattr(handle, "value") else handle

    def _fact(self, index: int, name: str, *arguments: Any) -> Any:
        """Return a fact that may be missing: None when it is unavailable."""
        try:
            function = getattr(self._hlml, name)
            value = self._call(index, name.removeprefix("hlmlDevice"), lambda: function(*arguments))
        except (Unavailable, AttributeError):
            return None
        return _decode_text(value) if isinstance(value, str | bytes) else value

    def _call(self, index: int, name: str, function: Callable[[], Any]) -> Any:
        self._mark(index, name)
        try:
            return function()
        except Exception as error:
            raise explain_error(self._hlml, error)[0] from error
        finally:
            self._mark(index, "")


class GaudiDevice:
    """One Gaudi, read by one thread; `sample()` never raises."""

    def __init__(
        self, hlml: Any, index: int, handle: Any, mark: Mark, clock: Callable[[], int]
    ) -> None:
        self.index = index
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=64)
        """Events since the list was last cleared: `device-lost`."""
        self._hlml, self._handle, self._mark, self._clock = hlml, handle, mark, clock
        self._lost: Unavailable | None = None
        self._due_ns = [0] * len(CALLS)
        self._values: list[tuple[ValueBinding, ...]] = [()] * len(CALLS)

    def sample(self) -> list[ValueBinding]:
        """Return one value per signal, making only the calls that are due."""
        for number, call in enumerate(CALLS):
            # Slightly early rather than a tick late: the caller samples on a grid of its own.
            if self._lost is None and self._clock() >= self._due_ns[number] - SECOND_NS // 10:
                self._ask(number, call)
        if self._lost is not None:
            return [self._lost] * len(SIGNALS)
        return [value for values in self._values for value in values]

    def fail(self, reason: Unavailable) -> None:
        """Mark the device as lost because it could not be opened."""
        self._lost = reason

    def _ask(self, number: int, call: HlmlCall) -> None:
        self._due_ns[number] = self._clock() + call.every_ns
        self._mark(self.index, call.name)
        try:
            self._values[number] = call.read(self._hlml, self._handle)
        except Exception as error:
            reason, fatal = explain_error(self._hlml, error)
            self._values[number] = (reason,) * len(call.signals)
            if fatal:
                self._lost = reason
                self.notes.append(("device-lost", {"message": reason.message, "call": call.name}))
        finally:
            self._mark(self.index, "")


def load_binding() -> Any:
    """Import the binding.

    Raises: Unavailable when it is missing, or hides the library's errors.
    """
    try:
        import pyhlml
        import pyhlml.hlml_types
        import pyhlml.main
    except ImportError:
        message = "the Python package habana-pyhlml is missing"
        raise Unavailable("absent", message, "pip install habana-pyhlml", True) from None
    try:
        pyhlml.main.check_return(pyhlml.hlml_types.HLML_RETURN.HLML_ERROR_UNKNOWN)
    except Exception:
        return pyhlml
    message = "this habana-pyhlml hides errors behind zeros"
    raise Unavailable("absent", message, "pip install --upgrade habana-pyhlml", True)


def explain_error(hlml: Any, error: Exception) -> tuple[Unavailable, bool]:
    """Translate an exception to a reason; True when the device must not be used again."""
    if isinstance(error, Unavailable):
        return error, False
    code = getattr(error, "value", None)
    if code is not None:
        for name, reason in _ERRORS.items():
            if getattr(hlml.hlml_types.HLML_RETURN, name, None) == code:
                return reason, name in _FATAL_ERRORS
        return Unavailable("failed", f"HLML: error {code}"), False
    if isinstance(error, AttributeError):
        message = "habana-pyhlml is too old for this value"
        return Unavailable("absent", message, "pip install --upgrade habana-pyhlml", True), False
    return Unavailable("failed", f"HLML: {error}"), False


def _decode_text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
