"""Spans of the probe as columns, and a typed view of them for each span kind.

A recorded span has four values `a`, `b`, `c`, `d`; what they mean depends on its kind
(`probe.layout.ARGUMENTS`). Only loading, trimming and concatenating work on them as they are
(`SpanTable`). The analysis uses views, which share the arrays:

    steps = process.get_spans(StepSpans)      # None without spans of that kind
    warm_up = steps.end_ns[steps.step == 0]

Unless noted, -1 in a column means unknown. Kinds without values need no view: their times are in
the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe import layout

Int = NDArray[np.int64]
Table = TypeVar("Table", bound="SpanTimes")
View = TypeVar("View", bound="SpanView")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SpanTimes:
    """Times of the spans of one kind of one process, sorted by start: int64[n] columns."""

    start_ns: Int
    end_ns: Int
    sequence: Int
    """Number of the span in its process."""

    def select(self: Table, rows: Int | NDArray[np.bool_]) -> Table:
        """Return the selected rows: bool[n] or int64[m]."""
        return type(self)(*(getattr(self, name)[rows] for name in self.__match_args__))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SpanTable(SpanTimes):
    """Spans of any kind as recorded, int64[n] columns: `probe.layout.ARGUMENTS` names a to d."""

    a: Int
    b: Int
    c: Int
    d: Int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SpanView(SpanTimes):
    """Spans of one kind with named columns."""

    kind: ClassVar[int]

    @classmethod
    def from_table(cls: type[View], table: SpanTable) -> View:
        """Name the columns of a table; both share the arrays."""
        columns = dict(zip(layout.ARGUMENTS[cls.kind], (table.a, table.b, table.c, table.d)))
        return cls(table.start_ns, table.end_ns, table.sequence, **columns)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DataWaitSpans(SpanView):
    """Waits of the training loop for its next batch, int64[n] columns."""

    kind = layout.DATA_WAIT

    batch: Int
    worker_pid: Int
    """Process that owns the batch; 0 = the waiting process loads itself."""
    workers: Int
    """Number of dataloader workers."""
    first: Int
    """1 for the first wait of an iterator, else 0."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FetchSpans(SpanView):
    """Fetches of batches in the process that loads them, int64[n] columns."""

    kind = layout.FETCH

    items: Int
    """Number of samples fetched."""
    user_cpu_ns: Int
    system_cpu_ns: Int
    read_bytes: Int
    """Bytes read from block devices."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepSpans(SpanView):
    """Training steps, int64[n] columns."""

    kind = layout.STEP

    step: Int
    """Step number, from 0."""
    marked_by: Int
    """0 = the optimizer, 1 = the user, 2 = a framework, 3 = batches of a loader."""
    samples: Int
    """Number of samples of this rank."""
    tokens: Int
    """Number of tokens of this rank."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepCounterSpans(SpanView):
    """Instants at which a step ended whose number in the job is known, int64[n] columns."""

    kind = layout.STEP_COUNTER

    job_step: Int
    """The job's own number of the step; it goes on after a restart."""
    step: Int
    """Number of the step in its process, from 0."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class H2dSpans(SpanView):
    """Copies from the host to the device, int64[n] columns."""

    kind = layout.H2D

    bytes: Int
    non_blocking: Int
    """1 if the host did not wait for the copy, else 0."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckpointSpans(SpanView):
    """Saves of checkpoints, int64[n] columns."""

    kind = layout.CHECKPOINT

    bytes: Int
    """Bytes written."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExposedSpans(SpanView):
    """Device time that a wait of the host did not hide, int64[n] columns."""

    kind = layout.EXPOSED

    measured_sequence: Int
    """Sequence number of the span that was measured."""
    device_ns: Int
    """Time in which the device had no work, in ns."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExposedCollectiveSpans(SpanView):
    """Device time of collective operations that nothing hid, int64[n] columns."""

    kind = layout.EXPOSED_COLLECTIVE

    measured_sequence: Int
    """Sequence number of the collective span that was measured."""
    device_ns: Int
    """Time for which the compute stream waited, in ns; may exceed the span."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CollectiveSpans(SpanView):
    """Collective operations as their host entered and left them, int64[n] columns."""

    kind = layout.COLLECTIVE

    group: Int
    """Hash of the process group; 0 = unknown."""
    number: Int
    """Number of the operation within its group, or of the message within its channel, from 0."""
    bytes: Int
    code: Int
    """Operation, form and peer (`probe.layout.OPERATION_MASK`, `FORM_SHIFT`, `PEER_SHIFT`)."""

    @property
    def form(self) -> Int:
        """Return the forms (`probe.layout.BLOCKING`, `ISSUE`, `WAIT`): int64[n]."""
        return self.code >> layout.FORM_SHIFT & layout.FORM_MASK

    @property
    def by_other_thread(self) -> NDArray[np.bool_]:
        """Return whether another thread than the main one was in the operation: bool[n]."""
        return np.asarray((self.code & layout.OTHER_THREAD) != 0, np.bool_)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompileSpans(SpanView):
    """Compilations of models, int64[n] columns."""

    kind = layout.COMPILE

    compiled_before: Int
    """Number of earlier compilations of that code."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoaderStartSpans(SpanView):
    """Instants at which iterators of dataloaders were made, int64[n] columns."""

    kind = layout.LOADER_START

    workers: Int
    pin_memory: Int
    """0 or 1."""
    prefetch_factor: Int
    """Number of batches that a worker may have ready; 0 = not set."""
    persistent_workers: Int
    """0 or 1."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WorkerStartSpans(SpanView):
    """Instants at which dataloader workers were ready, int64[n] columns."""

    kind = layout.WORKER_START

    worker: Int
    """Number of the worker, from 0."""
    workers: Int
    """Number of workers of its loader."""
    parent_pid: Int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SyncSpans(SpanView):
    """Waits of the host for its device, int64[n] columns."""

    kind = layout.SYNC

    waited_ns: Int
    """Time in ns that the host waited inside the span; more than its length = all of it."""
    times: Int
    """Number of calls that the span stands for."""


MAX_RESUME_NS = 5_000_000
"""The probe's thread sleeps again within this time of a wait for the interpreter lock."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class InterpreterWaitSpans(SpanView):
    """Waits of the probe's own thread for the interpreter lock, int64[n] columns."""

    kind = layout.INTERPRETER_WAIT

    pause_ns: Int
    """How long the thread had slept before."""

    def find_lock_hold_intervals(self) -> tuple[Int, Int]:
        """Find when the lock was kept: int64[n] starts and ends, ns, disjoint and sorted.

        It was taken at some time in the pause before the wait, on average in its middle; where the
        pause began at the end of another wait, as soon as that had ended.
        """
        begin = self.start_ns - self.pause_ns
        start = self.start_ns - self.pause_ns // 2
        follows = begin[1:] <= self.end_ns[:-1] + MAX_RESUME_NS
        start[1:] = np.where(follows, self.end_ns[:-1], np.maximum(start[1:], self.end_ns[:-1]))
        return start, self.end_ns


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StackSamples(SpanView):
    """Samples of a thread's Python stack, int64[n] columns.

    `start_ns` is when the sample was due and `end_ns` when it was taken: in between another thread
    had the interpreter lock, usually the sampled one.
    """

    kind = layout.STACK_SAMPLE

    stack: Int
    """Number of the stack in the process (event `stacks-defined`), from 1; 0 = not known."""
    interval_ns: Int
    """Time for which the sample stands, ns."""
    thread: Int
    """0 = the thread that trains or loads batches; other threads have other numbers."""
    state: Int
    """Code of the letter of the thread's state in /proc ("R", "S", "D"); 0 = not known."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AllocatorSpans(SpanView):
    """Counts of the device memory allocator between two readings, int64[n] columns."""

    kind = layout.ALLOCATOR

    retries: Int
    """Number of allocations repeated after a cache flush."""
    mallocs: Int
    """Number of blocks obtained from the driver."""
    frees: Int
    """Number of blocks returned to the driver."""
    out_of_memory: Int
    """Number of failed allocations."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DebugModeSpans(SpanView):
    """Time in which modes for debugging were on, about a second each, int64[n] columns."""

    kind = layout.DEBUG_MODES

    modes: Int
    """Bits as in `probe.layout`: `TORCH_PROFILER`, `ANOMALY_DETECTION` and others."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StarvedSpans(SpanView):
    """Gaps of an imported trace in which the device had no launched work, int64[n] columns."""

    kind = layout.STARVED

    launching_ns: Int
    """Time of the gap in ns that the host spent in operators and launches."""
    synced_ns: Int
    """Time in ns that it waited for the device."""
    memory_ns: Int
    """Time in ns that it allocated or freed device memory."""
    copying_ns: Int
    """Time in ns that it copied to or from the device."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoadingSpans(SpanView):
    """Work of the loading thread in an imported trace, int64[n] columns."""

    kind = layout.LOADING

    reading_ns: Int
    """Time in ns spent in file reads."""
    computing_ns: Int
    read_bytes: Int
    storage: Int
    """Where the files are stored (`probe.layout.STORAGE_LOCAL` and others); 0 = unknown."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HostWorkSpans(SpanView):
    """What the host did instead of launching work, int64[n] columns; disjoint in a trace."""

    kind = layout.HOST_WORK

    activity: Int
    """`probe.layout.WARMING_UP` and others."""
    function: Int
    """Index into `host_functions` of the registration; -1 = no function is known."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExposedCopySpans(SpanView):
    """Time in which a device copied from or to its host and did nothing else, int64[n] columns."""

    kind = layout.EXPOSED_COPY

    bytes: Int
    """Bytes copied in that time."""
    to_device_ns: Int
    """Part of the time in ns in which the copies went to the device."""
