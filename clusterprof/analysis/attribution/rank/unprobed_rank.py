"""Attribute lost time to families by host activity, for ranks without the probe.

Without spans it is not recorded what the training process waited for. What remains:

    it writes a model while the device does nothing; it writes a log    checkpoint, eval
    bytes go to the device while that computes nothing                  h2d
    a loading process works all the time, the training process sleeps   storage, cpu
    it is blocked on storage and reads, or has no CPU                   storage, cpu
    it is on a CPU, and loads by itself                                 cpu
    it is on a CPU in any case, or in the driver                        launch
    it is on a CPU just while the device idles                          no cause: `on-cpu`
    it sleeps while another of its threads runs                         cpu

analysis.attribution.rank.host_activity estimates how much idle time coincided with each. A loader
that is ahead works too, but rests between batches; one that the device waits for never rests, or
works mainly when the device idles. All other time is unattributed.

It also estimates lost time that may be waiting for other ranks, in operations without a mark.

    idle, inside a step, main thread asleep       a collective in which the host waits
    likewise, and the node sends                  a collective, or a transfer
    busy, computing nothing                       a collective in which the device waits

From one rank alone this cannot be decided: the main thread sleeps for other reasons
too. It is therefore a reason why time is unattributed, until all ranks are compared
(analysis.attribution.rank.step_blocks).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.attribution.accumulator import SHARE_SCALE, Accumulator
from clusterprof.analysis.attribution.rank.host_activity import (
    HostActivity,
    estimate_host_activity,
    find_pauses,
    is_mostly_writing,
)
from clusterprof.analysis.timeline.data_wait.blocked import UNKNOWN, ReadContext, get_read_context
from clusterprof.analysis.timeline.data_wait.samples import (
    ThreadWindows,
    estimate_activity,
    measure_thread_windows,
)
from clusterprof.analysis.timeline.load.ranks import parse_job_position
from clusterprof.analysis.timeline.model import (
    PHASE_BUSY_WAIT,
    PHASE_COMPUTE,
    PHASE_NONE,
    PHASE_SUSPECTED_BUSY_WAIT,
    PHASE_THROTTLED,
    SOURCE_DEVICE_SAMPLES,
    Float,
    Int,
    LostTime,
    Process,
    Rank,
)
from clusterprof.analysis.timeline.series import compute_increase
from clusterprof.analysis.timeline.spans import CollectiveSpans
from clusterprof.probe import layout

LOADER_BUSY_RATIO = 0.9
"""Part of a window, and of the time around it, in which a loader that never rests is
working.
"""
LOADER_PREFERENCE_RATIO = 0.3
"""Difference of a loader's working time, while the device idles minus while it is busy,
above which the device waits for it.
"""
ON_CPU = "on-cpu"
"""Reason id: the main thread was on a CPU, and what it computed is not known."""
_AROUND_NS = 1_000_000_000
_WHOLE_RATIO = 0.95  # of a window: the device did nothing


def attribute_to_families(lost: LostTime, rank: Rank) -> dict[str, Int]:
    """Claim a part of each lost interval for families of causes.

    Returns int64[n] per family, in 1/SHARE_SCALE, together at most that; under ON_CPU the part in
    which the main thread was on a CPU for a reason unknown.
    """
    n = lost.start_ns.size
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not n:
        return {}
    around = get_read_context(rank.chunk)
    main = measure_thread_windows(thread, lost.start_ns, lost.end_ns, around)
    has_samples = ~np.isnan(main.on_cpu)
    has_samples &= ~np.isin(
        lost.phase, (PHASE_BUSY_WAIT, PHASE_SUSPECTED_BUSY_WAIT, PHASE_THROTTLED)
    )
    idle = np.maximum(lost.lost_ns / np.maximum(lost.end_ns - lost.start_ns, 1), 1e-9)
    host = estimate_host_activity(rank, lost, around)
    unclaimed = np.where(has_samples, 1.0, 0.0)
    out: dict[str, Float] = {}

    def claim(name: str, share: Float) -> None:
        nonlocal unclaimed
        share = np.clip(np.nan_to_num(share), 0.0, unclaimed)
        out[name] = out.get(name, np.zeros(n)) + share
        unclaimed = unclaimed - share

    claim("checkpoint", np.where(host.saves, 1.0, 0.0))
    # Its activity around the writing belongs to the writing too.
    is_writing = (host.storage > 0) & is_mostly_writing(rank.main, int(lost.start_ns[0]))
    written = np.where(is_writing, host.storage + host.on_cpu + host.runnable, 0.0)
    claim("checkpoint" if host.saves_models else "eval", written)
    unclaimed = np.where(is_writing, 0.0, unclaimed)
    claim("h2d", host.copying)
    # Loading explains idle time only while the host gives the device no work.
    unlaunched = np.minimum((1.0 - main.on_cpu) / idle, 1.0)
    storage, cpu = _estimate_loading(rank, lost, around)
    claim("storage", storage * unlaunched)
    claim("cpu", cpu * unlaunched)
    claim("storage", host.storage)
    claim("cpu", host.runnable + host.memory)
    family = _choose_cpu_family(rank, host)
    # Slow launches do not leave a device completely idle, and a thread that is always on a CPU
    # may wait there.
    launching = family == "launch" and not host.in_driver
    claim(family, np.where(launching & find_pauses(lost), 0.0, host.on_cpu))
    claim("cpu", host.other_threads)
    return _convert_to_shares(out)


def _choose_cpu_family(rank: Rank, host: HostActivity) -> str:
    """Choose the family of the main thread's CPU time while its device idles.

    ON_CPU where workers load the data: evaluation, logs, compilation and slow launches look alike.
    """
    if not any(process.pid != rank.pid for process in rank.workers):
        return "cpu"  # it loads its data itself, too
    return "launch" if host.launching or host.in_driver else ON_CPU


def _convert_to_shares(shares: dict[str, Float]) -> dict[str, Int]:
    out: dict[str, Int] = {}
    unclaimed: Int | None = None
    for name, share in shares.items():
        units = np.rint(share * SHARE_SCALE).astype(np.int64)
        unclaimed = np.full(units.size, SHARE_SCALE, np.int64) if unclaimed is None else unclaimed
        out[name] = np.minimum(units, unclaimed)
        unclaimed = unclaimed - out[name]
    return {name: units for name, units in out.items() if units.any()}


def _estimate_loading(rank: Rank, lost: LostTime, around: ReadContext) -> tuple[Float, Float]:
    """Estimate which part of each interval a loading process spent on storage and on the CPU.

    Only a loading process that the device waits for counts.
    """
    n = lost.start_ns.size
    storage, cpu, busiest = np.zeros(n), np.zeros(n), np.full(n, LOADER_BUSY_RATIO)
    for process in rank.workers:
        measured = _measure_worker(process, lost, around)
        if (
            process.pid == rank.pid
            or measured is None
            or is_mostly_writing(process, int(lost.start_ns[0]))
        ):
            continue
        inside, around_it = measured
        work = np.nan_to_num(inside.active)
        never_rests = np.nan_to_num(around_it.active) >= LOADER_BUSY_RATIO
        is_best = (work >= busiest) & (
            never_rests | _has_idle_preference(lost, process, work, around)
        )
        busiest = np.where(is_best, work, busiest)
        part = np.maximum(work, 1e-9)
        loading = np.nan_to_num(inside.storage + inside.reading)
        storage = np.where(is_best, loading / part, storage)
        cpu = np.where(is_best, np.maximum(work - loading, 0.0) / part, cpu)
    return storage, cpu


def _measure_worker(
    process: Process, lost: LostTime, around: ReadContext
) -> tuple[ThreadWindows, ThreadWindows] | None:
    """Return what a worker's main thread did in each interval, and in the time around it."""
    thread = process.threads.get(process.pid)
    if thread is None or len(thread.t_ns) < 2:
        return None
    low, high = int(thread.t_ns[0]), int(thread.t_ns[-1])
    inside = measure_thread_windows(thread, lost.start_ns, lost.end_ns, around, loads=True)
    start = np.clip(lost.start_ns - _AROUND_NS, low, high)
    end = np.clip(lost.end_ns + _AROUND_NS, low, high)
    return inside, measure_thread_windows(thread, start, end, around, loads=True)


