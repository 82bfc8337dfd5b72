"""Find what connects other processes and threads of the job with the training process.

    active in its waits, and not while it runs     12 of 12 and 1 of 9 samples: works on request
    writes what the training process reads         54 of 110 kB in each second: read twice

Samples of all main threads are taken in the same ticks, those of other threads while they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.data_wait.samples import HELPER_THREADS
from clusterprof.analysis.timeline.load.buffers import TRAINING_KINDS
from clusterprof.analysis.timeline.model import Float, Int, LostTime, Process, Rank
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.probe import layout

_Bools = NDArray[np.bool_]
_RUNNING, _DISK_WAIT = ord("R"), ord("D")
_MIN_RUNNING_SAMPLES = 4
"""Number of samples of the running training thread that show who was active meanwhile."""
_MIN_CONTRAST_RATIO, _MIN_DEVIATIONS = 0.3, 3.0
"""By how much more of the time it is active in waits, and in standard errors."""
_MAX_THREADS = 64
MIN_MEMBER_RATIO = 0.1
"""Part of the waits, and of the bytes, from which one of several counts."""
_MIN_BYTES_RATIO, _MAX_BYTES_RATIO = 0.4, 1.1
"""Part of the bytes that is explained: a file may be read twice."""
_MIN_BYTES_PER_SECOND = 8_000.0  # the probe itself reads some 1.5 kB of states
_BYTES_WINDOW_NS = 1_000_000_000
_MIN_BYTES_WINDOWS, _USUAL_QUANTILE = 5, 0.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process, or a thread of the training process, that may be awaited."""

    process: Process
    tids: tuple[int, ...]
    """Its threads that were active, the busiest first."""
    is_thread: bool
    """True for the other threads of the training process."""
    active: _Bools
    """bool[samples] of the training thread: it was on a CPU, runnable, or waited for a disk."""
    alive: _Bools


def list_candidates(rank: Rank) -> list[Candidate]:
    """List the processes of the job that belong to no other rank, and the threads of this one."""
    processes = rank.chunk.processes
    fetching = {worker.pid for worker in rank.workers if layout.FETCH in worker.spans}
    training = {pid for pid, process in processes.items() if TRAINING_KINDS & process.spans.keys()}
    ancestors = set(list_ancestors(rank, rank.main))
    candidates = []
    for pid, process in processes.items():
        if pid == rank.pid or pid in fetching | training | ancestors or not process.threads:
            continue
        if not (training - {rank.pid}) & set(list_ancestors(rank, process)):
            candidates.append(_build_candidate(rank, process, tuple(process.threads), False))
    thread_ids = [
        tid
        for tid, thread in rank.main.threads.items()
        if tid != rank.pid and not thread.name.startswith(HELPER_THREADS)
    ]
    candidates.append(_build_candidate(rank, rank.main, tuple(thread_ids), True))
    return candidates


def list_ancestors(rank: Rank, process: Process) -> list[int]:
    """List the pids of the parents of a process, nearest first, as far as they were recorded."""
    ancestors: list[int] = []
    parent = process.parent_pid
    while parent > 0 and parent not in ancestors:
        ancestors.append(parent)
        process_above = rank.chunk.processes.get(parent)
        parent = process_above.parent_pid if process_above is not None else 0
    return ancestors


def _build_candidate(
    rank: Rank, process: Process, tids: tuple[int, ...], is_thread: bool
) -> Candidate:
    t_ns = rank.main.threads[rank.pid].t_ns
    active, alive = np.zeros((2, t_ns.size), np.bool_)
    counts = []
    for tid in tids:
        thread = process.threads[tid]
        if not thread.t_ns.size:
            continue
        at_work = np.isin(thread.state, (_RUNNING, _DISK_WAIT))
        at_samples = np.isin(t_ns, thread.t_ns[at_work])
        active |= at_samples
        alive |= (t_ns >= thread.t_ns[0]) & (t_ns <= thread.t_ns[-1])
        counts.append((-int(at_samples.sum()), tid))
    busiest_count = min(counts, default=(0, 0))[0]
    busiest = [
        tid for count, tid in sorted(counts) if count <= MIN_MEMBER_RATIO * busiest_count < 0
    ]
    return Candidate(process, tuple(busiest[:_MAX_THREADS]), is_thread, active, alive)


def measure_active_ratio(candidate: Candidate, samples: _Bools) -> float:
    """Measure in which part of some samples a candidate was active, 0 to 1; 0 if it was not there.

    samples: bool[samples] of the training thread.
    """
    alive_samples = samples if candidate.is_thread else samples & candidate.alive
    if not _lives_in(candidate, samples):
        return 0.0
    return int((alive_samples & candidate.active).sum()) / max(int(alive_samples.sum()), 1)


def _lives_in(candidate: Candidate, samples: _Bools) -> bool:
    """Return whether a candidate lived in most of some samples; threads may follow each other."""
    alive = int((samples & candidate.alive).sum())
    return candidate.is_thread or 2 * alive >= int(samples.sum())


