"""Find the process or thread of the job for which the training thread waits.

    training thread   |run|~~~~~~~~ sleeps, looks for a file, sleeps ~~~~~~~~|run|~~~~~~~~
    process 4711      |============ computes ================================|============
    process 4712      |~~~~~~~~~~~~ asleep ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~

A thread that waits in a timer, on a lock, a pipe or a connection does not say for whom. A process
or thread of the job is named only if something connects the two:

* it is active in most of the waits, and much less while the training thread runs: on request;
* what it writes is what the training process reads, as far as bytes are counted;
* it is active in most of the waits, nobody else is, and the code waits for another part of the job
  (`multiprocessing`, a pipe, a loop that polls).

A busy process that shares nothing with the training process is innocent beside a `time.sleep`.
What the awaited one did meanwhile decides the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.base import (
    compute_sleep_ratios,
    find_certain_idle_time,
    is_poll,
    may_wait_in_driver,
    measure_main_thread,
    measure_sleep,
    select_phases,
    select_sleep_samples,
    sum_claimed_ns,
)
from clusterprof.analysis.timeline.code_locations import list_wait_kinds
from clusterprof.analysis.timeline.data_wait import blocked as kinds
from clusterprof.analysis.timeline.data_wait.blocked import ReadContext, get_read_context
from clusterprof.analysis.timeline.data_wait.candidates import (
    MIN_MEMBER_RATIO,
    Candidate,
    compute_concentration,
    describe_candidates,
    is_on_request,
    is_reading,
    list_ancestors,
    list_candidates,
    measure_active_ratio,
    select_sharing,
)
from clusterprof.analysis.timeline.data_wait.samples import (
    estimate_activity,
    find_sleep_samples,
    is_imported,
    view_thread,
)
from clusterprof.analysis.timeline.device_sync import find_samples_in_waits
from clusterprof.analysis.timeline.intervals import find_containing
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    Float,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.network_counters import may_have_remote_connections
from clusterprof.report.model import UNKNOWN_RESOURCE, ResourceFacts
from clusterprof.util.source_calls import SourceReader

_Bools = NDArray[np.bool_]
TIMER, LOCK, CONNECTION, BUSY, QUEUE = "timer", "lock", "connection", "busy", "queue"
"""Why the training thread waits; BUSY = in a loop that polls without a pause, QUEUE = in a wait for
data that has a span.
"""
_KEY, _FEEDERS_KEY, _SOURCES_KEY = "awaited work", "feeders", "sources"
_PIPE_WCHANS = ("pipe_read", "pipe_write", "unix_stream")
_CONNECTION_WCHANS = (
    *("sk_wait", "wait_woken", "tcp_recv", "skb_wait", "sk_stream_wait"),
    *_PIPE_WCHANS,
)
_WCHANS_BY_REASON: dict[str, Callable[[str], bool]] = {
    TIMER: lambda name: "nanosleep" in name,
    LOCK: lambda name: "futex" in name,
    CONNECTION: lambda name: any(part in name for part in _CONNECTION_WCHANS) or is_poll(name),
}
_RUNNING, _DISK_WAIT, _ASLEEP = ord("R"), ord("D"), ord("S")
_LATE_NS = 300_000  # a free interpreter lock is had sooner
_MIN_SAMPLES = 16
"""Number of samples of a wait that show who was active in it."""
_MIN_STACKS = 8
_MIN_WAIT_RATIO = 0.04  # of the lost segments: less is not divided
_MIN_ACTIVE_RATIO = 0.6
"""Part of the waits in which the awaited process or thread was active."""
_MIN_CODE_RATIO = 0.5
"""Part of the waits in calls that wait for another part of the job."""
ACTIVE_COLUMNS = (
    *(kinds.USER_CPU, kinds.READING_CPU, kinds.RUNNABLE),
    *(kinds.BLOCK_IO, kinds.REMOTE_IO, kinds.MEMORY),
)
_WRITTEN_COLUMNS = (kinds.BLOCK_IO, kinds.REMOTE_IO)


@dataclass(frozen=True, slots=True)
class AwaitedWork:
    """Waits of the training thread for a process or a thread of the job, and what that did."""

    wait_reason: str
    """TIMER, LOCK, CONNECTION, BUSY or QUEUE."""
    share: Float
    """float64[n]: part of each lost segment in which the training thread waited so."""
    activity: Float
    """float64[n, 11], the columns of `timeline.data_wait.blocked`; the rest is unknown."""
    pids: tuple[int, ...]
    tid: int
    """Thread of the training process; 0 = other processes."""
    resource: str
    resource_facts: ResourceFacts
    takes_output: bool
    """True if the training thread hands something over, False if it waits for something."""
    is_sure: bool
    """True if requests or bytes connect the two; else the only active one was chosen."""
    timer_ratio: float
    """Part of the samples in which it was not active, but slept in a timer."""

    @property
    def active_share(self) -> Float:
        """Return the part of each segment's loss in which the awaited process was active."""
        active: Float = self.activity[:, ACTIVE_COLUMNS].sum(axis=1)
        return self.share * active

    @property
    def runnable_share(self) -> Float:
        """Return the part of each segment's loss in which the awaited process had no CPU."""
        runnable: Float = self.activity[:, kinds.RUNNABLE]
        return self.share * runnable