def _has_idle_preference(
    lost: LostTime, process: Process, work: Float, around: ReadContext
) -> bool:
    """Return whether a process works more while the device is idle than otherwise."""
    length = (lost.end_ns - lost.start_ns).astype(np.float64)
    idle = lost.lost_ns >= _WHOLE_RATIO * length
    ends = lost.start_ns[:1], lost.end_ns[-1:]
    in_all = np.nan_to_num(
        measure_thread_windows(process.threads[process.pid], *ends, around, loads=True).active
    )[0]
    idle_ns, all_ns = length[idle].sum(), float((ends[1] - ends[0])[0])
    if idle_ns <= 0 or idle_ns >= all_ns:
        return False
    worked_ns = (work * length)[idle].sum()
    busy_rate = (in_all * all_ns - worked_ns) / (all_ns - idle_ns)
    return bool(worked_ns / idle_ns - busy_rate >= LOADER_PREFERENCE_RATIO)


ASLEEP, SENDING, BUSY_WAIT = "asleep", "sending", "spinning"  # reason ids in the ledger
SUSPECTED_BUSY_WAIT = "perhaps-spinning"
CERTAIN_SLEEP = "surely_asleep"
"""Id of a total in ns * SHARE_SCALE: sleep that certainly coincided with
idle time.
"""
UNMARKED_WAIT_REASONS = ASLEEP, SENDING, BUSY_WAIT, SUSPECTED_BUSY_WAIT
MIN_SLEEP_RATIO = 0.5
MIN_SENT_BYTES_PER_SECOND = 100_000_000
MIN_SENT_RATIO = 0.25  # of the rate of the fastest link, where it is known


