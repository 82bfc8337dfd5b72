"""What the host of a rank without marks did beside the idle time of its device (`beside`).

main thread on a CPU, ready to run, blocked      counters and samples of the thread
other threads of the training process            the same: one of them may hold its lock
copies to the device                             bytes on its bus, at the rate of such copies
saving a model                                   whole idle windows in which much was written
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.attribution.beside import counted, found, while_busy
from clusterprof.attribution.device import Windows, busy_windows, within
from clusterprof.timeline.feeding_blocked import Surroundings
from clusterprof.timeline.feeding_fetch import READING_NS_PER_BYTE
from clusterprof.timeline.model import (
    PHASE_NONE,
    Float,
    Int,
    Lost,
    Process,
    Rank,
    ThreadTable,
)
from clusterprof.timeline.series import differences, growth_of, located, risen
from clusterprof.timeline.thread_windows import Windowed, windowed

PAUSED = "paused"
SAVED_BYTES = 16 << 20
"""In one pause, in the mean: a model. Less is a log."""
COPY_AT_LEAST = 1e9
"""Bytes per second: even a copy from pageable memory is faster."""
COPY_AT_MOST = 64e9
"""No bus is faster: what seems to be went on while the device worked."""
_WHOLE_RATIO = 0.95  # of a window: the device did nothing
_OTHERS_RATIO = 0.5
"""Of idle time: another thread that runs for less of it is not what the main one waits for."""
_DRIVER_RATIO, _LAUNCHING_RATIO, _AT_WORK_RATIO = 0.5, 0.5, 0.5


class Host(NamedTuple):
    """Parts of each lost piece, float64[n]; what is missing to 1 the main thread slept."""

    on_cpu: Float
    runnable: Float
    storage: Float
    memory: Float
    others: Float
    """Other threads of the process were on a CPU."""
    copying: Float
    saves: NDArray[np.bool_]
    """In a pause in which the process wrote, if it writes models in them."""
    saves_models: bool
    launching: bool
    """It is on a CPU most of the time in which the device is busy, too."""
    in_driver: bool
    """Most of `on_cpu` was in the kernel, and not for reading or writing."""


def at_the_time(rank: Rank, lost: Lost, around: Surroundings) -> Host:
    """Return what the host did in the lost pieces of a region."""
    every = busy_windows(rank)
    thread = rank.main.threads.get(rank.pid)
    n = lost.start_ns.size
    if every is None or thread is None:
        none, no = np.zeros(n), np.zeros(n, np.bool_)
        return Host(none, none, none, none, none, none, no, False, False, False)
    windows = within(every, int(lost.start_ns[0]), int(lost.end_ns[-1]))
    row = np.searchsorted(windows.start_ns, lost.start_ns, side="right") - 1
    length, idle = windows.end_ns - windows.start_ns, windows.idle_ns
    main = windowed(thread, windows.start_ns, windows.end_ns, around)
    saves, models = np.zeros(length.size, np.bool_), False
    if _saves_models(rank, thread, _worked(every), around):
        saves, models = _saving(rank, windows, main), True
    left = np.where(saves, np.nan, length)  # what is told already is not asked again
    both = idle, length, windows.start_ns
    return Host(
        counted(main.on_cpu * left, *both)[row],
        counted(main.runnable * left, *both)[row],
        found(_even(main.storage) * left, *both)[row],
        found(_even(main.memory) * left, *both)[row],
        _others(rank, windows)[row],
        _copying(rank, windows)[row],
        saves[row] & (lost.phase == PHASE_NONE),
        models,
        while_busy(main.on_cpu * length, idle, length) >= _LAUNCHING_RATIO,
        _in_driver(rank, thread, windows),
    )


def _worked(windows: Windows) -> Windows:
    """The windows from the first to the last in which the device did something."""
    some = np.flatnonzero(windows.idle_ns < windows.end_ns - windows.start_ns)
    part = slice(some[0], some[-1] + 1) if some.size else slice(0)
    return Windows(*(getattr(windows, one.name)[part] for one in fields(windows)))


def _even(did: Float) -> Float:
    """Of a sample at the edge of two windows each gets half."""
    after = np.append(did[1:], did[-1:])
    return (did + after) / 2


def _others(rank: Rank, windows: Windows) -> Float:
    """Beside which part of idle time another thread ran, beyond what it does while it is busy.

    A thread that polls is always on a CPU; it is no reason for anything.
    """
    length = windows.end_ns - windows.start_ns
    best, most = np.zeros(length.size), _OTHERS_RATIO * float(windows.idle_ns.sum())
    for tid, thread in rank.main.threads.items():
        if tid == rank.pid or len(thread.t_ns) < 2:
            continue
        at = located(thread.t_ns, windows.start_ns, windows.end_ns)
        ran = np.nan_to_num(risen(growth_of(thread.on_cpu_ns), at))  # no samples: it slept
        share = counted(np.minimum(ran, length), windows.idle_ns, length, windows.start_ns)
        ran_ns = float((share * windows.idle_ns).sum())
        if ran_ns > most:
            best, most = share, ran_ns
    return best


def _copying(rank: Rank, windows: Windows) -> Float:
    """Beside which part of idle time data were copied to the device, at the rate of such copies."""
    none = np.zeros(windows.start_ns.size)
    series = rank.chunk.series.get((signals.GPU_PCIE_RECEIVE.name, rank.device))
    if series is None or not series.t_ns.size:
        return none
    length, idle = windows.end_ns - windows.start_ns, windows.idle_ns
    row = np.searchsorted(series.t_ns, windows.end_ns)  # a reading tells of the time before it
    known = row < series.t_ns.size
    rate = np.where(known, series.values[np.minimum(row, series.t_ns.size - 1)], np.nan)
    copied = np.nan_to_num(rate) * length / 1e9
    some = (copied > 0) & (idle > 0)
    if not some.any():
        return none
    speeds, weights = copied[some] / (idle[some] / 1e9), copied[some]
    order = np.argsort(speeds)
    at = np.searchsorted(np.cumsum(weights[order]), 0.5 * weights.sum())
    speed = float(speeds[order][min(int(at), order.size - 1)])
    if not COPY_AT_LEAST <= speed <= COPY_AT_MOST:
        return none
    return counted(np.minimum(copied / speed * 1e9, length), idle, length, windows.start_ns)


def _in_driver(rank: Rank, thread: ThreadTable, windows: Windows) -> bool:
    """Return whether the main thread's time on a CPU beside idle time was spent in the driver."""
    if (thread.user_ns < 0).any() or (thread.system_ns < 0).any() or not windows.start_ns.size:
        return False
    at = located(thread.t_ns, windows.start_ns, windows.end_ns)
    length = windows.end_ns - windows.start_ns
    parts = []
    for column in (thread.user_ns, thread.system_ns):
        ran = np.clip(risen(growth_of(column), at), 0, length)
        share = counted(ran, windows.idle_ns, length, windows.start_ns)
        parts.append(float((share * windows.idle_ns).sum()))
    user, system = parts
    system -= READING_NS_PER_BYTE * _moved_bytes(rank.main)
    return system > _DRIVER_RATIO * (user + max(system, 0.0)) > 0


