"""Check what decoded records say, once, where they enter: types, ranges and times.

A checksum finds damage, not forgery: anybody who hands over a recording can write frames with
valid checksums. What no recorder writes is refused here and counted as damage, so that the
analysis may rely on the types and ranges below.

    types, ranges    attributes of events and facts of headers have the types that the analysis
                     reads; ranks are below 1,048,576; times lie between 0 and 100 years
    times            one record far from all others is refused. A jump of more than ten minutes,
                     such as after a suspended recorder, is accepted when the frames that follow
                     agree with it:

        10.0 s   10.1 s   30 days   10.2 s   10.3 s        the sample at 30 days is refused
        10.0 s   10.1 s   3600 s    3600.1 s 3600.2 s      the recorder was stopped for an hour

Spans are older than their frame by any time: where chunks are cut, those are left out that end
after the last record. Attributes that are not listed here pass: a newer recorder may write more. Of
an event, an optional attribute of another type is left out, and counted; the event stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from clusterprof.trace.column_decoder import BlockColumns
from clusterprof.trace.frame import FrameError, SpansPart
from clusterprof.trace.schema import Clock, Columns, Event, Gap, Header, Rows

MAX_TIME_NS = 100 * 365 * 86_400 * 10**9
"""Latest time that is believed, ns: imported logs count from 1970, recorders from the start of a
node."""
MAX_RANKS = 1 << 20
"""Ranks of a job; about ten times the largest that has been published."""
MAX_VALUE = float(1 << 64)
"""Greatest value of a signal: counters of the kernel and of drivers have 64 bits."""
MAX_JUMP_NS = 600 * 10**9
"""Distance from all earlier records beyond which a time must be confirmed, ns: one minute would
do for a recorder that runs, and ten cost nothing."""
CONFIRMATIONS = 2
"""Later frames that must agree with a jump."""
MAX_CLUSTERS = 16
"""Far times that are kept in mind; of more the oldest is refused."""

Time = Annotated[int, Meta(ge=0, le=MAX_TIME_NS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Whole = Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)]
Pid = Annotated[int, Meta(ge=0, lt=1 << 31)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Link = Annotated[int, Meta(ge=0, lt=1024)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Text = str | None
Variables = dict[str, str]


class ProcessAttributes(Struct):
    """Attributes of any event; those that name a process."""

    pid: Pid | None = None
    started_ticks: Count | None = None
    device: Text = None


class RegistrationAttributes(ProcessAttributes):
    """A process that was registered."""

    role: Text = None
    job: Text = None
    rank: Rank | None = None
    world_size: Rank | None = None
    node_local_rank: Rank | None = None
    node_number: Rank | None = None
    restart: Rank | None = None
    variables: Variables = {}
    frameworks: Text = None
    framework: Text = None
    host_functions: list[str] | None = None


class ExitAttributes(ProcessAttributes):
    """A process that ended."""

    wait_status: Whole | None = None
    exit_code: Whole | None = None
    signal: Whole | None = None


class GroupAttributes(ProcessAttributes, kw_only=True):
    """A process group that was announced."""

    pid: Pid
    group: Annotated[int, Meta(ge=0, lt=(1 << 63) - 1)]
    ranks: Annotated[list[Rank], Meta(max_length=MAX_RANKS)]
    name: Text = None


class UnderWayAttributes(ProcessAttributes):
    """An operation that has begun and not ended."""

    start_ns: Time = 0
    group: Annotated[int, Meta(ge=0, lt=(1 << 63) - 1)] = 0
    number: Whole = 0
    operation: Whole = 0


class DriverErrorAttributes(ProcessAttributes):
    """An error of a device that a driver reported."""

    pci: Text = None
    code: Whole | Text = None
    gpu_instance: Whole | Text = None
    count: Count | None = None
    text: Text = None
    message: Text = None


class LinkAttributes(ProcessAttributes):
    """Links of a device that had errors, or went down or came up."""

    errors: list[tuple[Link, str, Count]] = []
    error_rates: list[tuple[Link, Ratio]] = []
    down: list[Link] = []
    up: list[Link] = []
    remotes: list[tuple[Link, str, str]] = []


class DeviceFacts(Struct):
    """Facts about an accelerator."""

    id: Text = None
    vendor: Text = None
    name: Text = None
    index: Whole | Text = None
    emulated: bool | None = None
    driver: Text = None
    parent: Text = None
    pci_bus_id: Text = None
    numa_node: Whole | None = None
    memory_bytes: Count | None = None
    users: list[Pid] | None = None


class ProgressAttributes(Struct):
    """Ranks that hang."""

    since_ns: Time | None = None
    bound_ns: Count | None = None
    longest_pause_ns: Count | None = None
    waiting: list[Pid] | None = None
    silent: list[Pid] | None = None
    stepping: list[Pid] | None = None
    threads: list[dict[str, Any]] | None = None


class ReasonAttributes(ProcessAttributes):
    """Why something ended or changed."""

    reason: Text = None
    message: Text = None
    ras_reply: Text = None


EVENT_ATTRIBUTES: Mapping[str, type[Struct]] = {
    "process-registered": RegistrationAttributes,
    "process-exited": ExitAttributes,
    "group-announced": GroupAttributes,
    "operation-under-way": UnderWayAttributes,
    "gpu-xid": DriverErrorAttributes,
    "nvswitch-sxid": DriverErrorAttributes,
    "device-lost": DriverErrorAttributes,
    "nvlink-errors": LinkAttributes,
    "nvlink-states": LinkAttributes,
    "device-appeared": DeviceFacts,
    "progress-stopped": ProgressAttributes,
    "progress-resumed": ProgressAttributes,
}


_IDENTIFYING_ATTRIBUTES = frozenset(("pid", "started_ticks"))
"""An event is refused without these: it would be about another process."""


class NamedEntry(Struct):
    """A disk, network interface or adapter of the inventory."""

    name: Text = None
    on: list[str] | None = None
    partition_of: Text = None


class MountEntry(Struct):
    """A mounted file system of the inventory."""

    point: Text = None
    type: Text = None
    source: Text = None
    device: Text = None


class CpuFacts(Struct):
    """CPUs of the inventory; lists as the kernel writes them."""

    online: Text = None
    cores: list[str] | None = None
    nodes: dict[str, str] | None = None
    packages: dict[str, str] | None = None


class HostFacts(Struct):
    """The inventory of a node, as far as the analysis reads it."""

    cpus: CpuFacts | int | None = None
    memory_bytes: Count | None = None
    disks: list[NamedEntry | str] = []
    nics: list[NamedEntry] = []
    hcas: list[NamedEntry] = []
    mounts: list[MountEntry] = []


class LauncherFacts(Struct):
    """The launcher of a job."""

    job: Text = None
    named: bool | None = None
    variables: Variables | None = None


class StartTimes(Struct):
    """The clocks when a recording began."""

    monotonic_ns: Time | None = None
    boottime_ns: Time | None = None
    realtime_ns: Count | None = None


_HEADER_FACTS: Mapping[str, Any] = {
    "started": StartTimes,
    "host": HostFacts,
    "launcher": LauncherFacts,
    "devices": list[DeviceFacts],
}


_Any = TypeVar("_Any")
_Simple = Header | Clock | Event | Gap


class ImplausibleError(FrameError):
    """A valid frame whose contents no recorder writes."""


def check_record(record: _Simple) -> tuple[_Simple, Sequence[str]]:
    """Check the types and ranges of a record without columns.

    Returns the record, an event without the optional attributes that no recorder writes, and
    what is wrong with each of these: a rank is not lost for the name of its framework.
    Raises: ImplausibleError for a record that no recorder writes.
    """
    if isinstance(record, Event):
        _convert(record.t_ns, Time, "the time of an event")
        kind = EVENT_ATTRIBUTES.get(record.kind, ReasonAttributes)
        try:
            _convert(record.attributes, kind, f"an event {record.kind[:40]}")
        except ImplausibleError:
            return _drop_attributes(record, kind)
    elif isinstance(record, Gap):
        _convert(record.t_ns, Time, "the time of a gap")
    elif isinstance(record, Clock):
        _convert(record.monotonic_ns, Time, "a clock")
        _convert(record.boottime_ns, Time, "a clock")
        _convert(record.realtime_ns, Count, "a clock")
    else:
        for name, kind in _HEADER_FACTS.items():
            _convert(getattr(record, name), kind, f"{name} of a header")
    return record, ()


def _drop_attributes(event: Event, kind: type[Struct]) -> tuple[Event, list[str]]:
    """Return an event without its wrong attributes, and what is wrong with them.

    Raises: ImplausibleError when one of them says which process the event is about, or has no
    default that means "not known".
    """
    subject = f"an event {event.kind[:40]}"
    attributes: dict[str, Any] = dict(event.attributes)
    problems = []
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in attributes:
            raise ImplausibleError(f"{subject}: no {field.name}")
        is_optional = field.default is None or field.default_factory is not msgspec.NODEFAULT
        is_optional = is_optional and field.name not in _IDENTIFYING_ATTRIBUTES
        try:
            if field.name in attributes:
                _convert(attributes[field.name], field.type, f"{field.name} of {subject}")
        except ImplausibleError as error:
            if not is_optional:
                raise
            problems.append(str(error))
            del attributes[field.name]
    return replace(event, attributes=attributes), problems


def check_span_parts(parts: Iterable[SpansPart]) -> None:
    """Check the processes and numbers of a frame of spans.

    Raises: ImplausibleError for numbers that no recorder writes.
    """
    for part in parts:
        is_process = 0 <= part.pid < 1 << 31 and 0 <= part.started_ticks < 1 << 62
        if not (is_process and 0 <= part.first_sequence < 1 << 62 and 0 <= part.dropped < 1 << 62):
            raise ImplausibleError("spans of an impossible process")


def _convert(value: Any, kind: Any, subject: str) -> None:
    try:
        msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise ImplausibleError(f"{subject}: {error}") from error


def find_impossible_values(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Find the values that no signal has: infinite, or beyond 64 bits; bool[n] for float64[n]."""
    return np.abs(values) > MAX_VALUE