@dataclass(frozen=True, slots=True)
class _Wait:
    """Samples in which the training thread waited for one reason."""

    reason: str
    share: Float
    """float64[n], part of each segment."""
    samples: _Bools
    """bool[samples] of the training thread."""
    is_known: bool
    """True if the code waits for another part of the job."""
    is_pool: bool
    takes_output: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    """Who was awaited; nobody if it is not known."""

    culprits: Sequence[Candidate] = ()
    is_sure: bool = False
    ratio: float = 1.0
    """How much more of the time they were active in waits than on the whole."""


@dataclass(frozen=True, slots=True)
class _Calls:
    """What the training thread waited for by its sampled stacks, as parts of their weight."""

    polls: float = 0.0
    """In loops that poll: of its sleep outside known calls."""
    sleeps: float = 0.0
    """In other lines of files that could be read."""
    job: float = 0.0
    """In calls that wait for another part of the job: of all its sleep."""
    output: float = 0.0
    pools: float = 0.0
    busy_polls: float = 0.0
    """In loops that poll, of its time on a CPU."""
    late: float = 0.0
    """Of all its sleep, while the interpreter lock was taken."""


def find_awaited_work(rank: Rank, lost: LostTime) -> tuple[AwaitedWork, ...]:
    """Find for whom the training thread waited inside steps, one for each reason of its waits.

    Waits for batches, other ranks and the device, which have spans, are left out.
    """
    works = lost.shared.get(_KEY)
    if works is None:
        works = lost.shared[_KEY] = tuple(_find_awaited_work(rank, lost))
    return works  # type: ignore[no-any-return]


def find_feeders(rank: Rank, lost: LostTime) -> AwaitedWork | None:
    """Find who makes the batches that the training thread takes from a queue: by their bytes.

    Its share is 1 in waits for data and 0 elsewhere. None where bytes connect no process.
    """
    if _FEEDERS_KEY not in lost.shared:
        lost.shared[_FEEDERS_KEY] = _find_feeders(rank, lost)
    feeders: AwaitedWork | None = lost.shared[_FEEDERS_KEY]
    return feeders