def _moved_bytes(process: Process) -> float:
    """What a process read and wrote, from wherever, in the samples at hand."""
    if process.io is None or process.io.t_ns.size < 2:
        return 0.0
    columns = process.io.read_chars, process.io.write_chars
    return float(sum(differences(column)[0].sum() for column in columns))


def writes(process: Process, since_ns: int) -> bool:
    """True for one that wrote more than it read: when it is blocked it saves rather than loads."""
    io = process.io
    if io is None or not io.t_ns.size:
        return False
    row = max(int(np.searchsorted(io.t_ns, since_ns, side="right")) - 1, 0)
    return bool(io.write_bytes[-1] - io.write_bytes[row] > io.read_chars[-1] - io.read_chars[row])


def pauses(lost: Lost) -> NDArray[np.bool_]:
    """Return bool[n]: pieces in which the device does nothing, and those at their edges."""
    whole = lost.lost_ns >= _WHOLE_RATIO * np.maximum(lost.end_ns - lost.start_ns, 1)
    whole &= lost.phase == PHASE_NONE  # not busy, and computing nothing
    joined = lost.start_ns[1:] == lost.end_ns[:-1]
    out = whole.copy()
    out[1:] |= whole[:-1] & joined
    out[:-1] |= whole[1:] & joined
    return out


def paused(lost: Lost, shares: Mapping[str, Int]) -> dict[str, int]:
    """Return, for `Partial.totals`, what was claimed for the CPU in pauses, in 1/SHARE."""
    if "cpu" not in shares:
        return {}
    return {PAUSED: int((lost.lost_ns * shares["cpu"])[pauses(lost)].sum())}


def _saves_models(rank: Rank, thread: ThreadTable, windows: Windows, around: Surroundings) -> bool:
    """Return whether the training process writes as much in each pause as a model has."""
    io = rank.main.io
    if io is None or io.t_ns.size < 2 or not windows.start_ns.size:
        return False
    main = windowed(thread, windows.start_ns, windows.end_ns, around)
    whole = _saving(rank, windows, main)
    count = np.count_nonzero(whole[1:] & ~whole[:-1]) + bool(whole[0])
    row = max(int(np.searchsorted(io.t_ns, windows.start_ns[0], side="right")) - 1, 0)
    return bool(count and io.write_bytes[-1] - io.write_bytes[row] >= SAVED_BYTES * count)


def _saving(rank: Rank, windows: Windows, main: Windowed) -> NDArray[np.bool_]:
    """True for windows of pauses in which the main thread is at work and the process writes."""
    whole = windows.idle_ns >= _WHOLE_RATIO * (windows.end_ns - windows.start_ns)
    at_work = np.nan_to_num(main.at_work) >= _AT_WORK_RATIO
    return whole & at_work & _wrote(rank, windows.start_ns, windows.end_ns)


def _wrote(rank: Rank, start_ns: Int, end_ns: Int) -> NDArray[np.bool_]:
    """True where the training process wrote to a disk about that time."""
    io = rank.main.io
    assert io is not None
    grown, _ = differences(io.write_bytes)
    first = np.searchsorted(io.t_ns, start_ns, side="right") - 1
    last = np.searchsorted(io.t_ns, end_ns, side="left") + 1  # what is written shows a little later
    before = np.concatenate([[0.0], np.cumsum(grown > 0)])
    low, high = np.clip(first, 0, grown.size), np.clip(last, 0, grown.size)
    out: NDArray[np.bool_] = before[high] > before[low]
    return out
