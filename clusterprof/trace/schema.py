"""Define the records of a recording: what a frame may hold, and what it means.

The recorder makes records, trace.writer turns them into frames, and
trace.reader returns the records with numpy arrays for columns. No other module
handles the bytes. Times are nanoseconds of the node's CLOCK_MONOTONIC unless a name
says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterprof.errors import Kind

SCHEMA_VERSION = 1

# A column is an array('q') or array('d') when written and a numpy int64/float64 array when read.
Column = Any
"""A column: array('q') or array('d') when written, numpy int64[n] or float64[n] when read."""


@dataclass(frozen=True, slots=True)
class Header:
    """Origin of a recording: node, devices, versions and sampling plan. First frame of every
    segment.
    """

    node: dict[str, str]
    """key, hostname, display, boot_id, kernel."""
    started: dict[str, int]
    """monotonic_ns, boottime_ns, realtime_ns."""
    host: dict[str, Any]
    """cpus, memory_bytes, disks, nics, hcas, mounts, rails, gpu_nics, gpudirect: the inventory."""
    devices: Sequence[dict[str, Any]]
    """id, vendor, name, emulated, …: the accelerators."""
    launcher: dict[str, Any]
    """job, and every detected launcher variable under "variables"."""
    versions: dict[str, str]
    """clusterprof, python, schema, nvml, driver: those that are known."""
    profile: dict[str, Any]
    """Effective values of the profile."""
    collectors: Sequence[dict[str, Any]]
    """name, interval_ns, status: the sampling plan."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The node's clocks, read together: at start, every 10 s, and at the end."""

    monotonic_ns: int
    boottime_ns: int
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Samples of one collector: one value per tick and column."""

    collector: str
    signals: Sequence[str]
    """Signal name of each column."""
    devices: Sequence[str]
    """Device of each column; "" = the node."""
    t_ns: Column
    """int64[n]: when each row was sampled."""
    values: Sequence[Column]
    """One int64[n] or float64[n] per column; meaningless where masked."""
    masks: Sequence[bytes | None]
    """Per column None (all present) or n bytes, 1 = missing; a `Gap` gives the reason."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A table whose rows appear and disappear, such as threads of the job."""

    table: str
    names: Sequence[str]
    columns: Sequence[Column]
    """One int64[n] or float64[n] per name; -1 in an int64 column = not available."""
    strings: dict[str, Sequence[str]] = field(default_factory=dict)
    """For columns that hold indices: column name -> the strings they refer to."""


SPAN_FIELDS = ("start_ns", "end_ns", "kind", "a", "b", "c", "d")


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans that one process recorded, read from its ring."""

    pid: int
    started_ticks: int
    """Start time of the process in clock ticks since boot: with pid, its identity."""
    first_sequence: int
    """Sequence number of the first span here; numbers missing between frames were dropped."""
    dropped: int
    """Spans of this process lost since the last frame."""
    names: dict[int, str]
    """Names of user-defined kinds (>= 64) that occur."""
    columns: dict[str, Column]
    """int64[n] per name of SPAN_FIELDS, in order of recording."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one instant."""

    t_ns: int
    kind: str
    """process-registered, process-exited, group-announced, operation-under-way, device-owner,
    collector-hung, collector-recovered, disk-full, disk-resumed, recorder-stopped, oom-kill, …"""
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that could not be observed, from `t_ns` to the next gap or value of these
    columns.
    """

    t_ns: int
    collector: str
    signal: str
    """"" = the whole collector."""
    device: str
    """"" = all devices, or the node."""
    kind: Kind
    message: str
    remedy: str


Record = Header | Clock | Columns | Rows | Spans | Event | Gap
