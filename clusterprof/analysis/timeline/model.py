"""Data model of the analysis: series, spans and threads of one node in one time window.

All data are numpy columns sorted by time; missing readings are not filled in. The
analysis holds one `Chunk` at a time (about 60 s of one node), so memory does not grow
with the recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.spans import Int, SpanTable, StackSamples, View
from clusterprof.analysis.timeline.stacks import StackTree
from clusterprof.trace.schema import Event, Gap, Header

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """Readings of one signal of one device; for a counter only differences are meaningful."""

    t_ns: Int
    values: Float
    """NaN where the value was not available."""
    is_counter: bool


@dataclass(frozen=True, slots=True)
class ThreadTable:
    """Samples of one thread, sorted by time. Counters are in ns; -1 means not available."""

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
    """Name of a thread other than the main one; "" if unknown."""


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
    """CPUs and NUMA nodes that one process may use, and the CPUs on which it was observed."""

    cpus: frozenset[int]
    """CPUs allowed by affinity and cpuset; empty = unknown."""
    nodes: frozenset[int]
    """NUMA nodes from which it may allocate memory; empty = unknown."""
    observed_cpus: Int
    """int64[n]: the last CPU of its main thread at each sample."""


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
    """By kind (`clusterprof.probe.layout`). For a training process, forward, backward,
    collective, optimizer and user-defined kinds keep only the spans that show when it was
    active: the first to start, the last to end and the last to arrive.
    """
    threads: Mapping[int, ThreadTable]
    """By tid; the main thread's tid is the pid."""
    io: ProcessIo | None
    placement: Placement | None = None
    stacks: StackSamples | None = None
    """Samples of its Python stack, with the stack numbers of the node; None without any."""

    def get_spans(self, view: type[View]) -> View | None:
        """Return the spans of one kind with named columns; None if the process has no table."""
        table = self.spans.get(view.kind)
        return None if table is None else view.from_table(table)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One window of one node's recording.

    Spans and samples begin before `start_ns` as far as intervals that end inside the window
    need them. Each span belongs to the chunk in which it *ended*.
    """

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
    stacks: StackTree = field(default_factory=StackTree, compare=False)
    """The stacks that samples of its processes refer to, and those of earlier chunks."""
    shared: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Cache of results computed for one rank that hold for all ranks; a copied chunk starts
    empty.
    """


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
    """Descendants that fetch batches; if no spans exist, all descendants."""
    marked: bool
    """True when spans of the probe exist; False = samples only, without the probe."""


# Activity of the host during a segment of lost time. Their precedence is in
# analysis.attribution.rank.host_phases.
PHASE_NONE = 0  # unknown: between spans, or no spans at all
PHASE_STARTUP = 1
PHASE_CHECKPOINT = 2
PHASE_EVAL = 3
PHASE_THROTTLED = 4  # a kernel was resident and ran at reduced speed
PHASE_H2D = 5
PHASE_DATA_WAIT = 6
PHASE_GC = 7
PHASE_COMPUTE = 8  # inside a step, the host launches work
PHASE_COLLECTIVE = 10  # inside a collective operation, or waiting for its end
PHASE_BUSY_WAIT = 11  # a resident kernel computed nothing, outside the operations that have spans
# suspected busy-wait: counts as loss only if the other ranks confirm it
PHASE_SUSPECTED_BUSY_WAIT = 12
PHASE_HIDDEN_COLLECTIVE = 13  # launches work while another thread is in a collective operation
PHASE_COPY = 14  # the device copied from or to its host, and did nothing else
PHASE_LOCK = 15  # asleep while another thread keeps the interpreter lock
PHASE_SYNC = 16  # waits within a step until its own device has done all its work

# How the loss was measured, best source first.
SOURCE_STREAM_EVENTS = 1
SOURCE_DEVICE_SAMPLES = 2
SOURCE_HOST_SPANS = 3  # an upper bound


@dataclass(frozen=True, slots=True)
class LostTime:
    """Segments of lost device time of one rank in one chunk, sorted by start.

    int64[n] columns.
    """

    start_ns: Int
    end_ns: Int
    lost_ns: Int
    """0 <= lost_ns <= end_ns - start_ns."""
    phase: Int
    source: Int
    step: Int
    """Step number, -1 outside steps."""
    shared: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Cache of results computed for one detector that hold for all detectors."""


@dataclass(frozen=True, slots=True)
class DataWaitBreakdown:
    """What the critical thread did during each of n intervals: shares that sum to 1 per row.

    The critical thread is the worker that owned the awaited batch, or the main thread if it
    loads the data itself. Without spans it is the busiest data-loading thread. A row
    without information is entirely `unknown`. Shares are float64[n].
    """

    user_cpu: Float
    """On a CPU in user code, or in the kernel without reading from a device."""
    reading_cpu: Float
    """On a CPU in the kernel on behalf of reads from a device."""
    runnable: Float
    """Ready to run without getting a CPU (contention or quota)."""
    block_io: Float
    """Blocked on a local block device."""
    remote_io: Float
    """Blocked on a network or user-space file system."""
    socket: Float
    """Asleep while receiving from another host."""
    memory: Float
    """Blocked on memory reclaim, swap or a major page fault."""
    no_work: Float
    """The worker had no batch to fetch: too little prefetching, or no worker at all."""
    no_worker: Float
    """The worker did not exist yet."""
    delivery: Float
    """The batch was ready and in transfer from the worker to the main process."""
    unknown: Float
    """Blocked for a reason that was not recorded (sleep, lock, pipe), or no samples."""
    identified: NDArray[np.bool_]
    """True where a span or bytes identify the critical thread; False where it was inferred."""
    worker_pid: Int
    """Process of the critical thread; 0 if there is none."""
