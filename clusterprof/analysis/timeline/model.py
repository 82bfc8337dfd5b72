"""The recording in memory: series, spans and threads of one node for one stretch of time.

Everything is numpy columns sorted by time; nothing is filled in. A `Chunk` is what the analysis
holds at once (about 60 s of one node), so that the length of a recording costs no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace.schema import Event, Gap, Header

Int = NDArray[np.int64]
Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """Readings of one signal of one device; for counters differences mean something."""

    t_ns: Int
    values: Float
    """NaN where the value was not available."""
    is_counter: bool


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Spans of one kind of one process, sorted by start."""

    start_ns: Int
    end_ns: Int
    a: Int
    b: Int
    c: Int
    d: Int
    sequence: Int


@dataclass(frozen=True, slots=True)
class ThreadTable:
    """Samples of one thread, sorted by time. Counters in ns; -1 = not available."""

    t_ns: Int
    state: Int
    """ord of R, S, D, T, Z, …"""
    on_cpu_ns: Int
    run_delay_ns: Int
    user_ns: Int
    system_ns: Int
    block_io_delay_ns: Int
    major_faults: Int
    wchan: Int
    """Index into `Chunk.wchan_names`; -1 unknown."""
    name: str = ""
    """Of a thread that is not the main one; "" unknown."""


@dataclass(frozen=True, slots=True)
class ProcessIo:
    """Samples of /proc/<pid>/io and memory of one process. -1 = not available."""

    t_ns: Int
    rss_bytes: Int
    read_chars: Int
    write_chars: Int
    read_bytes: Int
    write_bytes: Int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one process may run and have its memory, as last seen, and where it ran."""

    cpus: frozenset[int]
    """CPUs that affinity and cpuset leave it; empty = unknown."""
    nodes: frozenset[int]
    """NUMA nodes it may have memory of; empty = unknown."""
    ran_on: Int
    """The CPU its main thread had last run on, at each look."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the job in this chunk."""

    pid: int
    started_ticks: int
    parent_pid: int
    """-1 when unknown."""
    name: str
    registration: Mapping[str, Any]
    """Attributes of its `process-registered` event ({} when it never registered)."""
    spans: Mapping[int, SpanTable]
    """By kind (`clusterprof.probe.layout`). Of forward, backward, collective, optimizer and a
    user's own kinds a training process has only those that tell when it was seen: the first to
    start, the last to end, the latest to arrive."""
    threads: Mapping[int, ThreadTable]
    """By tid; the main thread's tid is the pid."""
    io: ProcessIo | None
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stretch of one node. Spans and samples reach back before `start_ns` as far as intervals
    that end inside need them; each span belongs to the chunk in which it *ended*."""

    header: Header
    start_ns: int
    end_ns: int
    first: bool
    last: bool
    series: Mapping[tuple[str, str], Series]
    """By (signal name, device)."""
    processes: Mapping[int, Process]
    """By pid."""
    wchan_names: tuple[str, ...]
    events: tuple[Event, ...]
    gaps: tuple[Gap, ...]
    shared: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What was worked out of this chunk for one rank and holds for all; a copy begins anew."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One training process, its dataloader workers and its accelerator, in one chunk."""

    chunk: Chunk
    rank: int | None
    pid: int
    device: str
    """Device id of its accelerator; "" when none was measured."""
    emulated: bool
    main: Process
    workers: tuple[Process, ...]
    """Descendants that fetch batches (or, without spans, all descendants)."""
    marked: bool
    """True when spans of the probe exist; False = samples only (degraded mode M2)."""


# What the host was doing during a piece of lost time, by precedence of the taxonomy.
PHASE_NONE = 0  # nothing known: between spans, or no spans at all
PHASE_STARTUP = 1
PHASE_CHECKPOINT = 2
PHASE_EVAL = 3
PHASE_THROTTLED = 4  # a kernel was resident, and slowed
PHASE_H2D = 5
PHASE_DATA_WAIT = 6
PHASE_GC = 7
PHASE_COMPUTE = 8  # inside a step, the host is launching work
PHASE_GAP = 9  # the samples needed are missing
PHASE_COLLECTIVE = 10  # inside an operation with other ranks, or waiting for the end of one
PHASE_SPINNING = 11  # a kernel was resident and computed nothing: in one that nobody marked
PHASE_PERHAPS = 12  # the same, if other ranks bear it out; else it is no loss

# Where the loss was measured, best first.
SOURCE_STREAM_EVENTS = 1
SOURCE_DEVICE_SAMPLES = 2
SOURCE_HOST_SPANS = 3  # an upper bound


@dataclass(frozen=True, slots=True)
class Lost:
    """Pieces of lost device time of one rank in one chunk, sorted by start; n rows."""

    start_ns: Int
    end_ns: Int
    lost_ns: Int
    """0 <= lost_ns <= end_ns - start_ns."""
    phase: Int
    source: Int
    step: Int
    """Step number, -1 outside steps."""
    shared: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What was worked out of these pieces for one detector and holds for all."""


@dataclass(frozen=True, slots=True)
class Feeding:
    """What the critical thread did during each of n intervals: shares that sum to 1 per row.

    The critical thread is the worker that owned the awaited batch, or the main thread when it
    loads itself; without spans the busiest of the feeding threads. Rows about which nothing is
    known are all `unknown`.
    """

    user_cpu: Float
    """On a CPU in user code, or in the kernel without reading from a device."""
    reading_cpu: Float
    """On a CPU in the kernel on behalf of reads from a device."""
    runnable: Float
    """Ready to run, and no CPU given (contention or quota)."""
    block_io: Float
    """Blocked on a local block device."""
    remote_io: Float
    """Blocked on a network or user-space file system."""
    socket: Float
    """Asleep in a receive from another host."""
    memory: Float
    """Blocked on reclaim, swap or a major fault."""
    no_work: Float
    """The worker had no batch to fetch: too little prefetch, or no worker at all."""
    no_worker: Float
    """The worker did not exist yet."""
    delivery: Float
    """The batch was ready and on its way from the worker to the main process."""
    unknown: Float
    """Blocked on something unseen (sleep, lock, pipe), or no samples."""
    identified: NDArray[np.bool_]
    """True where the critical thread is known from a marker, not inferred."""
    worker_pid: Int
    """Process of the critical thread; 0 when none."""
