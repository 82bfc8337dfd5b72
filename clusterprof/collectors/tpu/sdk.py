"""`libtpu.sdk.tpumonitoring`: lists of text, one entry per chip or core.

    get_metric("duty_cycle_pct").data()      ["98.10", …]   per chip, a sliding mean
    get_metric("tensorcore_util").data()     ["34.20", …]   per core, a look of 10 µs each second
    get_metric("hbm_capacity_usage").data()  ["17179869184", …]   per core
    get_metric("hbm_capacity_total").data()

An empty list means that no process holds the TPU. Of several entries per chip memory is added up
and shares are averaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from clusterprof.collectors.tpu.where import chips, inventory
from clusterprof.errors import Unavailable
from clusterprof.linux.feed import FedDevice, Feed, Keeper, Value

EVERY_SECONDS = 1.0
_SILENT_NS = 5_000_000_000
_FIRST_SECONDS = 5.0
LIBRARY = -1
METRICS: tuple[tuple[str, str, bool], ...] = (
    ("duty_cycle_pct", "gpu.duty_cycle_ratio", True),
    ("tensorcore_util", "gpu.tensorcore_ratio", True),
    ("hbm_capacity_usage", "gpu.memory_used_bytes", False),
    ("hbm_capacity_total", "gpu.memory_total_bytes", False),
)
"""Name in libtpu, signal, and whether it is a percentage."""
_NOBODY = Unavailable("absent", "no process holds the TPU")


class Library:
    """The chips of a node; raises Unavailable when libtpu is missing or says nothing of any."""

    signals = tuple(signal for _, signal, _ in METRICS)

    def __init__(
        self, mark: Callable[[int, str], None], every_seconds: float = EVERY_SECONDS
    ) -> None:
        self._monitoring, self._mark, self._asked = _load(mark), mark, ""
        self._feed = Feed(len(METRICS), _SILENT_NS, self._silence)
        self._opened = threading.Event()
        self._found = chips()
        self._count = len(self._found)
        self._keeper = Keeper(self._feed, self._work, every_seconds)
        self._keeper.start()
        if not self._opened.wait(_FIRST_SECONDS):
            raise self._silence()
        if not self._count:
            self._keeper.stop()
            newest = self._feed.newest
            why = newest[1] if newest is not None else _NOBODY
            raise why if isinstance(why, Unavailable) else _NOBODY
        self.devices = [FedDevice(self._feed, index) for index in range(self._count)]
        version = getattr(self._monitoring[1], "__version__", None)
        facts = {"driver": f"libtpu {version}"} if isinstance(version, str) else {}
        self.inventory = inventory(self._count, self._found, **facts)

    def adopt(self, index: int) -> FedDevice:
        """Return a chip; all are asked at once, so none is ever skipped."""
        return self.devices[index]

    def close(self) -> None:
        """Stop asking; a call that hangs is left to itself."""
        self._keeper.stop(0.2)

    def _work(self, wanted: Callable[[], bool]) -> None:
        lists = [self._ask(name) for name, _, _ in METRICS]
        if not self._count:  # the bus does not show them
            self._count = next((len(one) for one in lists if isinstance(one, list) and one), 0)
        self._feed.put(rows(lists, self._count) if self._count else _NOBODY)
        self._opened.set()

    def _ask(self, name: str) -> list[Any] | Unavailable:
        self._asked = name
        self._mark(LIBRARY, name)
        try:
            return list(self._monitoring[0].get_metric(name).data())
        except Exception as error:
            return Unavailable("failed", f"libtpu: {str(error)[:100]}")
        finally:
            self._mark(LIBRARY, "")
            self._asked = ""

    def _silence(self) -> Unavailable:
        inside = f" (inside {self._asked})" if self._asked else ""
        return Unavailable("failed", f"libtpu does not answer{inside}")


def rows(lists: Sequence[list[Any] | Unavailable], count: int) -> list[list[Value]]:
    """Return one row per chip out of one list per metric."""
    columns = [
        _column(name, data, count, percent) for (name, _, percent), data in zip(METRICS, lists)
    ]
    return [list(row) for row in zip(*columns)]


def _column(name: str, data: list[Any] | Unavailable, count: int, percent: bool) -> list[Value]:
    if isinstance(data, Unavailable):
        return [data] * count
    if not data:
        return [_NOBODY] * count
    each, rest = divmod(len(data), count)
    if rest:
        message = f"libtpu says {len(data)} values of {name} for {count} chips"
        return [Unavailable("failed", message)] * count
    parts = (data[index * each : (index + 1) * each] for index in range(count))
    return [_value(name, part, percent) for part in parts]


def _value(name: str, part: list[Any], percent: bool) -> Value:
    numbers = []
    for one in part:
        try:
            number = float(one)
        except (TypeError, ValueError):
            return Unavailable("failed", f"libtpu says {str(one)[:40]!r} for {name}")
        if not 0 <= number < 2**62 or (percent and number > 100):
            return Unavailable("failed", f"libtpu: impossible value {number:g} for {name}")
        numbers.append(number)
    return sum(numbers) / len(numbers) / 100 if percent else int(sum(numbers))


def _load(mark: Callable[[int, str], None]) -> tuple[Any, Any]:
    mark(LIBRARY, "import libtpu")
    try:
        import libtpu
        from libtpu.sdk import tpumonitoring
    except ImportError:
        message = "the Python package libtpu is missing, or too old to be asked"
        raise Unavailable("absent", message, "pip install --upgrade libtpu") from None
    finally:
        mark(LIBRARY, "")
    return tpumonitoring, libtpu
