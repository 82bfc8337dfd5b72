"""Follow how far each process has come in its job, for the life of the job over its restarts.

    process 1   step 0 = the job's step 1    …   step 19 = 20, killed
    process 2   step 0 = the job's step 11   …           the steps 11 to 20 are done twice

The job's own numbers come from the optimizer's counter or from `clusterprof.step(number)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterprof.analysis.timeline.model import Chunk, Int, Process
from clusterprof.analysis.timeline.spans import SpanTable, StepCounterSpans, StepSpans
from clusterprof.probe import layout
from clusterprof.trace.schema import Event

NO_COUNTER = "no number of a step was seen: mark steps with clusterprof.step(number)"
OTHER_COUNT = "the job counts other steps than its process: mark them with clusterprof.step(number)"


@dataclass(frozen=True, slots=True)
class ProcessProgress:
    """Progress of one process in steps and operations; times are ns on its node's clock."""

    pid: int
    started_ticks: int
    steps: int = 0
    """Steps that ended."""
    first_job_step: int | None = None
    """The job's own number of its first step; None = `why_missing`."""
    why_missing: str = NO_COUNTER
    save_ns: int = 0
    """Time in saves after its last step."""
    evaluation_ns: int = 0
    """Time in evaluations after its last step."""
    exit_code: int | None = None
    """Its exit status; None where its end was not seen, or a signal ended it."""
    signal: int = 0
    """The signal that ended it; 0 = none."""


@dataclass(slots=True)
class _Observed:
    """What was seen of a process so far."""

    last_step: int = -1
    last_end_ns: int = 0
    job_steps: dict[int, int] = field(default_factory=dict)
    """Step of the process -> the job's own number."""
    later: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(kind, sequence) -> start and end of its saves and evaluations after the last step."""
    exited: Mapping[str, Any] = field(default_factory=dict)


class ProgressTracker:
    """Follows every process that ends steps, chunk by chunk."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, int], _Observed] = {}

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Pass chunks through, and record what they show."""
        for chunk in chunks:
            for process in chunk.processes.values():
                self._observe(process)
            for event in chunk.events:
                self._observe_exit(event)
            yield chunk
            del chunk  # else it stays while the next one is read

    def finish(self) -> tuple[ProcessProgress, ...]:
        """Return the progress of each process, by pid and start."""
        return tuple(
            _summarize_progress(*key, observed) for key, observed in sorted(self._processes.items())
        )

    def _observe(self, process: Process) -> None:
        key = process.pid, process.started_ticks
        observed = self._processes.get(key)
        steps = process.get_spans(StepSpans)
        if steps is not None and steps.end_ns.size:
            observed = self._processes.setdefault(key, _Observed())
            observed.last_step = max(observed.last_step, int(steps.step.max()))
            observed.last_end_ns = max(observed.last_end_ns, int(steps.end_ns.max()))
        if observed is None:
            return
        counters = process.get_spans(StepCounterSpans)
        if counters is not None:
            observed.job_steps.update(zip(counters.step.tolist(), counters.job_step.tolist()))
        for kind in (layout.CHECKPOINT, layout.EVAL):
            table = process.spans.get(kind)
            if table is not None:
                observed.later.update(_list_times(kind, table, observed.last_end_ns))
        observed.later = {
            name: times
            for name, times in observed.later.items()
            if times[0] >= observed.last_end_ns
        }

    def _observe_exit(self, event: Event) -> None:
        if event.kind != "process-exited":
            return
        attributes = event.attributes
        key = attributes.get("pid", -1), attributes.get("started_ticks", -1)
        if key in self._processes:
            self._processes[key].exited = attributes


def _list_times(
    kind: int, table: SpanTable, from_ns: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    rows = table.start_ns >= from_ns
    columns: tuple[Int, ...] = (table.sequence[rows], table.start_ns[rows], table.end_ns[rows])
    for sequence, start_ns, end_ns in zip(*(column.tolist() for column in columns)):
        yield (kind, sequence), (start_ns, end_ns)


def _summarize_progress(pid: int, started_ticks: int, observed: _Observed) -> ProcessProgress:
    first, why = find_first_job_step(observed.job_steps)
    saves, evaluations = (
        _measure_times(observed, kind) for kind in (layout.CHECKPOINT, layout.EVAL)
    )
    code, signal = observed.exited.get("exit_code"), observed.exited.get("signal")
    return ProcessProgress(
        pid,
        started_ticks,
        steps=observed.last_step + 1,
        first_job_step=first,
        why_missing=why,
        save_ns=saves,
        evaluation_ns=evaluations,
        exit_code=code if isinstance(code, int) and not signal else None,
        signal=int(signal or 0),
    )


def _measure_times(observed: _Observed, kind: int) -> int:
    times = [times for (own_kind, _), times in observed.later.items() if own_kind == kind]
    return measure_union(times)


def measure_union(times: Iterable[tuple[int, int]]) -> int:
    """Measure the time in at least one of some intervals (start and end, ns): ns."""
    total_ns, until_ns = 0, -(1 << 62)
    for start_ns, end_ns in sorted(times):
        total_ns += max(end_ns - max(start_ns, until_ns), 0)
        until_ns = max(until_ns, end_ns)
    return total_ns


def find_first_job_step(job_steps: Mapping[int, int]) -> tuple[int | None, str]:
    """Find the job's own number of the first step of a process, or why it is not known.

    job_steps: step of the process, from 0 -> the job's own number. The last two must be as far
    apart in both counts: a job that counts otherwise, such as by batch, cannot be compared.
    """
    if not job_steps:
        return None, NO_COUNTER
    steps = sorted(job_steps)[-2:]
    offsets = {job_steps[step] - step for step in steps}
    if len(offsets) > 1:
        return None, OTHER_COUNT
    return offsets.pop(), ""
