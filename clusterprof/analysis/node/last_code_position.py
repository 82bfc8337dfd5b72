"""Track in which line each process was last, and how far each rank went on without an operation.

    spans     step 811 |
    samples   a a b b b |  c c c c c c c c        since its last span it was in c
    samples   a a b b b |                         none since: b was the last before it stopped

What a process does while it hangs is in the samples after its last span. A process that
was stopped or killed has none: then the last sample of all is kept, which is less certain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clusterprof.analysis.timeline.model import Process
from clusterprof.analysis.timeline.spans import StepSpans
from clusterprof.probe import layout

_NO_WORK_KINDS = frozenset(
    (
        *(layout.GC, layout.INTERPRETER_WAIT, layout.HOOK_NOTE, layout.ALLOCATOR),
        *(layout.WORKER_START, layout.DEBUG_MODES),
    )
)
"""Spans that say nothing about the progress of a process: it has them in an endless loop, too."""
MAX_WORKERS = 64
"""Workers of one rank that are kept."""


@dataclass(slots=True)
class LastCodePosition:
    """Where a process was last seen, as stack numbers of its node."""

    pid: int
    last_span_ns: int = 0
    """End of its last span of work, ns; 0 = it had none."""
    last_sample_ns: int = 0
    last_stack: int = 0
    """Stack of the last sample; 0 = not known."""
    since_span: dict[int, int] = field(default_factory=dict)
    """Number of samples after the last span, by stack."""
    state: str = ""
    """State of the thread in the last sample, a letter of /proc; "" = not read."""

    @property
    def stack(self) -> int:
        """Return the most frequent stack since the last span, else the last stack; 0 = none."""
        counts = [(count, stack) for stack, count in self.since_span.items() if stack]
        return max(counts)[1] if counts else self.last_stack

    @property
    def samples(self) -> int:
        """Return the number of samples of that stack since its last span; 0 = it was before."""
        return self.since_span.get(self.stack, 0)

    def update(self, process: Process) -> None:
        """Add the spans and samples of one chunk, except those repeated from the chunk before."""
        end_ns = max(
            (
                int(table.end_ns.max())
                for kind, table in process.spans.items()
                if kind not in _NO_WORK_KINDS and table.end_ns.size
            ),
            default=0,
        )
        if end_ns > self.last_span_ns:
            self.last_span_ns = end_ns
            self.since_span = {}
        samples = process.stacks
        if samples is None or not samples.end_ns.size:
            return
        main_rows = np.flatnonzero((samples.thread == 0) & (samples.end_ns > self.last_sample_ns))
        if not main_rows.size:
            return
        last = main_rows[np.argmax(samples.end_ns[main_rows])]
        self.last_sample_ns = int(samples.end_ns[last])
        self.last_stack = int(samples.stack[last])
        state = int(samples.state[last])
        self.state = chr(state) if 32 < state < 127 else ""
        after = main_rows[samples.start_ns[main_rows] > self.last_span_ns]
        numbers, counts = np.unique(samples.stack[after], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist()):
            self.since_span[number] = self.since_span.get(number, 0) + count


@dataclass(slots=True)
class StepsBetweenOperations:
    """How many steps a rank marked between its operations, and after the last one."""

    last_step: int = -1
    at_operation: int = -1
    """Step that its last operation was in."""
    most: int = 0
    """Most steps between two of its operations."""
    _last_start_ns: int = 0

    @property
    def after_last(self) -> int:
        """Return the number of steps since the rank's last operation; 0 = it had no operation."""
        return max(0, self.last_step - self.at_operation) if self._last_start_ns else 0

    def update(self, process: Process) -> None:
        """Add the steps and operations of one chunk."""
        steps = process.get_spans(StepSpans)
        if steps is None or not steps.end_ns.size:
            return
        order = np.argsort(steps.end_ns, kind="stable")
        ends, numbers = steps.end_ns[order], steps.step[order]
        table = process.spans.get(layout.COLLECTIVE)
        starts = table.start_ns if table is not None else np.zeros(0, np.int64)
        starts = np.sort(starts, kind="stable")  # nearly sorted already
        starts = starts[starts > self._last_start_ns]
        if starts.size:
            before = np.searchsorted(ends, starts) - 1
            ended = np.where(before >= 0, numbers[np.maximum(before, 0)], self.last_step)
            steps_at = ended + 1
            first = self.at_operation if self._last_start_ns else int(steps_at[0])
            self.most = max(self.most, int(np.diff(steps_at, prepend=first).max()))
            self.at_operation = int(steps_at[-1])
            self._last_start_ns = int(starts[-1])
        self.last_step = max(self.last_step, int(numbers.max()))
