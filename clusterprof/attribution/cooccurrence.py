"""Causes at the level of a family by what the host did in the windows in which the device idled.

Without spans nobody says what the training process waited for. What can be said is:

    it writes a model while the device does nothing; it writes a log    checkpoint, eval
    bytes go to the device while that computes nothing                  h2d
    a loading process is at work all the time, this one sleeps          storage, cpu
    it is blocked on storage and reads, or has no CPU                   storage, cpu
    it is on a CPU, and loads by itself or was stopped                  cpu
    it is on a CPU in any case, or in the driver                        launch
    it sleeps while another of its threads runs                         cpu

How much of its idle time was beside what the host did: `hosting`, `beside`.
A loader that is ahead works too, but it rests between batches; one that the device waits for never
does, or works just when the device idles. All else is unattributed.
"""

from __future__ import annotations

import numpy as np

from clusterprof.attribution.hosting import Host, at_the_time, pauses, writes
from clusterprof.attribution.partial import SHARE
from clusterprof.timeline.feeding_blocked import Surroundings, surroundings
from clusterprof.timeline.model import (
    PHASE_PERHAPS,
    PHASE_SPINNING,
    PHASE_THROTTLED,
    Float,
    Int,
    Lost,
    Process,
    Rank,
)
from clusterprof.timeline.thread_windows import Windowed, windowed

BY_FAMILY = ("storage", "cpu", "launch", "h2d", "eval")
"""What is claimed here and is no leaf."""
AT_WORK_RATIO = 0.9
"""Of a window, and of the time around it: a loader that never rests."""
WORKS_RATHER_RATIO = 0.3
"""By so much more it works while the device idles than while that is busy: they wait for it."""
_AROUND_NS = 1_000_000_000
_WHOLE_RATIO = 0.95  # of a window: the device did nothing


def cooccurring(lost: Lost, rank: Rank) -> dict[str, Int]:
    """Return which part of each piece goes to a family: int64[n] in 1/SHARE, together <= SHARE."""
    n = lost.start_ns.size
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not n:
        return {}
    around = surroundings(rank.chunk)
    main = windowed(thread, lost.start_ns, lost.end_ns, around)
    known = ~np.isnan(main.on_cpu)
    known &= ~np.isin(lost.phase, (PHASE_SPINNING, PHASE_PERHAPS, PHASE_THROTTLED))
    idle = np.maximum(lost.lost_ns / np.maximum(lost.end_ns - lost.start_ns, 1), 1e-9)
    host = at_the_time(rank, lost, around)
    left = np.where(known, 1.0, 0.0)
    out: dict[str, Float] = {}

    def claim(name: str, share: Float) -> None:
        nonlocal left
        share = np.clip(np.nan_to_num(share), 0.0, left)
        out[name] = out.get(name, np.zeros(n)) + share
        left = left - share

    claim("checkpoint", np.where(host.saves, 1.0, 0.0))
    # What it does around its writing is for that, too.
    wrote = (host.storage > 0) & writes(rank.main, int(lost.start_ns[0]))
    written = np.where(wrote, host.storage + host.on_cpu + host.runnable, 0.0)
    claim("checkpoint" if host.saves_models else "eval", written)
    left = np.where(wrote, 0.0, left)
    claim("h2d", host.copying)
    # The device idles while its host is not giving it work, as far as that is long enough.
    free = np.minimum((1.0 - main.on_cpu) / idle, 1.0)
    storage, cpu = _loading(rank, lost, around)
    claim("storage", storage * free)
    claim("cpu", cpu * free)
    claim("storage", host.storage)
    claim("cpu", host.runnable + host.memory)
    family = _computes(rank, host)
    # Who launches too slowly leaves no device without anything to do; who is always on a CPU may
    # wait there.
    launching = family == "launch" and not host.in_driver
    claim(family, np.where(launching & pauses(lost), 0.0, host.on_cpu))
    claim("cpu", host.others)
    return _whole_parts(out)


def _computes(rank: Rank, host: Host) -> str:
    """What it is that the main thread does on a CPU while its device idles."""
    if not any(process.pid != rank.pid for process in rank.workers):
        return "cpu"  # it loads itself, too
    return "launch" if host.launching or host.in_driver else "cpu"


def _whole_parts(shares: dict[str, Float]) -> dict[str, Int]:
    out: dict[str, Int] = {}
    left: Int | None = None
    for name, share in shares.items():
        units = np.rint(share * SHARE).astype(np.int64)
        left = np.full(units.size, SHARE, np.int64) if left is None else left
        out[name] = np.minimum(units, left)
        left = left - out[name]
    return {name: units for name, units in out.items() if units.any()}


def _loading(rank: Rank, lost: Lost, around: Surroundings) -> tuple[Float, Float]:
    """Which part of each piece a loading process that the device waits for spent on what."""
    n = lost.start_ns.size
    storage, cpu, best = np.zeros(n), np.zeros(n), np.full(n, AT_WORK_RATIO)
    for process in rank.workers:
        found = _of_worker(process, lost, around)
        if process.pid == rank.pid or found is None or writes(process, int(lost.start_ns[0])):
            continue
        now, wide = found
        work = np.nan_to_num(now.at_work)
        never_rests = np.nan_to_num(wide.at_work) >= AT_WORK_RATIO
        chosen = (work >= best) & (never_rests | _rather(lost, process, work, around))
        best = np.where(chosen, work, best)
        part = np.maximum(work, 1e-9)
        loading = np.nan_to_num(now.storage + now.reading)
        storage = np.where(chosen, loading / part, storage)
        cpu = np.where(chosen, np.maximum(work - loading, 0.0) / part, cpu)
    return storage, cpu


def _of_worker(
    process: Process, lost: Lost, around: Surroundings
) -> tuple[Windowed, Windowed] | None:
    """What a worker's main thread did in each piece, and in the time around it."""
    thread = process.threads.get(process.pid)
    if thread is None or len(thread.t_ns) < 2:
        return None
    low, high = int(thread.t_ns[0]), int(thread.t_ns[-1])
    now = windowed(thread, lost.start_ns, lost.end_ns, around, loads=True)
    start = np.clip(lost.start_ns - _AROUND_NS, low, high)
    end = np.clip(lost.end_ns + _AROUND_NS, low, high)
    return now, windowed(thread, start, end, around, loads=True)


def _rather(lost: Lost, process: Process, work: Float, around: Surroundings) -> bool:
    """True for one that works rather while the device does nothing than in the rest of the time."""
    length = (lost.end_ns - lost.start_ns).astype(np.float64)
    idle = lost.lost_ns >= _WHOLE_RATIO * length
    ends = lost.start_ns[:1], lost.end_ns[-1:]
    in_all = np.nan_to_num(
        windowed(process.threads[process.pid], *ends, around, loads=True).at_work
    )[0]
    idle_ns, all_ns = length[idle].sum(), float((ends[1] - ends[0])[0])
    if idle_ns <= 0 or idle_ns >= all_ns:
        return False
    worked_ns = (work * length)[idle].sum()
    rest = (in_all * all_ns - worked_ns) / (all_ns - idle_ns)
    return bool(worked_ns / idle_ns - rest >= WORKS_RATHER_RATIO)