def _find_feeders(rank: Rank, lost: LostTime) -> AwaitedWork | None:
    waiting = select_phases(lost, PHASE_DATA_WAIT)
    thread = rank.main.threads.get(rank.pid)
    if not rank.marked or thread is None or not waiting.any() or is_imported(rank.chunk):
        return None
    bounds = lost.start_ns[waiting], lost.end_ns[waiting]
    samples = find_containing(thread.t_ns, bounds) >= 0
    samples &= np.isin(thread.state, (_ASLEEP, _DISK_WAIT))
    if np.count_nonzero(samples) < _MIN_SAMPLES:
        return None
    feeders = select_sharing(rank, lost, list_candidates(rank), samples)
    if not feeders:
        return None
    wait = _Wait(QUEUE, waiting.astype(np.float64), samples, True, len(feeders) > 1, False)
    return _measure_work(rank, lost, wait, _Choice(feeders, True), None)


def list_awaited_work(rank: Rank, lost: LostTime) -> list[AwaitedWork]:
    """List for whom the training thread waited, inside steps and for its batches."""
    feeders = find_feeders(rank, lost)
    return [*find_awaited_work(rank, lost), *((feeders,) if feeders is not None else ())]


def find_awaited_input(rank: Rank, lost: LostTime) -> AwaitedWork | None:
    """Find for whom the training thread waited most to get something; None = not known."""
    works = [work for work in find_awaited_work(rank, lost) if not work.takes_output]
    feeders = find_feeders(rank, lost)
    if feeders is not None and len(feeders.pids) == 1:  # several are workers like a loader's
        works.append(feeders)
    return max(works, key=lambda work: sum_claimed_ns(lost, work.active_share), default=None)


def measure_poll_ratio(rank: Rank, lost: LostTime) -> float:
    """Measure which part of its sleep in timers the training thread spent in loops that poll."""
    calls = _measure_calls(rank, lost, select_phases(lost, PHASE_COMPUTE))
    readable = calls.polls + calls.sleeps if calls is not None else 0.0
    return calls.polls / readable if calls is not None and readable > 0 else 0.0


def _find_awaited_work(rank: Rank, lost: LostTime) -> list[AwaitedWork]:
    inside = select_phases(lost, PHASE_COMPUTE)
    thread = rank.main.threads.get(rank.pid)
    if not rank.marked or thread is None or not inside.any() or is_imported(rank.chunk):
        return []
    calls = _measure_calls(rank, lost, inside)
    waits = _list_waits(rank, lost, inside, calls)
    if not waits:
        return []
    candidates = list_candidates(rank)
    within = find_containing(thread.t_ns, (lost.start_ns, lost.end_ns)) >= 0
    result = []
    for wait in waits:
        running = within & (thread.state == _RUNNING) & ~wait.samples
        choice = _choose_culprits(rank, lost, candidates, wait, running)
        if choice.culprits:
            result.append(_measure_work(rank, lost, wait, choice, calls))
    return result


def _list_waits(rank: Rank, lost: LostTime, inside: _Bools, calls: _Calls | None) -> list[_Wait]:
    """List the waits of the training thread that took a notable part of the lost time."""
    thread = rank.main.threads[rank.pid]
    length_ns = np.maximum(lost.end_ns - lost.start_ns, 1).astype(np.float64)
    asleep = select_sleep_samples(rank, lost, inside)
    asleep_ns = measure_sleep(rank, lost, inside)
    samples_of = {
        reason: asleep & find_sleep_samples(thread, rank.chunk.wchan_names, matches)
        for reason, matches in _WCHANS_BY_REASON.items()
    }
    if may_wait_in_driver(rank):
        samples_of[CONNECTION] &= ~find_sleep_samples(thread, rank.chunk.wchan_names, is_poll)
    pipes = find_sleep_samples(thread, rank.chunk.wchan_names, _is_pipe)
    may_be_remote = may_have_remote_connections(rank.chunk)
    waits = []
    for reason, samples in samples_of.items():
        count = int(samples.sum())
        if count < _MIN_SAMPLES:
            continue
        ratio = count / max(int(asleep.sum()), 1)
        part, is_known = _judge_wait_reason(reason, ratio, calls)
        if reason == CONNECTION:  # the other side is on this machine
            is_known |= not may_be_remote or 2 * int((samples & pipes).sum()) > count
        ratios = asleep_ns * compute_sleep_ratios(rank, lost, inside, samples) / length_ns
        if reason == CONNECTION:
            certain_ns = find_certain_idle_time(ratios * length_ns, length_ns - lost.lost_ns)
            ratios = np.maximum(ratios, certain_ns / np.maximum(lost.lost_ns, 1))
        takes = calls is not None and 2 * calls.output > calls.job > 0 and reason != TIMER
        is_pool = calls is not None and 2 * calls.pools > calls.job > 0
        waits.append(
            _Wait(reason, np.clip(ratios * part, 0.0, 1.0), samples, is_known, is_pool, takes)
        )
    waits += _find_short_waits(rank, lost, inside, calls)
    waits += _find_busy_polls(rank, lost, inside, calls)
    weight = lost.lost_ns[inside].astype(np.float64)
    least = _MIN_WAIT_RATIO * float(weight.sum())
    return [wait for wait in waits if float((wait.share[inside] * weight).sum()) >= least]