def find_impossible_spans(
    start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], last_ns: int
) -> NDArray[np.bool_]:
    """Find the spans that end before they start, begin before the node, or end after its records.

    start_ns, end_ns: int64[n]. last_ns: time of the last record. Returns bool[n].
    """
    return (end_ns < start_ns) | (start_ns < 0) | (end_ns > last_ns + MAX_JUMP_NS)


@dataclass(slots=True)
class _Cluster:
    """Records whose times lie together, and far from all that were accepted."""

    first_ns: int
    last_ns: int
    frames: int
    records: list[Any]


class TimeFilter:
    """Passes on the records whose times agree with those of other frames.

    Until the first frames agree, everything is held, then passed on in order. `refused` counts
    the records that no other frame confirmed; it is complete when the frames have ended.
    """

    def __init__(self, has_start: bool = True) -> None:
        """has_start: the recording begins with its first segment, none was dropped."""
        self.refused = 0
        self.example = ""
        """The first record that was refused, in words; "" when none was."""
        self._has_start = has_start
        self._is_imported = False
        self._started: Mapping[str, int] | None = None
        self._first_ns = self._last_ns = 0
        self._early: list[list[Any]] | None = []
        self._clusters: list[_Cluster] = []

    @property
    def unconfirmed(self) -> int:
        """Records far from all others that wait for frames that agree with them."""
        return sum(len(cluster.records) for cluster in self._clusters)

    def filter_frames(self, frames: Iterable[list[_Any]]) -> Iterator[list[_Any]]:
        """Yield the records that are accepted, frame by frame.

        All of what an importer wrote: its frames are slices of a file, hours apart or long.
        """
        for records in frames:
            yield from self.filter_frame(records)
        if self._early is not None and not self._is_imported:
            # Too short for a confirmation: most frames decide, of equals the earliest time.
            largest = max(self._clusters, key=lambda c: (c.frames, -c.first_ns), default=None)
            yield from self._start(largest)
        for cluster in self._clusters:
            self._refuse(cluster.records)

    def filter_frame(self, records: list[_Any]) -> Iterator[list[_Any]]:
        """Yield what is accepted once a further frame is there: its records, and held ones."""
        header = records[0] if records and not self._is_imported else None
        if isinstance(header, Header) and "importer" in header.versions:
            self._is_imported = True
        if self._is_imported:
            yield records
            return
        if self._early is None:
            yield self._filter_records(records)
            return
        self._early.append(records)
        for cluster in self._collect(records, keep=False):
            if cluster.frames > CONFIRMATIONS:
                yield from self._start(cluster)
                break

    def _start(self, cluster: _Cluster | None) -> Iterator[list[Any]]:
        """Accept the times of a cluster, and pass on what was held until now."""
        early, self._early, self._clusters = self._early or [], None, []
        if cluster is not None:
            self._first_ns, self._last_ns = cluster.first_ns, cluster.last_ns
        for records in early:
            yield self._filter_records(records)

    def _filter_records(self, records: list[Any]) -> list[Any]:
        first_ns, last_ns = self._first_ns - MAX_JUMP_NS, self._last_ns + MAX_JUMP_NS
        out, far = [], []
        for record in records:
            times = find_times(record)
            if times is None:
                out.append(self._correct_start(record) if isinstance(record, Header) else record)
            elif first_ns <= times[0] <= times[1] <= last_ns:
                self._last_ns = max(self._last_ns, times[1])
                out.append(record)
            else:
                far.append(record)
        if far:
            for cluster in self._collect(far, keep=True):
                if cluster.frames > CONFIRMATIONS:
                    self._first_ns = min(self._first_ns, cluster.first_ns)
                    self._last_ns = max(self._last_ns, cluster.last_ns)
                    self._clusters.remove(cluster)
                    out += cluster.records
        return out

    def _collect(self, records: Iterable[Any], keep: bool) -> list[_Cluster]:
        """Add the records of a frame to clusters of times; return the clusters it confirms."""
        confirmed: list[_Cluster] = []
        for record in records:
            times = find_times(record)
            if times is None:
                continue
            first_ns, last_ns = times
            if first_ns > last_ns or last_ns - first_ns > MAX_JUMP_NS:
                if keep:
                    self._refuse([record])
                continue
            cluster = self._find_cluster(first_ns, last_ns)
            if cluster not in confirmed:
                cluster.frames += 1
                confirmed.append(cluster)
            if keep:
                cluster.records.append(record)
        return confirmed

    def _find_cluster(self, first_ns: int, last_ns: int) -> _Cluster:
        for cluster in self._clusters:
            is_near = cluster.first_ns - MAX_JUMP_NS <= first_ns
            if is_near and last_ns <= cluster.last_ns + MAX_JUMP_NS:
                cluster.first_ns = min(cluster.first_ns, first_ns)
                cluster.last_ns = max(cluster.last_ns, last_ns)
                return cluster
        if len(self._clusters) >= MAX_CLUSTERS:
            self._refuse(self._clusters.pop(0).records)
        self._clusters.append(_Cluster(first_ns, last_ns, 0, []))
        return self._clusters[-1]

    def _correct_start(self, header: Header) -> Header:
        """Return the header without a start that disagrees with the records, or an earlier one."""
        started = header.started
        if self._started is None:
            at_ns = started.get("monotonic_ns")
            low_ns = self._first_ns - MAX_JUMP_NS if self._has_start else 0
            if at_ns is None or low_ns <= at_ns <= self._last_ns + MAX_JUMP_NS:
                self._started = started
                return header
            self._refuse([header])
            return replace(header, started={})
        if started == self._started:
            return header
        self._refuse([header])
        return replace(header, started=dict(self._started))

    def _refuse(self, records: Sequence[Any]) -> None:
        self.refused += len(records)
        if records and not self.example:
            self.example = f"the time of a record ({type(records[0]).__name__.lower()})"


def find_times(record: Any) -> tuple[int, int] | None:
    """Find the first and last time of a record, ns; None for one whose times lie in the past.

    Spans tell when they began and ended, which is earlier than their frame, by any time.
    """
    if isinstance(record, Columns):
        t_ns = record.t_ns
    elif isinstance(record, Rows):
        if "t_ns" not in record.names:
            return None
        index = record.names.index("t_ns")
        columns = record.columns
        if isinstance(columns, BlockColumns):
            t_ns = columns.encoded_column(index)
        else:
            t_ns = columns[index]
    elif isinstance(record, Clock):
        return record.monotonic_ns, record.monotonic_ns
    elif isinstance(record, Event | Gap):
        return record.t_ns, record.t_ns
    else:
        return None
    return (int(t_ns[0]), int(t_ns[-1])) if len(t_ns) else None