def has_peers(rank: Rank) -> bool:
    """Return whether the launcher reports other ranks."""
    return (parse_job_position(rank.main.registration).world_size or 1) > 1


def has_marked_operations(rank: Rank) -> bool:
    """Return whether the rank marked operations; if so, it waits only in marked ones."""
    operations = rank.main.get_spans(CollectiveSpans)
    return operations is not None and bool((operations.group != 0).any())


MIN_HOST_WAIT_NS = 1_000_000
"""In shorter operations a host only issues what its device executes."""


def has_waited_in_operations(rank: Rank) -> bool:
    """Return whether a wait of the rank in one of its marked operations was recorded."""
    operations = rank.main.get_spans(CollectiveSpans)
    if operations is None:
        return False
    if layout.EXPOSED_COLLECTIVE in rank.main.spans:
        return True
    waited = operations.end_ns - operations.start_ns >= MIN_HOST_WAIT_NS
    return bool(((operations.group != 0) & (waited | (operations.form != layout.BLOCKING))).any())


def estimate_unmarked_waits(
    rank: Rank, lost: LostTime, unclaimed: Int
) -> tuple[Int, Int, Int, Int]:
    """Estimate which part of each interval the rank may have waited in unmarked operations.

    unclaimed: int64[n], the part that no cause has claimed.
    Returns int64[n] each, in 1/SHARE_SCALE: asleep, in a busy-wait, in a
    suspected busy-wait (together at most `unclaimed`), and the part of the first that is
    certain.
    """
    busy_wait = np.where(lost.phase == PHASE_BUSY_WAIT, unclaimed, 0)
    suspected = np.where(lost.phase == PHASE_SUSPECTED_BUSY_WAIT, unclaimed, 0)
    asleep, certain = (
        np.minimum(np.rint(part * SHARE_SCALE).astype(np.int64), unclaimed)
        for part in estimate_sleep(rank, lost, unclaimed > 0)
    )
    return asleep, busy_wait, suspected, certain