def _is_pipe(name: str) -> bool:
    return any(wchan in name for wchan in _PIPE_WCHANS)


def _judge_wait_reason(reason: str, ratio: float, calls: _Calls | None) -> tuple[float, bool]:
    """Return which part of the sleep for a reason may be a wait for the job, and if it is known so.

    ratio: part of all sleep that has this reason.
    """
    if reason == CONNECTION:
        return 1.0, calls is not None and calls.job >= _MIN_CODE_RATIO * ratio
    if calls is None:  # a timer may be a poll; a lock can be anything
        return (1.0, False) if reason == TIMER else (0.0, False)
    if reason == LOCK:
        part = min(calls.job / ratio, 1.0)
        return part, part >= _MIN_CODE_RATIO
    readable = calls.polls + calls.sleeps
    if readable <= 0:
        return 1.0, False
    part = calls.polls / readable
    return part, part >= _MIN_CODE_RATIO


def _find_short_waits(
    rank: Rank, lost: LostTime, inside: _Bools, calls: _Calls | None
) -> list[_Wait]:
    """Find waits so short that the thread was awake again before its wchan could be read.

    Such as questions to a manager process: the call alone says for whom they are.
    """
    if calls is None or calls.job < _MIN_CODE_RATIO:
        return []
    thread = rank.main.threads[rank.pid]
    bounds = lost.start_ns[inside], lost.end_ns[inside]
    samples = (find_containing(thread.t_ns, bounds) >= 0) & (thread.state == _ASLEEP)
    samples &= (thread.wchan < 0) & ~find_samples_in_waits(rank.main, thread.t_ns)
    count, named = int(samples.sum()), int(select_sleep_samples(rank, lost, inside).sum())
    if count < _MIN_SAMPLES or count < named:
        return []
    length_ns = np.maximum(lost.end_ns - lost.start_ns, 1)
    share = measure_sleep(rank, lost, inside) / length_ns * calls.job * count / (count + named)
    is_pool, takes = 2 * calls.pools > calls.job, 2 * calls.output > calls.job
    return [_Wait(LOCK, share, samples, True, is_pool, takes)]


def _find_busy_polls(
    rank: Rank, lost: LostTime, inside: _Bools, calls: _Calls | None
) -> list[_Wait]:
    """Find waits in loops that look for something all the time, without a sleep."""
    if calls is None or calls.busy_polls < _MIN_CODE_RATIO:
        return []
    thread = rank.main.threads[rank.pid]
    on_cpu = np.nan_to_num(measure_main_thread(rank, "on_cpu_ns", lost, inside))
    bounds = lost.start_ns[inside], lost.end_ns[inside]
    samples = (find_containing(thread.t_ns, bounds) >= 0) & (thread.state == _RUNNING)
    if np.count_nonzero(samples) < _MIN_SAMPLES:
        return []
    return [_Wait(BUSY, on_cpu * calls.busy_polls, samples, True, False, False)]


