"""TPU through the monitoring part of `libtpu`, else through the command `tpu-info`.

https://cloud.google.com/tpu/docs/tpu-monitoring-library,
https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics (tpu_info). Both query the process
that holds the TPU, on localhost port 8431; without one there are no values. That service uses gRPC,
whose library is twice as large as all of ours, so it is not queried directly.

This package runs in the helper process: no signals, no heavy imports before `libtpu`.

Which TPU chips a node has, from the PCI bus only.

Google TPU through the monitoring part of `libtpu`, else `tpu-info`; a device is a chip.

The duty cycle is a mean over a sliding window of seconds and contains nothing about
single steps: the lost time on TPU hosts is bounded from above by the host's waits
(docs/design/devices-and-isolation.md). Duty cycle, matrix units and memory are reported in
addition. Without a process that holds the TPU there are no values.

The helper process calls `libtpu` from a thread that may hang; `tpu-info` runs below it
every 5 s and ends with it. The service on port 8431 is not queried directly, because it
uses gRPC.

## Source

`libtpu.sdk.tpumonitoring`, else the tool `tpu-info` (Google Cloud TPU documentation,
"TPU monitoring library").

## Privilege

None; the helper process must run on the TPU host, and a process must hold the TPU.

## Cost

A helper process; with `tpu-info` alone one run of it every 5 s.

## Where it is blind

Single steps: the duty cycle is a sliding mean of seconds. Which process uses a chip.
Everything while no process holds the TPU.

TPU through `tpu-info`, run every few seconds; its tables for humans are parsed.

TPU Runtime Utilization
│ Chip │ HBM Usage (GiB)       │ Duty cycle │
│ 0    │ 18.45 GiB / 31.25 GiB │    100.00% │
TensorCore Utilization
│ Core ID │ TensorCore Utilization │
│ 0       │ 13.60%                 │

`libtpu.sdk.tpumonitoring`: lists of text, one entry per chip or core.

    get_metric("duty_cycle_pct").data()      ["98.10", …]   per chip, a sliding mean
    get_metric("tensorcore_util").data()     ["34.20", …]   per core, a 10 µs sample each second
    get_metric("hbm_capacity_usage").data()  ["17179869184", …]   per core
    get_metric("hbm_capacity_total").data()

An empty list means that no process holds the TPU. Of several entries per chip, memory
is summed and shares are averaged.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from clusterprof.agent.collectors.base import InProcessLibraryCollector
from clusterprof.agent.linux.files import list_folder, read_int, read_text
from clusterprof.agent.linux.reader_threads import LatestRows, PollingThread, RowReader, Value
from clusterprof.agent.linux.vendor_tools import find_program, run_tool
from clusterprof.errors import Unavailable

TPU_INFO = "tpu-info"
PCI = "/sys/bus/pci/devices"
_GOOGLE_VENDOR = "0x1ae0"
# PCI device ids of tpu_info/device.py; v2 and v3 share 0x0027 and differ in the subsystem.
_CHIP_NAMES = {
    "0x005e": "TPU v4",
    "0x0063": "TPU v5e",
    "0x0062": "TPU v5p",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}
_OLD_CHIP, _OLD_NAMES = "0x0027", {"0x004e": "TPU v2", "0x004f": "TPU v3"}


def list_chips(folder: str = PCI) -> list[dict[str, Any]]:
    """Return name, pci_bus_id and, where known, numa_node of each chip, sorted by address."""
    out = []
    for device in list_folder(Path(folder)):
        if read_text(device / "vendor") != _GOOGLE_VENDOR:
            continue
        kind = read_text(device / "device")
        name = _CHIP_NAMES.get(kind)
        if kind == _OLD_CHIP:
            name = _OLD_NAMES.get(read_text(device / "subsystem_device"))
        if name is None:
            continue  # a network card of this vendor
        chip: dict[str, Any] = {"name": name, "pci_bus_id": device.name}
        numa = read_int(device / "numa_node")
        if numa is not None and numa >= 0:
            chip["numa_node"] = numa
        out.append(chip)
    return out


def build_inventory(
    count: int, known_chips: list[dict[str, Any]], **extra_fields: Any
) -> list[dict[str, Any]]:
    """Build the header entries of `count` chips; locations only if the bus shows as many."""
    locations = known_chips if len(known_chips) == count else [{} for _ in range(count)]
    return [
        {
            "id": f"tpu-{index}",
            "vendor": "google",
            "index": index,
            "emulated": False,
            "tells_busy": False,
            **location,
            **extra_fields,
        }
        for index, location in enumerate(locations)
    ]


def explain_absence(environ: Mapping[str, str], folder: str = PCI) -> Unavailable | None:
    """Return why this node has no TPU; None when it may have one."""
    if find_program(TPU_INFO, environ) or any(os.path.exists(f"/dev/accel{n}") for n in range(2)):
        return None
    return None if list_chips(folder) else Unavailable("absent", "no TPU on the PCI bus")


def open_library(mark: Callable[[int, str], None], skip: Collection[int] = ()) -> Any:
    """Open libtpu, or else tpu-info.

    Raises: Unavailable with the reasons of both when neither can be opened.
    """
    # __drop__  # the recorder needs neither

    try:
        return LibtpuLibrary(mark)
    except Unavailable as of_library:
        try:
            return TpuInfoLibrary()
        except Unavailable as of_tool:
            kind = "failed" if "failed" in (of_library.kind, of_tool.kind) else "absent"
            message = f"{of_library.message}; {of_tool.message}"
            advised = of_library if of_library.remedy else of_tool
            remedy = advised.remedy, advised.by_user
            raise Unavailable(kind, message, *remedy) from None  # type: ignore[arg-type]


class GpuTpuCollector(InProcessLibraryCollector):
    """Duty cycle, use of the matrix units and memory of TPU chips."""

    name: ClassVar[str] = "gpu_tpu"
    interval_ns: ClassVar[int] = 1_000_000_000

    def open_library(self, mark: Callable[[int, str], None]) -> Any:
        """Open libtpu or tpu-info in this process."""
        return open_library(mark)


TPU_INFO_POLL_SECONDS, TPU_INFO_TIMEOUT_SECONDS = 5.0, 10.0
_TPU_INFO_SILENCE_NS = 20_000_000_000
_GIB = 1 << 30
_USE = re.compile(r"(\d+)\D+?(\d+(?:\.\d+)?) ?GiB / (\d+(?:\.\d+)?) ?GiB\W+(\S+?)%?\W*", re.ASCII)
_TENSORCORE = re.compile(r"\W*(\d+)\W+(\d+(?:\.\d+)?)%\W*", re.ASCII)


class TpuInfoLibrary:
    """The chips that `tpu-info` lists.

    Raises: Unavailable when it lists none.
    """

    signals = (
        "gpu.duty_cycle_ratio",
        "gpu.tensorcore_ratio",
        "gpu.memory_used_bytes",
        "gpu.memory_total_bytes",
    )

    def __init__(self) -> None:
        path = find_program(TPU_INFO, os.environ)
        if path is None:
            raise Unavailable("absent", "tpu-info was not found", "pip install tpu-info", True)
        self._argv = [path]
        first = parse_tpu_info(run_tool(self._argv, TPU_INFO_TIMEOUT_SECONDS))
        self._chips = sorted(first)
        silence = Unavailable(
            "failed", f"tpu-info has printed nothing for {_TPU_INFO_SILENCE_NS // 10**9} s"
        )
        self._latest = LatestRows(len(self.signals), _TPU_INFO_SILENCE_NS, lambda: silence)
        self._latest.put([first[chip] for chip in self._chips])
        self.devices = [RowReader(self._latest, index) for index in range(len(self._chips))]
        self.inventory = build_inventory(len(self._chips), list_chips())
        self._first = True
        self._poller = PollingThread(self._latest, self._work, TPU_INFO_POLL_SECONDS)
        self._poller.start()

    def adopt(self, index: int) -> RowReader:
        """Return a chip; none is ever skipped, because the tool is a separate process."""
        return self.devices[index]

    def close(self) -> None:
        """Stop the tool if it runs."""
        self._poller.stop()

    end_tools = close

    def _work(self, wanted: object) -> None:
        if self._first:  # the constructor has just read
            self._first = False
            return
        values_by_chip = parse_tpu_info(run_tool(self._argv, TPU_INFO_TIMEOUT_SECONDS))
        missing = Unavailable("failed", "tpu-info no longer lists this chip")
        self._latest.put(
            [values_by_chip.get(chip, [missing] * len(self.signals)) for chip in self._chips]
        )


def parse_tpu_info(text: str) -> dict[int, list[Value]]:
    """Parse the values per chip.

    Raises: Unavailable when no chip is in use.
    """
    values_by_chip: dict[int, list[Value]] = {}
    matrix: list[float] = []
    section = ""
    for line in text.splitlines():
        for title in ("TPU Runtime Utilization", "TensorCore Utilization", "TPU "):
            if title in line and "Core ID" not in line:
                section = title
                break
        cells = line.strip(" |│┃")
        if section == "TPU Runtime Utilization" and (use := _USE.fullmatch(cells)):
            duty = _parse_percent(use[4])
            memory = (int(float(use[2]) * _GIB), int(float(use[3]) * _GIB))
            missing = Unavailable("absent", "tpu-info does not report it")
            values_by_chip[int(use[1])] = [duty, missing, *memory]
        elif section == "TensorCore Utilization" and (core := _TENSORCORE.fullmatch(cells)):
            matrix.append(float(core[2]))
    if not values_by_chip:
        raise Unavailable("absent", "tpu-info shows no TPU in use; a process must hold it")
    cores_per_chip, remainder = divmod(len(matrix), len(values_by_chip))
    if cores_per_chip and not remainder:
        for number, chip in enumerate(sorted(values_by_chip)):
            part = matrix[number * cores_per_chip : (number + 1) * cores_per_chip]
            values_by_chip[chip][1] = _parse_percent(str(sum(part) / cores_per_chip))
    return values_by_chip


def _parse_percent(word: str) -> Value:
    try:
        percent = float(word)
    except ValueError:
        return Unavailable("absent", f"tpu-info reports {word[:20]!r} for the duty cycle")
    if not 0 <= percent <= 100:
        return Unavailable("failed", f"tpu-info: impossible value {percent:g} %")
    return percent / 100


LIBTPU_POLL_SECONDS = 1.0
_LIBTPU_SILENCE_NS = 5_000_000_000
_FIRST_SECONDS = 5.0
LIBRARY = -1
METRICS: tuple[tuple[str, str, bool], ...] = (
    ("duty_cycle_pct", "gpu.duty_cycle_ratio", True),
    ("tensorcore_util", "gpu.tensorcore_ratio", True),
    ("hbm_capacity_usage", "gpu.memory_used_bytes", False),
    ("hbm_capacity_total", "gpu.memory_total_bytes", False),
)
"""Name in libtpu, signal, and whether it is a percentage."""
_TPU_UNUSED = Unavailable("absent", "no process holds the TPU")


class LibtpuLibrary:
    """The chips of a node.

    Raises: Unavailable when libtpu is missing or reports no chip.
    """

    signals = tuple(signal for _, signal, _ in METRICS)

    def __init__(self, mark: Callable[[int, str], None]) -> None:
        self._monitoring, self._mark, self._current_call = _load_libtpu(mark), mark, ""
        self._latest = LatestRows(len(METRICS), _LIBTPU_SILENCE_NS, self._describe_silence)
        self._opened = threading.Event()
        self._found = list_chips()
        self._count = len(self._found)
        self._poller = PollingThread(self._latest, self._work, LIBTPU_POLL_SECONDS)
        self._poller.start()
        if not self._opened.wait(_FIRST_SECONDS):
            raise self._describe_silence()
        if not self._count:
            self._poller.stop()
            newest = self._latest.newest
            why = newest[1] if newest is not None else _TPU_UNUSED
            raise why if isinstance(why, Unavailable) else _TPU_UNUSED
        self.devices = [RowReader(self._latest, index) for index in range(self._count)]
        version = getattr(self._monitoring[1], "__version__", None)
        facts = {"driver": f"libtpu {version}"} if isinstance(version, str) else {}
        self.inventory = build_inventory(self._count, self._found, **facts)

    def adopt(self, index: int) -> RowReader:
        """Return a chip; all are read together, so none is ever skipped."""
        return self.devices[index]

    def close(self) -> None:
        """Stop reading; a call that hangs is abandoned."""
        self._poller.stop(0.2)

    def _work(self, wanted: Callable[[], bool]) -> None:
        lists = [self._read_metric(name) for name, _, _ in METRICS]
        if not self._count:  # the PCI bus does not show them
            self._count = next(
                (
                    len(metric_data)
                    for metric_data in lists
                    if isinstance(metric_data, list) and metric_data
                ),
                0,
            )
        self._latest.put(build_rows(lists, self._count) if self._count else _TPU_UNUSED)
        self._opened.set()

    def _read_metric(self, name: str) -> list[Any] | Unavailable:
        self._current_call = name
        self._mark(LIBRARY, name)
        try:
            return list(self._monitoring[0].get_metric(name).data())
        except Exception as error:
            return Unavailable("failed", f"libtpu: {str(error)[:100]}")
        finally:
            self._mark(LIBRARY, "")
            self._current_call = ""

    def _describe_silence(self) -> Unavailable:
        inside = f" (inside {self._current_call})" if self._current_call else ""
        return Unavailable("failed", f"libtpu does not answer{inside}")


def build_rows(lists: Sequence[list[Any] | Unavailable], count: int) -> list[list[Value]]:
    """Build one row per chip from one list per metric."""
    columns = [
        _build_column(name, data, count, percent)
        for (name, _, percent), data in zip(METRICS, lists)
    ]
    return [list(row) for row in zip(*columns)]


def _build_column(
    name: str, data: list[Any] | Unavailable, count: int, percent: bool
) -> list[Value]:
    if isinstance(data, Unavailable):
        return [data] * count
    if not data:
        return [_TPU_UNUSED] * count
    values_per_chip, remainder = divmod(len(data), count)
    if remainder:
        message = f"libtpu reports {len(data)} values of {name} for {count} chips"
        return [Unavailable("failed", message)] * count
    parts = (
        data[index * values_per_chip : (index + 1) * values_per_chip] for index in range(count)
    )
    return [_combine_values(name, part, percent) for part in parts]


def _combine_values(name: str, part: list[Any], percent: bool) -> Value:
    numbers = []
    for entry in part:
        try:
            number = float(entry)
        except (TypeError, ValueError):
            return Unavailable("failed", f"libtpu reports {str(entry)[:40]!r} for {name}")
        if not 0 <= number < 2**62 or (percent and number > 100):
            return Unavailable("failed", f"libtpu: impossible value {number:g} for {name}")
        numbers.append(number)
    return sum(numbers) / len(numbers) / 100 if percent else int(sum(numbers))


def _load_libtpu(mark: Callable[[int, str], None]) -> tuple[Any, Any]:
    mark(LIBRARY, "import libtpu")
    try:
        import libtpu
        from libtpu.sdk import tpumonitoring
    except ImportError:
        message = "the Python package libtpu is missing or too old"
        raise Unavailable("absent", message, "pip install --upgrade libtpu", True) from None
    finally:
        mark(LIBRARY, "")
    return tpumonitoring, libtpu
