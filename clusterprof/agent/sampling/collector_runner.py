"""Runs one collector in the loop: opens it, samples it at its own rate, isolates its errors.

An error of one collector never stops the others or the recording. `Unavailable` becomes
a gap when the reason changes; `DevicesChanged` reopens the collector; any other
exception is a `failed` gap and a note in agent.log, and after three in a row the
collector rests for 1, 2, 4 … 60 s.

The samples of one collector since the last flush, kept in flat arrays and cut into columns.

A Python object kept until the flush has left every CPU cache by then; in an array a
number takes 8 bytes, and a column is one strided slice. Packing a sample with `struct`
takes a sixth of the time of extending an array by these numbers.

Reasons for missing values of one collector: a gap when the reason is new, a mask per value.

The devices of one collector: listed in the header, or in an event when they appear later.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import starmap
from typing import Any

from clusterprof.agent.collectors.base import DeferredCollector
from clusterprof.agent.linux.files import OpenFile
from clusterprof.errors import DEVICES_RELEASED, DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import Signal
from clusterprof.trace.schema import Columns, Event, Gap, Record, Rows
from clusterprof.units import SECOND_NS

_INTEGER_UNITS = frozenset({"ns", "bytes", "count", "bits"})


def choose_type_codes(signals: Sequence[Any]) -> str:
    """Choose the array typecode of each signal's column.

    "q" (int64) for the units ns, bytes, count and bits, "d" (float64) for all others; one
    character per signal.
    Raises: TypeError when an element is not a Signal.
    """
    for signal in signals:
        if not isinstance(signal, Signal):
            raise TypeError(f"not a signal: {signal!r}")
    return "".join("q" if signal.unit in _INTEGER_UNITS else "d" for signal in signals)


@lru_cache(maxsize=64)
def _make_packer(codes: str) -> Callable[..., bytes]:
    return struct.Struct("=" + codes).pack


class SampleBatch:
    """Samples with fixed columns: per column and tick a number, or the reason for its absence.

    `t_ns`: time of each sample, int64, ns.
    """

    __slots__ = ("_codes", "_flat", "_pack", "_samples", "t_ns")

    def __init__(self, codes: str) -> None:
        """Create an empty batch; `codes` holds the array typecode of each column."""
        self.t_ns = array("q")
        self._codes = codes
        self._pack = _make_packer(codes)
        self._flat: array[int] | None = array("q")  # floats are stored as their bits
        self._samples: list[tuple[Any, ...]] = []  # used once a value does not fit its column

    def add(self, t_ns: int, sample: Sequence[Any]) -> None:
        """Add the sample of one tick.

        Raises: ValueError when the sample does not have one value per column.
        """
        if len(sample) != len(self._codes):
            raise ValueError(f"{len(sample)} values for {len(self._codes)} columns")
        if self._flat is not None:
            try:
                self._flat.frombytes(self._pack(*sample))
            except BaseException as error:
                self._convert_to_samples(self._flat)
                if not isinstance(error, struct.error | TypeError | OverflowError):
                    raise
        if self._flat is None:
            self._samples.append(tuple(sample))  # a collector may return the same list every time
        self.t_ns.append(t_ns)

    def numbers(self) -> list[Any] | None:
        """Return one array per column (int64 or float64); None when a value is not a number."""
        flat, width = self._flat, len(self._codes)
        if flat is None:
            return None
        columns: list[Any] = [flat[column::width] for column in range(width)]
        if "d" in self._codes:
            for column, code in enumerate(self._codes):
                if code == "d":
                    columns[column] = array("d", columns[column].tobytes())
        return columns

    def columns(self) -> list[tuple[Any, ...]]:
        """Return the samples column by column, including values that are not numbers."""
        return list(zip(*self._samples))

    def _convert_to_samples(self, flat: Any) -> None:
        self._samples = list(struct.iter_unpack("=" + self._codes, flat.tobytes())) if flat else []
        self._flat = None


class RowBatch:
    """Rows of integers, with a different number of rows at each tick.

    `t_ns`: time of each tick, int64, ns.
    """

    __slots__ = ("_flat", "_pack", "_width", "t_ns")

    def __init__(self, width: int) -> None:
        self.t_ns = array("q")
        self._width = width
        self._pack = _make_packer("q" * width)
        self._flat = array("q")

    def add(self, t_ns: int, rows: Sequence[Sequence[int]]) -> None:
        """Add the rows of one tick.

        Raises: ValueError when a row does not fit; then no row of the tick is added.
        """
        try:
            self._flat.frombytes(b"".join(starmap(self._pack, rows)))
        except struct.error as error:
            widths = set(map(len, rows))
            raise ValueError(f"rows of {widths} values for {self._width}: {error}") from error
        self.t_ns.append(t_ns)

    def numbers(self) -> list[Any] | None:
        """Return one int64 array per column; None when there is no row."""
        flat, width = self._flat, self._width
        return [flat[column::width] for column in range(width)] if flat else None


_ALL_COLUMNS = -1  # key for the collector as a whole


class MissingValueReasons:
    """The current reasons, per column and for the whole collector."""

    def __init__(self, collector: str, emit: Callable[[Record], None]) -> None:
        self._collector = collector
        self._emit = emit
        self._known: dict[int, Unavailable] = {}

    @property
    def whole(self) -> Unavailable | None:
        """Why the whole collector is unavailable at the moment."""
        return self._known.get(_ALL_COLUMNS)

    def reset(self) -> None:
        """Forget all reasons, so that each is reported again: the columns have changed."""
        self._known = {}

    def clear_collector(self) -> None:
        """Note that the collector delivers values again."""
        if self._known:
            self._known.pop(_ALL_COLUMNS, None)

    def clear_columns(self) -> None:
        """Note that every column has values again."""
        if self._known:
            self._known = {column: reason for column, reason in self._known.items() if column < 0}

    def set_for_collector(self, now_ns: int, reason: Unavailable) -> bool:
        """Report why the whole collector is unavailable; False when already reported."""
        if self._known.get(_ALL_COLUMNS) == reason:
            return False
        self._known[_ALL_COLUMNS] = reason
        self._gap(now_ns, "", "", reason)
        return True

    def pack(
        self,
        names: Sequence[tuple[str, str]],
        codes: str,
        t_ns: Sequence[int],
        columns: Sequence[Sequence[Any]],
    ) -> tuple[list[Any], list[bytes | None]]:
        """Return arrays and masks of columns in which some values are reasons instead of numbers.

        names: signal and device of each column; codes: the array typecode of each column. A
        mask has one byte per value, 1 = missing; None = no value is missing.
        """
        values: list[Any] = []
        masks: list[bytes | None] = []
        for index, (column, code) in enumerate(zip(columns, codes)):
            first = column[0]
            if isinstance(first, Unavailable) and column.count(first) == len(column):
                self._set_for_column(index, names, t_ns[0], first)
                values.append(array(code, bytes(8 * len(column))))
                masks.append(b"\1" * len(column))
                continue
            try:
                values.append(array(code, column))
                masks.append(None)
                self._known.pop(index, None)
            except (TypeError, OverflowError):
                packed, mask = self._pack_mixed(index, names, code, t_ns, column)
                values.append(packed)
                masks.append(mask)
        return values, masks

    def _pack_mixed(
        self,
        index: int,
        names: Sequence[tuple[str, str]],
        code: str,
        t_ns: Sequence[int],
        column: Sequence[Any],
    ) -> tuple[Any, bytes | None]:
        values: list[int | float] = []
        mask = bytearray(len(column))
        convert = int if code == "q" else float
        for row, value in enumerate(column):
            if not isinstance(value, Unavailable):
                try:
                    values.append(array(code, (convert(value),))[0])
                    self._known.pop(index, None)
                    continue
                except (TypeError, ValueError, OverflowError):
                    value = Unavailable("failed", f"no number that fits: {type(value).__name__}")
            mask[row] = 1
            values.append(0)
            self._set_for_column(index, names, t_ns[row], value)
        return array(code, values), bytes(mask) if any(mask) else None

    def _set_for_column(
        self, index: int, names: Sequence[tuple[str, str]], t_ns: int, reason: Unavailable
    ) -> None:
        known_reason = self._known.get(index)
        if known_reason is not reason and known_reason != reason:
            self._gap(t_ns, *names[index], reason)
        # this object, so that the identity test above is true next time
        self._known[index] = reason

    def _gap(self, t_ns: int, signal: str, device: str, reason: Unavailable) -> None:
        self._emit(
            Gap(t_ns, self._collector, signal, device, reason.kind, reason.message, reason.remedy)
        )


ErrorLogger = Callable[[str, BaseException], None]


class DeviceInventory:
    """The devices of a collector that the recording already lists."""

    def __init__(self, collector: Any, note: ErrorLogger) -> None:
        self._collector = collector
        self._describe = getattr(collector, "inventory", None)
        self._note = note
        self._known: frozenset[str] | None = None

    def list_devices(self, opened: bool) -> list[dict[str, Any]]:
        """Return the devices present now, for the header."""
        inventory = self._inventory() if opened else []
        self._known = _collect_ids(inventory)
        return inventory

    def list_appeared(self, now_ns: int) -> list[Record]:
        """Return an event for each device that appeared after the header; the collector is open."""
        if self._known is None:
            return []  # the header is not written yet and will name them
        inventory = self._inventory()
        known_ids, self._known = self._known, self._known | _collect_ids(inventory)
        return [
            Event(now_ns, "device-appeared", device)
            for device in inventory
            if str(device.get("id")) not in known_ids
        ]

    def _inventory(self) -> list[dict[str, Any]]:
        if self._describe is None:
            return []
        try:
            return [dict(device) for device in self._describe()]
        except BaseException as error:
            self._note(self._collector.name, error)
            return []


def _collect_ids(inventory: list[dict[str, Any]]) -> frozenset[str]:
    return frozenset(str(device.get("id")) for device in inventory)


MAX_CONSECUTIVE_FAULTS = 3
_SKIPPED_TICKS_WITHOUT_DEVICES = 4  # ticks left out between two attempts
_RETRY_NS = 100_000_000  # a source that is missing now may appear in the first moments of the job
_MAX_REST_NS = 60 * SECOND_NS


def _skip_notification() -> None:
    """Ignore a change, the default of `on_change`."""


class CollectorRunner:
    """A collector with its interval, its buffered samples and its status."""

    def __init__(self, collector: Any, interval_ns: int, note: ErrorLogger) -> None:
        self.name: str = collector.name
        self.collector = collector
        self.interval_ns = interval_ns
        self.due_ns = 0
        self.status = "opening"
        self.is_released = False
        """True from `release` to `resume`: the loop leaves it alone."""
        self.on_change: Callable[[], None] = _skip_notification
        """Called when the collector is opened or closed."""
        self._note = note
        self._is_table = hasattr(collector, "strings")
        self._table = str(getattr(collector, "table", self.name))
        self._has_sample_time = hasattr(collector, "sampled_ns")
        self._reads_first = isinstance(collector, DeferredCollector)
        self._readings: list[tuple[int, Any]] = []  # read but not parsed yet
        self.add_reading = self._readings.append
        """Adds (time, reading) when another reader has read the files of `files()`."""
        self._events = getattr(collector, "events", None)
        self._columns: Sequence[Any] = ()
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # signals, devices
        self._codes = ""  # array typecode of each column
        self._batch: SampleBatch | RowBatch = SampleBatch("")
        self._pending: list[Record] = []
        self._reasons = MissingValueReasons(self.name, lambda record: self._pending.append(record))
        self._faults = 0
        self._rest_ns = 0
        self._last_ns = 0
        self._devices = DeviceInventory(collector, note)

    def open(self, now_ns: int) -> None:
        """Open the collector; a failure becomes a gap, and it is retried later."""
        self.on_change()
        try:
            columns = tuple(self.collector.open())
            if not self._is_table:
                columns = tuple((signal, str(device)) for signal, device in columns)
                self._codes = choose_type_codes([signal for signal, _ in columns])
                self._names = (
                    tuple(signal.name for signal, _ in columns),
                    tuple(device for _, device in columns),
                )
        except NothingNew:  # still looking for its devices: not a gap yet
            self.status = "opening"
            self.due_ns = now_ns + _RETRY_NS
            return
        except Unavailable as reason:
            self.status = reason.kind
            self._reasons.set_for_collector(now_ns, reason)
            self._start_rest(now_ns, _RETRY_NS)
            return
        except BaseException as error:
            self.status = "failed"
            self._report_fault(now_ns, error)
            self._start_rest(now_ns)
            return
        self.status = "available"
        self._columns = columns
        self._batch = self._new_batch()
        self._reasons.reset()
        self._pending += self._devices.list_appeared(now_ns)

    def files(self) -> Sequence[OpenFile]:
        """Return the files of a reading, if another reader may read them; otherwise ()."""
        try:
            opened = self.status == "available"
            return self.collector.files() if self._reads_first and opened else ()
        except BaseException:
            return ()  # the error is reported when the collector itself reads

    def tick(self, now_ns: int) -> None:
        """Take one sample at `now_ns`; open the collector first if necessary."""
        if self.status != "available":
            self.open(now_ns)
        reopened = False
        while self.status == "available":
            try:
                if self._reads_first:
                    self._readings.append((now_ns, self.collector.read()))
                    return
                sample = self.collector.sample()
                self._batch.add(
                    self._sample_time_ns(now_ns) if self._has_sample_time else now_ns, sample
                )
            except BaseException as error:
                self._parse_readings()  # earlier readings are not affected by the error
                if self.status == "available" and self._handle_error(now_ns, error, reopened):
                    reopened = True
                    continue
                return
            self._clear_faults()
            return

    def _parse_readings(self) -> None:
        """Parse the buffered readings into samples; errors hidden in a reading appear here."""
        readings = self._readings[:]
        self._readings.clear()  # in place: `add_reading` is bound to this list
        reopened = parsed = False
        for t_ns, reading in readings:
            while self.status == "available":
                try:
                    self._batch.add(t_ns, self.collector.parse(reading))
                except DevicesChanged as error:
                    if not reopened:
                        reopened = self._handle_error(readings[-1][0], error, reopened)
                        continue
                    # It was read from devices that no longer exist.
                except BaseException as error:
                    self._handle_error(t_ns, error, reopened)
                else:
                    parsed = True
                    self._clear_faults()
                break
        if reopened and not parsed and self.status == "available":
            self._count_fault(readings[-1][0], DevicesChanged("again and again"))

    def _handle_error(self, now_ns: int, error: BaseException, reopened: bool) -> bool:
        """Handle a missing sample; return True if the collector was reopened for a retry."""
        if isinstance(error, NothingNew):
            if not self._columns:  # without devices it need not be tried at every tick
                self.due_ns += _SKIPPED_TICKS_WITHOUT_DEVICES * self.interval_ns
            return False
        if isinstance(error, Unavailable):
            self._reasons.set_for_collector(now_ns, error)
            return False
        if isinstance(error, DevicesChanged) and not reopened:
            self._close()
            self.open(now_ns)
            return True
        self._count_fault(now_ns, error)
        return False

    def _clear_faults(self) -> None:
        self._faults = 0
        self._rest_ns = 0
        self._reasons.clear_collector()

    def _sample_time_ns(self, now_ns: int) -> int:
        """Return the sample time, ns: the one that the collector reports, if it is plausible."""
        taken_ns = self.collector.sampled_ns
        before_ns = self._last_ns
        self._last_ns = taken_ns if before_ns < taken_ns <= now_ns else now_ns
        return self._last_ns

    def _count_fault(self, now_ns: int, error: BaseException) -> None:
        self._report_fault(now_ns, error)
        self._faults += 1
        if self._faults >= MAX_CONSECUTIVE_FAULTS:
            self._close()
            self.status = "failed"
            self._start_rest(now_ns)

    @property
    def reason(self) -> Unavailable | None:
        """Why the whole collector is unavailable at the moment; None while it is available."""
        return self._reasons.whole

    def take(self, now_ns: int) -> list[Record]:
        """Return the records since the last call."""
        if self._readings:
            self._parse_readings()
        if self._batch.t_ns:
            self._pack()
        if self._events is not None:
            try:
                for kind, attributes in self._events():
                    self._pending.append(Event(now_ns, str(kind), dict(attributes)))
            except BaseException as error:
                self._report_fault(now_ns, error)
        if not self._pending:
            return []
        records, self._pending = self._pending, []
        return records

    @property
    def holds_device(self) -> bool:
        """Return whether the collector, or its helper, keeps a device or its driver open."""
        return bool(getattr(self.collector, "holds_device", self.collector.isolated))

    def release(self, now_ns: int) -> bool:
        """Close the collector until `resume`; return False when its devices are none of the node's.

        The reason becomes a gap, unless there already is one that no release changes: the library
        is absent, or may not be used.
        """
        has_devices = self.status in ("available", "opening", "failed")
        if self.status == "available" and isinstance(self._batch, SampleBatch):
            # Else the last values would hold on.
            self._parse_readings()
            self._batch.add(now_ns, [DEVICES_RELEASED] * len(self._columns))
        self._close()  # in every status: a helper may still be looking for its devices
        self.is_released = True
        if has_devices:
            self.status = "failed"
            self._reasons.set_for_collector(now_ns, DEVICES_RELEASED)
        return has_devices

    def resume(self, now_ns: int) -> None:
        """Let the loop open the collector again at its next turn."""
        self.is_released = False
        self.due_ns = now_ns

    def close(self) -> None:
        """Close the collector for good; exceptions it raises are only logged."""
        if self.status == "available":
            self._close()
        self.status = "closed"

    def _close(self) -> None:
        self.on_change()
        self._parse_readings()
        self._pack()
        try:
            self.collector.close()
        except BaseException as error:
            self._note(self.name, error)

    def _new_batch(self) -> SampleBatch | RowBatch:
        return RowBatch(len(self._columns)) if self._is_table else SampleBatch(self._codes)

    def _pack(self) -> None:
        batch = self._batch
        if not batch.t_ns:
            return
        self._batch = self._new_batch()
        try:
            packed = self._rows(batch) if isinstance(batch, RowBatch) else self._series(batch)
        except BaseException as error:
            self._report_fault(batch.t_ns[0], error)
            return
        if packed is not None:
            self._pending.append(packed)

    def _rows(self, batch: RowBatch) -> Rows | None:
        columns = batch.numbers()
        if columns is None:
            return None
        return Rows(self._table, tuple(self._columns), columns, self.collector.strings())

    def _series(self, batch: SampleBatch) -> Columns | None:
        if not self._columns:
            return None
        values = batch.numbers()
        masks: list[bytes | None] = [None] * len(self._columns)
        if values is None:
            names, columns = list(zip(*self._names)), batch.columns()
            values, masks = self._reasons.pack(names, self._codes, batch.t_ns, columns)
        else:
            self._reasons.clear_columns()
        return Columns(self.name, *self._names, batch.t_ns, values, masks)

    def _report_fault(self, now_ns: int, error: BaseException) -> None:
        reason = Unavailable(
            "failed", f"{type(error).__name__}: {error}"[:500], "report this as a bug", True
        )
        if self._reasons.set_for_collector(now_ns, reason):
            self._note(self.name, error)

    def _start_rest(self, now_ns: int, minimum_ns: int = SECOND_NS) -> None:
        self._rest_ns = min(max(2 * self._rest_ns, minimum_ns), _MAX_REST_NS)
        self.due_ns = now_ns + self._rest_ns
        self._faults = 0

    def devices_for_header(self) -> list[dict[str, Any]]:
        """Return the devices known now; devices that appear later are announced by events."""
        return self._devices.list_devices(self.status == "available")