def is_on_request(candidate: Candidate, samples: _Bools, running: _Bools) -> bool:
    """Return whether a candidate is much less active while the training thread runs.

    samples, running: bool[samples] of the training thread, in waits and while it runs.
    """
    running_alive = running & candidate.alive
    count, other_count = int((samples & candidate.alive).sum()), int(running_alive.sum())
    if other_count < _MIN_RUNNING_SAMPLES or not count:
        return False
    ratio = int((samples & candidate.active).sum()) / count
    other_ratio = int((running_alive & candidate.active).sum()) / other_count
    # Each side as if one sample more were active and one not: no side is ever certain.
    spread = sum(
        (part * n + 1) / (n + 2) * (1 - (part * n + 1) / (n + 2)) / n
        for part, n in ((ratio, count), (other_ratio, other_count))
    )
    contrast = ratio - other_ratio
    return contrast >= _MIN_CONTRAST_RATIO and contrast >= _MIN_DEVIATIONS * spread**0.5


def compute_concentration(candidate: Candidate, samples: _Bools, running: _Bools) -> float:
    """Compute how much more of the time a candidate is active in waits than in all samples.

    samples, running: bool[samples] of the training thread. A factor, 1 = equally much.
    """
    everywhere = (samples | running) & candidate.alive
    overall = int((everywhere & candidate.active).sum()) / max(int(everywhere.sum()), 1)
    return measure_active_ratio(candidate, samples) / max(overall, 1e-9)


def select_sharing(
    rank: Rank,
    lost: LostTime,
    candidates: Sequence[Candidate],
    samples: _Bools,
    takes_output: bool = False,
) -> list[Candidate]:
    """Select the processes whose output is the input of the training process, or the reverse.

    Together they must explain what it reads (or writes), each a known part of it. samples:
    bool[samples] of the training thread, in which it waits.
    """
    main = rank.main.io
    processes = [item for item in candidates if not item.is_thread and _lives_in(item, samples)]
    if main is None or main.t_ns.size < 2 or not processes:
        return []
    start_ns = max(int(lost.start_ns[0]), int(main.t_ns[0]))
    end_ns = min(int(lost.end_ns[-1]), int(main.t_ns[-1]))
    for item in processes:
        t_ns = item.process.io.t_ns if item.process.io is not None else np.zeros(0, np.int64)
        if t_ns.size:
            start_ns, end_ns = max(start_ns, int(t_ns[0])), min(end_ns, int(t_ns[-1]))
    columns = ("write_chars", "read_chars") if takes_output else ("read_chars", "write_chars")
    edges = np.arange(start_ns, end_ns + 1, _BYTES_WINDOW_NS)
    usual = _select_usual_windows(rank, columns[0], edges)
    if usual is None:
        return []
    total = float(_measure_increases(rank.main, columns[0], edges)[usual].sum())
    parts = [
        float(_measure_increases(item.process, columns[1], edges)[usual].sum()) / total
        for item in processes
    ]
    members = [item for item, part in zip(processes, parts) if part >= MIN_MEMBER_RATIO]
    explained = sum(part for part in parts if part >= MIN_MEMBER_RATIO)
    return members if _MIN_BYTES_RATIO <= explained <= _MAX_BYTES_RATIO else []


def is_reading(rank: Rank, lost: LostTime) -> bool:
    """Return whether the training process reads bytes all the time: from files, pipes or queues."""
    edges = np.arange(int(lost.start_ns[0]), int(lost.end_ns[-1]) + 1, _BYTES_WINDOW_NS)
    return _select_usual_windows(rank, "read_chars", edges) is not None


def _select_usual_windows(rank: Rank, column: str, edges: Int) -> _Bools | None:
    """Select the windows without imports and ends of children: bool[n - 1]; None = hardly a byte.

    edges: int64[n], ns.
    """
    if edges.size < _MIN_BYTES_WINDOWS:
        return None
    increases = _measure_increases(rank.main, column, edges)
    usual = increases <= np.quantile(increases, _USUAL_QUANTILE)
    is_enough = float(increases[usual].sum()) >= _MIN_BYTES_PER_SECOND * np.count_nonzero(usual)
    return usual if is_enough else None


def _measure_increases(process: Process, column: str, edges: Int) -> Float:
    """Measure by how much a counter of a process rose between some times: float64[n - 1]."""
    io = process.io
    if io is None:
        return np.zeros(edges.size - 1)
    rise = compute_column_increase(io.t_ns, getattr(io, column), edges[:-1], edges[1:])
    return np.nan_to_num(rise)


def describe_candidates(culprits: Sequence[Candidate]) -> str:
    """Name the awaited ones: "process tokenizer pid 4711", "thread logger 4712", "2 processes"."""
    first = culprits[0]
    if first.is_thread:
        tid = first.tids[0]
        suffix = f" and {len(first.tids) - 1} more" if len(first.tids) > 1 else ""
        return f"thread {first.process.threads[tid].name} {tid}{suffix}"
    if len(culprits) == 1:
        return f"process {first.process.name} pid {first.process.pid}"
    pids = ", ".join(str(item.process.pid) for item in culprits[:4])
    return f"{len(culprits)} processes {first.process.name} pid {pids}"