def split_unmarked_waits(
    totals: Accumulator, rank: Rank, lost: LostTime, unclaimed: Int, unknown_reason: str
) -> tuple[Accumulator, Int]:
    """Split suspected waits for other ranks off from the time with an unknown reason.

    Returns the changed accumulator and the part of each interval that may be waiting,
    int64[n], in 1/SHARE_SCALE.
    """
    asleep, busy_wait, suspected, certain = estimate_unmarked_waits(rank, lost, unclaimed)
    sleep_reason = SENDING if asleep.any() and is_sending(rank, lost, asleep) else ASLEEP
    pairs = (sleep_reason, asleep), (BUSY_WAIT, busy_wait), (SUSPECTED_BUSY_WAIT, suspected)
    explained = {name: int((lost.lost_ns * units).sum()) for name, units in pairs}
    share = asleep + busy_wait + suspected
    unexplained = {**totals.unexplained, **explained}
    unexplained[unknown_reason] = unexplained.get(unknown_reason, 0) - sum(explained.values())
    sleep_totals = {CERTAIN_SLEEP: int((lost.lost_ns * certain).sum())}
    reasons = {reason: n for reason, n in unexplained.items() if n}
    return replace(totals, totals={**totals.totals, **sleep_totals}, unexplained=reasons), share


def subtract_sleep(rank: Rank, lost: LostTime, startup: Float) -> Float:
    """Return what start-up claims of each interval minus the host's sleep: float64[n].

    A rank that sleeps in the first step may wait for another that starts up; all ranks
    decide that.
    """
    return startup * (1.0 - estimate_sleep(rank, lost, startup > 0)[0])


def estimate_sleep(rank: Rank, lost: LostTime, selected: NDArray[np.bool_]) -> tuple[Float, Float]:
    """Estimate which part of the selected intervals the host slept in unmarked operations.

    Also returns the part in which it certainly slept while its device idled; float64[n]
    each, 0 to 1. Of 100 ns with 20 idle and 90 asleep: all of it, and (20 + 90 - 100) / 20.
    """
    out, certain = np.zeros((2, lost.start_ns.size))
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not has_peers(rank) or has_marked_operations(rank):
        return out, certain
    inside = lost.phase == (PHASE_COMPUTE if rank.marked else PHASE_NONE)
    rows = np.flatnonzero(inside & (lost.source == SOURCE_DEVICE_SAMPLES) & selected)
    if rows.size:
        start, end = lost.start_ns[rows], lost.end_ns[rows]
        asleep = estimate_activity(rank.main, start, end, get_read_context(rank.chunk))[:, UNKNOWN]
        asleep[(asleep < MIN_SLEEP_RATIO) | ~_is_sampled(thread.t_ns, start, end)] = 0.0
        # Assumption: a device idles while its host sleeps, not while the host gives it work.
        idle = lost.lost_ns[rows] / np.maximum(end - start, 1)
        out[rows] = np.minimum(asleep / idle, 1.0)
        certain[rows] = np.clip((asleep + idle - 1.0) / idle, 0.0, 1.0)
    return out, certain


def is_sending(rank: Rank, lost: LostTime, asleep: Int) -> bool:
    """Return whether the node sends about as much as it receives, and enough to explain waits.

    asleep: int64[n], in 1/SHARE_SCALE. A rank that loads remote data
    receives much more than it sends.
    """
    slept_s = float((lost.lost_ns * (asleep / SHARE_SCALE)).sum()) / 1e9
    if slept_s <= 0:
        return False
    ends = lost.start_ns[:1], lost.end_ns[-1:]
    sent, received = (
        sum(
            float(np.nan_to_num(compute_increase(series, *ends)).sum())
            for (name, _), series in rank.chunk.series.items()
            if name == signal.name
        )
        for signal in (signals.NET_TRANSMIT, signals.NET_RECEIVE)
    )
    least = max(MIN_SENT_BYTES_PER_SECOND, MIN_SENT_RATIO * _find_link_rate(rank))
    return sent >= least * slept_s and 4 * sent >= received


def _find_link_rate(rank: Rank) -> float:
    """Return the rate of the node's fastest link, bytes per second; 0 if unknown."""
    rates = [
        float(np.nanmax(series.values))
        for (name, _), series in rank.chunk.series.items()
        if name == signals.NET_LINK_SPEED.name and not np.isnan(series.values).all()
    ]
    return max(rates, default=0.0)


def _is_sampled(t_ns: Int, start_ns: Int, end_ns: Int) -> np.ndarray:
    """Return for each interval whether it lies between samples of the thread."""
    if len(t_ns) < 2:
        return np.zeros(len(start_ns), np.bool_)
    return (start_ns >= t_ns[0]) & (end_ns <= t_ns[-1])