def _measure_calls(rank: Rank, lost: LostTime, inside: _Bools) -> _Calls | None:
    """Measure by its sampled stacks what the training thread waited for; None = too few."""
    stacks = rank.main.stacks
    if stacks is None or not rank.chunk.stacks.has_paths:
        return None
    bounds = lost.start_ns[inside], lost.end_ns[inside]
    rows = (stacks.thread == 0) & (stacks.stack > 0)
    rows &= find_containing(stacks.start_ns, bounds) >= 0
    rows &= ~find_samples_in_waits(rank.main, stacks.start_ns)
    late = stacks.end_ns - stacks.start_ns >= _LATE_NS
    asleep = rows & ~late & np.isin(stacks.state, (_ASLEEP, _DISK_WAIT))
    busy = rows & (late | (stacks.state == _RUNNING))
    numbers, inverse = np.unique(stacks.stack, return_inverse=True)
    used = set(np.unique(stacks.stack[rows]).tolist())
    table, reader = rank.chunk.stacks, _get_sources(rank)
    classified = [
        list_wait_kinds([table.locations[index] for index in table.list_locations(number)], reader)
        if number in used
        else ()
        for number in numbers.tolist()
    ]
    weight = np.maximum(stacks.interval_ns, 0).astype(np.float64)

    def measure(selected: _Bools, word: str) -> float:
        has_word = np.array([word in words for words in classified])[inverse]
        return float(weight[selected & has_word].sum()) / max(float(weight[selected].sum()), 1.0)

    enough = [bool(np.count_nonzero(part) >= _MIN_STACKS) for part in (asleep, busy)]
    if not any(enough):
        return None
    in_job = rows & (np.array(["job" in words for words in classified])[inverse])
    is_late = float(weight[in_job & late].sum()) / max(float(weight[in_job].sum()), 1.0)
    polls, sleeps, job, output, pools = (
        measure(asleep, word) if enough[0] else 0.0
        for word in ("poll", "sleep", "job", "output", "pool")
    )
    busy_polls = measure(busy, "poll") if enough[1] else 0.0
    return _Calls(polls, sleeps, job, output, pools, busy_polls, is_late)


def _get_sources(rank: Rank) -> SourceReader:
    """Return the reader of the job's files; those changed since then are not read."""
    reader: SourceReader | None = rank.chunk.shared.get(_SOURCES_KEY)
    if reader is None:
        started_ns = rank.chunk.header.started.get("realtime_ns", 0)
        reader = rank.chunk.shared[_SOURCES_KEY] = SourceReader(started_ns)
    return reader


def _choose_culprits(
    rank: Rank, lost: LostTime, candidates: Sequence[Candidate], wait: _Wait, running: _Bools
) -> _Choice:
    """Choose who was awaited: those that are connected with the training process."""
    least = MIN_MEMBER_RATIO if wait.is_pool else _MIN_ACTIVE_RATIO
    active = [item for item in candidates if measure_active_ratio(item, wait.samples) >= least]
    if wait.is_pool:
        active = [item for item in active if not item.is_thread]
        together = np.logical_or.reduce([item.active for item in active] or [running & False])
        if not active or float(together[wait.samples].mean()) < _MIN_ACTIVE_RATIO:
            return _Choice()
        return _Choice(
            select_sharing(rank, lost, active, wait.samples, wait.takes_output) or active, True
        )
    on_request = [item for item in active if is_on_request(item, wait.samples, running)]
    if on_request:
        ratios = [compute_concentration(item, wait.samples, running) for item in on_request]
        return _Choice(on_request, True, float(np.mean(ratios)))
    sharing = select_sharing(rank, lost, candidates, wait.samples, wait.takes_output)
    if sharing:  # also where these rest themselves
        return _Choice(sharing, True)
    if not wait.is_known or len(active) != 1:
        return _Choice()
    if wait.reason in (TIMER, BUSY) and is_reading(rank, lost):  # from others: bytes would show it
        return _Choice()
    # What a loop polls for may also come from outside the job.
    is_child = all(rank.pid in list_ancestors(rank, item.process) for item in active)
    return _Choice(active, is_child or wait.reason in (LOCK, CONNECTION))


