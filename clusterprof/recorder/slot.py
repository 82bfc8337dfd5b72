"""One collector in the loop: opened, sampled at its own rate, and guarded.

Whatever a collector does, the others and the recording go on. `Unavailable` becomes a gap when
the reason changes; `DevicesChanged` opens it anew; any other exception is a `failed` gap and a
note for agent.log, and after three in a row the collector rests for 1, 2, 4 … 60 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clusterprof.collectors.base import ReadFirst
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.linux.held import HeldFile
from clusterprof.recorder.batch import Table, Ticks, codes_of
from clusterprof.recorder.devices import Devices, Note
from clusterprof.recorder.reasons import Reasons
from clusterprof.trace.schema import Columns, Event, Record, Rows

FAULTS_IN_A_ROW = 3
_SECOND_NS = 1_000_000_000
_TICKS_WITHOUT_DEVICES = 4  # left out
_RETRY_NS = 100_000_000  # something that is not there yet may come with the job's first moments
_REST_AT_MOST_NS = 60 * _SECOND_NS


def _nobody() -> None:
    """Nobody wants to know."""


class Slot:
    """A collector with its interval, its buffered rows and its state of health."""

    def __init__(self, collector: Any, interval_ns: int, note: Note) -> None:
        self.name: str = collector.name
        self.collector = collector
        self.interval_ns = interval_ns
        self.due_ns = 0
        self.status = "opening"
        self.on_change: Callable[[], None] = _nobody
        """Called when it is opened or closed."""
        self._note = note
        self._is_table = hasattr(collector, "strings")
        self._says_when = hasattr(collector, "sampled_ns")
        self._reads_first = isinstance(collector, ReadFirst)
        self._readings: list[tuple[int, Any]] = []  # taken, and not yet understood
        self.keep = self._readings.append
        """Takes (when, a reading of `files()` that somebody else has made)."""
        self._events = getattr(collector, "events", None)
        self._columns: Sequence[Any] = ()
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # signals, devices
        self._codes = ""  # array typecode of each column
        self._batch: Ticks | Table = Ticks("")
        self._pending: list[Record] = []
        self._reasons = Reasons(self.name, lambda record: self._pending.append(record))
        self._faults = 0
        self._rest_ns = 0
        self._last_ns = 0
        self._devices = Devices(collector, note)

    def open(self, now_ns: int) -> None:
        """Open the collector; a failure is a gap, and it is tried again later."""
        self.on_change()
        try:
            columns = tuple(self.collector.open())
            if not self._is_table:
                columns = tuple((signal, str(device)) for signal, device in columns)
                self._codes = codes_of([signal for signal, _ in columns])
                self._names = (
                    tuple(signal.name for signal, _ in columns),
                    tuple(device for _, device in columns),
                )
        except NothingNew:  # it is still looking for its devices: no hole yet
            self.status = "opening"
            self.due_ns = now_ns + _RETRY_NS
            return
        except Unavailable as reason:
            self.status = reason.kind
            self._reasons.of_all(now_ns, reason)
            self._rest(now_ns, _RETRY_NS)
            return
        except BaseException as error:
            self.status = "failed"
            self._fault(now_ns, error)
            self._rest(now_ns)
            return
        self.status = "available"
        self._columns = columns
        self._batch = self._empty()
        self._reasons.forget()
        self._pending += self._devices.appeared(now_ns)

    def files(self) -> Sequence[HeldFile]:
        """Return the files that make up a reading, where somebody else may read them."""
        try:
            opened = self.status == "available"
            return self.collector.files() if self._reads_first and opened else ()
        except BaseException:
            return ()  # it will say why when it is to read

    def tick(self, now_ns: int) -> None:
        """Take one sample at `now_ns`, from a collector opened anew if it has to be."""
        if self.status != "available":
            self.open(now_ns)
        reopened = False
        while self.status == "available":
            try:
                if self._reads_first:
                    self._readings.append((now_ns, self.collector.read()))
                    return
                sample = self.collector.sample()
                self._batch.add(self._taken_ns(now_ns) if self._says_when else now_ns, sample)
            except BaseException as error:
                self._understand()  # what was read before has no part in it
                if self.status == "available" and self._failed(now_ns, error, reopened):
                    reopened = True
                    continue
                return
            self._well()
            return

    def _understand(self) -> None:
        """Make samples of what was read; what a reading hides comes to light here."""
        readings = self._readings[:]
        self._readings.clear()  # `keep` is of this list
        reopened = fits = False
        for t_ns, reading in readings:
            while self.status == "available":
                try:
                    self._batch.add(t_ns, self.collector.parse(reading))
                except DevicesChanged as error:
                    if not reopened:
                        reopened = self._failed(readings[-1][0], error, reopened)
                        continue
                    # It was read of other devices than there are now.
                except BaseException as error:
                    self._failed(t_ns, error, reopened)
                else:
                    fits = True
                    self._well()
                break
        if reopened and not fits and self.status == "available":
            self._faulty(readings[-1][0], DevicesChanged("again and again"))

    def _failed(self, now_ns: int, error: BaseException, reopened: bool) -> bool:
        """Note why there is no sample; True when it was opened anew, to be tried again."""
        if isinstance(error, NothingNew):
            if not self._columns:  # it has no device, and need not be asked at every tick
                self.due_ns += _TICKS_WITHOUT_DEVICES * self.interval_ns
            return False
        if isinstance(error, Unavailable):
            self._reasons.of_all(now_ns, error)
            return False
        if isinstance(error, DevicesChanged) and not reopened:
            self._close()
            self.open(now_ns)
            return True
        self._faulty(now_ns, error)
        return False

    def _well(self) -> None:
        self._faults = 0
        self._rest_ns = 0
        self._reasons.seen()

    def _taken_ns(self, now_ns: int) -> int:
        """A collector that does not wait for its values says when the newest were taken."""
        taken_ns = self.collector.sampled_ns
        before_ns = self._last_ns
        self._last_ns = taken_ns if before_ns < taken_ns <= now_ns else now_ns
        return self._last_ns

    def _faulty(self, now_ns: int, error: BaseException) -> None:
        self._fault(now_ns, error)
        self._faults += 1
        if self._faults >= FAULTS_IN_A_ROW:
            self._close()
            self.status = "failed"
            self._rest(now_ns)

    @property
    def reason(self) -> Unavailable | None:
        """Why the whole collector sees nothing at the moment."""
        return self._reasons.whole

    def take(self, now_ns: int) -> list[Record]:
        """Return what has been gathered since the last call, as records."""
        if self._readings:
            self._understand()
        if self._batch.t_ns:
            self._pack()
        if self._events is not None:
            try:
                for kind, about in self._events():
                    self._pending.append(Event(now_ns, str(kind), dict(about)))
            except BaseException as error:
                self._fault(now_ns, error)
        if not self._pending:
            return []
        records, self._pending = self._pending, []
        return records

    def close(self) -> None:
        """Close the collector for good; nothing it raises matters any more."""
        if self.status == "available":
            self._close()
        self.status = "closed"

    def _close(self) -> None:
        self.on_change()
        self._understand()
        self._pack()
        try:
            self.collector.close()
        except BaseException as error:
            self._note(self.name, error)

    def _empty(self) -> Ticks | Table:
        return Table(len(self._columns)) if self._is_table else Ticks(self._codes)

    def _pack(self) -> None:
        batch = self._batch
        if not batch.t_ns:
            return
        self._batch = self._empty()
        try:
            packed = self._rows(batch) if isinstance(batch, Table) else self._series(batch)
        except BaseException as error:
            self._fault(batch.t_ns[0], error)
            return
        if packed is not None:
            self._pending.append(packed)

    def _rows(self, batch: Table) -> Rows | None:
        columns = batch.numbers()
        if columns is None:
            return None
        return Rows(self.name, tuple(self._columns), columns, self.collector.strings())

    def _series(self, batch: Ticks) -> Columns | None:
        if not self._columns:
            return None
        values = batch.numbers()
        masks: list[bytes | None] = [None] * len(self._columns)
        if values is None:
            names, columns = list(zip(*self._names)), batch.columns()
            values, masks = self._reasons.pack(names, self._codes, batch.t_ns, columns)
        else:
            self._reasons.seen_in_every_column()
        return Columns(self.name, *self._names, batch.t_ns, values, masks)

    def _fault(self, now_ns: int, error: BaseException) -> None:
        reason = Unavailable(
            "failed", f"{type(error).__name__}: {error}"[:500], "report this as a bug"
        )
        if self._reasons.of_all(now_ns, reason):
            self._note(self.name, error)

    def _rest(self, now_ns: int, least_ns: int = _SECOND_NS) -> None:
        self._rest_ns = min(max(2 * self._rest_ns, least_ns), _REST_AT_MOST_NS)
        self.due_ns = now_ns + self._rest_ns
        self._faults = 0

    def devices_for_header(self) -> list[dict[str, Any]]:
        """Return the devices known now; those that come later are announced by events."""
        return self._devices.known(self.status == "available")