def _measure_work(
    rank: Rank, lost: LostTime, wait: _Wait, choice: _Choice, calls: _Calls | None
) -> AwaitedWork:
    """Measure what the awaited processes did in each segment."""
    culprits = choice.culprits
    context = get_read_context(rank.chunk)
    tables = [_measure_activity(item, lost, context) for item in culprits]
    mean = np.mean(tables, axis=0)
    active = mean[:, ACTIVE_COLUMNS].sum(axis=1)
    if wait.is_pool:  # one of them makes the awaited item
        highest = np.max([table[:, ACTIVE_COLUMNS].sum(axis=1) for table in tables], axis=0)
        mean = mean * (highest / np.maximum(active, 1e-9))[:, None]
        active = highest
    factor = np.minimum(choice.ratio, 1.0 / np.maximum(active, 1e-9))
    activity = np.zeros_like(mean)
    for column in ACTIVE_COLUMNS:
        activity[:, column] = mean[:, column] * factor
    is_thread = culprits[0].is_thread
    share = wait.share
    if is_thread and calls is not None:  # `cpu-gil` claims what it keeps from the training thread
        share = share * (1.0 - calls.late)
    pids = tuple(item.process.pid for item in culprits)
    return AwaitedWork(
        wait.reason,
        share,
        activity,
        pids,
        culprits[0].tids[0] if is_thread else 0,
        describe_candidates(culprits),
        ResourceFacts("process", pid=pids[0])
        if len(pids) == 1 and not is_thread
        else UNKNOWN_RESOURCE,
        wait.takes_output or _is_writing(culprits, activity),
        choice.is_sure,
        _measure_timer_ratio(rank, culprits, wait.samples),
    )


def _measure_timer_ratio(rank: Rank, culprits: Sequence[Candidate], samples: _Bools) -> float:
    """Measure which part of the awaited process's own sleep was in a timer, 0 to 1."""
    counts = np.zeros(2)
    t_ns = rank.main.threads[rank.pid].t_ns[samples]
    for item in culprits:
        thread = item.process.threads.get(item.process.pid)
        if thread is None or item.is_thread:
            continue
        asleep = np.isin(thread.t_ns, t_ns) & (thread.state == _ASLEEP) & (thread.wchan >= 0)
        timer = find_sleep_samples(thread, rank.chunk.wchan_names, _WCHANS_BY_REASON[TIMER])
        counts += (int((asleep & timer).sum()), int(asleep.sum()))
    return float(counts[0] / max(counts[1], 1.0))


def _measure_activity(candidate: Candidate, lost: LostTime, context: ReadContext) -> Float:
    """Measure what the threads of a candidate did in each segment: float64[n, 11]."""
    tids = candidate.tids or (candidate.process.pid,)
    views = [view_thread(candidate.process, tid) for tid in tids]
    tables = [estimate_activity(view, lost.start_ns, lost.end_ns, context) for view in views]
    table: Float = np.sum(tables, axis=0)
    active = table[:, ACTIVE_COLUMNS].sum(axis=1)
    return table / np.maximum(active, 1.0)[:, None]


def _is_writing(culprits: Sequence[Candidate], activity: Float) -> bool:
    """Return whether the awaited ones were mostly blocked, and wrote more than they read."""
    blocked = float(activity[:, _WRITTEN_COLUMNS].sum())
    if 2 * blocked < float(activity.sum()):
        return False
    read = written = 0
    for item in culprits:
        io = item.process.io
        if io is not None and io.t_ns.size > 1:
            read += int(io.read_bytes[-1] - io.read_bytes[0])
            written += int(io.write_bytes[-1] - io.write_bytes[0])
    return written > read
